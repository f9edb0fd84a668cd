"""Operations in flight and what they keep from being reused (law 14).

An operation names rows: a launched step, a transfer, a backup or load of a tier. Until it drains, the rows are not
given to anybody else and pages that left the rows meanwhile are kept aside, in state `held`.

A *step* names of a row the pages from its own read floor on: its queries are at or behind the host's `committed`,
so what `evict` frees below the floor computed from `committed` (law 13) was never named by it and is reusable at
once. Every other kind names the whole row.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from octavo.errors import LawViolation
from octavo.kv.pages import Int32Array, Int64Array

STEP = "step"
KINDS = (STEP, "transfer", "backup", "load")


@dataclass
class Aside:
    """Pages that left a row while operations named it: freed, or unlocked, when the last of those drains."""

    row: int
    waits_for: set[int]
    full: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    swa: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))
    swa_unlock: Int32Array = field(default_factory=lambda: np.empty(0, np.int32))


@dataclass(frozen=True)
class Operation:
    kind: str
    rows: Int64Array


class InFlight:
    """Operations by id, their count per row, and the pages that wait for them."""

    def __init__(self, max_rows: int) -> None:
        self.per_row = np.zeros(max_rows, np.int32)
        self.whole_per_row = np.zeros(max_rows, np.int32)  # operations that are not steps
        self.operations: dict[int, Operation] = {}
        self.aside: list[Aside] = []
        self._next_id = 1
        self._mark = np.zeros(max_rows, np.int32)  # scratch: finds rows that are named twice

    def begin(self, rows: Int64Array, kind: str) -> int:
        if kind not in KINDS:
            raise ValueError(f"operation kind {kind!r}; one of {KINDS}")
        order = np.arange(len(rows), dtype=np.int32)
        self._mark[rows] = order
        if (self._mark[rows] != order).any():
            raise LawViolation(14, "an operation names a row twice", rows=rows.tolist())
        op, self._next_id = self._next_id, self._next_id + 1
        self.operations[op] = Operation(kind, rows)
        self.per_row[rows] += 1
        if kind != STEP:
            self.whole_per_row[rows] += 1
        return op

    def end(self, op: int) -> tuple[Int64Array, list[Aside]]:
        """Drain `op`. Returns rows that no operation names any more, and pages that nothing waits for any more."""
        done = self.operations.pop(op, None)
        if done is None:
            raise LawViolation(14, "operation is not in flight (ended twice?)", operation=op)
        self.per_row[done.rows] -= 1
        if done.kind != STEP:
            self.whole_per_row[done.rows] -= 1
        ready: list[Aside] = []
        for entry in self.aside:
            entry.waits_for.discard(op)
            if not entry.waits_for:
                ready.append(entry)
        if ready:
            self.aside = [entry for entry in self.aside if entry.waits_for]
        return done.rows[self.per_row[done.rows] == 0], ready

    def set_aside(self, row: int, *, full: Int32Array | None = None, swa: Int32Array | None = None,
                  swa_unlock: Int32Array | None = None) -> None:  # fmt: skip
        """Keep pages of `row` until every operation that names it now has drained."""
        entry = Aside(row, {op for op, o in self.operations.items() if (o.rows == row).any()})
        entry.full = entry.full if full is None else full
        entry.swa = entry.swa if swa is None else swa
        entry.swa_unlock = entry.swa_unlock if swa_unlock is None else swa_unlock
        self.aside.append(entry)
