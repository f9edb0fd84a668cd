"""State of the ledger and the moves its entries share. Nothing outside `octavo.kv` changes what is kept here."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any, cast

import numpy as np

from octavo.errors import LawViolation, OutOfPages
from octavo.kv.books import ROW_STATE_NAMES, LedgerConfig, NoSuchRow, OutOfRows, RowState, Table, read_only
from octavo.kv.inflight import Aside, InFlight
from octavo.kv.node import Match, Namespace, Node
from octavo.kv.offload import OffloadTree
from octavo.kv.pages import NO_PAGE, FullPages, Int32Array, Int64Array, SwaPages, whole_number, whole_numbers
from octavo.kv.policy import EvictPolicy, LeastRecentlyUsed
from octavo.kv.pool import PagePool, PageState
from octavo.kv.prefix import PrefixTree
from octavo.kv.tiered_pool import TieredPool
from octavo.kv.tiers import Tiers


class LedgerBase:
    """Arrays over rows, two pools, two tables, the prefix tree, operations in flight."""

    def __init__(self, config: LedgerConfig, *, evict_policy: EvictPolicy | None = None, trace: Any = None) -> None:
        self.config = config
        self.page_size = p = config.page_size
        self._shift = p.bit_length() - 1
        self.width_pages = config.width_pages
        self.width_tokens = self.width_pages * p
        self._max_rows = rows = config.max_rows
        self._committed, self._known, self._allocated = (np.zeros(rows, np.int64) for _ in range(3))
        self._protected, self._evicted, self._fill = (np.zeros(rows, np.int64) for _ in range(3))
        self._generation = np.ones(rows, np.int64)
        self._state = np.zeros(rows, np.uint8)
        self._plannable = np.zeros(rows, np.bool_)  # state == ACTIVE
        self._node: list[Node | None] = [None] * rows  # where a row's locked path ends
        self._free_rows = list(range(rows - 1, -1, -1))
        self.swa_pool: PagePool[SwaPages] | None = PagePool("swa", config.swa_pages) if config.swa_pages else None
        self._full = Table(rows, self.width_pages)
        self._swa = Table(rows, self.width_pages) if self.swa_pool else None
        keys = (config.window_tokens, config.key_mode == "pair", evict_policy or LeastRecentlyUsed())
        self.full_pool: PagePool[FullPages]
        self.tiers: Tiers | None = None
        if config.tiers is None:
            self.full_pool = PagePool("full", config.full_pages)
            self.tree = PrefixTree(p, self.full_pool, self.swa_pool, *keys)
        else:
            self.full_pool = tiered = TieredPool(config.full_pages, config.tiers.host_pages)
            self.tree = tree = OffloadTree(p, tiered, self.swa_pool, *keys)
            self.tiers = Tiers(config.tiers, tree, rows, p)
        self.inflight = InFlight(rows)
        self._leases: dict[tuple[int, int], tuple[Int32Array, Int32Array]] = {}
        self.trace = trace
        if trace is not None:
            trace.begin(config)
        # (generation, lengths) at the last check of the laws
        self.audited: tuple[Int64Array, dict[str, Int64Array]] | None = None
        self.stats = {"queried_tokens": 0, "hit_tokens": 0, "remapped_pages": 0, "stale_commits": 0, "violations": 0}

    # --- what others may read ----------------------------------------------------------------------------------

    @property
    def committed(self) -> Int64Array:
        return cast(Int64Array, read_only(self._committed))

    @property
    def known(self) -> Int64Array:
        """`committed`, or the end of the prefill chunk in flight."""
        return cast(Int64Array, read_only(self._known))

    @property
    def allocated(self) -> Int64Array:
        return cast(Int64Array, read_only(self._allocated))

    @property
    def protected(self) -> Int64Array:
        return cast(Int64Array, read_only(self._protected))

    @property
    def evicted(self) -> Int64Array:
        return cast(Int64Array, read_only(self._evicted))

    @property
    def fill(self) -> Int64Array:
        return cast(Int64Array, read_only(self._fill))

    @property
    def generation(self) -> Int64Array:
        return cast(Int64Array, read_only(self._generation))

    @property
    def row_state(self) -> Any:
        """uint8 [max_rows], values of `RowState`."""
        return read_only(self._state)

    @property
    def full_table(self) -> Int32Array:
        """int32 [max_rows, width_pages]; -1: no page."""
        return cast(Int32Array, read_only(self._full.cells))

    @property
    def swa_table(self) -> Int32Array | None:
        """The same for the SWA pool; None without sliding layers. -1 below a row's floor."""
        return cast(Int32Array, read_only(self._swa.cells)) if self._swa else None

    def take_table_updates(self, pool: str) -> tuple[Int64Array, Int64Array, Int32Array]:
        """(rows, columns, pages) that a device copy of the table of `pool` ("full" or "swa") lacks."""
        table = self._full if pool == "full" else self._swa
        if table is None:
            none = np.empty(0, np.int64)
            return none, none, np.empty(0, np.int32)
        return table.take_updates()

    def live_rows(self) -> Int64Array:
        """Rows that hold anything."""
        return np.flatnonzero(self._state)

    def path_end(self, row: int) -> Node:
        """The node at which the locked path of a live row ends: exactly at `protected`."""
        return cast(Node, self._node[self._row(row)])

    def free_pages(self, pool: str) -> int:
        return self._pool(pool).free

    def available(self, pool: str) -> int:
        """Pages a plan could get now: free ones, unlocked cached ones and, of logical pages, those that only retracted
        requests lock. Of this pool only."""
        if pool == "full":
            logical = self.available("logical")
            return logical if self.tiers is None else min(logical, self.available("host"))
        if pool == "logical":  # full pages for KV whose host pages are there already
            return self.full_pool.free + self.tree.evictable_full + self.tree.offloadable_full
        if self.tiers is not None and pool == "host":
            return self.tiers.pool.host.free + self.tree.evictable_full
        if self.tiers is not None and pool == "slots":
            return self.tiers.slots.free
        return self._pool(pool).free + self.tree.evictable_swa

    def _pool(self, pool: str) -> PagePool[Any]:
        if pool == "full":
            return self.full_pool
        if pool == "swa" and self.swa_pool is not None:
            return self.swa_pool
        if self.tiers is not None and pool in ("host", "slots"):
            return self.tiers.pool.host if pool == "host" else self.tiers.slots
        raise ValueError(f"no pool {pool!r}")

    # --- rows --------------------------------------------------------------------------------------------------

    def _broken(self, law: int, message: str, row: int | None = None, **numbers: object) -> LawViolation:
        """A law would break: count it. To be raised by the caller."""
        self.stats["violations"] += 1
        return LawViolation(law, message, row=row, **numbers)

    def _row(self, row: object) -> int:
        """`row` as an int. Raises `NoSuchRow`."""
        at = whole_number(row)
        if at is None or not 0 <= at < self._max_rows:
            raise NoSuchRow(row, self._max_rows)
        return at

    def _rows(self, rows: object) -> Int64Array:
        """`rows` as int64 [n]. Raises `NoSuchRow`: without this, -1 would be the last row."""
        at = whole_numbers(rows)
        if at is None:
            raise NoSuchRow(rows, self._max_rows)
        # Seen without a sign, numbers below 0 are the largest: one pass finds both kinds.
        most = at.item(0) if len(at) == 1 else np.maximum.reduce(at.view(np.uint64), initial=0)
        if not 0 <= most < self._max_rows:
            raise NoSuchRow(int(at[(at < 0) | (at >= self._max_rows)][0]), self._max_rows)
        return at

    def _require(self, row: object, state: int, entry: str) -> int:
        """`row` as an int. Raises `NoSuchRow`, or `LawViolation` 2 if it is not in `state`."""
        at = self._row(row)
        now = int(self._state[at])
        if now != state:
            expected = ROW_STATE_NAMES[state]
            raise self._broken(2, f"{entry} of a row that is {ROW_STATE_NAMES[now]}", at, expected=expected)
        return at

    def _open_row(self, match: Match, namespace: Namespace, floor_page: int, state: int, budget_pages: int) -> int:
        """Give out a row, lock the match for it and map its pages. The caller has checked that there is a row."""
        row = self._free_rows.pop()
        self._node[row] = self.tree.take(match, namespace, min(floor_page, match.pages))
        cached = match.pages << self._shift
        self._full.write(row, 0, match.pages, match.full)
        if self._swa is not None:
            self._swa.write(row, floor_page, match.pages, match.swa[floor_page:])
        self._committed[row] = self._known[row] = self._allocated[row] = self._protected[row] = cached
        self._evicted[row] = floor_page << self._shift if self._swa is not None else 0
        self._state[row] = state
        self._plannable[row] = state == RowState.ACTIVE
        if self.tiers is not None:
            self.tiers.open_row(row, match.pages, budget_pages)
        return row

    def _check_row_free(self) -> None:
        if not self._free_rows:
            raise OutOfRows(self.config.max_rows)

    def _check_promise(self, pages: int) -> None:
        """Raises `OutOfPages` unless the host tier can hold `pages` more beside what others may come to need."""
        if self.tiers is not None and pages:
            have = self.available("host") - self.tiers.promised_pages(self._allocated >> self._shift)
            if pages > have:
                raise OutOfPages("host", pages, max(0, have))

    def _check_growth(self, rows: Int64Array | int, last_pages: Int64Array | int) -> None:
        """Raises `OutOfPages` if rows that grow to `last_pages` would take host pages that others were promised."""
        if self.tiers is not None:
            own = np.maximum(self.tiers.budget[rows], self._allocated[rows] >> self._shift)
            self._check_promise(int(np.maximum(last_pages - own, 0).sum()))

    def _close_row(self, row: int) -> None:
        """Free what a row owns, unlock what it shares, forget it. Nothing names it any more."""
        if self.tiers is not None:
            self.tiers.close_row(row)
        full, swa, shared_swa = self.pages_of(row)
        self.full_pool.give_back(cast(FullPages, full), PageState.HELD)
        if self.swa_pool is not None and self._swa is not None:
            self.swa_pool.give_back(cast(SwaPages, swa), PageState.HELD)
            self.tree.unlock_swa(shared_swa)
            self._swa.write(row, int(self._evicted[row]) >> self._shift, self.width_of(row), NO_PAGE)
        self._full.write(row, 0, self.width_of(row), NO_PAGE)
        self.tree.unlock_path(self._node[row])
        self._node[row] = None
        self._forget_row(row)

    def _close_retracted(self, row: int, kept: int, width: int) -> None:
        """`_close_row`, but the locks and the host pages below `kept` live on."""
        self._generation[row] += 1
        self._plannable[row] = False
        if self.tiers is not None:
            self.tiers.close_row(row)
        self.full_pool.give_back(cast(FullPages, self._full.cells[row, kept:width].copy()), PageState.HELD)
        if self.swa_pool is not None and self._swa is not None:
            floor = max(int(self._evicted[row]), int(self._protected[row])) >> self._shift
            own: Int32Array = self._swa.cells[row, floor:width]
            self.tree.unlock_swa(self.pages_of(row)[2])
            self.swa_pool.give_back(cast(SwaPages, own.copy()), PageState.HELD)
            self._swa.write(row, int(self._evicted[row]) >> self._shift, width, NO_PAGE)
        self._full.write(row, 0, width, NO_PAGE)
        self._forget_row(row)

    def _forget_row(self, row: int) -> None:
        for lengths in (self._committed, self._known, self._allocated, self._protected, self._evicted, self._fill):
            lengths[row] = 0
        self._state[row] = RowState.FREE
        self._free_rows.append(row)

    def width_of(self, row: int) -> int:
        """Pages of the row up to its watermark."""
        return int(self._allocated[self._row(row)]) >> self._shift

    def pages_of(self, row: int) -> tuple[Int32Array, Int32Array, Int32Array]:
        """A row's (own full pages, own SWA pages, SWA pages of the tree that it has locked)."""
        row = self._row(row)
        protected, end = int(self._protected[row]) >> self._shift, self.width_of(row)
        full = self._full.cells[row, protected:end]
        if self._swa is None:
            none = np.empty(0, np.int32)
            return full, none, none
        floor = int(self._evicted[row]) >> self._shift
        shared = self._swa.cells[row, floor:protected]
        return full, self._swa.cells[row, max(floor, protected) : end], shared[shared >= 0]

    # --- pages -------------------------------------------------------------------------------------------------

    def _make_room(self, full: int, swa: int, *, host: bool = True) -> None:
        """See that so many pages are free: cached ones are evicted, then what only retracted requests lock is
        offloaded. `host` False: the host pages are there already. Raises `OutOfPages`, then nothing has changed."""
        pool = self.full_pool
        spare = pool.spare if host else pool.free
        if full > spare:
            have = self.available("full" if host else "logical")
            if full > have:
                short = "full" if have == self.available("logical") else "host"
                raise OutOfPages(short, full, have)
        if self.swa_pool is not None:
            have = self.swa_pool.free + self.tree.evictable_swa
            if swa > have:
                raise OutOfPages("swa", swa, have)
        if full > spare:
            self.tree.evict_full(full - spare)
        if full > pool.free and self.tiers is not None:
            self.tiers.offload(full - pool.free)
        if self.swa_pool is not None and swa > self.swa_pool.free:
            self.tree.evict_swa(swa - self.swa_pool.free)

    def _grow(self, row: int, allocated_tokens: int) -> None:
        """Raise one row's watermark; both pools (law 11)."""
        first, last = self.width_of(row), allocated_tokens >> self._shift
        if last <= first:
            return
        if last > self.width_pages:
            raise self._broken(10, "row is too narrow", row, pages=last, width_pages=self.width_pages)
        self._check_growth(row, last)
        self._make_room(last - first, last - first)
        self._full.write(row, first, last, self.full_pool.take(last - first))
        if self.swa_pool is not None and self._swa is not None:
            self._swa.write(row, first, last, self.swa_pool.take(last - first))
        self._allocated[row] = allocated_tokens

    def _free_or_set_aside(self, row: int, full: Int32Array, swa: Int32Array) -> None:
        """Pages that a row has just lost: freed now, or when the operations naming the row have drained."""
        if self.inflight.per_row[row]:
            self.inflight.set_aside(row, full=full, swa=swa)
            return
        self.full_pool.give_back(cast(FullPages, full), PageState.HELD)
        if self.swa_pool is not None:
            self.swa_pool.give_back(cast(SwaPages, swa), PageState.HELD)

    def _settle_aside(self, entries: Iterable[Aside]) -> None:
        for entry in entries:
            self.full_pool.give_back(cast(FullPages, entry.full), PageState.HELD)
            if self.swa_pool is not None:
                self.swa_pool.give_back(cast(SwaPages, entry.swa), PageState.HELD)
                self.tree.unlock_swa(entry.swa_unlock)
