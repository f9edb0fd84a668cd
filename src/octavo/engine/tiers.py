"""The engine's side of the host tier: backups after a settle, retraction and return of requests, lost files.

All copies run in the stream of the steps, so that whatever is launched later finds them done: in that order a backup
has drained as soon as it is launched, and a slot is not written again before it was read.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import numpy as np
import torch

from octavo.backend.host_tier import TierMover
from octavo.backend.relay import upload
from octavo.engine.request import Request, State
from octavo.errors import HostTierLost, OctavoError
from octavo.kv.pages import Int64Array, ceil_pages
from octavo.kv.tiers import Ticket, Tiers

if TYPE_CHECKING:
    from octavo.backend.runner import Runner
    from octavo.kv.ledger import Ledger
    from octavo.kv.trace import TraceWriter


NO_LIMIT = 1 << 30


@dataclass(eq=False)
class Kept:
    """A retracted request's KV: the ledger's ticket, its sliding-window pages from column `swa_first` on (copied
    aside), and what its next draft starts from."""

    ticket: Ticket
    swa_first: int
    swa: torch.Tensor | None
    seed: bytes | None


class TierControl:
    """One per engine with HiSparse."""

    def __init__(self, ledger: Ledger, runner: Runner, mover: TierMover, max_draft_tokens: int) -> None:
        if ledger.tiers is None:
            raise ValueError("this ledger has no host tier")
        self._ledger, self._runner, self._mover = ledger, runner, mover
        self._tiers: Tiers = ledger.tiers
        self._page = ledger.page_size
        self.max_draft_tokens = max_draft_tokens
        self.loaded_pages = 0  # of resumed and landed rows
        self.lost = 0  # times that the file was removed or cut

    # -- steps --

    def draft_limit(self, longest_tokens: int) -> int:
        """Most drafted tokens of a step whose longest row reaches so far: the union of its pages fits the buffer."""
        return NO_LIMIT if longest_tokens <= self._tiers.dense_limit else self.max_draft_tokens

    def back_up(self, rows: Int64Array) -> None:
        """Copy what has become final. Raises HostTierLost; the books are as before then."""
        backup = self._ledger.begin_backup(rows)
        if backup is None:
            return
        try:
            self._runner.write_pending(backup.rows.tolist())
            self._mover.back_up(backup.rows, backup.columns)
        except OctavoError:
            self._ledger.end_backup(backup.op, written=False)
            raise
        self._mover.sum_up(self._host_pages(backup.rows, backup.columns))
        self._ledger.end_backup(backup.op)

    def _host_pages(self, rows: Int64Array, columns: Int64Array) -> Int64Array:
        logical = self._ledger.full_table[rows, columns]
        return self._tiers.pool.host_pages_of(logical).astype(np.int64)

    # -- retraction --

    def retract(self, request: Request) -> Kept:
        """Bring everything of a settled, decoding request into the host tier and end its row."""
        from octavo.disagg.layout import seed_bytes

        row = request.row
        first, last = self._ledger.unbacked(row)
        columns = np.arange(first, last)
        self._runner.project()
        self._runner.write_pending((row,))
        self._mover.back_up(np.full_like(columns, row), columns)
        whole = columns[columns < int(self._ledger.committed[row]) // self._page]
        self._mover.sum_up(self._host_pages(np.full_like(whole, row), whole))
        swa_first, swa = self._copy_window(row, last)
        seed = seed_bytes(self._runner.drafter, row)
        return Kept(self._ledger.retract(row), swa_first, swa, seed)

    def _copy_window(self, row: int, last: int) -> tuple[int, torch.Tensor | None]:
        """The row's sliding-window pages up to column `last`, copied: shared ones too, for they may be evicted."""
        table, pool = self._ledger.swa_table, self._runner.kv.swa
        if table is None or pool is None:
            return 0, None
        first = int(self._ledger.evicted[row]) // self._page
        pages = upload(table[row, first:last].astype(np.int64), pool.device)
        return first, pool.index_select(0, pages)

    def resume(self, request: Request, kept: Kept) -> None:
        """Open a row for a retracted request and bring its KV back. Raises OutOfRows, OutOfPages (nothing changed),
        HostTierLost if its pages are lost (its ticket is still open)."""
        from octavo.disagg.layout import import_seed

        self._check_for(request)
        committed = kept.ticket.committed
        pre = self._ledger.preallocate(request.tokens, committed, host=True, ticket=kept.ticket)
        request.kept = None
        request.lease(pre.row, pre.generation, committed)
        self.load(request, pre.cached_tokens // self._page, kept, pre.healed_columns)
        self._ledger.land(pre.row, pre.generation)
        request.move(State.DECODE)
        self._runner.resume(request, request.output.ban_ids, request.tokens[-1])
        import_seed(self._runner.drafter, pre.row, kept.seed)

    def load(self, request: Request, first: int, kept: Kept | None = None, healed: tuple[int, ...] = ()) -> None:
        """From the host tier dense layers of the columns from `first` on and the newest pages of a row's sparse layers,
        a short row's all; what `kept` has copied aside of its own window and of the columns `healed`."""
        row, p = request.row, self._page
        tokens = int(self._ledger.fill[row]) or int(self._ledger.committed[row])
        width = ceil_pages(tokens, p)
        op = self._ledger.begin_op([row], "load")
        self._runner.project()
        tiers = self._tiers.config
        recent = 0 if width <= tiers.device_pages else max(0, tokens - tiers.recent_tokens) // p
        self._mover.load(row, (first, width), (recent, width))
        if kept is not None and kept.swa is not None:
            self._restore_window(row, kept.swa, kept.swa_first, healed)
        self._ledger.end_op(op)
        self.loaded_pages += width - first

    def _restore_window(self, row: int, copied: torch.Tensor, first: int, healed: tuple[int, ...]) -> None:
        """The row's own sliding-window pages and those of the columns `healed`, from a copy that starts at `first`."""
        table, pool = self._ledger.swa_table, self._runner.kv.swa
        if table is None or pool is None:
            return
        own = max(int(self._ledger.evicted[row]), int(self._ledger.protected[row])) // self._page
        columns = np.array([*healed, *range(own, self._ledger.width_of(row))], np.int64)
        pages = upload(table[row, columns].astype(np.int64), pool.device)
        pool.index_copy_(0, pages, copied.index_select(0, upload(columns - first, copied.device)))

    def drop(self, kept: Kept) -> None:
        """A retracted request ended while it waited."""
        if kept.ticket.open:
            self._ledger.drop_ticket(kept.ticket)

    def load_landed(self, request: Request) -> None:
        """A transfer has put the row's KV into the host tier: take bounds, load dense layers and the newest pages (a
        short row's all). Raises HostTierLost if its pages are lost; nothing has changed then."""
        self._check_for(request)
        row = request.row
        first = int(self._ledger.protected[row]) // self._page
        self.load(request, first)
        columns = np.arange(first, int(self._tiers.backed[row]))
        self._mover.sum_up(self._host_pages(np.full_like(columns, row), columns))

    # -- faults --

    def check(self, requests: list[Request], fail: Callable[[Request, OctavoError], None]) -> None:
        """Before a step and before its results are used: if the tier's file was removed or cut, end the requests whose
        pages it held, forget cached pages and make the file whole again."""
        try:
            self._mover.tier.check()
        except HostTierLost as lost:
            self.mend(lost, requests, fail)

    def _check_for(self, request: Request) -> None:
        """Raises HostTierLost if pages of this request are lost; those of others are the next step's to find."""
        try:
            self._mover.tier.check()
        except HostTierLost as lost:
            if self._touches(request, lost.intact_pages):
                raise

    def mend(self, lost: HostTierLost, requests: list[Request], fail: Callable[[Request, OctavoError], None]) -> None:
        self.lost += 1
        for request in requests:
            if self._touches(request, lost.intact_pages):
                fail(request, lost)
        self._ledger.forget_cache()  # also what a step in flight still locks
        try:
            self._mover.tier.repair()
        except HostTierLost as worse:
            for request in requests:
                if request.state is not State.FINISHED:
                    fail(request, worse)

    def _touches(self, request: Request, intact_pages: int) -> bool:
        """Whether KV of the request lies behind the first `intact_pages` host pages."""
        if request.state is State.FINISHED:
            return False
        if request.row >= 0:
            row = request.row
            moving = request.state is State.TRANSFER
            width = self._ledger.width_of(row) if moving else int(self._tiers.backing[row])
            logical = self._ledger.full_table[row, :width]
            pages = self._tiers.pool.host_pages_of(logical)
        elif request.kept is not None:
            pages = self._tiers.host_pages_of(request.kept.ticket)
        else:
            return False
        return bool((pages >= intact_pages).any())

    def report(self) -> dict[str, Any]:
        """`tiers` of `kv_report()`: what the books know, and hits, swaps and bytes. Reads device counters: not on the
        launch path."""
        books, view = self._tiers.report(), self._mover.view
        hits, swaps, _ = view.counts.tolist()
        layer_bytes = view.slots[0, 0].numel() * view.slots.element_size()
        page_bytes = self._mover.tier.page_bytes
        return {
            **books,
            "loaded_pages": self.loaded_pages,
            "hits": hits,
            "swaps": swaps,
            "bytes_in": swaps * layer_bytes + self.loaded_pages * page_bytes,
            "bytes_out": books["backed_up_pages"] * page_bytes,
            "file_lost": self.lost,
            "missed_accesses": self._mover.tier.missed_accesses,
        }

    def record_counters(self, trace: TraceWriter) -> None:
        """Into a trace that ends: what the device has counted and no call of the ledger says."""
        hits, swaps, _ = self._mover.view.counts.tolist()
        trace.record("tier_counters", hits=hits, swaps=swaps)

    def close(self) -> None:
        self._mover.tier.close()
