"""One pool of page ids and the state of every page (laws 5 and 6).

    free ──take──> held ──publish──> cached ──evict──> free
                    │ └───────────free─────────────────^
    free ──take──> leased ──land──> held        leased ──quarantine──> quarantined ──restart──> free

`cached` pages belong to the prefix tree, `held` pages to one request, `leased` pages to a transfer whose status is
not final, `quarantined` pages to a transfer that will never become final. A page has exactly one state.
"""

from __future__ import annotations

from typing import Final, Generic, TypeVar, cast

import numpy as np

from octavo.errors import LawViolation, OutOfPages
from octavo.kv.pages import DeviceSlots, FullPages, HostPages, Int32Array, SwaPages

Ids = TypeVar("Ids", FullPages, SwaPages, HostPages, DeviceSlots)


class PageState:
    """Values of `PagePool.state`: plain integers, for they are looked up in every plan."""

    FREE: Final = 0
    CACHED: Final = 1
    HELD: Final = 2
    LEASED: Final = 3
    QUARANTINED: Final = 4


STATE_NAMES = ("free", "cached", "held", "leased", "quarantined")


class PagePool(Generic[Ids]):
    """`total` pages; ids 0 … total-1. The free list is a stack on the host: no device tensor is read (law 8)."""

    def __init__(self, name: str, total_pages: int) -> None:
        self.name = name
        self.total = total_pages
        self.state = np.zeros(total_pages, np.uint8)
        self.counts = [total_pages, 0, 0, 0, 0]  # pages per PageState
        self.min_free = total_pages  # low-water mark, for reports
        # Stack of free ids, top at free_count-1; low ids come out first.
        self._stack: Int32Array = np.arange(total_pages - 1, -1, -1, dtype=np.int32)
        self._mark = np.zeros(total_pages, np.int32)  # scratch: finds duplicates inside one call

    @property
    def free(self) -> int:
        return self.counts[0]

    @property
    def spare(self) -> int:
        """Pages that `take` could give now."""
        return self.counts[0]

    def take(self, count: int, state: int = PageState.HELD) -> Ids:
        """Take `count` free pages into `state`; all or nothing (law 11). Raises `OutOfPages`."""
        top = self.counts[0]
        if count > top:
            raise OutOfPages(self.name, count, top)
        if count == 1:
            page = self._stack[top - 1]
            self.state[page] = state
            pages = self._stack[top - 1 : top].copy()
        else:
            pages = self._stack[top - count : top][::-1].copy()
            self.state[pages] = state
        self.counts[0] = top - count
        self.counts[state] += count
        if self.counts[0] < self.min_free:
            self.min_free = self.counts[0]
        return cast(Ids, pages)

    def give_back(self, pages: Ids, state: int) -> None:
        """Return `pages`, all of them in `state`, to the free list. Raises `LawViolation` (6), changing nothing."""
        count = len(pages)
        if count == 0:
            return
        self._check(pages, state)
        self.state[pages] = PageState.FREE
        free = self.counts[0]
        self._stack[free : free + count] = pages[::-1]
        self.counts[0] = free + count
        self.counts[state] -= count

    def move(self, pages: Ids, old: int, new: int) -> None:
        """Change the state of `pages` from `old` to `new` (neither is free). Raises `LawViolation` (6)."""
        count = len(pages)
        if count == 0:
            return
        self._check(pages, old)
        self.state[pages] = new
        self.counts[old] -= count
        self.counts[new] += count

    def _check(self, pages: Ids, expected: int) -> None:
        """Every page exists, is in `expected`, and occurs once."""
        array: Int32Array = pages
        if int(array.min()) < 0 or int(array.max()) >= self.total:
            bad = int(array[(array < 0) | (array >= self.total)][0])
            raise LawViolation(6, f"{self.name} pool has no page {bad}", page=bad, total=self.total)
        wrong = self.state[array] != expected
        if wrong.any():
            page = int(array[wrong.argmax()])
            now = STATE_NAMES[int(self.state[page])]
            what = f"{self.name} page {page} is free already" if now == "free" else f"{self.name} page {page} is {now}"
            raise LawViolation(6, f"{what}, expected {STATE_NAMES[expected]}", page=page, state=now)
        order = np.arange(len(array), dtype=np.int32)
        self._mark[array] = order
        twice = self._mark[array] != order
        if twice.any():
            page = int(array[twice.argmax()])
            raise LawViolation(6, f"{self.name} page {page} is named twice in one call", page=page)

    def free_list(self) -> Int32Array:
        """Ids on the free list (a copy), for checks."""
        return self._stack[: self.counts[0]].copy()

    def by_name(self) -> dict[str, int]:
        """State name -> pages, plus `total`."""
        return {"total": self.total, **dict(zip(STATE_NAMES, self.counts, strict=True))}
