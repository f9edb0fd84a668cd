"""Sliding-window arithmetic: how far a row may forget, and what a row that arrives by transfer needs.

W is the number of keys a query sees, its own included: query q reads q-W+1 … q.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octavo.errors import LawViolation
from octavo.kv.pages import Int64Array, floor_p


def eviction_floor(committed_tokens: int, window_tokens: int, page_size: int) -> int:
    """Highest read floor (tokens) of a row with `committed_tokens` on the host.

    floor_p(max(0, floor_p(n) - W)). The inner floor keeps the window of the next insertion boundary floor_p(n)
    alive, so that what is published there can be matched. Page-aligned and never negative.
    """
    return floor_p(max(0, floor_p(committed_tokens, page_size) - window_tokens), page_size)


def eviction_floors(committed_tokens: Int64Array, window_tokens: int, page_size: int) -> Int64Array:
    """`eviction_floor` for an array of rows."""
    mask = -page_size  # page_size is a power of two: & -p rounds down
    floors: Int64Array = np.maximum((committed_tokens & mask) - window_tokens, 0) & mask
    return floors


class Tail(NamedTuple):
    """SWA part of a preallocation, in tokens: SWA pages are taken for [max(start, prefix), fill)."""

    start_tokens: int
    tail_tokens: int


def swa_tail(fill_tokens: int, window_tokens: int, page_size: int) -> Tail:
    """Where the sliding-window tail of a row that will hold `fill_tokens` starts, and how long it is.

    start = floor_p(max(0, fill - W)). The one place where the start is checked (>= 0 and % p == 0), on every
    path, whether KV lands on the device or on the host. Raises `LawViolation` (1).
    """
    start = floor_p(max(0, fill_tokens - window_tokens), page_size)
    if start < 0 or start % page_size or start > fill_tokens:
        raise LawViolation(
            1, "tail start is not a page boundary inside the row", start=start, fill=fill_tokens, page_size=page_size
        )
    return Tail(start, fill_tokens - start)


def swa_tail_pages(fill_tokens: int, window_tokens: int, page_size: int, prefix_tokens: int = 0) -> int:
    """SWA pages a preallocation takes: those of [max(start, prefix), fill)."""
    start = max(swa_tail(fill_tokens, window_tokens, page_size).start_tokens, prefix_tokens)
    return max(0, -(-(fill_tokens - start) // page_size))
