"""The ledger's entries one by one: what they change, what they refuse, and that a refusal changes nothing."""

from __future__ import annotations

from dataclasses import asdict

import numpy as np
import pytest

from octavo.errors import ConfigError, LawViolation, OutOfPages
from octavo.kv.ledger import Ledger, LedgerConfig, OutOfRows
from octavo.kv.sizing import DecodeReserve, page_aligned_decode_alloc_lens
from tests.laws.helpers import commit, make, ok, pages, prefill, sliding, tokens


def lengths(ledger: Ledger, row: int) -> dict[str, int]:
    names = ("committed", "known", "allocated", "protected", "evicted", "fill")
    return {name: int(getattr(ledger, name)[row]) for name in names}


# --- configuration ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize("page_size", [0, 3, -16, 48])
def test_page_size_is_a_power_of_two(page_size: int) -> None:
    with pytest.raises(ConfigError, match=f"page_size: got {page_size}"):
        LedgerConfig(page_size=page_size, full_pages=100)


@pytest.mark.parametrize(
    ("option", "value"),
    [
        ("max_rows", 0), ("context_tokens", 0), ("largest_reserve_tokens", 0), ("swa_pages", -1),
        ("window_tokens", -1), ("chunk_tokens", -1), ("key_mode", "triple"),
    ],
)  # fmt: skip
def test_options_are_named(option: str, value: object) -> None:
    with pytest.raises(ConfigError, match=option):
        LedgerConfig(**{"page_size": 16, "full_pages": 100, option: value})


def test_the_smallest_configuration_works() -> None:
    config = LedgerConfig(page_size=1, full_pages=2, max_rows=1, context_tokens=1, largest_reserve_tokens=1)
    assert config.width_pages == 2 and config.swa_pages == config.chunk_tokens == config.window_tokens == 0
    got = prefill(Ledger(config), [7])
    assert got.cached_tokens == 0


def test_what_is_not_said_is_small_and_plain() -> None:
    assert asdict(LedgerConfig(page_size=16, full_pages=100)) == {
        "page_size": 16, "full_pages": 100, "swa_pages": 0, "window_tokens": 0, "max_rows": 256, "context_tokens": 2048,
        "largest_reserve_tokens": 1, "key_mode": "token", "prefix_cache": True, "chunk_tokens": 0, "overlap": False,
        "tiers": None,
    }  # fmt: skip


def test_memory_too_small_for_one_request() -> None:
    assert LedgerConfig(page_size=16, full_pages=1, largest_reserve_tokens=15).full_pages == 1
    assert LedgerConfig(page_size=16, full_pages=2, largest_reserve_tokens=16).full_pages == 2
    with pytest.raises(ConfigError, match="num_pages: got 1; one request needs at least 2"):
        LedgerConfig(page_size=16, full_pages=1, largest_reserve_tokens=16)


@pytest.mark.parametrize(("overlap", "least"), [(False, 36), (True, 52)])
def test_sliding_pool_minimum(overlap: bool, least: int) -> None:
    values = {
        "page_size": 16, "full_pages": 200, "window_tokens": 280, "chunk_tokens": 256, "largest_reserve_tokens": 9,
        "overlap": overlap,
    }  # fmt: skip
    assert LedgerConfig(**values, swa_pages=least).swa_pages == least
    why = rf"at least {least} = ceil\(\(window 280 \+ max\(reserve 9, {1 + overlap}·chunk 256\)\)/16\) \+ 2"
    with pytest.raises(ConfigError, match=why):
        LedgerConfig(**values, swa_pages=least - 1)


def test_a_window_and_its_pool_come_together() -> None:
    with pytest.raises(ConfigError, match="swa_pages"):
        LedgerConfig(page_size=16, full_pages=100, window_tokens=64)
    with pytest.raises(ConfigError, match="swa_pages"):
        LedgerConfig(page_size=16, full_pages=100, swa_pages=64)


def test_width_follows_law_10() -> None:
    assert LedgerConfig(page_size=16, full_pages=100, context_tokens=100, largest_reserve_tokens=12).width_pages == 7
    assert LedgerConfig(page_size=16, full_pages=100, context_tokens=100, largest_reserve_tokens=13).width_pages == 8


# --- admit, extend ---------------------------------------------------------------------------------------------


def test_admit_a_cold_prompt() -> None:
    ledger = make()
    got = ledger.admit(np.array(tokens(9)))
    assert got == (0, 1, 0)
    assert lengths(ledger, 0) == dict.fromkeys(("committed", "known", "allocated", "protected", "evicted", "fill"), 0)
    assert ledger.stats["queried_tokens"] == 9 and ledger.stats["hit_tokens"] == 0
    ok(ledger)


def test_admit_a_warm_prompt_starts_behind_the_prefix() -> None:
    ledger = make()
    first = prefill(ledger, tokens(10), publish=True)
    got = ledger.admit(tokens(12))
    assert got == (1, 1, 8)
    expected = {"committed": 8, "known": 8, "allocated": 8, "protected": 8, "evicted": 0, "fill": 0}
    assert lengths(ledger, 1) == expected
    assert pages(ledger, 1) == pages(ledger, first.row)[:2]
    assert ledger.stats["hit_tokens"] == 8
    ok(ledger)


def test_nobody_is_admitted_without_a_token() -> None:
    with pytest.raises(ValueError, match="at least one token"):
        make().admit([])


def test_rows_run_out_and_come_back() -> None:
    ledger = make(max_rows=2)
    a, b = ledger.admit([1]), ledger.admit([2])
    assert (a.row, b.row) == (0, 1)
    with pytest.raises(OutOfRows, match="all 2 request rows") as refused:
        ledger.admit([3])
    assert refused.value.max_rows == 2
    ledger.release(a.row)
    again = ledger.admit([3])
    assert again.row == a.row and again.generation == a.generation + 1


def test_without_a_prefix_cache_nothing_is_shared() -> None:
    ledger = make(prefix_cache=False)
    got = prefill(ledger, tokens(12))
    assert ledger.publish(got.row, tokens(12)) == 0
    ledger.release(got.row, tokens(12))
    assert ledger.admit(tokens(12)).cached_tokens == 0 and ledger.full_pool.free == 32
    ok(ledger)


def test_extend_holds_whole_pages() -> None:
    ledger = make()
    row = ledger.admit(tokens(40)).row
    for upto, allocated in ((1, 4), (4, 4), (5, 8), (5, 8), (13, 16)):
        ledger.extend(row, upto)
        assert (ledger.known[row], ledger.allocated[row], ledger.committed[row]) == (upto, allocated, 0)
        assert len(pages(ledger, row)) == allocated // 4 == ledger.full_pool.by_name()["held"]
        ok(ledger)


def test_extend_takes_pages_of_both_pools() -> None:
    ledger = sliding()
    row = ledger.admit(tokens(40)).row
    ledger.extend(row, 13)
    assert ledger.full_pool.by_name()["held"] == ledger.swa_pool.by_name()["held"] == 4
    ok(ledger)


def test_extend_never_goes_back_nor_behind_the_context() -> None:
    ledger = make(context_tokens=30, full_pages=30)
    row = ledger.admit(tokens(40)).row
    ledger.extend(row, 13)
    with pytest.raises(LawViolation, match="law 3.*known=13.*upto=12"):
        ledger.extend(row, 12)
    with pytest.raises(LawViolation, match="law 10.*upto=31.*context=30"):
        ledger.extend(row, 31)
    ledger.extend(row, 30)
    assert ledger.stats["violations"] == 2


@pytest.mark.parametrize("pool", ["full", "swa"])
def test_extend_is_all_or_nothing(pool: str) -> None:
    sizes = {"full": {"full_pages": 5, "swa_pages": 12}, "swa": {"full_pages": 40, "swa_pages": 6}}[pool]
    ledger = sliding(window_tokens=8, **sizes)
    row = ledger.admit(tokens(40)).row
    ledger.extend(row, 8)
    before = (lengths(ledger, row), ledger.full_table.copy(), ledger.full_pool.free, ledger.swa_pool.free)
    with pytest.raises(OutOfPages) as caught:
        ledger.extend(row, 36)
    have = ledger.available(pool)
    assert (caught.value.pool, caught.value.needed_pages, caught.value.available_pages) == (pool, 7, have)
    assert lengths(ledger, row) == before[0] and (ledger.full_table == before[1]).all()
    assert (ledger.full_pool.free, ledger.swa_pool.free) == before[2:]
    ledger.extend(row, 8 + 4 * have)
    assert ledger.free_pages(pool) == 0
    ok(ledger)


# --- plan, commit ----------------------------------------------------------------------------------------------


def test_plan_goes_through_the_watermark() -> None:
    ledger = make()
    a, b = prefill(ledger, tokens(9)), prefill(ledger, tokens(4, 50))
    plan = ledger.plan_decode([a.row, b.row], 4)
    assert (plan.current.tolist(), plan.next.tolist(), plan.needed_tokens) == ([12, 4], [16, 8], 8)
    plan = ledger.plan_decode(np.array([b.row, a.row]), DecodeReserve(4, 0))
    assert (plan.next.tolist(), plan.needed_tokens) == ([8, 16], 0)
    ok(ledger)


def test_rows_of_the_ledger_go_into_the_shared_watermark() -> None:
    ledger = make()
    a, b = prefill(ledger, tokens(9)), prefill(ledger, tokens(4, 50))
    view = ledger.rows_view(np.array([b.row, a.row]))
    current, after, needed = page_aligned_decode_alloc_lens(view, reserve=4, page_size=4)
    assert (current.tolist(), after.tolist(), needed) == ([4, 12], [8, 16], 8)
    assert ledger.allocated[[b.row, a.row]].tolist() == [4, 12], "asking changes nothing"


def test_plan_of_one_equals_plan_of_many() -> None:
    for reserve in (0, 1, 3, 4, 8):
        one, many = make(), make()
        for ledger in (one, many):
            prefill(ledger, tokens(7))
            prefill(ledger, tokens(3, 20))
        alone = [one.plan_decode([row], reserve) for row in (0, 1)]
        together = many.plan_decode([0, 1], reserve)
        assert [int(p.next[0]) for p in alone] == together.next.tolist()
        assert [int(p.current[0]) for p in alone] == together.current.tolist()
        assert sum(p.needed_tokens for p in alone) == together.needed_tokens
        assert one.full_pool.free == many.full_pool.free
        ok(one)
        ok(many)


@pytest.mark.parametrize("page_size", [1, 2, 4])
def test_plan_of_rows_that_need_several_pages_each(page_size: int) -> None:
    ledger = sliding(page_size=page_size, full_pages=100, swa_pages=90, window_tokens=8)
    rows = [prefill(ledger, tokens(n, 100 * n)).row for n in (3, 5, 6)]
    plan = ledger.plan_decode(rows, 8)
    assert plan.needed_tokens == sum(plan.next - plan.current)
    for row, end in zip(rows, plan.next.tolist(), strict=True):
        assert len(pages(ledger, row)) == len(pages(ledger, row, "swa")) == end // page_size
    ok(ledger)


def test_plan_of_nobody() -> None:
    plan = make().plan_decode([], 4)
    assert plan.needed_tokens == 0 and len(plan.next) == 0


def test_first_plan_behind_a_chunk_in_flight_counts_the_chunk() -> None:
    ledger = make()
    got = ledger.admit(tokens(20))
    ledger.extend(got.row, 20)
    assert ledger.plan_decode([got.row], 4).next.tolist() == [24], "known is 20, though committed is 0"
    commit(ledger, got, 20)
    assert ledger.plan_decode([got.row], 4).needed_tokens == 0
    ok(ledger)


def test_a_smaller_reserve_never_gives_pages_back() -> None:
    ledger = make()
    got = prefill(ledger, tokens(8))
    assert ledger.plan_decode([got.row], 8).next.tolist() == [16]
    assert ledger.plan_decode([got.row], 1).next.tolist() == [16]
    ok(ledger)


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("pool", ["full", "swa"])
def test_plan_is_all_or_nothing(count: int, pool: str) -> None:
    sizes = {"full": (3 * count, 12), "swa": (40, 6)}[pool]
    ledger = sliding(window_tokens=8, full_pages=sizes[0], swa_pages=sizes[1])
    for i in range(count):
        prefill(ledger, tokens(8, 20 * i))
    while pool == "swa" and ledger.free_pages("swa") >= 2 * count:
        if ledger.allocated[0] > 24:
            break
        ledger.extend(0, int(ledger.allocated[0]) + 4)
        ledger.commit([0], [1], [int(ledger.known[0])])
    before = [lengths(ledger, row) for row in range(count)]
    free = (ledger.free_pages("full"), ledger.free_pages("swa"))
    with pytest.raises(OutOfPages) as caught:
        ledger.plan_decode(list(range(count)), 8)
    assert caught.value.pool == pool and caught.value.available_pages == ledger.available(pool)
    assert caught.value.needed_pages == 2 * count
    assert [lengths(ledger, row) for row in range(count)] == before
    assert (ledger.free_pages("full"), ledger.free_pages("swa")) == free
    ok(ledger)


def test_plan_evicts_cached_pages_of_the_pool_that_lacks_them() -> None:
    ledger = sliding(window_tokens=8, full_pages=40, swa_pages=8)
    ledger.release(prefill(ledger, tokens(24), publish=True).row)
    assert ledger.swa_pool.by_name()["cached"] == 6
    got = ledger.admit(tokens(9, 50))
    ledger.extend(got.row, 9)
    commit(ledger, got, 9)
    ledger.plan_decode([got.row], 8)
    assert ledger.full_pool.by_name()["cached"] == 6, "full pages were not short"
    assert ledger.swa_pool.by_name() | {"total": 0} == {
        "total": 0, "free": 0, "cached": 3, "held": 5, "leased": 0, "quarantined": 0,
    }  # fmt: skip
    ok(ledger)


def test_cached_pages_count_as_room_and_no_more_of_them_go_than_are_needed() -> None:
    ledger = sliding(window_tokens=8, full_pages=10, swa_pages=9)
    ledger.release(prefill(ledger, tokens(24), publish=True).row)
    ledger.tree.evict_swa(1)
    row = ledger.admit(tokens(60, 50)).row
    ledger.extend(row, 4)
    for upto, pool, have in ((44, "full", 9), (40, "swa", 8)):
        with pytest.raises(OutOfPages) as caught:
            ledger.extend(row, upto)
        assert (caught.value.pool, caught.value.available_pages) == (pool, have)
    ledger.extend(row, 20)
    assert (ledger.full_pool.by_name()["cached"], ledger.swa_pool.by_name()["cached"]) == (5, 4)
    assert (ledger.full_pool.free, ledger.swa_pool.free) == (0, 0)
    ok(ledger)


def test_law_10_guards_reserve_and_row() -> None:
    ledger = make(context_tokens=16, largest_reserve_tokens=8, full_pages=40)
    assert ledger.width_pages == 6
    a, b = prefill(ledger, tokens(16)), prefill(ledger, tokens(16, 50))
    with pytest.raises(LawViolation, match="law 10.*reserve=9.*largest=8"):
        ledger.plan_decode([a.row], 9)
    assert ledger.plan_decode([b.row], 8).next.tolist() == [24]
    assert ledger.plan_decode([a.row, b.row], 8).next.tolist() == [24, 24], "the whole row is used, and no page more"
    ledger.commit([a.row, b.row], [1, 1], [17, 17])  # behind the context: nobody clamped the run
    for rows in ([a.row], [b.row, a.row]):
        with pytest.raises(LawViolation, match="law 10"):
            ledger.plan_decode(rows, 8)
    assert ledger.plan_decode([a.row, b.row], 7).needed_tokens == 0
    short = prefill(ledger, tokens(5, 90))
    with pytest.raises(LawViolation, match=f"law 10 row {a.row}: .*next=28, width=24"):
        ledger.plan_decode([short.row, a.row], 8)
    ok(ledger)


def test_a_plan_names_live_rows_once() -> None:
    ledger = make()
    got = prefill(ledger, tokens(4))
    with pytest.raises(LawViolation, match=r"law 2: a plan names a row twice \(rows=\[0, 0\]"):
        ledger.plan_decode([got.row, got.row], 4)
    for rows in ([3], [got.row, 3], [got.row, 3, 2]):
        with pytest.raises(LawViolation, match="law 2 row 3: plan_decode of a row that is free"):
            ledger.plan_decode(rows, 4)
    ok(ledger)


def test_commit_moves_on_and_never_back() -> None:
    ledger = make()
    got = prefill(ledger, tokens(4))
    ledger.plan_decode([got.row], 8)
    assert commit(ledger, got, 7) and ledger.known[got.row] == ledger.committed[got.row] == 7
    assert commit(ledger, got, 7)
    with pytest.raises(LawViolation, match="law 3.*committed=7.*new=6"):
        commit(ledger, got, 6)
    with pytest.raises(LawViolation, match="law 2.*new=13.*allocated=12"):
        commit(ledger, got, 13)
    assert commit(ledger, got, 12)
    ok(ledger)


def test_commit_leaves_known_at_the_chunk_in_flight() -> None:
    ledger = make()
    got = ledger.admit(tokens(20))
    ledger.extend(got.row, 8)
    ledger.extend(got.row, 20)
    commit(ledger, got, 8)
    assert (ledger.committed[got.row], ledger.known[got.row]) == (8, 20)


def test_a_refused_commit_changes_no_row() -> None:
    ledger = make()
    a, b = prefill(ledger, tokens(4)), prefill(ledger, tokens(6, 20))
    ledger.plan_decode([a.row, b.row], 8)
    with pytest.raises(LawViolation, match="row 1"):
        ledger.commit([a.row, b.row], [1, 1], [5, 5])
    with pytest.raises(LawViolation, match="law 3 row 1"):
        ledger.commit([a.row, b.row], [1, 1], [4, 5])
    for new in ([5, 50], [12, 50]):
        with pytest.raises(LawViolation, match="law 2 row 1"):
            ledger.commit([a.row, b.row], [1, 1], new)
    assert ledger.committed[[a.row, b.row]].tolist() == [4, 6]


def test_stale_commits_are_dropped_one_by_one() -> None:
    ledger = make()
    a, b = prefill(ledger, tokens(4)), prefill(ledger, tokens(4, 20))
    ledger.plan_decode([a.row, b.row], 8)
    ledger.release(a.row)
    c = prefill(ledger, tokens(4, 40))
    assert c.row == a.row
    applied = ledger.commit([a.row, b.row], [a.generation, b.generation], [6, 7])
    assert applied.tolist() == [False, True]
    assert ledger.committed[c.row] == 4 and ledger.committed[b.row] == 7
    assert ledger.stats["stale_commits"] == 1
