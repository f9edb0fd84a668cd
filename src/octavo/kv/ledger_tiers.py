"""What the ledger does for the host tier (HiSparse): backups, retraction into a ticket, and what a ticket leaves.

Retraction keeps host pages: a ticket holds them with the locked path, and `preallocate(ticket=…)` opens a row from it.
Nothing is computed again, so pressure does not change text.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, cast

import numpy as np

from octavo.kv.books import ROW_STATE_NAMES, RowState, cell_runs
from octavo.kv.ledger_transfers import TransferLedger
from octavo.kv.pages import FullPages, Int64Array, ceil_p, ceil_pages
from octavo.kv.pool import PageState
from octavo.kv.tiers import Ticket


class Backup(NamedTuple):
    """Pages to copy into the host tier: (rows[i], columns[i]), all of them final. `op` ends with `end_backup`."""

    op: int
    rows: Int64Array
    columns: Int64Array


class TierLedger(TransferLedger):
    def begin_backup(self, rows: Sequence[int] | Int64Array) -> Backup | None:
        """An operation of kind "backup" for the whole pages of active `rows` that the host knows as committed and that
        no backup has named. One backup of a row at a time. None if there are none, or no host tier."""
        at, tiers = self._rows(rows), self.tiers
        if tiers is None:
            return None
        at = at[self._plannable[at] & (tiers.backing[at] == tiers.backed[at])]
        first, last = tiers.backing[at], self.committed[at] >> self._shift
        at, first, last = (values[last > first] for values in (at, first, last))
        op = self._begin_op(at, "backup") if len(at) else None
        if self.trace is not None:  # with no page to copy too: at another page size there may be one
            self.trace.record("begin_backup", rows=np.asarray(rows, np.int64), op=op)
        if op is None:
            return None
        tiers.backing[at] = last
        tiers.backups[op] = (at, self.generation[at].copy(), last)
        return Backup(op, *cell_runs(at, first, last - first))

    def end_backup(self, op: int, *, written: bool = True) -> None:
        """The backup has drained: `backed` rises in the rows that still live. `written` False: the host tier refused
        the copy; the pages stay unbacked and the caller ends the requests."""
        tiers = self.tiers
        if tiers is None or op not in tiers.backups:
            raise self._broken(14, "no such backup is in flight", operation=op)
        rows, generations, last = tiers.backups.pop(op)
        alive = (self.generation[rows] == generations) & self._plannable[rows]
        rows, last = rows[alive], last[alive]
        if written:
            tiers.stats["backed_up_pages"] += int((last - tiers.backed[rows]).sum())
            tiers.backed[rows] = last
            tiers.touch(rows)
        else:
            tiers.backing[rows] = tiers.backed[rows]
        self._end_op(op)
        if self.trace is not None:
            self.trace.record("end_backup", op=op, written=written)

    def retract(self, row: int) -> Ticket:
        """End a row's life and keep its KV in the host tier: slots, own logical pages and own SWA pages go back. Shared
        pages stay locked; those that nobody else holds are offloaded when logical pages are short.

        The caller has copied the row's pages [backed, ceil_p(committed)) and its SWA pages from `evicted` on. No
        operation names the row. Raises `LawViolation` 14 or 2; then nothing has changed.
        """
        tiers = self.tiers
        if tiers is None:
            raise ValueError("this ledger has no host tier")
        row = self._require(row, RowState.ACTIVE, "retract")
        if self.inflight.per_row[row]:
            raise self._broken(
                14, "retract of a row that is in flight", row, operations=int(self.inflight.per_row[row])
            )
        protected, width = int(self.protected[row]) >> self._shift, self.width_of(row)
        kept = ceil_pages(int(self.committed[row]), self.page_size)
        if self._node[row] is None or kept < protected:
            raise self._broken(2, "retract: committed lies below protected", row, kept=kept, protected=protected)
        own = cast(FullPages, self._full.cells[row, protected:kept].copy())
        host = tiers.pool.part(own, PageState.HELD)
        tiers.stats["retracted"] += 1
        ticket = Ticket(
            number=tiers.stats["retracted"], node=self.path_end(row), host=host,
            committed=int(self.committed[row]), prefilled=int(tiers.prefilled[row]), budget=int(tiers.budget[row]),
        )  # fmt: skip
        tiers.tickets.append(ticket)
        tiers.tree.keep_path(ticket.node)
        self._node[row] = None  # its locks are the ticket's now
        self._close_retracted(row, kept, width)
        if self.trace is not None:
            self.trace.record("retract", row=row, ticket=ticket.number)
        return ticket

    def drop_ticket(self, ticket: Ticket) -> None:
        """The retracted request ended: its host pages are freed, its path unlocked."""
        if self.tiers is None:
            raise ValueError("this ledger has no host tier")
        if not ticket.open:
            raise self._broken(6, "a ticket is used twice", host_pages=len(ticket.host))
        self.tiers.pool.host.give_back(ticket.host, PageState.HELD)
        self._end_ticket(ticket, "dropped_tickets")
        if self.trace is not None:
            self.trace.record("drop_ticket", ticket=ticket.number)

    def unbacked(self, row: int) -> tuple[int, int]:
        """Columns [first, last) that a retraction must copy first: backed … ceil_p(committed)."""
        row = self._row(row)
        if self.tiers is None:
            raise ValueError(f"row {row} {ROW_STATE_NAMES[int(self._state[row])]}: this ledger has no host tier")
        return int(self.tiers.backed[row]), ceil_p(int(self.committed[row]), self.page_size) >> self._shift
