"""The ledger's entries that give pages up, and what operations in flight keep: publish, evict, release, law 14."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import LawViolation
from octavo.kv.ledger import Ledger, OutOfRows
from tests.laws.helpers import commit, make, ok, pages, prefill, sliding, tokens


def lengths(ledger: Ledger, row: int) -> dict[str, int]:
    names = ("committed", "known", "allocated", "protected", "evicted", "fill")
    return {name: int(getattr(ledger, name)[row]) for name in names}


# --- publish, evict, release -----------------------------------------------------------------------------------


def test_publish_is_bounded_by_known_tokens() -> None:
    ledger = make()
    got = prefill(ledger, tokens(4))
    ledger.plan_decode([got.row], 8)
    commit(ledger, got, 12)  # overshoot behind a stop
    assert ledger.publish(got.row, tokens(11)) == 8
    assert ledger.publish(got.row, tokens(3)) == 8, "protected never falls"
    assert ledger.publish(got.row, tokens(99)) == 12, "committed bounds it too"
    ok(ledger)


def test_releases_publish_what_is_settled() -> None:
    ledger = make()
    got = prefill(ledger, tokens(9))
    ledger.plan_decode([got.row], 8)
    ledger.release(got.row, tokens(10))
    assert ledger.full_pool.by_name() == {
        "total": 32, "free": 30, "cached": 2, "held": 0, "leased": 0, "quarantined": 0,
    }  # fmt: skip
    assert ledger.admit(tokens(10)).cached_tokens == 8
    ok(ledger)


def test_release_without_tokens_publishes_nothing() -> None:
    ledger = make()
    ledger.release(prefill(ledger, tokens(9)).row)
    assert ledger.full_pool.free == 32
    assert pages(ledger, 0) == [] and ledger.path_end(0) is None
    ok(ledger, at_rest=True)


@pytest.mark.parametrize("entry", ["release", "extend", "publish", "evict", "plan_decode"])
def test_entries_refuse_rows_that_are_gone(entry: str) -> None:
    ledger = sliding()
    got = prefill(ledger, tokens(9))
    op = ledger.begin_op([got.row])
    for state, law in (("draining", 14), ("free", 0)):
        if law:
            ledger.release(got.row)
        else:
            ledger.end_op(op)
        calls = {
            "release": lambda: ledger.release(got.row), "extend": lambda: ledger.extend(got.row, 12),
            "publish": lambda: ledger.publish(got.row, tokens(9)), "evict": lambda: ledger.evict([got.row]),
            "plan_decode": lambda: ledger.plan_decode([got.row], 1),
        }  # fmt: skip
        with pytest.raises(LawViolation, match=f"law {6 if entry == 'release' else 2} row 0: .*{state}"):
            calls[entry]()
        ok(ledger)


def test_eviction_frees_own_pages_and_says_none_below() -> None:
    ledger = sliding(window_tokens=8)
    got = prefill(ledger, tokens(27))
    own = pages(ledger, got.row, "swa")
    assert ledger.evict([got.row]) == 4  # floor_p(24 − 8) = 16
    assert ledger.evicted[got.row] == 16
    assert ledger.swa_table[got.row, :4].tolist() == [-1] * 4
    assert pages(ledger, got.row, "swa") == own[4:]
    assert ledger.swa_pool.by_name()["held"] == 3 and ledger.full_pool.by_name()["held"] == 7
    assert ledger.evict(np.array([got.row])) == 0
    with pytest.raises(LawViolation, match="law 2 row 3: evict of a row that is free"):
        ledger.evict([got.row, 3, 2])
    ok(ledger)


def test_eviction_of_several_rows_at_once() -> None:
    ledger = sliding(window_tokens=8, full_pages=60, swa_pages=30)
    rows = [prefill(ledger, tokens(n, 100 * n)).row for n in (8, 20, 25)]
    assert ledger.evict(rows) == 0 + 3 + 4
    assert ledger.evicted[rows].tolist() == [0, 12, 16]
    ok(ledger)


def test_eviction_goes_across_the_shared_prefix() -> None:
    ledger = sliding(window_tokens=8, full_pages=40)
    ledger.release(prefill(ledger, tokens(9), publish=True).row)
    got = ledger.admit(tokens(24))
    assert got.cached_tokens == 8 and ledger.evicted[got.row] == 0
    ledger.extend(got.row, 24)
    commit(ledger, got, 24)
    free, loose = ledger.swa_pool.free, ledger.tree.evictable_swa
    assert ledger.evict([got.row]) == 4  # [0, 8) is the tree's, [8, 16) the row's
    assert (ledger.swa_pool.free, ledger.tree.evictable_swa) == (free + 2, loose + 2)
    ok(ledger)


def test_without_sliding_layers_there_is_nothing_to_evict() -> None:
    ledger = make()
    got = prefill(ledger, tokens(30))
    assert ledger.evict([got.row]) == 0 and ledger.swa_table is None and ledger.evicted[got.row] == 0
    assert [len(part) for part in ledger.take_table_updates("swa")] == [0, 0, 0]


def test_an_admitted_row_starts_with_its_window() -> None:
    ledger = sliding(window_tokens=8, full_pages=40)
    ledger.release(prefill(ledger, tokens(21), publish=True).row)
    got = ledger.admit(tokens(21))
    assert (got.cached_tokens, int(ledger.evicted[got.row])) == (20, 12)
    assert ledger.tree.evictable_swa == 3 and len(pages(ledger, got.row, "swa")) == 2
    ok(ledger)


# --- operations in flight --------------------------------------------------------------------------------------


def test_a_row_in_flight_is_kept_until_the_step_drains() -> None:
    ledger = make(max_rows=2)
    got = prefill(ledger, tokens(9))
    first, second = ledger.begin_op([got.row]), ledger.begin_op([got.row])
    held = pages(ledger, got.row)
    ledger.release(got.row, tokens(9))
    assert pages(ledger, got.row) == held
    assert ledger.full_pool.by_name()["held"] == 1 and ledger.full_pool.by_name()["cached"] == 2
    assert ledger.admit([5]).row != got.row
    with pytest.raises(OutOfRows):
        ledger.admit([6])
    assert not commit(ledger, got, 10), "stale"
    ledger.end_op(second)
    assert ledger.full_pool.by_name()["held"] == 1
    ok(ledger)
    ledger.end_op(first)
    assert ledger.full_pool.by_name()["held"] == 0 and ledger.tree.evictable_full == 2
    assert ledger.admit([6]).row == got.row
    ok(ledger)


def test_an_operation_of_several_rows() -> None:
    ledger = make()
    a, b = prefill(ledger, tokens(4)), prefill(ledger, tokens(4, 20))
    op = ledger.begin_op(np.array([a.row, b.row]), "step")
    ledger.release(a.row)
    ledger.end_op(op)
    assert ledger.row_state[[a.row, b.row]].tolist() == [0, 1]
    ok(ledger)


def test_operations_are_ended_once_and_name_live_rows_once() -> None:
    ledger = make()
    got = prefill(ledger, tokens(4))
    op = ledger.begin_op([got.row])
    ledger.end_op(op)
    with pytest.raises(LawViolation, match=f"law 14.*operation={op}"):
        ledger.end_op(op)
    with pytest.raises(LawViolation, match="law 14.*twice"):
        ledger.begin_op([got.row, got.row])
    with pytest.raises(LawViolation, match="law 14 row 2: an operation names a free row"):
        ledger.begin_op([got.row, 2, 3])
    with pytest.raises(ValueError, match="'stop'.*step"):
        ledger.begin_op([got.row], "stop")
    ok(ledger)


def test_the_caller_may_reuse_its_array_of_rows() -> None:
    ledger = make()
    prefill(ledger, tokens(4))
    prefill(ledger, tokens(4, 9))
    rows = np.array([0])
    op = ledger.begin_op(rows)
    rows[0] = 1
    ledger.end_op(op)
    ok(ledger)


def test_a_step_lets_evicted_pages_go_at_once() -> None:
    """Its queries are behind the host's committed: it never named what lies below the floor."""
    ledger = sliding(window_tokens=8)
    got = prefill(ledger, tokens(20))
    op = ledger.begin_op([got.row], "step")
    free = ledger.swa_pool.free
    ledger.evict([got.row])
    assert ledger.swa_pool.free == free + 3
    ledger.end_op(op)
    ok(ledger)


@pytest.mark.parametrize("kind", ["transfer", "backup", "load"])
def test_a_reader_keeps_evicted_pages(kind: str) -> None:
    ledger = sliding(window_tokens=8, full_pages=40)
    got = prefill(ledger, tokens(9), publish=True)  # two shared pages
    ledger.extend(got.row, 20)
    commit(ledger, got, 20)
    op, step = ledger.begin_op([got.row], kind), ledger.begin_op([got.row], "step")
    free = ledger.swa_pool.free
    assert ledger.evict([got.row]) == 3
    assert ledger.swa_pool.free == free and ledger.tree.evictable_swa == 0
    assert ledger.evict([got.row]) == 0 and len(ledger.inflight.aside) == 1
    later = ledger.begin_op([got.row], kind)  # does not name what had left before it began
    ok(ledger)
    ledger.end_op(step)
    assert ledger.swa_pool.free == free
    ledger.end_op(op)
    assert ledger.swa_pool.free == free + 1 and ledger.tree.evictable_swa == 2
    ok(ledger)
    ledger.end_op(later)
    ledger.release(got.row)
    ok(ledger, at_rest=True)


@pytest.mark.parametrize("kind", ["transfer", "backup", "load"])
def test_a_reader_keeps_evicted_pages_of_a_row_that_shares_nothing(kind: str) -> None:
    """Nothing published, the floor raised before and again: the pages in between wait for the reader."""
    ledger = sliding(window_tokens=8, full_pages=40)
    got = prefill(ledger, tokens(20))
    assert ledger.evict([got.row]) == 3  # nobody reads
    op, free = ledger.begin_op([got.row], kind), ledger.swa_pool.free
    ledger.extend(got.row, 32)
    commit(ledger, got, 32)
    assert ledger.evict([got.row]) == 3 and ledger.evicted[got.row] == 24
    assert ledger.swa_pool.free == free - 3, "three pages for the chunk, none back"
    ok(ledger)
    ledger.end_op(op)
    assert ledger.swa_pool.free == free and ledger.tree.evictable_swa == 0
    ok(ledger)
    ledger.release(got.row)
    ok(ledger, at_rest=True)
