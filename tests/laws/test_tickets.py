"""Rows in the host tier: promises, backups, retraction into a ticket and the way back, what device copies hear."""

from __future__ import annotations

import numpy as np
import pytest

from octavo.errors import LawViolation, OutOfPages
from octavo.kv import balance
from octavo.kv.ledger import Ledger, LedgerConfig
from octavo.kv.tiered_pool import TieredPool
from octavo.kv.tiers import TierConfig
from tests.laws.helpers import back_up, commit, prefill, tiered, tokens


def windowed(full: int, swa: int, host: int = 30) -> Ledger:
    """A window of two pages of four tokens, in tiers."""
    sizes = TierConfig(host_pages=host, device_slots=8, device_pages=4, topk_pages=1, recent_tokens=4)
    return Ledger(
        LedgerConfig(page_size=4, full_pages=full, swa_pages=swa, window_tokens=8, max_rows=3, context_tokens=48,
                     largest_reserve_tokens=4, tiers=sizes)
    )  # fmt: skip


def test_available_counts_each_budget_by_itself() -> None:
    ledger = tiered(host=12, full=16, slots=12)
    got = prefill(ledger, tokens(9))
    back_up(ledger, got.row)
    ledger.release(got.row, tokens(9))
    prefill(ledger, tokens(14, 50))
    assert ledger.tree.evictable_full == 2
    budgets = ("full", "logical", "host", "slots")
    assert [ledger.available(name) for name in budgets] == [8, 12, 8, 8]
    assert [ledger.free_pages(name) for name in ("full", "host", "slots")] == [10, 6, 8]
    for name in ("swa", "nobody"):
        with pytest.raises(ValueError, match=f"no pool '{name}'"):
            ledger.available(name)


def test_a_request_without_a_promise_lives_on_what_nobody_was_promised() -> None:
    """Of 12 host pages 8 are promised: it is let in, grows to 4 pages and no further, in a plan or by a chunk."""
    ledger = tiered(host=12, full=16)
    first = ledger.admit(tokens(4), budget_pages=8)
    second = ledger.admit(tokens(28, 100))
    with pytest.raises(OutOfPages) as short:
        ledger.extend(second.row, 17)
    assert (short.value.pool, short.value.needed_pages, short.value.available_pages) == ("host", 5, 4)
    ledger.extend(second.row, 16)
    commit(ledger, second, 16)
    for rows in ([second.row], [first.row, second.row]):
        with pytest.raises(OutOfPages, match="host pool: 1 pages needed, 0 available"):
            ledger.plan_decode(rows, 1)
    assert not balance.check(ledger) and ledger.allocated[first.row] == 0
    for budget in (0, 1):
        with pytest.raises(OutOfPages, match="host pool: 1 pages needed, 0 available"):
            ledger.preallocate(tokens(4, 200), 4, host=True, budget_pages=budget)
    with pytest.raises(OutOfPages, match="host pool: 1 pages needed, 0 available"):
        ledger.admit(tokens(4, 200), budget_pages=1)
    third = ledger.admit(tokens(4, 200))
    assert ledger.tiers is not None and ledger.tiers.budget[third.row] == 0
    ledger.extend(first.row, 32)
    with pytest.raises(OutOfPages, match="host pool: 1 pages needed, 0 available"):
        ledger.extend(first.row, 33)
    assert not balance.check(ledger)


def test_who_shares_a_cached_prefix_takes_it_from_what_nobody_was_promised() -> None:
    """Three cached pages: of 12 host pages 9 may be promised beside them, not 10. What a row holds already is free."""
    ledger = tiered(host=12, full=16, slots=16)
    cached = prefill(ledger, tokens(13))
    back_up(ledger, cached.row)
    ledger.release(cached.row, tokens(13))
    promised = ledger.admit(tokens(4, 100), budget_pages=10)
    for call in (
        lambda: ledger.admit(tokens(14)), lambda: ledger.preallocate(tokens(13), 12, host=True),
    ):  # fmt: skip
        with pytest.raises(OutOfPages, match="host pool: 3 pages needed, 2 available"):
            call()
    assert ledger.admit(tokens(12)).cached_tokens == 8 and not balance.check(ledger)
    ledger.release(promised.row)
    ledger.admit(tokens(4, 100), budget_pages=9)
    ledger.release(ledger.admit(tokens(14)).row)  # one more of its pages is locked now
    assert ledger.admit(tokens(14)).cached_tokens == 12 and not balance.check(ledger)


def test_a_promise_ends_with_its_request() -> None:
    """Released while a step reads it; retracted and dropped: the whole tier may be promised again."""
    ledger = tiered(host=12, full=16)
    first = ledger.admit(tokens(4), budget_pages=8)
    op = ledger.begin_op([first.row])
    ledger.release(first.row)
    second = ledger.admit(tokens(4), budget_pages=12)
    ledger.end_op(op)
    ledger.drop_ticket(ledger.retract(second.row))
    assert ledger.admit(tokens(4), budget_pages=12)


def test_a_ticket_keeps_what_is_left_of_its_promise() -> None:
    ledger = tiered(host=12, full=16)
    plain = prefill(ledger, tokens(9, 100))
    ledger.retract(plain.row)  # nothing was promised: it holds 3 pages and wants none
    got = ledger.admit(tokens(13), budget_pages=8)
    ledger.extend(got.row, 13)
    commit(ledger, got, 13)
    back_up(ledger, got.row)
    assert ledger.publish(got.row, tokens(13)) == 12
    ticket = ledger.retract(got.row)  # 3 pages shared, 1 its own: 4 to come
    assert len(ticket.host) == 1 and ledger.available("host") == 5
    with pytest.raises(OutOfPages, match="host pool: 2 pages needed, 1 available"):
        ledger.admit(tokens(4, 200), budget_pages=2)
    assert ledger.admit(tokens(4, 200), budget_pages=1)


def test_without_a_host_tier_there_is_nothing_to_retract() -> None:
    ledger = Ledger(LedgerConfig(page_size=4, full_pages=8, context_tokens=16, largest_reserve_tokens=4))
    other = tiered()
    got, ticket = prefill(ledger, tokens(5)), other.retract(prefill(other, tokens(5)).row)
    assert ledger.begin_backup([got.row]) is None
    with pytest.raises(LawViolation, match="law 14: no such backup"):
        ledger.end_backup(1)
    for call in (lambda: ledger.retract(got.row), lambda: ledger.drop_ticket(ticket), lambda: ledger.unbacked(got.row)):
        with pytest.raises(ValueError, match="no host tier"):
            call()


def test_a_backup_names_what_no_backup_has_named() -> None:
    ledger = tiered()
    got = prefill(ledger, tokens(9))
    assert ledger.unbacked(got.row) == (0, 3)
    backup = ledger.begin_backup([got.row])
    assert backup is not None and ledger.begin_backup([got.row]) is None
    ledger.end_backup(backup.op)
    assert ledger.unbacked(got.row) == (2, 3) and ledger.begin_backup([got.row]) is None
    ledger.extend(got.row, 14)
    commit(ledger, got, 14)
    again = ledger.begin_backup([got.row])
    assert again is not None and again.columns.tolist() == [2]
    assert ledger.report()["tiers"]["backups_waiting"] == 1


def test_all_of_a_row_may_be_shared_when_it_is_retracted() -> None:
    ledger = tiered()
    got = prefill(ledger, tokens(8))
    back_up(ledger, got.row)
    assert ledger.publish(got.row, tokens(8)) == 8
    ticket = ledger.retract(got.row)
    assert len(ticket.host) == 0 and ledger.path_end(got.row) is None
    for used, fill in ((ticket, 9), (ticket, 7)):
        with pytest.raises(ValueError, match=f"fill_tokens {fill}: this ticket holds 8 tokens, open=True"):
            ledger.preallocate(tokens(9), fill, host=True, ticket=used)
    again = ledger.preallocate(tokens(9), 8, host=True, ticket=ticket)
    assert ledger.land(again.row, again.generation) and not balance.check(ledger)
    with pytest.raises(ValueError, match="open=False"):
        ledger.preallocate(tokens(9), 8, host=True, ticket=ticket)


def test_books_that_are_wrong_are_not_retracted() -> None:
    ledger = tiered()
    got = prefill(ledger, tokens(9))
    ledger._protected[got.row] = 16
    with pytest.raises(LawViolation, match="law 2 row 0: retract: committed lies below protected .kept=3, protected=4"):
        ledger.retract(got.row)


def test_what_a_dense_pass_wrote_is_remembered() -> None:
    """By transfer, over a retraction and in a shared prefix: all of it may be published, though longer than the
    limit of dense queries."""
    ledger = tiered(host=32, full=32)
    got = ledger.preallocate(tokens(18), 18, host=True)
    assert ledger.land(got.row, got.generation)
    again = ledger.preallocate(tokens(18), 18, host=True, ticket=ledger.retract(got.row))
    assert ledger.land(again.row, again.generation)
    assert ledger.publish(again.row, tokens(18)) == 16
    ledger.release(again.row)
    shared = ledger.admit(tokens(19))
    assert ledger.tiers is not None and ledger.tiers.prefilled[shared.row] == 16


def test_a_full_host_tier_takes_its_tickets_back() -> None:
    """A resumed request brings its host pages; it wants logical pages and, where layers slide, window pages."""
    ledger = tiered(host=3, full=8)
    got = prefill(ledger, tokens(9))
    ticket = ledger.retract(got.row)
    assert ledger.available("host") == 0
    again = ledger.preallocate(tokens(9), 9, host=True, ticket=ticket)
    assert ledger.land(again.row, again.generation) and not balance.check(ledger)


def test_a_resumed_request_evicts_as_many_cached_pages_as_it_lacks() -> None:
    ledger = tiered(host=8, full=4)
    ticket = ledger.retract(prefill(ledger, tokens(9)).row)
    other = prefill(ledger, tokens(8, 50))
    back_up(ledger, other.row)
    ledger.release(other.row, tokens(8, 50))
    assert (ledger.full_pool.free, ledger.tree.evictable_full, ledger.available("logical")) == (2, 2, 4)
    ledger.preallocate(tokens(9), 9, host=True, ticket=ticket)
    assert (ledger.full_pool.free, ledger.tree.evictable_full) == (0, 1)
    assert not balance.check(ledger)


def test_a_ticket_waits_for_window_pages() -> None:
    ledger = windowed(full=20, swa=6, host=20)
    ticket = ledger.retract(prefill(ledger, tokens(9)).row)
    other = prefill(ledger, tokens(20, 50))
    before = ledger.report()
    with pytest.raises(OutOfPages, match="swa pool: 3 pages needed, 1 available"):
        ledger.preallocate(tokens(9), 9, host=True, ticket=ticket)
    assert ledger.report() == before and ticket.open
    ledger.release(other.row)
    again = ledger.preallocate(tokens(9), 9, host=True, ticket=ticket)
    assert ledger.land(again.row, again.generation) and not balance.check(ledger)


def test_a_ticket_comes_back_to_its_path() -> None:
    ledger = windowed(full=20, swa=16, host=20)
    got = prefill(ledger, tokens(22))
    back_up(ledger, got.row)
    assert ledger.publish(got.row, tokens(22)) == 20
    ledger.evict([got.row])
    ticket = ledger.retract(got.row)
    assert not balance.check(ledger)
    assert (ledger.tree.evictable_full, ledger.tree.evictable_swa) == (0, 5)
    assert (ledger.available("slots"), ledger.available("swa")) == (8, 16)
    with pytest.raises(LawViolation, match=f"law 2 row {got.row}: plan_decode of a row that is free"):
        ledger.plan_decode([got.row], 1)
    again = ledger.preallocate(tokens(23), 22, host=True, ticket=ticket)
    assert (again.row, again.generation) == (got.row, got.generation + 1)
    assert (again.cached_tokens, again.tail_start_tokens, again.healed_columns) == (20, 12, ())
    assert ledger.tree.evictable_swa == 3
    assert ledger.land(again.row, again.generation) and not balance.check(ledger)
    ledger.drop_ticket(ledger.retract(again.row))
    assert (ledger.tree.evictable_full, ledger.tree.evictable_swa) == (5, 5)
    assert not balance.check(ledger, at_rest=True)


def test_a_row_in_flight_is_not_retracted() -> None:
    ledger = tiered()
    got = prefill(ledger, tokens(9))
    op = ledger.begin_op([got.row])
    with pytest.raises(LawViolation, match="law 14"):
        ledger.retract(got.row)
    ledger.end_op(op)
    ticket = ledger.retract(got.row)
    with pytest.raises(LawViolation, match="law 6: a ticket is used twice"):
        ledger.drop_ticket(ticket)
        ledger.drop_ticket(ticket)


def test_device_copies_hear_of_every_change() -> None:
    """A row starts anew when it opens and when it closes; a backup moves its frontier only."""
    ledger = tiered()
    books = ledger.tiers
    assert books is not None

    def news() -> tuple[list[int], list[int]]:
        renewed, dirty = books.take_row_updates()
        return renewed.tolist(), dirty.tolist()

    got = prefill(ledger, tokens(9))
    assert news() == ([got.row], [got.row])
    assert news() == ([], [])
    back_up(ledger, got.row)
    assert news() == ([], [got.row])
    ledger.release(got.row)
    assert news() == ([got.row], [got.row])
    landing = ledger.preallocate(tokens(9), 9, host=True)
    assert news() == ([], [landing.row])
    ledger.land(landing.row, landing.generation)
    assert news() == ([landing.row], [landing.row])
    assert books.backed[landing.row] == 2


def test_the_report_counts_what_waits() -> None:
    ledger = tiered()
    first, second = prefill(ledger, tokens(9)), prefill(ledger, tokens(5, 50))
    backup = ledger.begin_backup([first.row, second.row])
    assert backup is not None and backup.columns.tolist() == [0, 1, 0]
    shown = ledger.report()["tiers"]
    assert (shown["backups_waiting"], shown["backed_up_pages"], shown["tickets"]) == (3, 0, 0)
    ledger.end_backup(backup.op)
    ledger.drop_ticket(ledger.retract(first.row))
    ledger.retract(second.row)
    shown = ledger.report()["tiers"]
    assert (shown["backups_waiting"], shown["backed_up_pages"], shown["tickets"], shown["ticket_pages"]) == (0, 3, 1, 2)
    assert (shown["retracted"], shown["resumed"], shown["dropped_tickets"]) == (2, 0, 1)
    sizes = [shown[name] for name in ("device_pages", "topk_pages", "recent_tokens", "dense_limit_tokens")]
    assert sizes == [4, 1, 4, 12]
    with pytest.raises(LawViolation, match="law 14: no such backup"):
        ledger.end_backup(backup.op)


def test_a_tiered_pool_does_both_or_neither() -> None:
    pool = TieredPool(8, 4)
    with pytest.raises(OutOfPages, match="host pool: 5 pages needed, 4 available"):
        pool.take(5)
    assert (pool.free, pool.host.free) == (8, 4)
    three = pool.take(3, 1)
    assert pool.host_pages_of(np.array([2, -1, 0])).tolist() == [2, -1, 0]
    for wrong in (lambda: pool.part(three, 2), lambda: pool.give_back(three, 2), lambda: pool.move(three, 2, 3)):
        with pytest.raises(LawViolation, match="law 6: full page 0 is cached, expected held"):
            wrong()
    assert pool.host_of[:3].tolist() == [0, 1, 2] and pool.counts == [5, 3, 0, 0, 0]
    both = TieredPool(2, 2)
    both.take(2)
    assert both.host_pages_of(np.array([1, -1])).tolist() == [1, -1]
    pool.give_back(three, 1)
    with pytest.raises(LawViolation, match="law 6: full page 0 is free already"):
        pool.give_back(three, 1)
    assert (pool.free, pool.host.free) == (8, 4)


def test_a_ticket_takes_exactly_what_it_lacks() -> None:
    """Of 7 pages two are in the tree: five full ones and, for the tail from token 20, two sliding ones will do."""
    ledger = windowed(full=7, swa=7)
    got = prefill(ledger, tokens(28))
    back_up(ledger, got.row)
    assert ledger.publish(got.row, tokens(8)) == 8
    ticket = ledger.retract(got.row)
    assert (ledger.available("logical"), ledger.free_pages("full"), ledger.free_pages("swa")) == (7, 5, 5)
    again = ledger.preallocate(tokens(28), 28, host=True, ticket=ticket)
    assert (ledger.available("logical"), ledger.free_pages("swa")) == (0, 3)
    assert ledger.land(again.row, again.generation) and not balance.check(ledger)


def test_slots_of_a_ticket_are_taken_before_it_lands_and_its_landing_is_heard_of() -> None:
    ledger = tiered()
    ticket = ledger.retract(prefill(ledger, tokens(9)).row)
    assert ledger.tiers is not None and ledger.available("slots") == 12
    again = ledger.preallocate(tokens(9), 9, host=True, ticket=ticket)
    assert ledger.available("slots") == 8
    ledger.tiers.take_row_updates()
    assert ledger.land(again.row, again.generation) and ledger.available("slots") == 8
    renewed, dirty = ledger.tiers.take_row_updates()
    assert (renewed.tolist(), dirty.tolist()) == ([], [again.row])
    assert ledger.tiers.backed[again.row] == 2


def test_backups_are_counted_page_by_page_and_a_refused_one_is_named_again() -> None:
    ledger = tiered()
    got = prefill(ledger, tokens(9))
    back_up(ledger, got.row)
    ledger.extend(got.row, 20)
    commit(ledger, got, 20)
    refused = ledger.begin_backup([got.row])
    assert refused is not None and refused.columns.tolist() == [2, 3, 4]
    ledger.end_backup(refused.op, written=False)
    assert ledger.unbacked(got.row) == (2, 5) and ledger.report()["tiers"]["backed_up_pages"] == 2
    again = ledger.begin_backup([got.row])
    assert again is not None and again.columns.tolist() == [2, 3, 4]
    ledger.end_backup(again.op)
    assert ledger.unbacked(got.row) == (5, 5) and ledger.report()["tiers"]["backed_up_pages"] == 5
    assert not balance.check(ledger)


def test_only_active_rows_are_retracted() -> None:
    ledger = tiered()
    coming = ledger.preallocate(tokens(9), 9, host=True)
    for row, state in ((coming.row, "in transfer"), (3, "free")):
        with pytest.raises(LawViolation, match=f"law 2 row {row}: retract of a row that is {state}"):
            ledger.retract(row)
    assert not balance.check(ledger)


def test_who_holds_more_than_was_promised_gives_nobody_room() -> None:
    ledger = tiered(host=12, full=16)
    prefill(ledger, tokens(9))  # three pages, none promised
    with pytest.raises(OutOfPages, match="host pool: 10 pages needed, 9 available"):
        ledger.admit(tokens(4, 100), budget_pages=10)
    assert ledger.admit(tokens(4, 100), budget_pages=9).row == 1


def test_slots_are_no_cache() -> None:
    ledger = tiered()
    prefill(ledger, tokens(9))
    pools = ledger.report()["pools"]
    assert {name: pool["evictable"] for name, pool in pools.items()} == {"full": 0, "host": 0, "slots": 0}
