"""Traces: recorded calls replay to the same books, on other books without a broken law, and bad files are named."""

from __future__ import annotations

import json
import random
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.kv.ledger import Ledger
from octavo.kv.replay import _Request
from octavo.kv.trace import TraceError, TraceWriter, read_trace, replay
from tests.laws.helpers import commit, prefill, sliding, tokens
from tests.laws.law_setups import Setup
from tests.laws.simulation import Simulation

SETUPS = [Setup(16, 0, True), Setup(16, 40, False, pair_keys=True), Setup(4, 9, True), Setup(64, 50, True)]


def record(path: Path, setup: Setup, moves: int = 250) -> Ledger:
    simulation = Simulation(setup)
    with TraceWriter(path) as writer:
        simulation.ledger = Ledger(simulation.config, trace=writer)
        simulation.run(moves, random.Random(setup.page_size))
    return simulation.ledger


@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: f"p{s.page_size}w{s.window_tokens}")
def test_replay_on_the_same_books_gives_the_same_figures(tmp_path: Path, setup: Setup) -> None:
    ledger = record(tmp_path / "trace", setup)
    got = replay(tmp_path / "trace")
    assert got["violations"] == 0 and got["preemptions"] == 0 and got["waiting_at_end"] == 0
    assert got["queried_tokens"] == ledger.stats["queried_tokens"] and got["hits"] == ledger.stats["hit_tokens"]
    assert got["peak_pages"]["full"] == ledger.full_pool.total - ledger.full_pool.min_free
    assert got["evicted_pages"] == ledger.tree.evicted_full
    assert (got["page_size"], got["num_pages"]) == (setup.page_size, ledger.full_pool.total)


@pytest.mark.parametrize("page_size", [1, 8, 32])
@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: f"p{s.page_size}w{s.window_tokens}")
def test_replay_with_another_page_size(tmp_path: Path, setup: Setup, page_size: int) -> None:
    record(tmp_path / "trace", setup)
    got = replay(tmp_path / "trace", page_size=page_size)
    assert got["violations"] == 0 and got["page_size"] == page_size


@pytest.mark.parametrize("setup", SETUPS, ids=lambda s: f"p{s.page_size}w{s.window_tokens}")
def test_replay_under_pressure_preempts_and_everybody_finishes(tmp_path: Path, setup: Setup) -> None:
    ledger = record(tmp_path / "trace", setup)
    got = replay(tmp_path / "trace", num_pages=ledger.width_pages)
    assert got["violations"] == 0 and got["preemptions"] > 0 and got["resumed"] > 0 and got["waiting_at_end"] == 0
    assert got["peak_pages"]["full"] <= ledger.width_pages


def write_trace(path: Path, *calls: dict, **config: int) -> None:
    sizes = {
        "page_size": 4,
        "full_pages": 8,
        "max_rows": 4,
        "context_tokens": 64,
        "largest_reserve_tokens": 4,
        **config,
    }
    lines = [{"octavo_trace": 1, "config": sizes}, *calls]
    path.write_text("".join(json.dumps(line) + "\n" for line in lines))


def admit(row: int, count: int, start: int = 0) -> list[dict]:
    return [
        {"call": "admit", "tokens": tokens(count, start), "namespace": None, "row": row, "cached": 0},
        {"call": "extend", "row": row, "upto": count},
        {"call": "commit", "rows": [row], "committed": [count]},
    ]


@pytest.mark.parametrize("ending", ["release", "fail_transfer", "quarantine"])
def test_a_request_that_never_fitted_does_not_linger(tmp_path: Path, ending: str) -> None:
    arrive = {"call": "preallocate", "tokens": tokens(40, 50), "fill": 40, "namespace": None, "row": 1}
    write_trace(
        tmp_path / "trace", *admit(0, 20), arrive, {"call": ending, "row": 1, "final": True},
        {"call": "release", "row": 0}, {"call": "plan", "rows": [], "reserve": 1},
    )  # fmt: skip
    got = replay(tmp_path / "trace")
    assert (got["requests"], got["resumed"], got["waiting_at_end"]) == (2, 0, 0)


def test_a_transfer_that_did_not_fit_is_computed_later(tmp_path: Path) -> None:
    arrive = {"call": "preallocate", "tokens": tokens(30, 50), "fill": 30, "namespace": None, "row": 1}
    write_trace(
        tmp_path / "trace", *admit(0, 20), arrive, {"call": "land", "row": 1}, {"call": "release", "row": 0},
        {"call": "plan", "rows": [1], "reserve": 2},
    )  # fmt: skip
    got = replay(tmp_path / "trace")
    assert (got["resumed"], got["waiting_at_end"], got["peak_pages"]) == (1, 0, {"full": 8})


def test_waiting_requests_go_on_with_the_next_plan(tmp_path: Path) -> None:
    arrive = {"call": "preallocate", "tokens": tokens(28, 50), "fill": 28, "namespace": None, "row": 0}
    failed = {"call": "fail_transfer", "row": 0, "final": True}
    write_trace(tmp_path / "trace", arrive, *admit(1, 12), failed, {"call": "plan", "rows": [1], "reserve": 2})
    got = replay(tmp_path / "trace")
    assert (got["requests"], got["preemptions"], got["resumed"], got["waiting_at_end"]) == (2, 1, 1, 0)


def test_the_one_with_the_fewest_outputs_is_preempted(tmp_path: Path) -> None:
    """Rows 0 and 1 fill the pool; row 0 has written three tokens, row 1 one; row 1 waits until row 0 ends."""
    calls = [*admit(0, 12), *admit(1, 12, 50)]
    calls += [{"call": "plan", "rows": [0, 1], "reserve": 4}]
    calls += [{"call": "commit", "rows": [0, 1], "committed": [15, 13]}]
    calls += [{"call": "plan", "rows": [0, 1], "reserve": 4}, {"call": "commit", "rows": [0, 1], "committed": [18, 16]}]
    calls += [{"call": "publish", "row": 0, "tokens": tokens(19)}, {"call": "release", "row": 0}]
    calls += [{"call": "plan", "rows": [1], "reserve": 4}, {"call": "release", "row": 1}]
    write_trace(tmp_path / "trace", *calls)
    got = replay(tmp_path / "trace")
    assert (got["preemptions"], got["resumed"], got["waiting_at_end"], got["violations"]) == (1, 1, 0, 0)
    assert got["calls"] == len(calls) and got["peak_pages"] == {"full": 8} and got["hits"] == 0


def test_a_resumed_request_publishes_what_was_computed_again(tmp_path: Path) -> None:
    """Row 1 is preempted at 16 tokens, computed again when row 0 ends, and a third request finds its pages."""
    calls = [*admit(0, 12), *admit(1, 12, 50)]
    calls += [{"call": "plan", "rows": [0, 1], "reserve": 4}]
    calls += [{"call": "commit", "rows": [0, 1], "committed": [15, 13]}]
    calls += [{"call": "plan", "rows": [0, 1], "reserve": 4}, {"call": "commit", "rows": [0, 1], "committed": [18, 16]}]
    calls += [{"call": "release", "row": 0}]
    calls += [{"call": "publish", "row": 1, "tokens": tokens(12, 50)}, {"call": "release", "row": 1}]
    calls += admit(2, 13, 50)
    write_trace(tmp_path / "trace", *calls)
    got = replay(tmp_path / "trace")
    assert (got["preemptions"], got["resumed"], got["violations"]) == (1, 1, 0)
    assert got["hits"] == 12


def test_what_is_asked_for_is_taken(tmp_path: Path) -> None:
    """Admission computes nothing; a chunk takes its pages; a plan those of its reserve."""
    calls = [*admit(0, 12), {"call": "plan", "rows": [0], "reserve": 2}, {"call": "plan", "rows": [0], "reserve": 9}]
    for count, peak in ((1, 0), (2, 3), (3, 3), (4, 4), (5, 4)):
        write_trace(tmp_path / "trace", *calls[:count])
        assert replay(tmp_path / "trace")["peak_pages"] == {"full": peak}


def test_quarantined_pages_come_back(tmp_path: Path) -> None:
    arrive = {"call": "preallocate", "tokens": tokens(28), "fill": 28, "namespace": None, "row": 0}
    calls = [arrive, {"call": "quarantine", "row": 0}, {"call": "end_quarantine"}, *admit(1, 28, 50)]
    write_trace(tmp_path / "trace", *calls)
    got = replay(tmp_path / "trace")
    assert (got["requests"], got["preemptions"], got["waiting_at_end"], got["violations"]) == (2, 0, 0, 0)
    write_trace(tmp_path / "trace", *[call for call in calls if call["call"] != "end_quarantine"])
    assert replay(tmp_path / "trace")["waiting_at_end"] == 1


def test_a_request_that_landed_goes_on(tmp_path: Path) -> None:
    """It is planned, its window slides, and it may be preempted by one that has written more."""
    arrive = {"call": "preallocate", "tokens": tokens(17), "fill": 16, "namespace": None, "row": 0}
    steps = [{"call": "plan", "rows": [0, 1], "reserve": 4}, {"call": "commit", "rows": [0, 1], "committed": [17, 15]}]
    calls = [arrive, {"call": "land", "row": 0}, *admit(1, 12, 50), *steps, {"call": "plan", "rows": [1], "reserve": 4}]
    write_trace(tmp_path / "trace", *calls, full_pages=10)
    got = replay(tmp_path / "trace")
    assert (got["preemptions"], got["waiting_at_end"], got["peak_pages"]) == (0, 0, {"full": 10})
    calls += [{"call": "plan", "rows": [1], "reserve": 9}, {"call": "release", "row": 0}]
    write_trace(tmp_path / "trace", *calls, full_pages=10, largest_reserve_tokens=9)
    got = replay(tmp_path / "trace")
    assert (got["preemptions"], got["resumed"], got["waiting_at_end"], got["violations"]) == (1, 0, 0, 0)


def test_outputs_are_what_was_written_behind_the_prompt() -> None:
    assert [_Request([7] * 3, None, committed=c).outputs for c in (0, 3, 5)] == [0, 0, 2]


def test_the_sliding_pool_keeps_its_tokens_and_its_slack_at_another_page_size(tmp_path: Path) -> None:
    write_trace(tmp_path / "trace", *admit(0, 12), swa_pages=20, window_tokens=8)
    assert replay(tmp_path / "trace")["swa_pages"] == 20
    assert replay(tmp_path / "trace", page_size=8)["swa_pages"] == 20 * 4 // 8 + 2
    assert replay(tmp_path / "trace", page_size=16)["swa_pages"] == 20 * 4 // 16 + 2


def test_the_books_are_checked_on_the_way(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    checks: list[bool] = []
    monkeypatch.setattr("octavo.kv.replay.balance.check", lambda ledger, deep=True: checks.append(deep) or ["broken"])
    write_trace(tmp_path / "trace", *admit(0, 12), *[{"call": "plan", "rows": [0], "reserve": 1}] * 130)
    assert replay(tmp_path / "trace")["violations"] == 3
    assert checks == [False, False, True]


def test_replay_with_another_policy(tmp_path: Path) -> None:
    record(tmp_path / "trace", Setup(16, 40, True))
    got = replay(tmp_path / "trace", num_pages=12, evict_policy="examples.evict_policy:Popular")
    assert got["violations"] == 0


def test_every_entry_is_recorded_once(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace") as writer:
        ledger = sliding(trace=writer)
        got = prefill(ledger, tokens(20), publish=True)
        ledger.plan_decode([got.row], 2)
        op = ledger.begin_op([got.row])
        ledger.evict([got.row])
        ledger.end_op(op)
        ledger.release(got.row, tokens(21))
        a = ledger.preallocate(tokens(9, 50), 9)
        ledger.land(a.row, a.generation)
        b, c = ledger.preallocate(tokens(5, 50), 5), ledger.preallocate(tokens(5, 70), 5)
        ledger.fail_transfer(b.row, b.generation)
        ledger.quarantine(c.row, c.generation)
        ledger.end_quarantine()
        ledger.reset_cache()
    config, calls = read_trace(tmp_path / "trace")
    lines = list(calls)
    assert config == ledger.config
    assert [line["call"] for line in lines] == [
        "admit", "extend", "commit", "publish", "plan", "begin_op", "evict", "end_op", "release", "preallocate", "land",
        "preallocate", "preallocate", "fail_transfer", "quarantine", "end_quarantine", "reset_cache",
    ]  # fmt: skip
    assert lines[0] == {"call": "admit", "tokens": tokens(20), "namespace": None, "row": 0, "cached": 0}
    assert lines[1] == {"call": "extend", "row": 0, "upto": 20}
    assert lines[2] == {"call": "commit", "rows": [0], "committed": [20]}
    assert lines[4] == {"call": "plan", "rows": [0], "reserve": 2}
    assert replay(tmp_path / "trace")["requests"] == 4


def test_refused_calls_are_not_recorded(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace") as writer:
        ledger = sliding(trace=writer, full_pages=4)
        got = ledger.admit(tokens(40))
        with pytest.raises(Exception, match="pages needed"):
            ledger.extend(got.row, 40)
        ledger.extend(got.row, 4)
        ledger.release(got.row)
        assert not commit(ledger, got, 4)
    assert [line["call"] for line in read_trace(tmp_path / "trace")[1]] == ["admit", "extend", "release", "commit"]


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "not an Octavo KV trace"),
        ('{"octavo_trace": 99}\n', "not an Octavo KV trace of format 1"),
        ('{"call": "admit"}\n', "not an Octavo KV trace"),
        ('{"octavo_trace": 1}\n', "no configuration"),
        ('{"octavo_trace": 1, "config": {"colour": 3}}\n', "no configuration"),
        ('{"octavo_trace": 1, "config": 3}\n', "no configuration"),
        ('{"octavo_trace": 1, "config": {"page_size": 4, "full_pages": 8, "tiers": {"a": 1}}}\n', "no configuration"),
        ('{"octavo_trace": 1, "config": {"page_size": 4, "full_pages": 8, "tiers": 5}}\n', "no configuration"),
        ('{"octavo_trace": 1\n', "line 1: not JSON"),
        ('{"a":' * 100_000, "line 1: not JSON"),
        ("[1]\n", "line 1: not an object"),
    ],
)
def test_a_bad_file_is_named(tmp_path: Path, content: str, message: str) -> None:
    path = tmp_path / "bad"
    path.write_text(content)
    with pytest.raises(TraceError, match=f"bad.*{message}"):
        replay(path)


def test_a_file_that_cannot_be_read_is_named(tmp_path: Path) -> None:
    (tmp_path / "bytes").write_bytes(b"\xff\xfe\x00")
    for name, message in (("none", "No such file"), ("bytes", "not text"), (".", "directory")):
        with pytest.raises(TraceError, match=f"{tmp_path / name}.*{message}"):
            replay(tmp_path / name)


@pytest.mark.parametrize(
    "policy", ["nonsense", ":X", "m:", "no.such.module:X", "octavo.kv.pages:Nothing", "octavo.kv.books:RowState"]
)
def test_a_bad_policy_is_named(tmp_path: Path, policy: str) -> None:
    record(tmp_path / "trace", SETUPS[0], moves=5)
    with pytest.raises(ConfigError, match="evict_policy"):
        replay(tmp_path / "trace", evict_policy=policy)


def test_sizes_that_cannot_be_are_named(tmp_path: Path) -> None:
    record(tmp_path / "trace", SETUPS[2], moves=5)
    with pytest.raises(ConfigError, match="page_size"):
        replay(tmp_path / "trace", page_size=3)
    with pytest.raises(ConfigError, match="num_pages"):
        replay(tmp_path / "trace", num_pages=1)
    with pytest.raises(ConfigError, match="swa_pages"):
        replay(tmp_path / "trace", swa_pages=1)


def test_a_trace_is_lines_of_json(tmp_path: Path) -> None:
    record(tmp_path / "trace", SETUPS[1], moves=40)
    lines = (tmp_path / "trace").read_text().splitlines()
    assert len(lines) > 20 and all(isinstance(json.loads(line), dict) for line in lines)


def test_a_full_disk_ends_the_trace_with_one_line(caplog: pytest.LogCaptureFixture) -> None:
    with TraceWriter("/dev/full") as writer:
        file = writer._file
        for row in range(5000):
            writer.record("release", row=row)
        assert file is not None and file.closed and len(caplog.records) == 1, "at once, not when the work is done"
    assert [record.getMessage().count("No space left") for record in caplog.records] == [1]
    with TraceWriter("/dev/full") as short:
        short.record("release", row=1)  # fits the buffer: closing finds out
    assert len(caplog.records) == 2


def test_nothing_is_recorded_behind_the_end(tmp_path: Path) -> None:
    writer = TraceWriter(tmp_path / "trace")
    writer.record("release", row=1)
    writer.close()
    writer.record("release", row=2)
    writer.close()
    assert (tmp_path / "trace").read_text() == '{"call":"release","row":1}\n'


def test_what_is_no_data_is_not_recorded(tmp_path: Path) -> None:
    with TraceWriter(tmp_path / "trace") as writer, pytest.raises(TypeError, match="Ledger in a trace"):
        writer.record("release", row=sliding())


def test_a_trace_that_cannot_be_opened_is_an_option_error(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="record_trace"):
        TraceWriter(tmp_path / "no folder" / "trace")
