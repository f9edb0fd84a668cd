"""The full pool with a host page beside every page."""

from __future__ import annotations

from typing import cast

import numpy as np

from octavo.errors import OutOfPages
from octavo.kv.pages import NO_PAGE, FullPages, HostPages, Int32Array
from octavo.kv.pool import PagePool, PageState


class TieredPool(PagePool[FullPages]):
    """Logical pages. Whatever happens to one happens to its host page; both or neither (law 11)."""

    def __init__(self, total_pages: int, host_pages: int) -> None:
        super().__init__("full", total_pages)
        self.host: PagePool[HostPages] = PagePool("host", host_pages)
        self.host_of: Int32Array = np.full(total_pages, NO_PAGE, np.int32)

    @property
    def spare(self) -> int:
        return min(self.free, self.host.free)

    def take(self, count: int, state: int = PageState.HELD) -> FullPages:
        if count > self.host.free:
            raise OutOfPages("host", count, self.host.free)
        pages = super().take(count, state)
        self.host_of[pages] = self.host.take(count, state)
        return pages

    def take_for(self, host: HostPages, old: int, new: int) -> FullPages:
        """Logical pages for host pages that had none, in state `old` until now. Raises `OutOfPages`."""
        pages = super().take(len(host), new)
        self.host.move(host, old, new)
        self.host_of[pages] = host
        return pages

    def give_back(self, pages: FullPages, state: int) -> None:
        if len(pages) == 0:
            return
        self._check(pages, state)
        self.host.give_back(cast(HostPages, self.host_of[pages]), state)
        self.host_of[pages] = NO_PAGE
        super().give_back(pages, state)

    def part(self, pages: FullPages, state: int) -> HostPages:
        """Free `pages`, all in `state`, and keep their host pages, which stay in it."""
        host = self.host_of[pages]
        if len(pages):
            self._check(pages, state)
            self.host_of[pages] = NO_PAGE
            super().give_back(pages, state)
        return cast(HostPages, host)

    def move(self, pages: FullPages, old: int, new: int) -> None:
        if len(pages) == 0:
            return
        super().move(pages, old, new)
        self.host.move(cast(HostPages, self.host_of[pages]), old, new)

    def host_pages_of(self, pages: Int32Array) -> Int32Array:
        """Host pages of table entries; -1 stays -1."""
        return np.where(pages >= 0, self.host_of[pages], NO_PAGE).astype(np.int32)
