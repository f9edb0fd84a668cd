"""Rows whose KV arrives by transfer: preallocation, landing, leases, quarantine.

A page under transfer is *leased*. A lease ends only when the status of its transfer is final, whatever happened to
the request: `land` (it arrived), `fail_transfer(final=True)` (it will not write any more), or `quarantine` (the
status will never be known: the pages are kept out until the local endpoint is restarted).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import cast

import numpy as np

from octavo.kv.books import Preallocation, RowState, as_tokens
from octavo.kv.ledger_base import LedgerBase
from octavo.kv.pages import NO_PAGE, FullPages, Int32Array, SwaPages, ceil_pages
from octavo.kv.pool import PageState
from octavo.kv.prefix import Match
from octavo.kv.sliding import swa_tail


class TransferLedger(LedgerBase):
    def match(self, tokens: Int32Array, namespace: str | None = None, read_from_page: int | None = None) -> Match:
        """The prefix a request could reuse now; at least one token is left. Changes nothing."""
        ids = as_tokens(tokens)
        limit = (len(ids) - 1) >> self._shift if self.config.prefix_cache else 0
        return self.tree.match(ids, namespace, limit, read_from_page)

    def preallocate(
        self, tokens: Sequence[int] | Int32Array, fill_tokens: int, *, namespace: str | None = None
    ) -> Preallocation:
        """Open a row for KV that is coming: lock the local prefix, lease full pages for the rest of
        [0, fill) and SWA pages for the tail only. One function for every path, device or host tier.

        Raises `OutOfRows`, `OutOfPages`, `LawViolation`; then nothing has changed and nothing is locked.
        """
        ids = as_tokens(tokens)
        if not 0 < fill_tokens <= len(ids):
            raise ValueError(f"fill_tokens {fill_tokens}: 1 … {len(ids)}, the tokens of the request")
        if fill_tokens > self.config.context_tokens:
            raise self._broken(
                10, "fill is longer than the context", fill=fill_tokens, context=self.config.context_tokens
            )
        self._check_row_free()
        tail = swa_tail(fill_tokens, self.config.window_tokens, self.page_size).start_tokens if self._swa else 0
        # The row never reads below its tail, so a match needs no window alive before that.
        match = self.match(ids[:fill_tokens], namespace, tail >> self._shift)
        first, last = match.pages, ceil_pages(fill_tokens, self.page_size)
        swa_first = max(first, tail >> self._shift)
        row = self._open_row(match, namespace, tail >> self._shift, RowState.TRANSFER)
        try:
            self._make_room(last - first, last - swa_first)
        except Exception:
            self._close_row(row)
            raise
        full = self.full_pool.take(last - first, PageState.LEASED)
        self._full.write(row, first, last, full)
        swa: Int32Array = np.empty(0, np.int32)
        if self.swa_pool is not None and self._swa is not None:
            swa = self.swa_pool.take(last - swa_first, PageState.LEASED)
            self._swa.write(row, swa_first, last, swa)
        self._allocated[row] = last << self._shift
        self._fill[row] = fill_tokens
        generation = int(self._generation[row])
        self._leases[row, generation] = (full, swa)
        self.stats["queried_tokens"] += len(ids)
        self.stats["hit_tokens"] += match.pages << self._shift
        if self.trace is not None:
            self.trace.record("preallocate", tokens=ids, fill=fill_tokens, namespace=namespace, row=row)
        return Preallocation(row, generation, match.pages << self._shift, tail)

    def land(self, row: int, generation: int) -> bool:
        """Every transfer of (row, generation) is final and arrived: `committed` := fill.

        False if that life of the row is over: its lease ends, its pages are freed, the data is discarded.
        """
        lease = self._leases.pop((row, generation), None)
        if lease is None:
            return False
        if self.trace is not None:
            self.trace.record("land", row=row)
        self._end_lease(lease, PageState.HELD)
        if self._state[row] != RowState.TRANSFER:
            self._close_if_drained(row)
            return False
        self._committed[row] = self._known[row] = self._fill[row]
        self._fill[row] = 0
        self._state[row] = RowState.ACTIVE
        self._plannable[row] = True
        return True

    def fail_transfer(self, row: int, generation: int, *, final: bool = True) -> bool:
        """The transfer failed: the request's life ends. `final` says that nothing will be written any more; without
        it the pages stay leased until a later `fail_transfer`, `land` or `quarantine`. False if nothing was leased."""
        lease = self._leases.get((row, generation))
        if lease is None:
            return False
        if self.trace is not None:
            self.trace.record("fail_transfer", row=row, final=final)
        if self._state[row] == RowState.TRANSFER:
            self._end_life(row)
        if final:
            del self._leases[row, generation]
            self._end_lease(lease, PageState.HELD)
            self._close_if_drained(row)
        return True

    def quarantine(self, row: int, generation: int) -> int:
        """The transfer's status will never be final: its pages are kept out of use. Returns how many that are."""
        lease = self._leases.get((row, generation))
        if lease is None:
            return 0
        if self.trace is not None:
            self.trace.record("quarantine", row=row)
        if self._state[row] == RowState.TRANSFER:
            self._end_life(row)
        del self._leases[row, generation]
        self._end_lease(lease, PageState.QUARANTINED)
        # The row keeps nothing of the lease: what is left are its shared pages.
        protected = int(self._protected[row]) >> self._shift
        self._full.write(row, protected, self.width_of(row), NO_PAGE)
        if self._swa is not None:
            self._swa.write(row, max(protected, int(self._evicted[row]) >> self._shift), self.width_of(row), NO_PAGE)
        self._allocated[row] = self._protected[row]
        self._close_if_drained(row)
        return len(lease[0]) + len(lease[1])

    def end_quarantine(self) -> int:
        """The local endpoint was restarted: nothing can write any more. Frees all quarantined pages of both pools."""
        if self.trace is not None:
            self.trace.record("end_quarantine")
        full = np.flatnonzero(self.full_pool.state == PageState.QUARANTINED).astype(np.int32)
        self.full_pool.give_back(cast(FullPages, full), PageState.QUARANTINED)
        if self.swa_pool is None:
            return len(full)
        swa = np.flatnonzero(self.swa_pool.state == PageState.QUARANTINED).astype(np.int32)
        self.swa_pool.give_back(cast(SwaPages, swa), PageState.QUARANTINED)
        return len(full) + len(swa)

    def _end_lease(self, lease: tuple[Int32Array, Int32Array], state: int) -> None:
        full, swa = lease
        self.full_pool.move(cast(FullPages, full), PageState.LEASED, state)
        if self.swa_pool is not None:
            self.swa_pool.move(cast(SwaPages, swa), PageState.LEASED, state)

    def _end_life(self, row: int) -> None:
        """The request is gone. Its row is closed at once, or when nothing names it any more."""
        self._generation[row] += 1
        self._plannable[row] = False
        self._state[row] = RowState.DRAINING
        self._close_if_drained(row)

    def _close_if_drained(self, row: int) -> None:
        if self._state[row] != RowState.DRAINING or self.inflight.per_row[row]:
            return
        if any(leased_row == row for leased_row, _ in self._leases):
            return
        self._close_row(row)
