"""Host residency (HiSparse): a host page beside every logical page, device slots of a row, the backup frontier.

    logical page   what tables, prefix tree and locks name; bound 1:1 to a host page for as long as it is not free
    host page      the whole KV of a page, all layers; moves with its logical page, or stays in a ticket or in an
                   offloaded node of the prefix tree
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
from octavo.kv.node import Node
from octavo.kv.offload import OffloadTree
from octavo.kv.pages import NO_PAGE, DeviceSlots, HostPages, Int32Array, Int64Array, ceil_pages
from octavo.kv.pool import PagePool, PageState
from octavo.kv.tiered_pool import TieredPool


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


# --- what rows and tickets hold ----------------------------------------------------------------------------------


@dataclass(eq=False)
class Ticket:
    """A retracted request's claim: its KV stays in the host tier until `preallocate(ticket=…)` or `drop_ticket`.

    number              which retraction of these books it comes from, from 1 on: its name in a trace
    node                end of the locked path of shared pages, which may be offloaded meanwhile
    host                host pages of [protected, ceil_p(committed)), in order
    committed, prefilled, budget   tokens, tokens, pages: as they were in the row
    """

    number: int
    node: Node
    host: HostPages
    committed: int
    prefilled: int
    budget: int
    open: bool = True


def path_of(ticket: Ticket) -> list[Node]:
    """The nodes that a ticket has locked, from the first page on."""
    path: list[Node] = []
    node = ticket.node
    while node.parent is not None:
        path.append(node)
        node = node.parent
    return path[::-1]


class Tiers:
    """Host state of the tiers, by row. Changed by the ledger alone."""

    def __init__(self, config: TierConfig, tree: OffloadTree, max_rows: int, page_size: int) -> None:
        self.config, self.tree, self.page_size = config, tree, page_size
        self.pool: TieredPool = tree.pool
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

    # -- what tickets lock --

    def offload(self, pages: int) -> None:
        """Free at least `pages` logical pages that only tickets lock; who was retracted last gives first."""
        self.tree.offload(pages, [ticket.node for ticket in reversed(self.tickets)])

    def pages_to_resume(self, ticket: Ticket) -> int:
        """Pages that a return takes out of what is available in the budget "logical"."""
        shared = sum(node.num_pages for node in path_of(ticket) if node.locks == node.kept)
        return len(ticket.host) + shared

    def host_pages_of(self, ticket: Ticket) -> Int32Array:
        """Every host page that a ticket needs: of its path from the first page on, and its own."""
        path = [self.pool.host_of[node.full] if node.host is None else node.host for node in path_of(ticket)]
        return np.concatenate([*path, ticket.host])

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
            **self.counters(),
        }

    def counters(self) -> dict[str, int]:
        moved = {"offloaded_pages": self.tree.offloaded_pages, "loaded_back_pages": self.tree.loaded_back_pages}
        return self.stats | moved
