"""Offloading: what only retracted requests lock gives its logical pages to those that run, and comes back with them.

Pages of four tokens. A host tier larger than the logical pool, as offloading is for.
"""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from octavo.errors import OutOfPages
from octavo.kv import balance
from octavo.kv.books import Admission, Preallocation
from octavo.kv.ledger import Ledger, LedgerConfig
from octavo.kv.node import Node
from octavo.kv.tiers import Ticket, TierConfig
from octavo.kv.trace import TraceWriter, replay
from tests.laws.helpers import back_up, commit, ok, pages, prefill, tiered, tokens
from tests.laws.test_tickets import windowed


def publish(ledger: Ledger, prompt: list[int], upto: int | None = None) -> Admission:
    """Compute a prompt, and share its whole pages, or those below `upto` tokens."""
    got = prefill(ledger, prompt)
    back_up(ledger, got.row)
    ledger.publish(got.row, prompt[:upto])
    return got


def retracted(ledger: Ledger, prompt: list[int], upto: int | None = None) -> Ticket:
    return ledger.retract(publish(ledger, prompt, upto).row)


def come_back(ledger: Ledger, ticket: Ticket, prompt: list[int]) -> Preallocation:
    got = ledger.preallocate(prompt, ticket.committed, host=True, ticket=ticket)
    ok(ledger)
    assert ledger.land(got.row, got.generation)
    ok(ledger)
    return got


def host_pages(ledger: Ledger, row: int) -> list[int]:
    assert ledger.tiers is not None
    return ledger.tiers.pool.host_of[pages(ledger, row)].tolist()


def offloaded(ledger: Ledger) -> list[tuple[int, int]]:
    """[first page, last page) of every offloaded node."""
    return sorted((n.start_page, n.end_page) for n in ledger.tree.nodes() if n.host is not None)


def test_the_last_that_runs_gets_the_pages_that_retracted_requests_share() -> None:
    """Eight logical pages; two retracted requests lock three each, and who runs needs all eight."""
    ledger = tiered(host=40, full=8)
    first = publish(ledger, tokens(13))
    kept = host_pages(ledger, first.row)
    one = ledger.retract(first.row)
    two = retracted(ledger, tokens(13, 100))
    assert (len(one.host), len(two.host), ledger.free_pages("full")) == (1, 1, 2)
    assert (ledger.tree.offloadable_full, ledger.available("logical"), ledger.available("full")) == (6, 8, 8)
    assert ledger.available("host") == 32
    last = prefill(ledger, tokens(28, 200))
    assert ledger.plan_decode([last.row], 4).needed_tokens == 4
    ok(ledger)
    assert len(pages(ledger, last.row)) == 8 and offloaded(ledger) == [(0, 3), (0, 3)]
    assert (ledger.tree.offloadable_full, ledger.free_pages("host")) == (0, 24)
    with pytest.raises(OutOfPages, match="full pool: 1 pages needed, 0 available"):
        ledger.extend(last.row, 33)
    with pytest.raises(OutOfPages, match="full pool: 4 pages needed, 0 available"):
        ledger.preallocate(tokens(13), 13, host=True, ticket=one)
    ok(ledger)
    ledger.release(last.row)
    got = come_back(ledger, one, tokens(13))
    assert (got.cached_tokens, got.healed_columns) == (0, ())
    assert host_pages(ledger, got.row) == kept, "the KV is where it was"
    assert ledger.protected[got.row] == 12 and offloaded(ledger) == [(0, 3)]
    report = ledger.report()["tiers"]
    assert (report["offloaded_pages"], report["loaded_back_pages"]) == (6, 3)
    ledger.drop_ticket(two)
    ledger.release(got.row, tokens(13))
    ok(ledger, at_rest=True)
    assert ledger.match(tokens(13)).pages == 3, "on the device it is a cached prefix as before"
    assert (ledger.tree.evictable_full, ledger.free_pages("host")) == (3, 37)


def test_cached_pages_go_first_and_no_more_nodes_than_needed() -> None:
    """Who was retracted last gives first, from the end of its path, whole nodes."""
    ledger = tiered(host=40, full=12)
    cached = publish(ledger, tokens(9, 300))
    ledger.release(cached.row)
    early = retracted(ledger, tokens(13, 100))
    late = publish(ledger, tokens(13), 4)
    ledger.publish(late.row, tokens(13))
    ledger.retract(late.row)
    assert [(n.start_page, n.num_pages) for n in ledger.tree.nodes() if n.kept] == [(0, 3), (0, 1), (1, 2)]
    assert (ledger.free_pages("full"), ledger.tree.evictable_full, ledger.tree.offloadable_full) == (4, 2, 6)
    row = prefill(ledger, tokens(24, 200)).row
    assert (ledger.free_pages("full"), ledger.tree.evictable_full, offloaded(ledger)) == (0, 0, [])
    ledger.extend(row, 25)
    ok(ledger)
    assert offloaded(ledger) == [(1, 3)] and ledger.free_pages("full") == 1
    ledger.extend(row, 33)
    assert offloaded(ledger) == [(0, 1), (1, 3)]
    ledger.extend(row, 37)
    assert offloaded(ledger) == [(0, 1), (0, 3), (1, 3)] and early.node.host is not None
    ok(ledger)


def shared_by_two(ledger: Ledger) -> tuple[Ticket, Ticket]:
    """Two retracted requests with two pages in common and one each of their own in the tree."""
    left, right = tokens(8) + tokens(5, 50), tokens(8) + tokens(5, 70)
    one = retracted(ledger, left)
    two = retracted(ledger, right)
    assert [(n.start_page, n.num_pages, n.kept) for n in ledger.tree.nodes()] == [(0, 2, 2), (2, 1, 1), (2, 1, 1)]
    return one, two


def test_what_several_retracted_requests_share_is_offloaded_once() -> None:
    ledger = tiered(host=40, full=8)
    one, two = shared_by_two(ledger)
    last = prefill(ledger, tokens(32, 200))
    ok(ledger)
    assert offloaded(ledger) == [(0, 2), (2, 3), (2, 3)]
    ledger.release(last.row)
    got = come_back(ledger, two, tokens(8) + tokens(5, 70))
    assert got.cached_tokens == 0 and offloaded(ledger) == [(2, 3)]
    again = come_back(ledger, one, tokens(8) + tokens(5, 50))
    assert again.cached_tokens == 8, "the other has brought what they share"
    assert pages(ledger, got.row)[:2] == pages(ledger, again.row)[:2] and not offloaded(ledger)
    for row in (got.row, again.row):
        ledger.release(row)
    ok(ledger, at_rest=True)


def test_what_a_row_holds_stays() -> None:
    ledger = tiered(host=40, full=9)
    shared_by_two(ledger)
    running = prefill(ledger, tokens(8) + tokens(1, 90))
    assert running.cached_tokens == 8 and ledger.tree.offloadable_full == 2
    ledger.extend(running.row, 32)
    assert offloaded(ledger) == [(2, 3)] and ledger.available("logical") == 1
    with pytest.raises(OutOfPages, match="full pool: 3 pages needed, 1 available"):
        ledger.extend(running.row, 41)
    ok(ledger)
    ledger.release(running.row)
    assert ledger.tree.offloadable_full == 3
    ok(ledger)


def test_an_offloaded_page_is_not_matched_and_who_computes_it_anew_puts_it_back() -> None:
    """Two of the three pages of an offloaded node: its host pages are freed, for the new ones say the same."""
    ledger = tiered(host=40, full=8)
    ticket = retracted(ledger, tokens(13))
    ledger.release(prefill(ledger, tokens(32, 200)).row)
    assert offloaded(ledger) == [(0, 3)] and ledger.match(tokens(13)).pages == 0
    assert ledger.free_pages("host") == 36
    other = publish(ledger, tokens(8) + tokens(2, 90))
    ok(ledger)
    assert other.cached_tokens == 0 and ledger.protected[other.row] == 8
    assert offloaded(ledger) == [(2, 3)] and ledger.match(tokens(13)).pages == 2
    assert ledger.free_pages("host") == 35, "three more, two less"
    got = come_back(ledger, ticket, tokens(13))
    assert got.cached_tokens == 8 and host_pages(ledger, got.row)[:2] == host_pages(ledger, other.row)[:2]
    assert pages(ledger, got.row)[:2] == pages(ledger, other.row)[:2]
    for row in (got.row, other.row):
        ledger.release(row)
    ok(ledger, at_rest=True)


def test_an_offloaded_page_goes_with_the_last_who_locks_it() -> None:
    ledger = tiered(host=40, full=8)
    one, two = shared_by_two(ledger)
    running = prefill(ledger, tokens(32, 200))
    assert ledger.free_pages("host") == 26
    ledger.drop_ticket(one)
    ok(ledger)
    assert offloaded(ledger) == [(0, 2), (2, 3)] and ledger.free_pages("host") == 28
    ledger.drop_ticket(two)
    ok(ledger)
    assert not ledger.tree.nodes() and ledger.free_pages("host") == 32
    ledger.release(running.row)
    ok(ledger, at_rest=True)
    assert not ledger.tree.roots


def test_offloading_frees_no_host_page() -> None:
    ledger = tiered(host=9, full=8)
    retracted(ledger, tokens(13))
    running = prefill(ledger, tokens(20, 200))
    assert (ledger.available("logical"), ledger.available("host"), ledger.available("full")) == (3, 0, 0)
    with pytest.raises(OutOfPages, match="host pool: 1 pages needed, 0 available"):
        ledger.extend(running.row, 21)
    assert not offloaded(ledger)


def test_cached_pages_go_where_host_pages_alone_are_short() -> None:
    ledger = tiered(host=8, full=16)
    ledger.release(publish(ledger, tokens(13)).row)
    assert (ledger.free_pages("full"), ledger.free_pages("host"), ledger.tree.evictable_full) == (13, 5, 3)
    prefill(ledger, tokens(28, 100))
    ok(ledger)
    assert (ledger.free_pages("host"), ledger.tree.evictable_full) == (0, 1)
    assert ledger.tiers is not None
    ledger.reset_cache()
    landing = ledger.preallocate(tokens(4, 300), 4, host=True)
    assert ledger.tiers.budget[landing.row] == 0


def test_what_a_return_takes() -> None:
    """Its own pages and those of its path that no row holds, offloaded or not: the path counts as available."""
    ledger = tiered(host=40, full=9)
    one, two = shared_by_two(ledger)
    assert ledger.tiers is not None
    assert [ledger.tiers.pages_to_resume(ticket) for ticket in (one, two)] == [4, 4]
    assert ledger.tiers.host_pages_of(one).tolist() == [0, 1, 2, 3]
    running = prefill(ledger, tokens(24, 200))
    assert offloaded(ledger) == [(2, 3)] and ledger.available("logical") == 3
    assert [ledger.tiers.pages_to_resume(ticket) for ticket in (one, two)] == [4, 4]
    assert ledger.tiers.host_pages_of(two).tolist() == [0, 1, 4, 5]
    for ticket, last in ((one, 50), (two, 70)):
        with pytest.raises(OutOfPages, match="full pool"):
            ledger.preallocate(tokens(8) + tokens(5, last), 13, host=True, ticket=ticket)
        ok(ledger)
    ledger.release(running.row)
    come_back(ledger, two, tokens(8) + tokens(5, 70))
    assert ledger.tiers.pages_to_resume(one) == 2


# --- sliding windows ---------------------------------------------------------------------------------------------


def test_shared_window_pages_of_a_retracted_request_may_go_and_are_healed() -> None:
    """Retracted with 21 tokens: it will read from token 12 on, columns 3 and 4 shared, 5 its own. Column 3 has gone."""
    ledger = windowed(full=20, swa=8)
    got = publish(ledger, tokens(21))
    ledger.evict([got.row])
    ticket = ledger.retract(got.row)
    assert (ledger.tree.evictable_swa, ledger.available("swa")) == (5, 8)
    before = ticket.node.swa.tolist()
    assert min(before) >= 0
    other = prefill(ledger, tokens(28, 100))
    ok(ledger)
    assert (ticket.node.swa < 0).tolist() == [True] * 4 + [False]
    ledger.release(other.row)
    again = come_back(ledger, ticket, tokens(21))
    assert (again.tail_start_tokens, again.healed_columns, again.cached_tokens) == (12, (3,), 20)
    assert ticket.node.swa[4] == before[4] and pages(ledger, again.row, "swa")[:2] == ticket.node.swa[3:].tolist()
    assert ledger.swa_pool is not None and ledger.swa_pool.by_name()["cached"] == 2
    ledger.release(again.row)
    ok(ledger, at_rest=True)


def test_a_return_that_lacks_window_pages_changes_nothing() -> None:
    ledger = windowed(full=20, swa=7)
    got = publish(ledger, tokens(21))
    ledger.evict([got.row])
    ticket = ledger.retract(got.row)
    running = prefill(ledger, tokens(20, 100))
    assert (ticket.node.swa < 0).tolist() == [True] * 3 + [False] * 2
    ledger.extend(running.row, 28)
    before = ledger.report()
    with pytest.raises(OutOfPages, match="swa pool: 3 pages needed, 0 available"):
        ledger.preallocate(tokens(21), 21, host=True, ticket=ticket)
    assert ledger.report() == before and ticket.open
    ok(ledger)


def test_an_offloaded_node_keeps_its_window_pages() -> None:
    ledger = windowed(full=7, swa=16)
    got = publish(ledger, tokens(13))
    ticket = ledger.retract(got.row)
    ledger.release(prefill(ledger, tokens(28, 100)).row)
    assert offloaded(ledger) == [(0, 3)] and (ticket.node.swa >= 0).all()
    again = come_back(ledger, ticket, tokens(13))
    assert (again.cached_tokens, again.healed_columns) == (0, ())
    assert len(pages(ledger, again.row, "swa")) == 3
    ledger.drop_ticket(ledger.retract(again.row))
    ok(ledger, at_rest=True)


def test_window_pages_go_with_an_offloaded_node() -> None:
    ledger = windowed(full=7, swa=16)
    ticket = retracted(ledger, tokens(13))
    assert ticket.node.swa.tolist() == [0, 1, 2]
    ledger.release(prefill(ledger, tokens(28, 100)).row)
    assert (offloaded(ledger), ledger.free_pages("swa")) == ([(0, 3)], 13)
    ledger.drop_ticket(ticket)
    ok(ledger, at_rest=True)
    assert (ledger.free_pages("swa"), ledger.tree.evictable_swa) == (16, 0)


# --- traces ------------------------------------------------------------------------------------------------------


def test_a_replay_offloads_where_the_recorded_books_did(tmp_path: Path) -> None:
    """No call of its own: it follows from the others, on other sizes too."""
    with TraceWriter(tmp_path / "trace") as writer:
        ledger = Ledger(tiered(host=40, full=8).config, trace=writer)
        one = retracted(ledger, tokens(13))
        running = prefill(ledger, tokens(32, 200))
        ledger.release(running.row)
        come_back(ledger, one, tokens(13))
    got = replay(tmp_path / "trace")
    assert (got["violations"], got["preemptions"], got["waiting_at_end"]) == (0, 0, 0)
    assert got["tiers"]["offloaded_pages"] == got["tiers"]["loaded_back_pages"] == 3
    assert got["peak_pages"]["full"] == 8
    other = replay(tmp_path / "trace", num_pages=12)
    assert (other["tiers"]["offloaded_pages"], other["peak_pages"]["full"]) == (0, 11)
    assert replay(tmp_path / "trace", page_size=2)["violations"] == 0


# --- planted violations -------------------------------------------------------------------------------------------


def busy() -> tuple[Ledger, Node, Node]:
    """Books with an offloaded node of two pages, one of one page below it, and a row: and those nodes."""
    ledger = tiered(host=40, full=8)
    shared_by_two(ledger)
    prefill(ledger, tokens(32, 200))
    ok(ledger)
    upper = next(n for n in ledger.tree.nodes() if n.start_page == 0)
    return ledger, upper, next(iter(upper.children.values()))


def on_the_device(ledger: Ledger, upper: Node, lower: Node) -> None:
    ledger.release(0)
    lower.full, lower.host = ledger.tiers.pool.take_for(lower.host, 1, 1), None


def nobodys(_: Ledger, __: Node, lower: Node) -> None:
    lower.kept = lower.locks = 0


PLANTED: dict[str, tuple[int, str, Callable[[Ledger, Node, Node], object]]] = {
    "a row's": (6, "a node is offloaded that may not be", lambda x, u, v: setattr(u, "kept", 1)),
    "nobody's": (6, "a node is offloaded that may not be", nobodys),
    "fewer host pages": (6, "a node is offloaded that may not be", lambda x, u, v: setattr(u, "host", u.host[:1])),
    "on the device too": (6, "a node is offloaded that may not be", lambda x, u, v: u.full.put(0, 0)),
    "host page without owner": (6, "has not exactly one owner", lambda x, u, v: setattr(u, "host", u.host[:1])),
    "host page held": (6, "an offloaded page is not cached", lambda x, u, v: x.tiers.pool.host.move(u.host[1:], 1, 2)),
    "below it": (6, "a page below an offloaded one is not offloaded", on_the_device),
    "miscounted": (5, "offloadable pages are miscounted", lambda x, u, v: setattr(x.tree, "offloadable_full", 1)),
    "locks": (12, "lock count of retracted requests", lambda x, u, v: setattr(v, "kept", 2)),
    "promise": (5, "more host pages are promised than there are", lambda x, u, v: x.tiers.budget.fill(90)),
}  # fmt: skip


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_seen(name: str) -> None:
    law, words, plant = PLANTED[name]
    ledger, upper, lower = busy()
    plant(ledger, upper, lower)
    assert [v for v in balance.check(ledger) if v.law == law and words in str(v)]


def test_promises_are_checked_to_the_page() -> None:
    """26 host pages are free, and the row of eight pages is promised so many more; aside pages will be."""
    ledger, *_ = busy()
    assert ledger.tiers is not None and ledger.available("host") == 26
    ledger.tiers.budget[0] = 34
    ok(ledger)
    ledger.tiers.budget[0] = 35
    assert [str(v) for v in balance.check(ledger)] == [
        "law 5: more host pages are promised than there are (promised=27, available=26)"
    ]
    ledger.tiers.budget[0] = 36
    with pytest.raises(OutOfPages, match="host pool: 1 pages needed, 0 available"):
        ledger.admit(tokens(4), budget_pages=1)
    ledger.tiers.budget[0] = 35
    op = ledger.begin_op([0])
    ledger.inflight.set_aside(0, full=np.array([3], np.int32))
    assert not [v for v in balance.check(ledger) if "promised" in str(v)]
    assert op


# --- pair keys ---------------------------------------------------------------------------------------------------


def test_pair_keys_split_an_offloaded_node() -> None:
    sizes = TierConfig(40, 12, device_pages=4, topk_pages=1, recent_tokens=4)
    ledger = Ledger(
        LedgerConfig(page_size=4, full_pages=8, max_rows=4, context_tokens=48, largest_reserve_tokens=4, tiers=sizes,
                     key_mode="pair")
    )  # fmt: skip
    ticket = retracted(ledger, tokens(14))
    ledger.release(prefill(ledger, tokens(32, 200)).row)
    other = publish(ledger, tokens(9) + tokens(2, 90))
    assert ledger.protected[other.row] == 8 and offloaded(ledger) == [(2, 3)]
    ok(ledger)
    got = come_back(ledger, ticket, tokens(14))
    assert got.cached_tokens == 8
    assert commit(ledger, got, 14)
