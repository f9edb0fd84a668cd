"""Replays of traces written by hand: who goes, who goes on first, and how much is held meanwhile."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.kv.trace import TraceError, replay
from tests.laws.helpers import tokens
from tests.laws.test_trace import admit, write_trace


def arrive(row: int, count: int) -> dict[str, Any]:
    return {"call": "preallocate", "tokens": tokens(count, 100 * row), "fill": count, "namespace": None, "row": row}


def plan(*rows: int, reserve: int = 4) -> dict[str, Any]:
    return {"call": "plan", "rows": list(rows), "reserve": reserve}


def commit_of(committed: dict[int, int]) -> dict[str, Any]:
    return {"call": "commit", "rows": list(committed), "committed": list(committed.values())}


def release(row: int) -> dict[str, Any]:
    return {"call": "release", "row": row}


def replayed(path: Path, *calls: dict[str, Any], **config: int) -> dict[str, Any]:
    write_trace(path / "trace", *calls, **config)
    got = replay(path / "trace")
    assert got["violations"] == 0
    return got


def test_who_stays_is_planned_after_a_preemption(tmp_path: Path) -> None:
    """Of 8 pages two rows hold 3 each; a step of 20 tokens takes row 0 to 8 once row 1 has gone."""
    calls = [*admit(0, 12), *admit(1, 12, 50), plan(0, 1, reserve=20)]
    got = replayed(tmp_path, *calls, largest_reserve_tokens=20)
    assert (got["preemptions"], got["waiting_at_end"], got["peak_pages"]) == (1, 1, {"full": 8})


def test_who_asks_for_a_chunk_stays_while_another_can_go(tmp_path: Path) -> None:
    """Row 1 needs 6 of 8 pages, row 0 holds 3: row 0 waits until row 1 has ended."""
    got = replayed(tmp_path, *admit(0, 12), *admit(1, 24, 50), release(1))
    assert (got["preemptions"], got["resumed"], got["waiting_at_end"]) == (1, 1, 0)


def test_the_oldest_goes_on_first_and_keeps_its_place_where_it_does_not_fit(tmp_path: Path) -> None:
    """Row 0 holds 5 of 8 pages; rows 1, 2, 3 wait for 6, 7 and 7. A try in vain changes no order."""
    calls = [*admit(0, 20), arrive(1, 24), arrive(2, 28), arrive(3, 28), plan(), release(0)]
    got = replayed(tmp_path, *calls)
    assert (got["resumed"], got["waiting_at_end"], got["peak_pages"]) == (1, 2, {"full": 6})
    got = replayed(tmp_path, *calls, release(1))
    assert (got["resumed"], got["waiting_at_end"], got["peak_pages"]) == (2, 1, {"full": 7})


def test_what_is_computed_again_goes_chunk_by_chunk_and_its_window_slides(tmp_path: Path) -> None:
    """40 tokens are 10 pages; the sliding pool has 6, enough for a window of 8, a chunk of 8 and the slack."""
    sizes = {"full_pages": 11, "swa_pages": 6, "window_tokens": 8, "chunk_tokens": 8}
    got = replayed(tmp_path, *admit(0, 12), arrive(1, 40), release(0), **sizes)
    assert (got["resumed"], got["waiting_at_end"], got["preemptions"]) == (1, 0, 0)
    assert got["peak_pages"]["full"] == 10


def test_what_is_computed_again_ends_where_the_request_was(tmp_path: Path) -> None:
    """Row 1 has published 2 of its 4 pages, goes, and comes back: 2 found, 2 computed, none beyond."""
    calls = [*admit(0, 12), *admit(1, 13, 50), {"call": "publish", "row": 1, "tokens": tokens(8, 50)}]
    calls += [{"call": "extend", "row": 0, "upto": 20}, commit_of({0: 20}), release(0)]
    full = {"full_pages": 7}
    got = replayed(tmp_path, *calls, **full)
    assert (got["preemptions"], got["resumed"], got["hits"], got["peak_pages"]) == (1, 1, 8, {"full": 7})
    # Row 2 takes what is left; a page more behind row 1 and somebody would have to go.
    got = replayed(tmp_path, *calls, *admit(2, 12, 200), **full)
    assert (got["preemptions"], got["waiting_at_end"]) == (1, 0)


def test_a_request_that_goes_on_still_counts_what_it_has_written(tmp_path: Path) -> None:
    """Row 0 has written 2 tokens and waited; when it is back, row 1, which has written one, goes."""
    calls = [*admit(0, 10), plan(0), commit_of({0: 12}), *admit(2, 8, 200), plan(2), commit_of({2: 12})]
    calls += [{"call": "extend", "row": 2, "upto": 24}, commit_of({2: 24}), release(2)]  # row 0 goes, and comes back
    calls += [*admit(1, 12, 100), plan(1), commit_of({1: 13}), plan(0, 1, reserve=8)]
    got = replayed(tmp_path, *calls, largest_reserve_tokens=8)
    assert (got["preemptions"], got["resumed"], got["waiting_at_end"]) == (2, 1, 1)
    got = replayed(tmp_path, *calls, release(0), largest_reserve_tokens=8)
    assert (got["resumed"], got["waiting_at_end"]) == (2, 0), "row 1 was the one that waited"


def test_pools_keep_their_size_in_tokens(tmp_path: Path) -> None:
    """8 pages of 4: down to pages of one token, and up to one page that holds them all, or more."""
    write_trace(tmp_path / "trace", *admit(0, 12))
    for page_size, pages in ((1, 32), (2, 16), (16, 2), (32, 1), (64, 1)):
        assert replay(tmp_path / "trace", page_size=page_size)["num_pages"] == pages
    write_trace(tmp_path / "trace", *admit(0, 12), swa_pages=20, window_tokens=8)
    assert replay(tmp_path / "trace", page_size=1)["swa_pages"] == 20 * 4 + 2
    for page_size in (-4, 0):
        with pytest.raises(ConfigError, match="page_size"):
            replay(tmp_path / "trace", page_size=page_size)
    for sizes, name in (({"num_pages": 0}, "num_pages"), ({"swa_pages": 0}, "swa_pages")):
        with pytest.raises(ConfigError, match=name):
            replay(tmp_path / "trace", **sizes)
    assert replay(tmp_path / "trace", swa_pages=30)["swa_pages"] == 30
    assert replay(tmp_path / "trace")["swa_pages"] == 20
    write_trace(tmp_path / "trace", *admit(0, 12))
    assert replay(tmp_path / "trace", page_size=2)["swa_pages"] == 0


@pytest.mark.parametrize(
    ("call", "message"),
    [
        ({"call": "invent"}, "call 2.*'invent' is no call"),
        ({"row": 0}, "call 2.*None is no call"),
        ({"call": "extend", "row": 0}, "call 2.*extend.*upto"),
        ({"call": "extend", "row": 0, "upto": "9"}, "call 2.*extend"),
        ({"call": "extend", "row": [0], "upto": 9}, "call 2.*extend"),
        ({"call": "commit", "rows": [0], "committed": []}, "call 2.*commit"),
        ({"call": "admit", "row": 1, "tokens": ["a"]}, "call 2.*admit"),
    ],
    ids=str,
)
def test_a_call_that_no_ledger_wrote_is_named(tmp_path: Path, call: dict[str, Any], message: str) -> None:
    write_trace(tmp_path / "trace", admit(0, 12)[0], call)
    with pytest.raises(TraceError, match=message):
        replay(tmp_path / "trace")


def test_a_last_step_may_end_behind_the_context(tmp_path: Path) -> None:
    """A context of 14 tokens: the page that holds its end holds 16, and a step that accepts four fills it."""
    got = replayed(tmp_path, *admit(0, 12), plan(0), commit_of({0: 16}), context_tokens=14)
    assert (got["preemptions"], got["waiting_at_end"], got["peak_pages"]) == (0, 0, {"full": 4})
