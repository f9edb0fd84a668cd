"""The page ledger: the only writer of lengths (law 7). Pure host arithmetic, in tokens and whole pages.

    0          evicted        protected        committed      known              allocated
    │───────────│────────────────│────────────────│─────────────│────────────────────│
    full pages: │ tree's, shared, read-only │  the row's own: final KV │ chunk in flight, drafts, rejects │
    SWA pages:  none below `evicted`, then as above

One entry per change: `admit`, `preallocate`, `land`, `extend`, `plan_decode`, `commit`, `publish`, `evict`,
`release`; with a host tier also `begin_backup`, `end_backup`, `retract`, `drop_ticket`. An entry that cannot do its
work raises before it changes anything (law 11).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, cast

import numpy as np

from octavo.errors import NeverFits, OutOfPages
from octavo.kv.books import (
    ROW_STATE_NAMES,
    Admission,
    DecodePlan,
    LedgerConfig,
    NoSuchRow,
    OutOfRows,
    Preallocation,
    RowState,
    Table,
    as_tokens,
    cell_runs,
)
from octavo.kv.ledger_tiers import TierLedger
from octavo.kv.ledger_transfers import unlocked_pages
from octavo.kv.node import Node
from octavo.kv.pages import NO_PAGE, FullPages, Int32Array, Int64Array, SwaPages, ceil_p, ceil_pages, floor_p
from octavo.kv.pool import PagePool, PageState
from octavo.kv.report import ledger_report
from octavo.kv.sizing import (
    DecodeReserve,
    RowsView,
    decode_watermark,
    full_budget_pages,
    page_aligned_decode_alloc_lens,
    reserve_tokens,
    swa_budget_pages,
)
from octavo.kv.sliding import eviction_floors

__all__ = [
    "Admission", "DecodePlan", "Ledger", "LedgerConfig", "NoSuchRow", "OutOfRows", "Preallocation", "RowState",
]  # fmt: skip


class Ledger(TierLedger):
    """See the module. Rows are small integers; a (row, generation) pair names one life of a row.

    Every method that takes rows raises `NoSuchRow` for one that is no whole number from 0 to `max_rows` − 1.
    """

    # --- life of a request -------------------------------------------------------------------------------------

    def admit(
        self, tokens: Sequence[int] | Int32Array, *, namespace: str | None = None, budget_pages: int = 0
    ) -> Admission:
        """Open a row for a prompt: match its prefix, lock and map the shared pages. At least one token is left to
        compute. Raises `OutOfRows`; then nothing has changed.

        With a host tier the row also gets its device slots, and `budget_pages` host pages are promised to it. Behind
        them (0: none are) it lives on what nobody was promised, and its growth may find the tier full. Raises
        `OutOfPages` ("slots", "host"); then nothing has changed."""
        ids = as_tokens(tokens)
        if not len(ids):
            raise ValueError("a request has at least one token")
        self._check_row_free()
        match = self.match(ids, namespace)
        if self.tiers is not None:
            self.tiers.check_slots()
            self._check_promise(max(budget_pages, unlocked_pages(match)))
        floor = self.tree.window_start_page(match.pages)
        row = self._open_row(match, namespace, floor, RowState.ACTIVE, budget_pages)
        if self.tiers is not None:
            self.tiers.open_slots(row)
        cached = match.pages << self._shift
        self.stats["queried_tokens"] += len(ids)
        self.stats["hit_tokens"] += cached
        admission = Admission(row, int(self._generation[row]), cached)
        if self.trace is not None:
            kept = {} if self.tiers is None else {"budget": budget_pages}
            self.trace.record("admit", tokens=ids, namespace=namespace, row=row, cached=cached, **kept)
        return admission

    def extend(self, row: int, upto_tokens: int) -> None:
        """A prefill chunk [known, upto) is about to be written: hold pages for it, `known` := upto.

        Raises `OutOfPages` (nothing changed), `LawViolation` 3 if upto lies below `known`, 10 if the row is too narrow.
        """
        row = self._require(row, RowState.ACTIVE, "extend")
        if upto_tokens < self._known[row]:
            raise self._broken(3, "known would fall", row, known=int(self._known[row]), upto=upto_tokens)
        if upto_tokens > self.config.context_tokens:
            raise self._broken(
                10, "chunk ends behind the context", row, upto=upto_tokens, context=self.config.context_tokens
            )
        self._grow(row, ceil_p(upto_tokens, self.page_size))
        self._known[row] = upto_tokens
        if self.tiers is not None:
            self.tiers.prefilled[row] = upto_tokens
        if self.trace is not None:
            self.trace.record("extend", row=row, upto=upto_tokens)

    def plan_decode(self, rows: Sequence[int] | Int64Array, reserve: DecodeReserve | int) -> DecodePlan:
        """Raise the watermark of `rows` (distinct) for one decode step: law 4, in both pools, all or nothing.

        Raises `OutOfPages` (nothing changed) and `LawViolation` 2 or 10.
        """
        tokens = reserve_tokens(reserve)
        if tokens > self.config.largest_reserve_tokens:
            largest = self.config.largest_reserve_tokens
            raise self._broken(10, "reserve is larger than rows are made for", reserve=tokens, largest=largest)
        at = self._rows(rows)
        plan = self._plan_one(int(at[0]), tokens) if len(at) == 1 else self._plan_many(at, tokens)
        if self.trace is not None:
            self.trace.record("plan", rows=at, reserve=tokens)
        return plan

    def _plan_one(self, row: int, reserve: int) -> DecodePlan:
        """A batch of one, in plain integers: array arithmetic costs more than it saves here."""
        if not self._plannable[row]:
            self._require(row, RowState.ACTIVE, "plan_decode")
        current = self._allocated.item(row)
        after = decode_watermark(current, self._known.item(row), reserve, self.page_size)
        if after > current:
            self._grow(row, after)
        return DecodePlan(np.array([current]), np.array([after]), after - current)

    def _plan_many(self, rows: Int64Array, reserve: int) -> DecodePlan:
        plannable = self._plannable.take(rows)
        if not plannable.all():
            self._require(int(rows[~plannable][0]), RowState.ACTIVE, "plan_decode")
        view = self._view(rows)
        plan = DecodePlan(*page_aligned_decode_alloc_lens(view, reserve=reserve, page_size=self.page_size))
        if plan.needed_tokens:
            self._take_for_plan(rows, plan)
        return plan

    def rows_view(self, rows: Int64Array) -> RowsView:
        """Rows as `page_aligned_decode_alloc_lens` takes them: what a plan of them would start from."""
        return self._view(self._rows(rows))

    def _view(self, rows: Int64Array) -> RowsView:
        return RowsView(self._allocated.take(rows), self._known.take(rows))

    def _take_for_plan(self, rows: Int64Array, plan: DecodePlan) -> None:
        growing = (plan.next > plan.current).nonzero()[0]
        rows, first, end = rows.take(growing), plan.current.take(growing) >> self._shift, plan.next.take(growing)
        if int(end.max()) > self.width_tokens:
            worst = int(end.argmax())
            raise self._broken(10, "row is too narrow", int(rows[worst]), next=int(end[worst]), width=self.width_tokens)
        if len(set(rows.tolist())) != len(rows):
            raise self._broken(2, "a plan names a row twice", rows=rows.tolist())
        pages = plan.needed_tokens >> self._shift
        self._check_growth(rows, end >> self._shift)
        self._make_room(pages, pages)
        self._allocated[rows] = end
        if pages != len(rows):  # some row takes several pages: one entry per page
            rows, first = cell_runs(rows, first, (end >> self._shift) - first)
        self._full.write_cells(rows, first, self.full_pool.take(pages))
        if self.swa_pool is not None and self._swa is not None:
            self._swa.write_cells(rows, first, self.swa_pool.take(pages))

    def commit(
        self,
        rows: Sequence[int] | Int64Array,
        generations: Sequence[int] | Int64Array,
        new_committed: Sequence[int] | Int64Array,
    ) -> Any:
        """Settle results: KV below `new_committed` is final. Returns bool [n]: False where (row, generation) is stale.

        Raises `LawViolation` 3 where a length would fall, 2 where it would pass the watermark; nothing has changed.
        """
        at, lengths = self._rows(rows), np.asarray(new_committed, np.int64)
        applied = (self._generation[at] == np.asarray(generations, np.int64)) & self._plannable[at]
        if applied.all():
            live, new = at, lengths
        else:
            live, new = at[applied], lengths[applied]
            self.stats["stale_commits"] += len(at) - len(live)
        old, limit = self._committed[live], self._allocated[live]
        if (new < old).any():
            bad = int((new < old).argmax())
            raise self._broken(3, "committed would fall", int(live[bad]), committed=int(old[bad]), new=int(new[bad]))
        if (new > limit).any():
            bad = int((new > limit).argmax())
            raise self._broken(2, "committed would pass the watermark", int(live[bad]), new=int(new[bad]),
                               allocated=int(limit[bad]))  # fmt: skip
        self._committed[live] = new
        self._known[live] = np.maximum(self._known[live], new)
        if self.trace is not None:
            self.trace.record("commit", rows=live, committed=new)
        return applied

    def publish(self, row: int, tokens: Sequence[int] | Int32Array) -> int:
        """Whole pages of the known key enter the tree. Returns `protected`, in tokens.

        tokens   prompt and accepted output, cut behind the token that completes a stop
        Call it once the draft KV of the pages is written. Where the tree has a page already the row is remapped to
        it and the duplicate freed when law 14 allows. Nothing is published if the window before the boundary is
        not alive in this row, for nobody could match it. With a host tier, only what is backed up and was written by
        a dense pass.
        """
        row = self._require(row, RowState.ACTIVE, "publish")
        protected = int(self._protected[row])
        if not self.config.prefix_cache:
            return protected
        ids = as_tokens(tokens)
        bound = floor_p(min(int(self._committed[row]), len(ids) - self.tree.extra), self.page_size)
        if self.tiers is not None:
            bound = min(bound, floor_p(self.tiers.publish_bound(row), self.page_size))
        if bound <= protected or not self._window_alive(row, bound >> self._shift):
            return protected
        first, last = protected >> self._shift, bound >> self._shift
        full = self._full.cells[row, first:last]
        swa = self._swa.cells[row, first:last] if self._swa is not None else None
        done = self.tree.insert(cast(Node, self._node[row]), ids, full, swa)
        self._node[row] = done.node
        self._remap(row, first, done.full, done.swa)
        self._protected[row] = bound
        if len(done.spare_full) or len(done.spare_swa):
            self.stats["remapped_pages"] += len(done.spare_full)
            self._free_or_set_aside(row, done.spare_full, done.spare_swa)
        if self.trace is not None:
            self.trace.record("publish", row=row, tokens=ids)
        return bound

    def _remap(self, row: int, first: int, full: FullPages, swa: SwaPages) -> None:
        """Write what differs between a row's table and the tree's pages."""
        changed = np.flatnonzero(self._full.cells[row, first : first + len(full)] != full)
        if len(changed):
            low, high = int(changed[0]), int(changed[-1]) + 1
            self._full.write(row, first + low, first + high, full[low:high])
        if self._swa is None:
            return
        changed = np.flatnonzero(self._swa.cells[row, first : first + len(swa)] != swa)
        if len(changed):
            low, high = int(changed[0]), int(changed[-1]) + 1
            self._swa.write(row, first + low, first + high, swa[low:high])

    def _window_alive(self, row: int, boundary_page: int) -> bool:
        if self._swa is None:
            return True
        start = self.tree.window_start_page(boundary_page)
        return bool((self._swa.cells[row, start:boundary_page] >= 0).all())

    def evict(self, rows: Sequence[int] | Int64Array) -> int:
        """Raise the read floor of `rows` to where their windows allow, by the host's `committed` (law 13).

        Frees the rows' own SWA pages below it and unlocks the tree's. Returns how many pages left rows. Call it
        after commits, and before retracting anybody.
        """
        at = self._rows(rows)
        pool, table = self.swa_pool, self._swa
        if pool is None or table is None:
            return 0
        if not self._plannable[at].all():
            self._require(int(at[~self._plannable[at]][0]), RowState.ACTIVE, "evict")
        floors = eviction_floors(self._committed[at], self.config.window_tokens, self.page_size)
        rising = (floors > self._evicted[at]).nonzero()[0]
        at, floors = at[rising], floors[rising]
        # Most rows drop pages of their own that nobody else names: those go together.
        alone = (self._evicted[at] >= self._protected[at]) & (self.inflight.whole_per_row[at] == 0)
        dropped = self._drop_own(at[alone], floors[alone], pool, table)
        for row, floor in zip(at[~alone].tolist(), floors[~alone].tolist(), strict=True):
            dropped += self._raise_floor(row, floor, pool, table)
        if self.trace is not None:
            self.trace.record("evict", rows=rows)
        return dropped

    def _drop_own(self, rows: Int64Array, floors: Int64Array, pool: PagePool[SwaPages], table: Table) -> int:
        """Raise the floors of rows whose pages in between are their own and may be freed at once."""
        if not len(rows):
            return 0
        first = self._evicted[rows] >> self._shift
        rows_of, columns = cell_runs(rows, first, (floors >> self._shift) - first)
        pages = table.cells[rows_of, columns]
        pool.give_back(cast(SwaPages, pages), PageState.HELD)
        table.write_cells(rows_of, columns, np.full_like(pages, NO_PAGE))
        self._evicted[rows] = floors
        return len(pages)

    def _raise_floor(self, row: int, floor_tokens: int, pool: PagePool[SwaPages], table: Table) -> int:
        old, new = int(self._evicted[row]) >> self._shift, floor_tokens >> self._shift
        protected = int(self._protected[row]) >> self._shift
        pages = table.cells[row, old:new].copy()
        shared, own = pages[: max(0, protected - old)], pages[max(0, protected - old) :]
        if self.inflight.whole_per_row[row]:
            self.inflight.set_aside(row, swa=own, swa_unlock=shared)
        else:
            pool.give_back(cast(SwaPages, own), PageState.HELD)
            self.tree.unlock_swa(shared)
        table.write(row, old, new, NO_PAGE)
        self._evicted[row] = floor_tokens
        return len(own) + len(shared)

    def release(self, row: int, tokens: Sequence[int] | Int32Array | None = None) -> None:
        """The one way out, for every reason. Publishes what may be published if `tokens` are given, frees the rest.

        The row's generation ends now: commits still on their way are stale. While an operation in flight names the
        row, its pages stay held and the row is not given out again (law 14). Of a row in transfer only the lease
        remains, until `land`, `fail_transfer` or `quarantine` says that its transfer is final.
        """
        row = self._row(row)
        state = int(self._state[row])
        if state not in (RowState.ACTIVE, RowState.TRANSFER):
            raise self._broken(6, f"release of a row that is {ROW_STATE_NAMES[state]}", row)
        if tokens is not None and state == RowState.ACTIVE:
            self.publish(row, tokens)
        if self.trace is not None:
            self.trace.record("release", row=row)
        self._end_life(row)

    # --- budgets and reports -----------------------------------------------------------------------------------

    def can_ever_fit(self, prompt_tokens: int, max_tokens: int, reserve: DecodeReserve | int) -> None:
        """Raises `NeverFits` if a request alone would not fit a pool (01, Budgets)."""
        c, tokens = self.config, reserve_tokens(reserve)
        full = full_budget_pages(prompt_tokens, max_tokens, c.context_tokens, tokens, c.page_size)
        needs = [("full", full, self.full_pool.total - self.full_pool.counts[PageState.QUARANTINED])]
        if self.swa_pool is not None:
            swa = swa_budget_pages(full, c.window_tokens, tokens, c.chunk_tokens, c.page_size, overlap=c.overlap)
            needs.append(("swa", swa, self.swa_pool.total - self.swa_pool.counts[PageState.QUARANTINED]))
        if self.tiers is not None:
            host = self.tiers.pool.host
            needs.append(("host", full, host.total - host.counts[PageState.QUARANTINED]))
        for pool, need, have in needs:
            if need > have:
                raise NeverFits(
                    f"the request needs {need} pages of {c.page_size} tokens in the {pool} pool, which has {have} "
                    f"(prompt {prompt_tokens} tokens, max_tokens {max_tokens}, reserve {tokens})",
                    param="max_tokens",
                )

    def pages_to_admit(self, tokens: int, reserve: DecodeReserve | int, *, cached_tokens: int = 0) -> dict[str, int]:
        """Pages that computing `tokens` and one decode step behind them takes, by pool; what is cached is there."""
        c = self.config
        full = ceil_pages(tokens + reserve_tokens(reserve), c.page_size)
        need = {"full": full - cached_tokens // c.page_size}
        if self.swa_pool is not None:
            swa = swa_budget_pages(
                full, c.window_tokens, reserve_tokens(reserve), c.chunk_tokens, c.page_size, overlap=c.overlap
            )
            need["swa"] = min(swa, need["full"])
        return need

    def check_room(self, need_pages: dict[str, int]) -> None:
        """Raises `OutOfPages` if a pool cannot give so many pages now."""
        for pool, need in need_pages.items():
            if need > self.available(pool):
                raise OutOfPages(pool, need, self.available(pool))

    def reset_cache(self) -> int:
        """Evict every unlocked cached page. Returns how many full pages that freed."""
        if self.trace is not None:
            self.trace.record("reset_cache")
        return self.tree.evict_full(self.tree.evictable_full)

    def forget_cache(self) -> int:
        """What cached pages hold is lost: evict the unlocked ones, and match none of the others again. Rows and tickets
        that hold some go on. Returns how many full pages that freed."""
        if self.trace is not None:
            self.trace.record("forget_cache")
        freed = self.tree.evict_full(self.tree.evictable_full)
        self.tree.retire()
        return freed

    def report(self, *, page_map: bool | None = None) -> dict[str, Any]:
        """The books as plain data; see `octavo.kv.report`."""
        return ledger_report(self, page_map=page_map)
