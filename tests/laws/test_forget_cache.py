"""A cache whose content is lost: nothing of it is matched again, and whoever holds some of it goes on and closes."""

from __future__ import annotations

from octavo.kv.ledger import Ledger
from octavo.kv.ledger_transfers import namespace_of
from octavo.kv.trace import TraceWriter, read_trace
from tests.laws.helpers import back_up, commit, make, ok, prefill, sliding, tiered, tokens


def cached(ledger: Ledger, count: int, namespace: str | None = None) -> int:
    return ledger.match(tokens(count), namespace).pages


def test_what_is_unlocked_is_evicted_and_what_is_locked_is_not_matched() -> None:
    ledger = make()
    running = prefill(ledger, tokens(13), publish=True)
    done = prefill(ledger, tokens(9, 100), publish=True)
    ledger.release(done.row, tokens(9, 100))
    assert cached(ledger, 14) == 3
    assert ledger.forget_cache() == 2
    assert cached(ledger, 14) == 0 and ledger.match(tokens(9, 100)).pages == 0
    ok(ledger)
    again = prefill(ledger, tokens(13), publish=True)
    assert again.cached_tokens == 0 and cached(ledger, 14) == 3, "of the new one"
    ledger.extend(running.row, 18)
    commit(ledger, running, 18)
    assert ledger.publish(running.row, tokens(18)) == 16 and cached(ledger, 20) == 3, "in a tree nobody looks at"
    ledger.release(running.row, tokens(18))
    ok(ledger)
    assert ledger.tree.evictable_full == 4
    ledger.release(again.row, tokens(13))
    assert ledger.reset_cache() == 7
    ok(ledger, at_rest=True)
    assert not ledger.tree.roots


def test_every_namespace_is_forgotten_and_each_starts_anew() -> None:
    ledger = make(max_rows=8)
    for namespace in (None, "a", "b"):
        prefill(ledger, tokens(9), publish=True, namespace=namespace)
    for _ in range(2):  # what is forgotten already stays so
        ledger.forget_cache()
        assert [cached(ledger, 9, namespace) for namespace in (None, "a", "b")] == [0, 0, 0]
        assert len(ledger.tree.roots) == 3
        ok(ledger)
    prefill(ledger, tokens(9), publish=True, namespace="a")
    assert [cached(ledger, 9, namespace) for namespace in (None, "a", "b")] == [0, 2, 0]
    ledger.forget_cache()
    assert len(ledger.tree.roots) == 4 and cached(ledger, 9, "a") == 0
    for row in ledger.live_rows().tolist():
        ledger.release(row)
    ledger.reset_cache()
    ok(ledger, at_rest=True)


def test_a_ticket_from_before_comes_back_to_its_own_pages() -> None:
    ledger = tiered()
    got = prefill(ledger, tokens(13))
    back_up(ledger, got.row)
    assert ledger.publish(got.row, tokens(13)) == 12
    ticket = ledger.retract(got.row)
    ledger.forget_cache()
    other = prefill(ledger, tokens(13))
    back_up(ledger, other.row)
    assert ledger.publish(other.row, tokens(13)) == 12
    back = ledger.preallocate(tokens(13), 13, host=True, ticket=ticket)
    assert ledger.land(back.row, back.generation) and back.cached_tokens == 12
    assert namespace_of(ledger.path_end(back.row)) == 1
    assert namespace_of(ledger.path_end(other.row)) is None
    ok(ledger)
    for row in (back.row, other.row):
        ledger.release(row, tokens(13))
    ledger.reset_cache()
    ok(ledger, at_rest=True)


def test_windows_slide_on_in_a_forgotten_tree() -> None:
    ledger = sliding()
    got = prefill(ledger, tokens(17), publish=True)
    ledger.forget_cache()
    ledger.extend(got.row, 30)
    commit(ledger, got, 30)
    ledger.evict([got.row])
    ok(ledger)
    ledger.release(got.row, tokens(30))
    ledger.reset_cache()
    ok(ledger, at_rest=True)


def test_it_is_recorded(tmp_path) -> None:
    with TraceWriter(tmp_path / "trace") as writer:
        make(trace=writer).forget_cache()
    assert list(read_trace(tmp_path / "trace")[1]) == [{"call": "forget_cache"}]
