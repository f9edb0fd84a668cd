"""What the second pool of a hybrid model saves: KV bytes of two pools against one full-length pool for all layers.

In one pool every page of tokens holds every layer, for as long as a request may read any of it. With two pools a
request keeps a page of the full-attention layers for all its tokens, and one of the sliding layers for its window only.
"""

from __future__ import annotations

from typing import NamedTuple

from octavo.kv.sizing import (
    DecodeReserve,
    PoolSizes,
    min_swa_pages,
    reserve_tokens,
    row_width_pages,
    swa_decode_bound_pages,
)


class PageBytes(NamedTuple):
    """Bytes of one page of the full pool (all full-attention layers) and of the SWA pool (all sliding ones)."""

    full: int
    swa: int


class PoolSaving(NamedTuple):
    """The same tokens in two pools and in one. Pages and bytes; saved_bytes = one_pool_bytes − two_pools_bytes."""

    full_pages: int
    swa_pages: int
    two_pools_bytes: int
    one_pool_bytes: int
    saved_bytes: int


def two_pool_saving(pages: PoolSizes, page_bytes: PageBytes) -> PoolSaving:
    """Tokens that take `pages.full_pages` pages of the full pool, and `pages.swa_pages` of the SWA pool.

    With f and s bytes a page of either pool:
    two pools = full·f + swa·s, one pool = full·(f + s), saved = (full − swa)·s
    """
    full, swa = pages
    two = full * page_bytes.full + swa * page_bytes.swa
    one = full * (page_bytes.full + page_bytes.swa)
    return PoolSaving(full, swa, two, one, one - two)


class Capacity(NamedTuple):
    """So many requests of `context_tokens` run together; `pages` is the most they hold of each pool."""

    requests: int
    context_tokens: int
    pages: PoolSizes


def longest_requests(
    sizes: PoolSizes,
    *,
    window_tokens: int,
    page_size: int,
    reserve: DecodeReserve | int,
    chunk_tokens: int,
    request_slots: int,
    context_tokens: int,
    overlap: bool,
) -> Capacity:
    """How many requests of the whole context run together in pools of `sizes`, and what they hold there at most.

    Full pages of each: L = ceil_p(context − 1 + reserve)/p. SWA pages: at most D = min(L, ceil((W + reserve)/p) + 2)
    while it decodes, and P = min(L, ceil((W + max(reserve, q·chunk))/p) + 2) of the one that is being prefilled. So
    n = min(slots, full/L, 1 + (swa − P)/D), which hold n·L full pages and P + (n − 1)·D SWA pages; 0 if none fits.
    """
    each = row_width_pages(context_tokens - 1, reserve_tokens(reserve), page_size)
    decoding = min(each, swa_decode_bound_pages(window_tokens, reserve, page_size))
    filling = min(each, min_swa_pages(window_tokens, reserve, chunk_tokens, page_size, overlap=overlap))
    requests = max(0, min(request_slots, sizes.full_pages // each, 1 + (sizes.swa_pages - filling) // decoding))
    swa = filling + (requests - 1) * decoding if requests else 0
    return Capacity(requests, context_tokens, PoolSizes(requests * each, swa))
