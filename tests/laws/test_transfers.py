"""Preallocation, landing, leases and quarantine: the decode side's part of the books."""

from __future__ import annotations

import pytest

from octavo.errors import LawViolation, OutOfPages
from octavo.kv.ledger import OutOfRows
from tests.laws.helpers import commit, make, ok, pages, prefill, sliding, tokens


def test_a_transfer_lands() -> None:
    ledger = make()
    got = ledger.preallocate(tokens(10), 10)
    assert got == (0, 1, 0, 0, ())
    assert (ledger.fill[0], ledger.committed[0], ledger.allocated[0]) == (10, 0, 12)
    assert ledger.full_pool.by_name()["leased"] == 3 and ledger.stats["queried_tokens"] == 10
    ok(ledger)
    assert ledger.land(0, 1)
    assert (ledger.fill[0], ledger.committed[0], ledger.known[0]) == (0, 10, 10)
    assert ledger.full_pool.by_name()["held"] == 3
    assert ledger.plan_decode([0], 4).next.tolist() == [16]
    assert ledger.publish(0, tokens(10)) == 8
    ok(ledger)
    assert not ledger.land(0, 1), "once"


@pytest.mark.parametrize("fill", [0, -1, 11])
def test_fill_lies_inside_the_request(fill: int) -> None:
    with pytest.raises(ValueError, match=f"fill_tokens {fill}: 1 … 10"):
        make().preallocate(tokens(10), fill)


def test_fill_lies_inside_the_context() -> None:
    ledger = make(context_tokens=12)
    with pytest.raises(LawViolation, match="law 10.*fill=13"):
        ledger.preallocate(tokens(13), 13)
    assert ledger.preallocate(tokens(13), 12).row == 0


@pytest.mark.parametrize("entry", ["plan_decode", "publish", "evict", "extend"])
def test_a_row_in_transfer_is_left_alone(entry: str) -> None:
    ledger = sliding()
    got = ledger.preallocate(tokens(10), 10)
    calls = {
        "plan_decode": lambda: ledger.plan_decode([got.row], 1), "publish": lambda: ledger.publish(got.row, tokens(10)),
        "evict": lambda: ledger.evict([got.row]), "extend": lambda: ledger.extend(got.row, 12),
    }  # fmt: skip
    with pytest.raises(LawViolation, match="law 2 row 0: .* in transfer"):
        calls[entry]()
    assert not commit(ledger, got, 10)
    ok(ledger)


def test_the_local_prefix_is_locked_and_not_transferred() -> None:
    ledger = make()
    ledger.release(prefill(ledger, tokens(12), publish=True).row)
    got = ledger.preallocate(tokens(12), 11)
    assert got.cached_tokens == 8 and ledger.full_pool.by_name()["leased"] == 1
    assert ledger.tree.evictable_full == 1 and ledger.protected[got.row] == ledger.committed[got.row] == 8
    assert ledger.stats["hit_tokens"] == 8
    ok(ledger)


def test_only_the_tail_takes_window_pages() -> None:
    ledger = sliding(window_tokens=8, swa_pages=14, full_pages=40)
    got = ledger.preallocate(tokens(27), 27)
    assert got.tail_start_tokens == 16  # floor_p(27 − 8)
    assert ledger.full_pool.by_name()["leased"] == 7 and ledger.swa_pool.by_name()["leased"] == 3
    assert ledger.evicted[got.row] == 16 and ledger.swa_table[got.row, :4].tolist() == [-1] * 4
    ok(ledger)
    assert ledger.land(got.row, got.generation)
    assert ledger.publish(got.row, tokens(27)) == 24
    assert ledger.match(tokens(30)).pages == 6
    assert ledger.match(tokens(24)).pages == 0, "below the tail there are tombstones"
    ok(ledger)


def test_a_tail_without_its_boundary_window_is_not_published() -> None:
    ledger = sliding(window_tokens=7, swa_pages=14, full_pages=40)
    got = ledger.preallocate(tokens(27), 27)  # tail 20 … 26; the boundary 24 reads 17 … 23
    assert got.tail_start_tokens == 20
    ledger.land(got.row, got.generation)
    assert ledger.publish(got.row, tokens(27)) == 0
    ok(ledger)


def test_prefix_and_tail_are_one_formula() -> None:
    ledger = sliding(window_tokens=8, swa_pages=20, full_pages=40)
    ledger.release(prefill(ledger, tokens(20), publish=True).row)
    got = ledger.preallocate([*tokens(20), 90, 91, 92, 93, 94], 25)
    assert (got.cached_tokens, got.tail_start_tokens) == (20, 16)
    # [16, 20) is the tree's, [20, 25) is leased
    assert ledger.swa_pool.by_name()["leased"] == 2 and ledger.tree.evictable_swa == 4
    ok(ledger)
    ledger.land(got.row, got.generation)
    ledger.release(got.row)
    ok(ledger, at_rest=True)


def test_a_tail_needs_no_window_before_it() -> None:
    ledger = sliding(window_tokens=8, swa_pages=20, full_pages=40)
    ledger.release(prefill(ledger, tokens(13), publish=True).row)
    ledger.tree.evict_swa(100)
    assert ledger.match(tokens(13)).pages == 0, "for a prefill the window is dead"
    got = ledger.preallocate([*tokens(13), *tokens(20, 60)], 33)
    assert (got.cached_tokens, got.tail_start_tokens) == (12, 24), "the tail brings its own"
    ok(ledger)


@pytest.mark.parametrize("pool", ["full", "swa"])
def test_preallocation_is_all_or_nothing_and_unlocks(pool: str) -> None:
    sizes = {"full": {"full_pages": 7, "swa_pages": 14}, "swa": {"full_pages": 40, "swa_pages": 6}}[pool]
    ledger = sliding(window_tokens=8, **sizes)
    ledger.release(prefill(ledger, tokens(9), publish=True).row)
    blocker = prefill(ledger, tokens(16 if pool == "swa" else 8, 50))
    before = (ledger.available("full"), ledger.available("swa"), ledger.full_pool.free)
    with pytest.raises(OutOfPages) as caught:
        ledger.preallocate([*tokens(9), *tokens(30, 70)], 35 if pool == "full" else 17)
    assert caught.value.pool == pool
    assert (ledger.available("full"), ledger.available("swa"), ledger.full_pool.free) == before
    ok(ledger)
    ledger.release(blocker.row)
    ok(ledger, at_rest=True)


def test_preallocation_takes_exactly_what_it_lacks() -> None:
    """Of 8 pages two are in the tree: six full ones and, for the tail from token 24, two sliding ones will do."""
    ledger = sliding(window_tokens=8, full_pages=8, swa_pages=6)
    ledger.release(prefill(ledger, tokens(9), publish=True).row)
    got = ledger.preallocate(tokens(33), 32)
    assert (got.cached_tokens, got.tail_start_tokens) == (8, 24)
    assert (ledger.free_pages("full"), ledger.free_pages("swa")) == (0, 2)
    ok(ledger)


def test_preallocation_needs_a_row() -> None:
    ledger = make(max_rows=1)
    ledger.admit([1])
    with pytest.raises(OutOfRows):
        ledger.preallocate([1, 2], 1)


def test_an_aborted_transfer_keeps_its_lease_until_it_is_final() -> None:
    ledger = sliding(max_rows=1)
    got = ledger.preallocate(tokens(10), 10)
    ledger.release(got.row)
    assert ledger.full_pool.by_name()["leased"] == 3 and ledger.swa_pool.by_name()["leased"] == 3
    with pytest.raises(OutOfRows):
        ledger.admit([1])
    with pytest.raises(LawViolation, match="draining"):
        ledger.release(got.row)
    ok(ledger)
    assert not ledger.land(got.row, got.generation), "discarded"
    ok(ledger, at_rest=True)
    assert ledger.full_pool.free == 32 and ledger.admit([1]).generation == got.generation + 1


def test_failure_that_is_final_frees_at_once() -> None:
    ledger = sliding()
    got = ledger.preallocate(tokens(10), 10)
    assert ledger.fail_transfer(got.row, got.generation)
    assert not ledger.fail_transfer(got.row, got.generation) and not ledger.land(got.row, got.generation)
    ok(ledger, at_rest=True)
    assert ledger.full_pool.free == 32


@pytest.mark.parametrize("ending", ["fail", "land", "quarantine"])
def test_failure_of_unknown_status_waits(ending: str) -> None:
    ledger = sliding()
    got = ledger.preallocate(tokens(10), 10)
    assert ledger.fail_transfer(got.row, got.generation, final=False)
    assert ledger.full_pool.by_name()["leased"] == 3 and ledger.row_state[got.row] == 3
    assert ledger.fail_transfer(got.row, got.generation, final=False)
    ok(ledger)
    if ending == "quarantine":
        assert ledger.quarantine(got.row, got.generation) == 6
        assert ledger.full_pool.by_name()["quarantined"] == ledger.swa_pool.by_name()["quarantined"] == 3
        ok(ledger, at_rest=True)
        assert ledger.quarantine(got.row, got.generation) == 0
        assert ledger.end_quarantine() == 6
    elif ending == "land":
        assert not ledger.land(got.row, got.generation)
    else:
        assert ledger.fail_transfer(got.row, got.generation)
    assert ledger.full_pool.free == 32 and ledger.swa_pool.free == 16
    ok(ledger, at_rest=True)


def test_quarantine_frees_the_row_and_what_it_shared() -> None:
    ledger = sliding(max_rows=1)
    ledger.release(prefill(ledger, tokens(9), publish=True).row)
    got = ledger.preallocate(tokens(14), 14)
    assert got.cached_tokens == 8
    assert ledger.quarantine(got.row, got.generation) == 4
    assert ledger.tree.evictable_full == 2 and pages(ledger, got.row) == []
    ok(ledger, at_rest=True)
    assert ledger.admit(tokens(9)).cached_tokens == 8
    assert make().end_quarantine() == 0


def test_quarantine_while_another_operation_names_the_row() -> None:
    ledger = sliding()
    got = ledger.preallocate(tokens(10), 10)
    op = ledger.begin_op([got.row], "transfer")
    ledger.quarantine(got.row, got.generation)
    ok(ledger)
    assert ledger.row_state[got.row] == 3
    ledger.end_op(op)
    assert ledger.row_state[got.row] == 0
    ok(ledger, at_rest=True)


def test_a_landing_of_a_former_attempt_is_discarded() -> None:
    ledger = make(max_rows=1)
    old = ledger.preallocate(tokens(10), 10)
    ledger.fail_transfer(old.row, old.generation)
    new = ledger.preallocate(tokens(10, 50), 10)
    assert new.row == old.row and new.generation == old.generation + 1
    assert not ledger.land(old.row, old.generation) and ledger.fill[new.row] == 10
    assert ledger.land(new.row, new.generation)
    ok(ledger)


def test_two_leases_end_by_themselves() -> None:
    ledger = make()
    a, b = ledger.preallocate(tokens(4), 4), ledger.preallocate(tokens(4, 9), 4)
    ledger.release(a.row)
    ledger.release(b.row)
    ledger.land(a.row, a.generation)
    assert ledger.row_state[[a.row, b.row]].tolist() == [0, 3]
    ledger.land(b.row, b.generation)
    ok(ledger, at_rest=True)


def test_quarantine_counts_pages_of_both_pools() -> None:
    ledger = sliding(window_tokens=8, swa_pages=16, full_pages=32)
    plain = make()
    assert plain.quarantine(plain.preallocate(tokens(9), 9).row, 1) == 3
    got = ledger.preallocate(tokens(30), 30)
    full, swa = len(pages(ledger, got.row)), len(pages(ledger, got.row, "swa"))
    assert full != swa
    assert ledger.quarantine(got.row, got.generation) == full + swa
