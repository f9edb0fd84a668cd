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
from octavo.kv.node import Match, Namespace, Node
from octavo.kv.pages import NO_PAGE, FullPages, Int32Array, Int64Array, SwaPages, ceil_pages
from octavo.kv.pool import PageState
from octavo.kv.sliding import swa_tail
from octavo.kv.tiers import Ticket, Tiers, path_of


def namespace_of(node: Node) -> Namespace:
    """The namespace of the root that a node hangs from."""
    while node.parent is not None:
        node = node.parent
    return node.namespace


def unlocked_pages(match: Match) -> int:
    """Pages of a match that nobody has locked: evictable until a row takes it."""
    return sum(min(node.end_page, match.pages) - node.start_page for node in match.path if not node.locks)


class TransferLedger(LedgerBase):
    def match(self, tokens: Int32Array, namespace: str | None = None, read_from_page: int | None = None) -> Match:
        """The prefix a request could reuse now; at least one token is left. Changes nothing."""
        ids = as_tokens(tokens)
        limit = (len(ids) - 1) >> self._shift if self.config.prefix_cache else 0
        return self.tree.match(ids, namespace, limit, read_from_page)

    def preallocate(
        self,
        tokens: Sequence[int] | Int32Array,
        fill_tokens: int,
        *,
        namespace: str | None = None,
        host: bool = False,
        budget_pages: int = 0,
        ticket: Ticket | None = None,
    ) -> Preallocation:
        """Open a row for KV that is coming: lock the local prefix, lease full pages for the rest of
        [0, fill) and SWA pages for the tail only. One function for every path, device or host tier.

        host           KV lands in the host pages of the full pages; `land` then takes the row's device slots
        budget_pages   host pages the row may come to hold (0: none are promised)
        ticket         the KV is in the host tier already, kept by `retract`: instead of a match its path, and its
                       host pages; its slots are taken now. Only `cached_tokens` of the path are on the device: the
                       caller brings the rest, and the SWA pages of `healed_columns`, before it launches anything
        Raises `OutOfRows`, `OutOfPages`, `LawViolation`; then nothing has changed and nothing is locked.
        """
        ids = as_tokens(tokens)
        if host != (self.tiers is not None):
            raise ValueError(f"host={host}: KV lands in the host tier exactly if there is one")
        if ticket is not None and (not ticket.open or ticket.committed != fill_tokens):
            raise ValueError(
                f"fill_tokens {fill_tokens}: this ticket holds {ticket.committed} tokens, open={ticket.open}"
            )
        if not 0 < fill_tokens <= len(ids):
            raise ValueError(f"fill_tokens {fill_tokens}: 1 … {len(ids)}, the tokens of the request")
        if fill_tokens > self.config.context_tokens:
            raise self._broken(
                10, "fill is longer than the context", fill=fill_tokens, context=self.config.context_tokens
            )
        self._check_row_free()
        tail = swa_tail(fill_tokens, self.config.window_tokens, self.page_size).start_tokens if self._swa else 0
        floor, last = tail >> self._shift, ceil_pages(fill_tokens, self.page_size)
        if ticket is None:
            # The row never reads below its tail, so a match needs no window alive before that.
            match = self.match(ids[:fill_tokens], namespace, floor)
            self._check_promise(max(budget_pages, unlocked_pages(match) + last - match.pages))
        else:
            match, budget_pages = self._match_of(ticket), ticket.budget
            if self.tiers is not None:
                self.tiers.check_slots()
        first, swa_first = match.pages, max(match.pages, floor)
        offloaded = int((match.full < 0).sum())  # of a ticket's path some pages may be gone
        dead = floor + np.flatnonzero(match.swa[floor:] < 0)
        opened = namespace if ticket is None else namespace_of(ticket.node)
        row = self._open_row(match, opened, floor, RowState.TRANSFER, budget_pages)
        try:
            self._make_room(last - first + offloaded, last - swa_first + len(dead), host=ticket is None)
        except Exception:
            self._close_row(row)
            raise
        if ticket is not None:
            self._load_back(row, ticket, dead)
        full = self._take_leased(row, last - first, ticket)
        self._full.write(row, first, last, full)
        swa: Int32Array = np.empty(0, np.int32)
        if self.swa_pool is not None and self._swa is not None:
            swa = self.swa_pool.take(last - swa_first, PageState.LEASED)
            self._swa.write(row, swa_first, last, swa)
        self._allocated[row] = last << self._shift
        self._fill[row] = fill_tokens
        generation = int(self._generation[row])
        self._leases[row, generation] = (full, swa)
        if self.tiers is not None:
            self.tiers.prefilled[row] = fill_tokens if ticket is None else ticket.prefilled
        if ticket is not None:
            self._end_ticket(ticket, "resumed")
        else:
            self.stats["queried_tokens"] += len(ids)
            self.stats["hit_tokens"] += match.pages << self._shift
        if self.trace is not None:
            kept = {} if self.tiers is None else {"budget": budget_pages, "ticket": ticket and ticket.number}
            self.trace.record("preallocate", tokens=ids, fill=fill_tokens, namespace=namespace, row=row, **kept)
        return Preallocation(row, generation, (first - offloaded) << self._shift, tail, tuple(dead.tolist()))

    def _match_of(self, ticket: Ticket) -> Match:
        """The path a ticket has locked, as `match` would give it."""
        path = path_of(ticket)
        none = np.empty(0, np.int32)
        full = np.concatenate([n.full for n in path]) if path else none
        swa = np.concatenate([n.swa for n in path]) if path and self.swa_pool is not None else none
        return Match(ticket.node.end_page, path, cast(FullPages, full), cast(SwaPages, swa))

    def _load_back(self, row: int, ticket: Ticket, dead: Int64Array) -> None:
        """Logical pages for what of a returning row's path was offloaded, SWA pages for its `dead` columns. They are
        the tree's at once: the caller brings their KV before it launches anything else."""
        for node in path_of(ticket):
            if node.host is not None and self.tiers is not None:
                self.tiers.tree.load_back(node, node.host)
                self._full.write(row, node.start_page, node.end_page, node.full)
            here = dead[(dead >= node.start_page) & (dead < node.end_page)]
            if self.swa_pool is not None and self._swa is not None and len(here):
                pages = self.swa_pool.take(len(here))
                self.tree.heal(node, here - node.start_page, pages)
                self._swa.write_cells(np.full_like(here, row), here, pages)

    def _take_leased(self, row: int, pages: int, ticket: Ticket | None) -> FullPages:
        if ticket is None or self.tiers is None:
            return self.full_pool.take(pages, PageState.LEASED)
        self.tiers.open_slots(row)
        return self.tiers.pool.take_for(ticket.host, PageState.HELD, PageState.LEASED)

    def _end_ticket(self, ticket: Ticket, how: str) -> None:
        """Drop what a ticket has locked. Its host pages have gone elsewhere. `how`: "resumed" or "dropped_tickets"."""
        ticket.open = False
        if self.tiers is not None:
            self.tiers.tree.unlock_kept(ticket.node)
            self.tiers.tickets.remove(ticket)
            self.tiers.stats[how] += 1

    def land(self, row: int, generation: int) -> bool:
        """Every transfer of (row, generation) is final and arrived: `committed` := fill.

        False if that life of the row is over: its lease ends, its pages are freed, the data is discarded.
        In the host tier: the row gets its device slots now. Raises `OutOfPages` ("slots"); then nothing has changed.
        """
        row = self._row(row)
        lease = self._leases.get((row, generation))
        if lease is None:
            return False
        if self.tiers is not None and self._state[row] == RowState.TRANSFER:
            self._land_in_host(row, self.tiers)
        del self._leases[row, generation]
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

    def _land_in_host(self, row: int, tiers: Tiers) -> None:
        if not tiers.has_slots(row):
            tiers.check_slots()
            tiers.open_slots(row)
        tiers.backed[row] = tiers.backing[row] = int(self._fill[row]) >> self._shift
        tiers.touch(row)

    def fail_transfer(self, row: int, generation: int, *, final: bool = True) -> bool:
        """The transfer failed: the request's life ends. `final` says that nothing will be written any more; without
        it the pages stay leased until a later `fail_transfer`, `land` or `quarantine`. False if nothing was leased."""
        row = self._row(row)
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
        row = self._row(row)
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
        if self.tiers is not None:
            self.tiers.budget[row] = 0  # it grows no more
        self._close_if_drained(row)

    def _close_if_drained(self, row: int) -> None:
        if self._state[row] != RowState.DRAINING or self.inflight.per_row[row]:
            return
        if any(leased_row == row for leased_row, _ in self._leases):
            return
        self._close_row(row)

    # --- operations in flight ----------------------------------------------------------------------------------

    def begin_op(self, rows: Sequence[int] | Int64Array, kind: str = "step") -> int:
        """An operation that names `rows` starts. kind: "step", "transfer", "backup" or "load". Returns its id."""
        at = self._rows(rows).copy()
        op = self._begin_op(at, kind)
        if self.trace is not None:
            self.trace.record("begin_op", rows=at, kind=kind, op=op)
        return op

    def _begin_op(self, rows: Int64Array, kind: str) -> int:
        if not self._state[rows].all():
            raise self._broken(14, "an operation names a free row", int(rows[self._state[rows] == RowState.FREE][0]))
        return self.inflight.begin(rows, kind)

    def end_op(self, op: int) -> None:
        """The operation has drained: what only it kept is freed. Raises `LawViolation` 14 for an unknown id."""
        self._end_op(op)
        if self.trace is not None:
            self.trace.record("end_op", op=op)

    def _end_op(self, op: int) -> None:
        idle, ready = self.inflight.end(op)
        self._settle_aside(ready)
        for row in idle[self._state[idle] == RowState.DRAINING].tolist():
            self._close_if_drained(row)
