"""Rows that a ledger does not have: every entry names the row and what is allowed, and changes nothing."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from octavo.kv.books import NoSuchRow, RowState
from octavo.kv.ledger import Ledger
from octavo.kv.tiers import TierConfig
from tests.laws.helpers import make, ok, prefill, sliding, tokens

ONE: dict[str, Callable[[Ledger, Any], object]] = {
    "extend": lambda ledger, row: ledger.extend(row, 20),
    "publish": lambda ledger, row: ledger.publish(row, tokens(20)),
    "release": lambda ledger, row: ledger.release(row),
    "land": lambda ledger, row: ledger.land(row, 1),
    "fail_transfer": lambda ledger, row: ledger.fail_transfer(row, 1),
    "quarantine": lambda ledger, row: ledger.quarantine(row, 1),
    "retract": lambda ledger, row: ledger.retract(row),
    "unbacked": lambda ledger, row: ledger.unbacked(row),
    "path_end": lambda ledger, row: ledger.path_end(row),
    "width_of": lambda ledger, row: ledger.width_of(row),
    "pages_of": lambda ledger, row: ledger.pages_of(row),
}
MANY: dict[str, Callable[[Ledger, Any], object]] = {
    "plan_decode": lambda ledger, rows: ledger.plan_decode(rows, 8),
    "rows_view": lambda ledger, rows: ledger.rows_view(rows),
    "commit": lambda ledger, rows: ledger.commit(rows, [1] * len(rows), [16] * len(rows)),
    "evict": lambda ledger, rows: ledger.evict(rows),
    "begin_op": lambda ledger, rows: ledger.begin_op(rows),
    "begin_backup": lambda ledger, rows: ledger.begin_backup(rows),
}
NOT_ROWS = [-1, 4, 99, -(2**62), 2**62, True, 1.0, np.float64(2), "1", None]


def busy() -> Ledger:
    """Four rows of sixteen tokens, all live, with a host tier."""
    ledger = make(full_pages=64, tiers=TierConfig(64, 64, device_pages=16, topk_pages=1, recent_tokens=4))
    for start in range(4):
        prefill(ledger, tokens(16, 100 * start))
    return ledger


def books(ledger: Ledger) -> dict[str, Any]:
    return copy.deepcopy(ledger.report())


def test_every_method_that_takes_rows_is_here() -> None:
    """By the names of their arguments; entries that only hold the books' own rows begin with an underscore."""
    methods = {name: getattr(Ledger, name) for name in dir(Ledger) if not name.startswith("_")}
    takes = {n for n, m in methods.items() if callable(m) and {"row", "rows"} & set(inspect.signature(m).parameters)}
    assert takes == set(ONE) | set(MANY)


@pytest.mark.parametrize("row", NOT_ROWS, ids=repr)
@pytest.mark.parametrize("entry", ONE)
def test_one_row(entry: str, row: object) -> None:
    ledger = busy()
    before = books(ledger)
    with pytest.raises(NoSuchRow) as caught:
        ONE[entry](ledger, row)
    assert str(caught.value) == f"row {row!r}: the rows of this ledger are whole numbers, 0 … 3"
    assert isinstance(caught.value, IndexError) and caught.value.row is row and caught.value.max_rows == 4
    assert books(ledger) == before
    ok(ledger)


@pytest.mark.parametrize("bad", [-1, 4, -(2**62), 2**62])
@pytest.mark.parametrize("place", [0, 1, 2])
@pytest.mark.parametrize("form", [list, np.array], ids=["list", "array"])
@pytest.mark.parametrize("entry", MANY)
def test_one_of_many_rows(entry: str, form: Callable[[list[int]], Any], place: int, bad: int) -> None:
    ledger = busy()
    before = books(ledger)
    rows = [0, 3]
    rows.insert(place, bad)
    with pytest.raises(NoSuchRow, match=f"^row {bad}: the rows of this ledger are whole numbers, 0 … 3$"):
        MANY[entry](ledger, form(rows))
    for other in ([bad], [0, bad], [bad, 3], [bad, -3, 77]):  # the first one is named
        with pytest.raises(NoSuchRow, match=f"^row {bad}: "):
            MANY[entry](ledger, form(other))
    assert books(ledger) == before
    ok(ledger)


@pytest.mark.parametrize(
    "rows",
    [[0.0, 1.0], [True, False], ["0"], [[0, 1]], np.array([0, 1], np.uint64), np.array([1.5]), [2**70]],
    ids=repr,
)
@pytest.mark.parametrize("entry", MANY)
def test_what_is_no_list_of_rows(entry: str, rows: Any) -> None:
    """1.5 would become row 1, and a mask of two rows rows 1 and 0."""
    ledger = busy()
    before = books(ledger)
    with pytest.raises(NoSuchRow) as caught:
        MANY[entry](ledger, rows)
    assert caught.value.row is rows
    assert books(ledger) == before


@pytest.mark.parametrize("entry", MANY)
@pytest.mark.parametrize("kind", [np.int8, np.int32, np.uint32, np.int64])
def test_every_row_and_none_are_rows(entry: str, kind: type[np.integer[Any]]) -> None:
    for rows in ([], [3], [0], [0, 1, 2, 3]):
        ledger = busy()
        MANY[entry](ledger, np.array(rows, kind))
        MANY[entry](busy(), rows)
        ok(ledger)


@pytest.mark.parametrize("row", [0, 3, np.int32(3)])
def test_the_first_and_the_last_row_are_rows(row: int) -> None:
    ledger = busy()
    ledger.extend(row, 20)
    assert int(ledger.known[row]) == 20 and ledger.width_of(row) == 5
    ledger.release(row)
    assert int(ledger.row_state[row]) == RowState.FREE
    assert not ledger.land(row, 1)
    ok(ledger)


def test_rows_of_an_operation_are_the_ledgers_own() -> None:
    """Whoever changes the array afterwards does not change what the operation names."""
    ledger = sliding()
    prefill(ledger, tokens(5))
    rows = np.array([0])
    op = ledger.begin_op(rows)
    rows[0] = 3
    ledger.end_op(op)
    assert ledger.inflight.per_row.tolist() == [0, 0, 0, 0]


@pytest.mark.parametrize("entry", MANY)
def test_a_ledger_of_one_row(entry: str) -> None:
    ledger = make(max_rows=1)
    MANY[entry](ledger, [])
    prefill(ledger, tokens(16))
    MANY[entry](ledger, [0])
    with pytest.raises(NoSuchRow, match="^row 1: the rows of this ledger are whole numbers, 0 … 0$"):
        MANY[entry](ledger, [1])


def test_rows_without_a_sliding_pool_or_a_tier_are_looked_at_too() -> None:
    ledger = make()
    assert ledger.evict([0]) == 0 and ledger.begin_backup([0]) is None
    for entry in (ledger.evict, ledger.begin_backup):
        with pytest.raises(NoSuchRow):
            entry([4])
    with pytest.raises(NoSuchRow):
        ledger.unbacked(4)
