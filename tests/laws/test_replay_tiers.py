"""Traces of books with a host tier: the same figures on the same books, tickets and promises on others."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.kv.ledger import Ledger
from octavo.kv.trace import TraceError, TraceWriter, read_trace, replay
from tests.laws.helpers import back_up, tiered, tokens
from tests.laws.test_replay import arrive, commit_of, plan, release
from tests.laws.test_trace import admit, write_trace
from tests.laws.tier_simulation import TierSimulation

SIZES = [(14, 60, 36), (60, 14, 36), (40, 40, 12), (40, 30, 24)]  # host pages, full pages, slots


def record(path: Path, seed: int, moves: int = 250) -> Ledger:
    host, full, slots = SIZES[seed % 4]
    simulation = TierSimulation(seed, page_size=(4, 8)[seed // 4 % 2], host=host, full=full, slots=slots)
    with TraceWriter(path) as writer:
        simulation.ledger = Ledger(simulation.ledger.config, trace=writer)
        simulation.run(moves)
    return simulation.ledger


NONE_MOVED = {"offloaded_pages": 0, "loaded_back_pages": 0}


def tiers(host: int = 16, slots: int = 12, device: int = 4, topk: int = 1, recent: int = 4) -> dict[str, int]:
    return {"host_pages": host, "device_slots": slots, "device_pages": device, "topk_pages": topk,
            "recent_tokens": recent}  # fmt: skip


def replayed(path: Path, *calls: dict[str, Any], host: int = 16, slots: int = 12, **config: Any) -> dict[str, Any]:
    write_trace(path / "trace", *calls, tiers=tiers(host, slots), **config)
    got = replay(path / "trace")
    assert got["violations"] == 0
    return got


def backup_of(*rows: int, op: int | None = None) -> dict[str, Any]:
    return {"call": "begin_backup", "rows": list(rows), "op": op}


def ended(op: int, *, written: bool = True) -> dict[str, Any]:
    return {"call": "end_backup", "op": op, "written": written}


def retract(row: int, ticket: int = 1) -> dict[str, Any]:
    return {"call": "retract", "row": row, "ticket": ticket}


def back(row: int, fill: int, ticket: int = 1) -> list[dict[str, Any]]:
    """A resumed row: from its ticket, loaded, landed."""
    return [arrive(row, fill) | {"budget": 0, "ticket": ticket}, {"call": "land", "row": row}]


# --- what is written ---------------------------------------------------------------------------------------------


def test_every_call_on_the_tiers_is_recorded_once(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace") as writer:
        ledger = Ledger(tiered().config, trace=writer)
        got = ledger.admit(tokens(9), budget_pages=5)
        assert ledger.begin_backup([got.row]) is None
        ledger.extend(got.row, 9)
        ledger.commit([got.row], [got.generation], [9])
        first = ledger.begin_backup([got.row])
        assert first is not None
        ledger.end_backup(first.op, written=False)
        back_up(ledger, got.row)
        ticket = ledger.retract(got.row)
        again = ledger.preallocate(tokens(9), 9, host=True, ticket=ticket)
        ledger.land(again.row, again.generation)
        ledger.drop_ticket(ledger.retract(again.row))
        fresh = ledger.preallocate(tokens(5), 4, host=True, budget_pages=3)
        ledger.release(fresh.row)
    config, calls = read_trace(tmp_path / "trace")
    assert config == ledger.config
    assert list(calls) == [
        {"call": "admit", "tokens": tokens(9), "namespace": None, "row": 0, "cached": 0, "budget": 5},
        backup_of(0),
        {"call": "extend", "row": 0, "upto": 9},
        {"call": "commit", "rows": [0], "committed": [9]},
        backup_of(0, op=1),
        ended(1, written=False),
        backup_of(0, op=2),
        ended(2),
        retract(0),
        arrive(0, 9) | {"budget": 5, "ticket": 1},
        {"call": "land", "row": 0},
        retract(0, 2),
        {"call": "drop_ticket", "ticket": 2},
        arrive(0, 5) | {"fill": 4, "budget": 3, "ticket": None},
        release(0),
    ]
    assert replay(tmp_path / "trace")["tiers"] == ledger.tiers.counters()


def test_books_without_a_host_tier_record_nothing_of_it(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace", *admit(0, 12))
    got = replay(tmp_path / "trace")
    assert "tiers" not in got and "host_pages" not in got
    with pytest.raises(ConfigError, match="host_pages: got 8.*host tier"):
        replay(tmp_path / "trace", host_pages=8)


# --- recorded random work ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("seed", range(8))
def test_the_same_books_give_the_same_figures(tmp_path: Path, seed: int) -> None:
    ledger = record(tmp_path / "trace", seed)
    got = replay(tmp_path / "trace")
    assert (got["violations"], got["preemptions"], got["resumed"], got["waiting_at_end"]) == (0, 0, 0, 0)
    assert got["tiers"] == ledger.tiers.counters()
    assert got["tiers"]["backed_up_pages"] > 0 and got["tiers"]["retracted"] > 0
    assert (got["queried_tokens"], got["hits"]) == (ledger.stats["queried_tokens"], ledger.stats["hit_tokens"])
    for name in got["peak_pages"]:
        assert got["peak_pages"][name] == ledger.report()["pools"][name]["peak_used"]
    assert set(got["peak_pages"]) >= {"full", "host", "slots"}
    assert got["evicted_pages"] == ledger.tree.evicted_full


@pytest.mark.parametrize("page_size", [1, 2, 4])
@pytest.mark.parametrize("seed", range(4, 8))
def test_other_page_sizes_break_no_law(tmp_path: Path, seed: int, page_size: int) -> None:
    ledger = record(tmp_path / "trace", seed)
    got = replay(tmp_path / "trace", page_size=page_size)
    assert (got["violations"], got["waiting_at_end"]) == (0, 0)
    assert got["host_pages"] == ledger.config.tiers.host_pages * 8 // page_size
    assert got["tiers"]["backed_up_pages"] * page_size >= ledger.tiers.stats["backed_up_pages"] * 8 * 0.7


def test_smaller_budgets_break_no_law_and_everybody_finishes(tmp_path: Path) -> None:
    preempted = kept = 0
    for seed in range(8):
        ledger = record(tmp_path / "trace", seed)
        for sizes in ({"num_pages": 9}, {"host_pages": 9}):
            got = replay(tmp_path / "trace", **sizes)
            assert (got["violations"], got["waiting_at_end"]) == (0, 0)
            assert got["peak_pages"]["full" if "num_pages" in sizes else "host"] <= 9
            preempted += got["preemptions"]
            kept += got["tiers"]["retracted"] - ledger.tiers.stats["retracted"]
        assert got["host_pages"] == 9
    assert preempted > 40 and kept != 0


# --- by hand: pages of 4 tokens, slots for three rows --------------------------------------------------------------


def test_a_preempted_request_keeps_its_kv_in_the_host_tier(tmp_path: Path) -> None:
    """Two rows of 3 pages in a pool of 8; a step of 20 tokens sends row 1 away. Back from its ticket it is not computed
    again: its 2 backed pages stay backed, so a publish finds them."""
    calls = [*admit(0, 12), *admit(1, 12, 50), backup_of(1, op=7), ended(7), plan(0, 1, reserve=20)]
    got = replayed(tmp_path, *calls, largest_reserve_tokens=20, full_pages=8)
    assert (got["preemptions"], got["waiting_at_end"], got["peak_pages"]) == (1, 1, {"full": 8, "host": 11, "slots": 8})
    assert got["tiers"] == {"backed_up_pages": 3, "retracted": 1, "resumed": 0, "dropped_tickets": 0} | NONE_MOVED
    calls += [release(0), {"call": "publish", "row": 1, "tokens": tokens(12, 50)}, release(1), *admit(2, 13, 50)]
    got = replayed(tmp_path, *calls, largest_reserve_tokens=20, full_pages=8)
    assert (got["resumed"], got["waiting_at_end"], got["hits"]) == (1, 0, 12)
    assert got["tiers"] == {"backed_up_pages": 3, "retracted": 1, "resumed": 1, "dropped_tickets": 0} | NONE_MOVED


def test_a_preempted_request_that_ends_gives_its_ticket_back(tmp_path: Path) -> None:
    calls = [*admit(0, 12), *admit(1, 12, 50), plan(0, 1, reserve=20), release(1)]
    got = replayed(tmp_path, *calls, largest_reserve_tokens=20, full_pages=8)
    assert got["tiers"] == {"backed_up_pages": 0, "retracted": 1, "resumed": 0, "dropped_tickets": 1} | NONE_MOVED
    assert got["waiting_at_end"] == 0
    got = replayed(tmp_path, *calls, *admit(2, 12, 90), largest_reserve_tokens=20, full_pages=11, host=11)
    assert (got["preemptions"], got["waiting_at_end"]) == (1, 0), "nobody holds the host pages of the one that ended"


def test_where_the_host_tier_is_short_a_preempted_request_leaves_it(tmp_path: Path) -> None:
    """8 host pages beside 20 logical ones: a ticket would free nothing."""
    calls = [*admit(0, 12), *admit(1, 12, 50), plan(0, 1, reserve=20)]
    got = replayed(tmp_path, *calls, largest_reserve_tokens=20, full_pages=20, host=8)
    assert (got["preemptions"], got["waiting_at_end"], got["peak_pages"]["host"]) == (1, 1, 8)
    assert got["tiers"]["retracted"] == 0


def test_who_is_still_at_its_prompt_is_computed_again(tmp_path: Path) -> None:
    """8 of 12 tokens, 11, and all of a prompt of one token that is not there yet."""
    for committed, kept in ((8, 0), (10, 0), (11, 1), (12, 1)):
        calls = [*admit(0, 12), *admit(1, 12, 50)[:2], commit_of({1: committed})]
        got = replayed(tmp_path, *calls, plan(0, reserve=24), largest_reserve_tokens=24, full_pages=9)
        assert (got["preemptions"], got["tiers"]["retracted"]) == (1, kept), committed
    for committed, kept in ((0, 0), (1, 1)):
        calls = [*admit(0, 12), *admit(1, 1, 50)[:2], commit_of({1: committed}), plan(0, reserve=24)]
        got = replayed(tmp_path, *calls, largest_reserve_tokens=24, full_pages=9)
        assert (got["preemptions"], got["tiers"]["retracted"]) == (1, kept)


def test_who_is_in_flight_leaves_no_ticket(tmp_path: Path) -> None:
    """Law 14: its pages come back when the step has drained."""
    begun, drained = {"call": "begin_op", "rows": [0], "kind": "step", "op": 1}, {"call": "end_op", "op": 1}
    calls = [*admit(0, 12), begun, plan(0, reserve=24), drained]
    got = replayed(tmp_path, *calls, largest_reserve_tokens=24, full_pages=8)
    assert (got["preemptions"], got["tiers"]["retracted"]) == (1, 0)
    got = replayed(tmp_path, *calls[:3], calls[4], largest_reserve_tokens=24, full_pages=8)
    assert (got["preemptions"], got["tiers"]["retracted"]) == (1, 1)


def test_a_recorded_ticket_is_followed(tmp_path: Path) -> None:
    """Retracted with 13 tokens, back with them, and at its end nothing is left of it."""
    calls = [*admit(0, 12), plan(0), commit_of({0: 13}), backup_of(0), retract(0), *back(2, 13), plan(2), release(2)]
    got = replayed(tmp_path, *calls)
    assert got["tiers"] == {"backed_up_pages": 3, "retracted": 1, "resumed": 1, "dropped_tickets": 0} | NONE_MOVED
    assert (got["requests"], got["resumed"], got["peak_pages"]) == (1, 0, {"full": 5, "host": 5, "slots": 4})
    calls = [*calls[:-4], {"call": "drop_ticket", "ticket": 1}, *admit(1, 40, 50)]
    got = replayed(tmp_path, *calls, host=10, full_pages=10)
    assert got["tiers"]["dropped_tickets"] == 1 and got["waiting_at_end"] == 0


def test_a_ticket_of_one_who_waits_here_is_followed(tmp_path: Path) -> None:
    """Row 1 was preempted before its recorded retraction: from then on it waits for its recorded return."""
    calls = [*admit(0, 12), *admit(1, 12, 50), plan(0, 1, reserve=20), retract(1), release(0), plan()]
    got = replayed(tmp_path, *calls, largest_reserve_tokens=20, full_pages=8)
    assert (got["resumed"], got["waiting_at_end"]) == (0, 0)
    assert got["tiers"] == {"backed_up_pages": 0, "retracted": 1, "resumed": 0, "dropped_tickets": 0} | NONE_MOVED
    got = replayed(tmp_path, *calls, *back(3, 12), plan(3), release(3), largest_reserve_tokens=20, full_pages=8)
    assert got["tiers"]["resumed"] == 1
    got = replayed(tmp_path, *calls, *back(3, 12), plan(3), largest_reserve_tokens=20, full_pages=20, host=8)
    assert (got["tiers"]["retracted"], got["peak_pages"]["slots"]) == (0, 8), "computed again: it left the tier"


def test_a_return_that_does_not_fit_waits_with_its_ticket(tmp_path: Path) -> None:
    """Row 1 needs 3 of 8 logical pages, and row 0 has grown to 7; afterwards there is room."""
    calls = [*admit(1, 12, 50), retract(1), *admit(0, 12), plan(0, reserve=16), *back(2, 12)]
    got = replayed(tmp_path, *calls, largest_reserve_tokens=20, full_pages=8)
    assert (got["tiers"]["resumed"], got["waiting_at_end"], got["preemptions"]) == (0, 1, 0)
    got = replayed(tmp_path, *calls, release(0), largest_reserve_tokens=20, full_pages=8)
    assert (got["tiers"]["resumed"], got["waiting_at_end"], got["resumed"]) == (1, 0, 1)
    got = replayed(tmp_path, *calls, release(2), largest_reserve_tokens=20, full_pages=8)
    assert (got["tiers"]["dropped_tickets"], got["waiting_at_end"]) == (1, 0)


def test_what_was_committed_while_it_waited_gets_its_pages_with_the_next_commit(tmp_path: Path) -> None:
    """Back with 12 tokens, it is at 22 when the next step ends: 6 pages, beside the 5 of row 0."""
    calls = [*admit(0, 12), *admit(1, 12, 50), plan(0, 1, reserve=20), commit_of({1: 20}), release(0), plan(1)]
    got = replayed(tmp_path, *calls, commit_of({1: 22}), largest_reserve_tokens=20, full_pages=8)
    assert (got["resumed"], got["waiting_at_end"]) == (1, 0)
    report = got["tiers"]
    assert report == {"backed_up_pages": 0, "retracted": 1, "resumed": 1, "dropped_tickets": 0} | NONE_MOVED


def test_promises_are_kept_as_recorded_and_scaled_with_the_page_size(tmp_path: Path) -> None:
    """A tier of 10 pages: a promise of 6 and one of 5 do not go together, 6 and 4 do."""
    for second, waits in ((5, 1), (4, 0)):
        calls = [admit(0, 12)[0] | {"budget": 6}, admit(1, 12, 50)[0] | {"budget": second}]
        assert replayed(tmp_path, *calls, host=10, full_pages=20)["waiting_at_end"] == waits
        calls = [calls[0], arrive(1, 12) | {"budget": second, "ticket": None}]
        assert replayed(tmp_path, *calls, host=10, full_pages=20)["waiting_at_end"] == waits
    calls = [admit(0, 12)[0] | {"budget": 6}, admit(1, 12, 50)[0] | {"budget": 4}]
    write_trace(tmp_path / "trace", *calls, tiers=tiers(10, 24, device=8), full_pages=20)
    for page_size, host, waits in ((2, 20, 0), (2, 19, 1), (8, 5, 0), (8, 4, 1)):
        got = replay(tmp_path / "trace", page_size=page_size, host_pages=host)
        assert (got["violations"], got["waiting_at_end"]) == (0, waits), (page_size, host)
    assert replayed(tmp_path, *admit(0, 12), admit(1, 4, 50)[0], host=3)["waiting_at_end"] == 0, "none is promised"
    odd = [admit(0, 12)[0] | {"budget": 3}, admit(1, 12, 50)[0] | {"budget": 3}]  # 12 tokens: two pages of 8 each
    write_trace(tmp_path / "trace", *odd, tiers=tiers(10, 24, device=8), full_pages=20)
    assert replay(tmp_path / "trace", page_size=8, host_pages=3)["waiting_at_end"] == 1


def test_a_row_waits_for_slots(tmp_path: Path) -> None:
    """Slots for one row only: the second is admitted when the first has gone."""
    calls = [*admit(0, 12), *admit(1, 12, 50)]
    got = replayed(tmp_path, *calls, slots=7)
    assert (got["waiting_at_end"], got["peak_pages"]["slots"], got["preemptions"]) == (1, 4, 0)
    got = replayed(tmp_path, *calls, release(0), slots=7)
    assert (got["waiting_at_end"], got["resumed"]) == (0, 1)


def test_what_landed_without_slots_is_computed_later(tmp_path: Path) -> None:
    calls = [arrive(1, 12), *admit(0, 12), {"call": "land", "row": 1}]
    got = replayed(tmp_path, *calls, slots=4)
    assert (got["waiting_at_end"], got["peak_pages"]["full"], got["tiers"]["retracted"]) == (1, 6, 0)
    got = replayed(tmp_path, *calls, release(0), plan(1), release(1), slots=4)
    assert (got["waiting_at_end"], got["resumed"], got["peak_pages"]["full"]) == (0, 1, 6)
    got = replayed(tmp_path, *calls, plan(0), {"call": "release", "row": 1}, release(0), slots=4)
    assert (got["waiting_at_end"], got["resumed"]) == (0, 0)


def test_backups_drain_when_they_did_in_the_trace(tmp_path: Path) -> None:
    """Only what is backed up enters the cache: between begin and end nothing does, nor after a refusal."""
    published = {"call": "publish", "row": 0, "tokens": tokens(12)}
    calls = [*admit(0, 12), backup_of(0, op=5), published, *admit(1, 13)]
    assert replayed(tmp_path, *calls, ended(5))["hits"] == 0
    calls = [*admit(0, 12), backup_of(0, op=5), ended(5, written=False), published, *admit(1, 13)]
    got = replayed(tmp_path, *calls)
    assert (got["hits"], got["tiers"]["backed_up_pages"]) == (0, 0)
    calls = [*admit(0, 12), backup_of(0, op=5), ended(5), published, *admit(1, 13)]
    got = replayed(tmp_path, *calls)
    assert (got["hits"], got["tiers"]["backed_up_pages"]) == (12, 3)
    assert replayed(tmp_path, backup_of(0, op=5), ended(5), ended(5))["tiers"]["backed_up_pages"] == 0


def test_pages_that_are_whole_only_here_are_backed_up_at_once(tmp_path: Path) -> None:
    """Three tokens are no page of 4 but one of 2: nothing was copied then, and a page is copied here."""
    calls = [*admit(0, 3), backup_of(0), {"call": "publish", "row": 0, "tokens": tokens(3)}, *admit(1, 4)]
    write_trace(tmp_path / "trace", *calls, tiers=tiers(16, 24, device=8))
    assert replay(tmp_path / "trace")["tiers"]["backed_up_pages"] == 0
    got = replay(tmp_path / "trace", page_size=2)
    assert (got["tiers"]["backed_up_pages"], got["hits"]) == (1, 2)


def test_tiers_keep_their_size_in_tokens(tmp_path: Path) -> None:
    """Slots of 8 pages of 4 tokens for 3 rows and a half; 9 host pages."""
    write_trace(tmp_path / "trace", *[call for row in range(4) for call in admit(row, 4, 50 * row)],
                tiers=tiers(9, 28, device=8), max_rows=6)  # fmt: skip
    for page_size, host, slots in ((1, 36, 32 * 3), (2, 18, 16 * 3), (4, 9, 8 * 3), (8, 4, 4 * 3)):
        got = replay(tmp_path / "trace", page_size=page_size)
        assert (got["host_pages"], got["peak_pages"]["slots"], got["waiting_at_end"]) == (host, slots, 1)
    assert replay(tmp_path / "trace", page_size=2, host_pages=11)["host_pages"] == 11
    assert replay(tmp_path / "trace", page_size=4, host_pages=11)["host_pages"] == 11
    with pytest.raises(ConfigError, match="page_size: got 16.*32 tokens of a row's slots are 2 pages, .*needs 4"):
        replay(tmp_path / "trace", page_size=16)
    for sizes in ({"host_pages": 0}, {"page_size": 0}, {"page_size": 3}):
        with pytest.raises(ConfigError, match=next(iter(sizes))):
            replay(tmp_path / "trace", **sizes)
    write_trace(tmp_path / "trace", *admit(0, 4), tiers=tiers(1, 28, device=8))
    assert replay(tmp_path / "trace", page_size=8)["host_pages"] == 1


def test_a_lost_cache_is_followed(tmp_path: Path) -> None:
    published = [backup_of(0), {"call": "publish", "row": 0, "tokens": tokens(12)}]
    calls = [*admit(0, 12), *published, *admit(1, 13), release(1), {"call": "forget_cache"}]
    got = replayed(tmp_path, *calls, *admit(2, 13))
    assert (got["hits"], got["queried_tokens"]) == (12, 12 + 13 + 13)


def test_what_the_device_counted_is_passed_on(tmp_path: Path) -> None:
    got = replayed(tmp_path, *admit(0, 12), {"call": "tier_counters", "hits": 70, "swaps": 9})
    assert (got["tiers"]["recorded_hits"], got["tiers"]["recorded_swaps"]) == (70, 9)


@pytest.mark.parametrize(
    "call",
    [retract(3), {"call": "drop_ticket", "ticket": 4}, {"call": "begin_backup", "rows": [0]}, back(1, 9, 5)[0],
     {"call": "tier_counters", "hits": "many", "swaps": 1}],
    ids=lambda call: call["call"],
)  # fmt: skip
def test_a_call_that_no_ledger_wrote_is_named(tmp_path: Path, call: dict[str, Any]) -> None:
    write_trace(tmp_path / "trace", *admit(0, 12), call, tiers=tiers())
    with pytest.raises(TraceError, match=f"call 4 of the trace, {call['call']}: a field is missing"):
        replay(tmp_path / "trace")
