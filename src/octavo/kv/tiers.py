"""Host residency (HiSparse): a host page beside every logical page, device slots of a row, the backup frontier.

    logical page   what tables, prefix tree and locks name; bound 1:1 to a host page for as long as it is not free
    host page      the whole KV of a page, all layers; moves with its logical page, or stays in a ticket
    device slot    room for the sparse layers of one page; a row holds `device_pages` of them while it lives

A column (page of a row) below `backed` is in the host tier, drained. Only then may it enter the prefix tree, and only
if a dense pass wrote it: below the end of the row's prefill, or below `dense_limit_tokens`. Pure host arithmetic; the
ledger is the only caller that changes anything here (law 7).
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, cast

import numpy as np

from octavo.errors import ConfigError, OutOfPages
from octavo.kv.pages import NO_PAGE, DeviceSlots, FullPages, HostPages, Int32Array, Int64Array, SwaPages, ceil_pages
from octavo.kv.pool import PagePool, PageState
from octavo.kv.prefix import Node


@dataclass(frozen=True)
class TierConfig:
    """Sizes of the tiers. Raises `ConfigError` naming the option.

    host_pages      pages of the host tier (all layers of the full pool)
    device_slots    slots of all rows together
    device_pages    slots of one row
    topk_pages      selected pages of a query, beside those that always count
    recent_tokens   positions up to a query's own whose pages always count
    """

    host_pages: int
    device_slots: int
    device_pages: int
    topk_pages: int
    recent_tokens: int

    def __post_init__(self) -> None:
        for option in ("host_pages", "device_slots", "device_pages", "topk_pages", "recent_tokens"):
            if getattr(self, option) < 1:
                raise ConfigError(option, getattr(self, option), "must be at least 1")
        if self.device_slots < self.device_pages:
            raise ConfigError("device_slots", self.device_slots, f"one row needs device_pages ({self.device_pages})")


# --- rules of position: the same for every company, draft and pressure ------------------------------------------


def dense_limit_tokens(device_pages: int, page_size: int, recent_tokens: int) -> int:
    """A query at position q attends to everything iff q + 1 <= this. What its step writes beside it fits the buffer
    too, for recent_tokens is at least the largest reserve, whatever drafts."""
    return max(0, device_pages * page_size - recent_tokens)


def always_pages(recent_tokens: int, footprint_tokens: int, page_size: int) -> int:
    """Most pages that count for some query of one step without being selected: the first page and those that overlap
    recent_tokens + footprint - 1 positions."""
    return 2 + ceil_pages(recent_tokens + footprint_tokens - 1, page_size)


def least_device_pages(topk_pages: int, recent_tokens: int, page_size: int, rows: int = 1) -> int:
    """Smallest buffer that is sure to hold the union of pages of `rows` query rows of one sequence."""
    return rows * topk_pages + always_pages(recent_tokens, rows, page_size)


def max_verify_rows(device_pages: int, topk_pages: int, recent_tokens: int, page_size: int) -> int:
    """Most query rows of one sequence whose union is sure to fit its buffer: m·topk + always(m) <= device_pages.
    0: not even a plain decode row fits."""
    rows = max(0, (device_pages - always_pages(recent_tokens, 1, page_size)) // topk_pages)
    while rows and least_device_pages(topk_pages, recent_tokens, page_size, rows) > device_pages:
        rows -= 1
    return rows


def max_chunk_tokens(device_pages: int, recent_tokens: int, page_size: int, *, overlap: bool) -> int:
    """Longest prefill chunk: pages of all chunks whose backup has not drained must fit beside the recent ones."""
    pages = device_pages - ceil_pages(recent_tokens, page_size) - 1
    return max(0, pages * page_size // (2 if overlap else 1))


# --- the full pool with a host page beside every page -----------------------------------------------------------


class TieredPool(PagePool[FullPages]):
    """Logical pages. Whatever happens to one happens to its host page; both or neither (law 11)."""

    def __init__(self, total_pages: int, host_pages: int) -> None:
        super().__init__("full", total_pages)
        self.host: PagePool[HostPages] = PagePool("host", host_pages)
        self.host_of: Int32Array = np.full(total_pages, NO_PAGE, np.int32)

    @property
    def spare(self) -> int:
        return min(self.free, self.host.free)

    @property
    def scarce(self) -> str:
        return "host" if self.host.free < self.free else "full"

    def take(self, count: int, state: int = PageState.HELD) -> FullPages:
        if count > self.host.free:
            raise OutOfPages("host", count, self.host.free)
        pages = super().take(count, state)
        self.host_of[pages] = self.host.take(count, state)
        return pages

    def take_for(self, host: HostPages, state: int) -> FullPages:
        """Logical pages for host pages that a ticket kept, `held` until now. Raises `OutOfPages`."""
        pages = super().take(len(host), state)
        self.host.move(host, PageState.HELD, state)
        self.host_of[pages] = host
        return pages

    def give_back(self, pages: FullPages, state: int) -> None:
        if len(pages) == 0:
            return
        self._check(pages, state)
        self.host.give_back(cast(HostPages, self.host_of[pages]), state)
        self.host_of[pages] = NO_PAGE
        super().give_back(pages, state)

    def part(self, pages: FullPages) -> HostPages:
        """Free `pages`, all `held`, and keep their host pages, which stay `held`."""
        host = self.host_of[pages]
        if len(pages):
            self._check(pages, PageState.HELD)
            self.host_of[pages] = NO_PAGE
            super().give_back(pages, PageState.HELD)
        return cast(HostPages, host)

    def move(self, pages: FullPages, old: int, new: int) -> None:
        if len(pages) == 0:
            return
        super().move(pages, old, new)
        self.host.move(cast(HostPages, self.host_of[pages]), old, new)

    def host_pages_of(self, pages: Int32Array) -> Int32Array:
        """Host pages of table entries; -1 stays -1."""
        return np.where(pages >= 0, self.host_of[pages], NO_PAGE).astype(np.int32)


# --- what rows and tickets hold ----------------------------------------------------------------------------------


@dataclass(eq=False)
class Ticket:
    """A retracted request's claim: its KV stays in the host tier until `preallocate(ticket=…)` or `drop_ticket`.

    number              which retraction of these books it comes from, from 1 on: its name in a trace
    node                end of the locked path of shared pages
    host                host pages of [protected, ceil_p(committed)), in order
    swa_shared          the tree's SWA pages that stay locked
    committed, prefilled, budget   tokens, tokens, pages: as they were in the row
    """

    number: int
    node: Node
    host: HostPages
    swa_shared: SwaPages
    committed: int
    prefilled: int
    budget: int
    open: bool = True


class Tiers:
    """Host state of the tiers, by row. Changed by the ledger alone."""

    def __init__(self, config: TierConfig, pool: TieredPool, max_rows: int, page_size: int) -> None:
        self.config, self.pool, self.page_size = config, pool, page_size
        self.slots: PagePool[DeviceSlots] = PagePool("slots", config.device_slots)
        self.row_slots: Int32Array = np.full((max_rows, config.device_pages), NO_PAGE, np.int32)
        self.backed = np.zeros(max_rows, np.int64)  # columns below it are in the host tier, drained
        self.backing = np.zeros(max_rows, np.int64)  # columns below it are there or on their way
        self.prefilled = np.zeros(max_rows, np.int64)  # tokens below it were written by a dense pass
        self.budget = np.zeros(max_rows, np.int64)  # host pages the row may come to hold, shared ones included
        self.tickets: list[Ticket] = []
        self.backups: dict[int, tuple[Int64Array, Int64Array, Int64Array]] = {}  # op -> rows, generations, new backed
        self.dense_limit = dense_limit_tokens(config.device_pages, page_size, config.recent_tokens)
        self.stats = {"backed_up_pages": 0, "retracted": 0, "resumed": 0, "dropped_tickets": 0}
        self._dirty = np.zeros(max_rows, np.bool_)
        self._renewed = np.zeros(max_rows, np.bool_)

    # -- slots --

    def check_slots(self) -> None:
        """Raises `OutOfPages` if no row can get its slots now."""
        if self.slots.free < self.config.device_pages:
            raise OutOfPages("slots", self.config.device_pages, self.slots.free)

    def open_slots(self, row: int) -> None:
        """Give a row its slots; its mappings start empty."""
        self.row_slots[row] = self.slots.take(self.config.device_pages)
        self._renewed[row] = self._dirty[row] = True

    def has_slots(self, row: int) -> bool:
        return bool(self.row_slots[row, 0] != NO_PAGE)

    def open_row(self, row: int, cached_pages: int, budget_pages: int) -> None:
        self.backed[row] = self.backing[row] = cached_pages
        self.prefilled[row] = cached_pages * self.page_size
        self.budget[row] = budget_pages
        self._dirty[row] = True

    def close_row(self, row: int) -> None:
        """The row's forward and backups have drained: slots first, then its mappings. Its pages go afterwards."""
        if self.has_slots(row):
            self.slots.give_back(cast(DeviceSlots, self.row_slots[row].copy()), PageState.HELD)
            self.row_slots[row] = NO_PAGE
        self.backed[row] = self.backing[row] = self.prefilled[row] = self.budget[row] = 0
        self._renewed[row] = self._dirty[row] = True

    def touch(self, rows: Int64Array | int) -> None:
        self._dirty[rows] = True

    def take_row_updates(self) -> tuple[Int64Array, Int64Array]:
        """Since the last call: (rows whose device state starts anew, rows whose slots or frontier have changed)."""
        renewed, dirty = np.flatnonzero(self._renewed), np.flatnonzero(self._dirty)
        self._renewed[renewed] = False
        self._dirty[dirty] = False
        return renewed, dirty

    # -- budgets --

    def promised_pages(self, width_pages: Int64Array) -> int:
        """Host pages that live rows (`width_pages` [max_rows]) and tickets may still come to need."""
        rows = int(np.maximum(self.budget - width_pages, 0).sum())
        return rows + sum(max(0, t.budget - len(t.host) - t.node.end_page) for t in self.tickets)

    def publish_bound(self, row: int) -> int:
        """Tokens that may enter the prefix tree: backed up, and written by a dense pass."""
        return min(int(self.backed[row]) * self.page_size, max(int(self.prefilled[row]), self.dense_limit))

    def report(self) -> dict[str, Any]:
        """Plain data for `kv_report()`."""
        c = self.config
        waiting = sum(int((new - self.backed[rows]).sum()) for rows, _, new in self.backups.values())
        return {
            "device_pages": c.device_pages,
            "topk_pages": c.topk_pages,
            "recent_tokens": c.recent_tokens,
            "dense_limit_tokens": self.dense_limit,
            "tickets": len(self.tickets),
            "ticket_pages": sum(len(t.host) for t in self.tickets),
            "backups_waiting": waiting,
            **self.stats,
        }
