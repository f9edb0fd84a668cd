"""Books of the tiers: a long simulation beside a slow model, rules of position, planted violations."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ConfigError, NeverFits, OutOfPages
from octavo.kv import balance, tiers
from octavo.kv.ledger import Ledger, LedgerConfig
from octavo.kv.tiers import TierConfig
from tests.laws.helpers import back_up, commit, golden, prefill, tiered, tokens
from tests.laws.tier_simulation import TierSimulation

EVENTS = (
    "prefix hit", "retracted", "retracted with shared pages", "resumed", "ticket dropped", "landed",
    "backup drained", "backup refused", "abort in flight", "abort during a backup", "published below a sparse part",
    "admit: out of slots", "admit: out of host", "grow: out of host", "grow: out of full", "resume: out of full",
    "resume: out of slots", "land: out of slots", "preallocate: out of host", "offloaded", "offloaded from several",
    "loaded back", "put back", "offloaded pages dropped", "window healed",
)  # fmt: skip


def test_driven() -> None:
    """Every rule and every named event happens; all laws and the slow model agree after each move."""
    seen: Counter[str] = Counter()
    for seed in range(11):
        host, full, slots = [(14, 60, 36), (60, 14, 36), (40, 40, 12), (40, 30, 24)][seed % 4]
        simulation = TierSimulation(seed, page_size=(4, 8)[seed // 4 % 2], host=host, full=full, slots=slots)
        simulation.run(300)
        seen += simulation.events
    for seed, full in ((34, 18), (43, 18), (54, 14)):
        simulation = TierSimulation(seed, host=120, full=full, slots=36, pressed=True)
        simulation.run(400)
        seen += simulation.events
    wanted = [*(f"rule {name}" for name, _ in TierSimulation.MOVES), *EVENTS]
    assert not [name for name in wanted if not seen[name]], seen


@settings(max_examples=25)
@given(
    seed=st.integers(1000, 1 << 30), host=st.integers(22, 60), full=st.integers(22, 60), slots=st.integers(6, 36),
    pressed=st.booleans(),
)  # fmt: skip
def test_any_sizes(seed: int, host: int, full: int, slots: int, pressed: bool) -> None:
    TierSimulation(seed, host=host, full=full, slots=slots, pressed=pressed).run(60)


@pytest.mark.parametrize("seed", [2, 4, 6])
def test_promises_hold_where_not_everybody_has_one(seed: int) -> None:
    """Fourteen host pages: whoever was promised none finds the tier full before a promise is broken."""
    simulation = TierSimulation(seed, page_size=4, host=14, full=60, slots=36)
    simulation.run(300)
    assert simulation.events["grow: out of host"] or simulation.events["admit: out of host"]


# --- rules of position -------------------------------------------------------------------------------------------


def test_sizes_by_hand() -> None:
    """Pages of 4 tokens, 4 recent tokens."""
    assert [tiers.dense_limit_tokens(pages, 4, 4) for pages in (1, 2, 4)] == [0, 4, 12]
    assert tiers.dense_limit_tokens(1, 4, 10) == 0
    assert [tiers.always_pages(4, rows, 4) for rows in (1, 2, 5, 6)] == [3, 4, 4, 5]
    assert tiers.least_device_pages(2, 4, 4) == 5 and tiers.least_device_pages(2, 4, 4, 2) == 8
    assert [tiers.max_verify_rows(device, 2, 4, 4) for device in (1, 4, 5, 7, 8, 10)] == [0, 0, 1, 1, 2, 3]
    assert [tiers.max_chunk_tokens(device, 4, 4, overlap=False) for device in (1, 2, 3, 8)] == [0, 0, 4, 24]
    assert [tiers.max_chunk_tokens(device, 5, 4, overlap=True) for device in (2, 3, 4, 8)] == [0, 0, 2, 10]


@given(
    device=st.integers(1, 200), topk=st.integers(1, 40), recent=st.integers(1, 100), p=st.sampled_from([1, 4, 16, 32]),
    start=st.integers(0, 5000),
)  # fmt: skip
def test_the_union_of_verify_rows_fits(device: int, topk: int, recent: int, p: int, start: int) -> None:
    """Counted pages of m rows at start … start+m-1, each choosing others: never more than the buffer."""
    rows = tiers.max_verify_rows(device, topk, recent, p)
    assert tiers.least_device_pages(topk, recent, p, rows + 1) > device
    if rows:
        first = max(0, start - recent + 1)
        always = {0, *(q // p for q in range(first, start + rows))}
        assert rows * topk + len(always) <= device


@given(device=st.integers(1, 100), recent=st.integers(1, 200), p=st.sampled_from([1, 4, 16]), q=st.integers(0, 2000))
def test_a_dense_query_fits_the_buffer_with_its_step(device: int, recent: int, p: int, q: int) -> None:
    if q + 1 <= tiers.dense_limit_tokens(device, p, recent):
        assert (q + recent) // p < device


@given(
    device=st.integers(1, 100), recent=st.integers(1, 100), p=st.sampled_from([1, 4, 16]), overlap=st.booleans(),
    start=st.integers(0, 500),
)  # fmt: skip
def test_chunks_in_flight_fit_the_buffer(device: int, recent: int, p: int, overlap: bool, start: int) -> None:
    chunk = tiers.max_chunk_tokens(device, recent, p, overlap=overlap)
    if chunk:
        end = start + chunk * (2 if overlap else 1)
        assert (end - 1) // p - start // p + 1 <= device


@pytest.mark.parametrize("name", ["host_pages", "device_slots", "device_pages", "topk_pages", "recent_tokens"])
def test_sizes_of_one_will_do(name: str) -> None:
    assert getattr(TierConfig(1, 1, 1, 1, 1), name) == 1


@pytest.mark.parametrize("name", ["host_pages", "device_slots", "device_pages", "topk_pages", "recent_tokens"])
def test_a_size_that_cannot_be_names_itself(name: str) -> None:
    good = {"host_pages": 8, "device_slots": 8, "device_pages": 4, "topk_pages": 1, "recent_tokens": 4}
    with pytest.raises(ConfigError, match=name):
        TierConfig(**{**good, name: 0})


def test_slots_for_one_row_at_least() -> None:
    with pytest.raises(ConfigError, match="device_slots"):
        TierConfig(host_pages=8, device_slots=3, device_pages=4, topk_pages=1, recent_tokens=4)


# --- single cases -----------------------------------------------------------------------------------------------


def test_each_budget_names_itself() -> None:
    for sizes, pool in (({"slots": 4}, "slots"), ({"host": 8}, "host"), ({"full": 8}, "full")):
        ledger = tiered(**sizes)
        got = prefill(ledger, tokens(20))
        before = ledger.report()
        with pytest.raises(OutOfPages) as short:
            second = ledger.admit(tokens(20, 100))
            ledger.extend(second.row, 20)
        assert short.value.pool == pool
        if pool == "slots":
            assert ledger.report() == before
        assert not balance.check(ledger)
        ledger.release(got.row)


def test_a_request_larger_than_the_host_tier_is_refused_by_name() -> None:
    with pytest.raises(NeverFits, match="host pool"):
        tiered(host=6, full=16).can_ever_fit(20, 10, 4)
    ledger = tiered(host=9, full=16)
    ledger.can_ever_fit(20, 10, 4)
    lost = ledger.preallocate(tokens(4), 4, host=True)
    ledger.quarantine(lost.row, lost.generation)
    with pytest.raises(NeverFits, match="needs 9 pages of 4 tokens in the host pool, which has 8"):
        ledger.can_ever_fit(20, 10, 4)


def test_unbacked_pages_are_not_published() -> None:
    ledger = tiered()
    got = prefill(ledger, tokens(11), publish=True)
    assert ledger.protected[got.row] == 0
    back_up(ledger, got.row)
    assert ledger.publish(got.row, tokens(11)) == 8


def test_what_a_sparse_step_wrote_is_not_published() -> None:
    ledger = tiered()
    assert ledger.tiers is not None and ledger.tiers.dense_limit == 12
    for prompt, expected in ((4, 12), (18, 16)):  # decoded up to the limit; prefilled behind it
        got = prefill(ledger, tokens(prompt, 50 * prompt))
        ledger.plan_decode([got.row], 4)
        while int(ledger.committed[got.row]) < 30:
            commit(ledger, got, min(30, int(ledger.committed[got.row]) + 3))
            ledger.plan_decode([got.row], 4)
        back_up(ledger, got.row)
        assert ledger.publish(got.row, tokens(30, 50 * prompt)) == expected
        ledger.release(got.row)


def test_a_promise_holds_against_the_cache_and_tickets() -> None:
    """A promised request grows to its end although others fill the tier: nobody else was let in for its pages."""
    ledger = tiered(host=12, full=16)
    first = ledger.admit(tokens(4), budget_pages=8)
    with pytest.raises(OutOfPages, match="host"):
        ledger.admit(tokens(4, 100), budget_pages=5)
    second = ledger.admit(tokens(4, 100), budget_pages=4)
    ledger.extend(second.row, 4)
    commit(ledger, second, 4)
    ticket = ledger.retract(second.row)
    with pytest.raises(OutOfPages, match="host"):
        ledger.admit(tokens(4, 200), budget_pages=1)
    ledger.extend(first.row, 32)
    ledger.drop_ticket(ticket)
    assert ledger.admit(tokens(4, 200), budget_pages=4)


def test_the_floor_check_holds_on_the_host_path() -> None:
    """The same preallocation, the same arithmetic: window 200, page 256 (inputs injected, nothing mocked)."""
    for fill, start, pages in ((512, 256, 1), (513, 256, 2), (456, 256, 1), (455, 0, 2), (100, 0, 1)):
        sizes = TierConfig(8, 8, device_pages=4, topk_pages=1, recent_tokens=4)
        ledger = Ledger(
            LedgerConfig(page_size=256, full_pages=8, swa_pages=8, window_tokens=200, max_rows=2, context_tokens=1024,
                         largest_reserve_tokens=4, tiers=sizes)
        )  # fmt: skip
        got = ledger.preallocate(tokens(fill), fill, host=True)
        assert got.tail_start_tokens == start == int(ledger.evicted[got.row])
        assert int((ledger.swa_table[got.row] >= 0).sum()) == pages
        assert ledger.land(got.row, got.generation)
        assert not balance.check(ledger)


def test_kv_lands_in_the_host_tier_exactly_if_there_is_one() -> None:
    with pytest.raises(ValueError, match="host=False"):
        tiered().preallocate(tokens(5), 5)
    plain = Ledger(LedgerConfig(page_size=4, full_pages=8, context_tokens=16, largest_reserve_tokens=4))
    with pytest.raises(ValueError, match="host=True"):
        plain.preallocate(tokens(5), 5, host=True)


# --- planted violations -------------------------------------------------------------------------------------------


def busy() -> Ledger:
    ledger = tiered(host=20, full=20, slots=16)
    first = prefill(ledger, tokens(10))
    back_up(ledger, first.row)
    ledger.publish(first.row, tokens(10))
    prefill(ledger, tokens(7, 60))
    third = prefill(ledger, tokens(9, 90))
    ledger.retract(third.row)
    assert not balance.check(ledger)
    return ledger


def edit(name: str, index: object, value: int) -> Callable[[Ledger], None]:
    def plant(ledger: Ledger) -> None:
        target = ledger.tiers.pool if name in ("host_of", "state") else ledger.tiers
        array = getattr(target, name)
        array[index] = value

    return plant


def lose_slot(ledger: Ledger) -> None:
    ledger.tiers.row_slots[1, 2] = -1


def double_slot(ledger: Ledger) -> None:
    ledger.tiers.row_slots[1, 2] = ledger.tiers.row_slots[0, 2]


def two_owners(ledger: Ledger) -> None:
    pool = ledger.tiers.pool
    used = np.flatnonzero(pool.state != 0)
    pool.host_of[used[0]] = pool.host_of[used[1]]


def host_state(ledger: Ledger) -> None:
    pool = ledger.tiers.pool
    page = int(ledger.full_table[0, 0])
    host = pool.host_of[page : page + 1]
    pool.host.move(host, 1, 2)


def ticket_loses_a_page(ledger: Ledger) -> None:
    ticket = ledger.tiers.tickets[0]
    ticket.host = ticket.host[:-1]


def ticket_forgotten(ledger: Ledger) -> None:
    ledger.tiers.tickets.clear()


def host_miscounted(ledger: Ledger) -> None:
    ledger.tiers.pool.host.counts[0] -= 1


def slot_miscounted(ledger: Ledger) -> None:
    ledger.tiers.slots.counts[2] += 1


def bound_though_free(ledger: Ledger) -> None:
    pool = ledger.tiers.pool
    pool.host_of[np.flatnonzero(pool.state == 0)[0]] = int(np.flatnonzero(pool.host.state == 0)[0])


PLANTED: dict[str, tuple[int, Callable[[Ledger], None]]] = {
    "shared before it is backed up": (12, edit("backed", 0, 1)),
    "backed before a backup began": (14, edit("backing", 0, 1)),
    "backing over committed": (14, edit("backing", 0, 3)),
    "row without slots": (6, edit("row_slots", 0, -1)),
    "slot lost": (6, lose_slot),
    "first slot lost": (6, edit("row_slots", (0, 0), -1)),
    "slot owned twice": (6, double_slot),
    "slot that does not exist": (6, edit("row_slots", (0, 1), 16)),
    "slots of a free row": (6, edit("row_slots", (3, 0), 15)),
    "host page owned twice": (6, two_owners),
    "page without a host page": (6, edit("host_of", 0, -1)),
    "host page that does not exist": (6, edit("host_of", 0, 20)),
    "host page in another state": (6, host_state),
    "ticket loses a page": (6, ticket_loses_a_page),
    "ticket forgotten": (6, ticket_forgotten),
    "ticket's page is leased": (6, lambda x: x.tiers.pool.host.move(x.tiers.tickets[0].host[1:], 2, 3)),
    "ticket's path elsewhere": (12, lambda x: setattr(x.tiers.tickets[0], "node", x.tree.nodes()[0])),
    "host page miscounted": (5, host_miscounted),
    "slot miscounted": (5, slot_miscounted),
    "bound though free": (6, bound_though_free),
}


READ = golden("planted_tiers.txt")


@pytest.mark.parametrize("name", PLANTED)
def test_a_planted_violation_is_seen(name: str) -> None:
    law, plant = PLANTED[name]
    ledger = busy()
    plant(ledger)
    found = balance.check(ledger)
    assert law in {violation.law for violation in found}
    assert [str(violation) for violation in found] == READ[name]  # after a wanted change, look at every line


@pytest.mark.parametrize("fault", ["bound", "host", "slot", "state"])
def test_eight_of_a_kind_are_named(fault: str) -> None:
    """What is wrong everywhere fills no log."""
    ledger = tiered(host=40, full=40, slots=16)
    pool, slots = ledger.tiers.pool, ledger.tiers.slots
    if fault == "bound":
        pool.host_of[pool.free_list()[:9]] = pool.host.free_list()[:9]
    elif fault == "host":
        pool.host.take(9)
    elif fault == "slot":
        slots.take(9)
    else:
        got = prefill(ledger, tokens(36))
        pool.host.move(pool.host_of[ledger.full_table[got.row, :9]], 2, 3)
    assert len(balance.check(ledger)) == 8


def test_tickets_are_not_at_rest() -> None:
    ledger = busy()
    assert [str(violation) for violation in balance.check(ledger, at_rest=True)] == READ["at rest"]
    for row in ledger.live_rows().tolist():
        ledger.release(row)
    assert any("tickets" in str(violation) for violation in balance.check(ledger, at_rest=True))


def test_a_row_that_lost_all_but_slot_0_is_named() -> None:
    ledger = tiered()
    prefill(ledger, tokens(5))
    assert ledger.tiers is not None and ledger.tiers.row_slots[0, 0] == 0
    ledger.tiers.row_slots[0, 1:] = -1
    assert any("some of its slots" in str(violation) for violation in balance.check(ledger))
