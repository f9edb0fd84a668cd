"""Whether a request may be preallocated now: what it needs, beside what the others still need, in pages of each pool.

Admission (01, Budgets): ceil_p(max(fill + reserved_decode, fill + min(tokens_left, clip) − retractable) + reserve)/p
must be there after every running, transferring and waiting row has got its own `reserved_decode` tokens.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import TYPE_CHECKING, NamedTuple

from octavo.kv.pages import ceil_pages
from octavo.kv.sizing import decode_admission_pages, swa_decode_bound_pages
from octavo.kv.sliding import swa_tail_pages

if TYPE_CHECKING:
    from octavo.kv.ledger import Ledger

RESERVED_DECODE_TOKENS = 32  # every admitted row may grow by this much without anybody being retracted
CLIP_TOKENS = 512  # of max_tokens, no more than this is believed


class Holder(NamedTuple):
    """A row that is here already: tokens it will hold KV for soonest, output tokens it may still add."""

    row: int
    tokens: int
    tokens_left: int


def admission_pages(
    ledger: Ledger, fill_tokens: int, tokens_left: int, reserve: int, *, prefix_tokens: int, retractable_tokens: int
) -> dict[str, int]:
    """Pages that preallocating a request must find, by pool; what its local prefix brings is there already."""
    c = ledger.config
    near = min(RESERVED_DECODE_TOKENS, tokens_left)
    full = decode_admission_pages(
        fill_tokens,
        reserved_decode_tokens=near,
        tokens_left=tokens_left,
        clip_tokens=CLIP_TOKENS,
        retractable_tokens=retractable_tokens,
        reserve=reserve,
        page_size=c.page_size,
    )
    width = ceil_pages(min(fill_tokens + tokens_left, c.context_tokens) + reserve, c.page_size)
    need = {"full": max(0, min(full, width) - prefix_tokens // c.page_size)}
    if ledger.swa_pool is not None:
        tail = swa_tail_pages(fill_tokens, c.window_tokens, c.page_size, prefix_tokens)
        grown = min(tail + ceil_pages(near + reserve, c.page_size),
                    swa_decode_bound_pages(c.window_tokens, reserve, c.page_size))
        need["swa"] = max(tail, grown)
    return need


def growth_pages(ledger: Ledger, holders: Iterable[Holder], reserve: int) -> dict[str, int]:
    """Pages the rows that are here still need before the next admission may count on them. SWA growth is bounded by
    the window: a row gives back behind what it takes in front."""
    c = ledger.config
    full = swa = 0
    bound = swa_decode_bound_pages(c.window_tokens, reserve, c.page_size) if ledger.swa_pool is not None else 0
    for holder in holders:
        soon = holder.tokens + min(RESERVED_DECODE_TOKENS, holder.tokens_left) + reserve
        held = int(ledger.allocated[holder.row]) // c.page_size
        more = max(0, min(ceil_pages(soon, c.page_size), ledger.width_pages) - held)
        full += more
        if ledger.swa_pool is not None:
            have = held - int(ledger.evicted[holder.row]) // c.page_size
            swa += max(0, min(more, bound - have))
    return {"full": full, "swa": swa}
