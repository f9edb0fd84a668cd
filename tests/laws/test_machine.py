"""The proof by simulation: every law after every move, over page sizes, pools, overlap, reserves and failures.

`test_driven` walks 20,000 weighted random moves, `test_soak` a million (OCTAVO_SOAK); both fail if a rule or a named
event never happened. `LedgerMachine` lets hypothesis choose and shrink.
"""

from __future__ import annotations

import os
import random
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from tests.laws.law_setups import Setup, covering_setups
from tests.laws.simulation import Simulation

SOAK_MOVES = int(os.environ.get("OCTAVO_SOAK", "1000000"))
MOVES = int(os.environ.get("OCTAVO_LAW_MOVES", "20000"))
LAP_MOVES = 420

NAMED_EVENTS = (
    "retract in flight",
    "abort in flight",
    "remap of a duplicate",
    "late write on a lease",
    "down-switch",
    "eviction at the insert boundary",
    "first decode plan behind a prefill chunk in flight",
    "prefix hit",
    "heal",
    "tombstone",
    "match cut at a tombstone",
    "boundary without a live window",
    "cached page evicted",
    "sliding eviction",
    "stale commit",
    "late read of a row that ended",
    "landed",
    "landed after the end",
    "transfer failed, status final",
    "transfer failed, status unknown",
    "transfer failed, status never",
    "quarantine ended",
    "out of full pages",
    "out of swa pages",
    "out of rows",
    "cache reset",
    "at rest",
)


def drive(page_size: int, moves: int, seed: int) -> Counter[str]:
    """Weighted random moves over windows, overlap and key modes. Returns what happened, by name."""
    setups = [setup for setup in covering_setups(seed) if setup.page_size == page_size]
    seen: Counter[str] = Counter()
    for lap in range(-(-moves // LAP_MOVES)):  # fresh books now and then: a long run is many short ones
        setup = setups[lap % len(setups)]
        simulation = Simulation(replace(setup, seed=setup.seed + lap))
        simulation.run(min(LAP_MOVES, moves - lap * LAP_MOVES), random.Random(1_000_003 * setup.seed + lap))
        seen += simulation.events
    assert sum(count for name, count in seen.items() if name.startswith("rule ")) >= moves
    return seen


def missing(seen: Counter[str]) -> list[str]:
    return [name for name in (*(f"rule {name}" for name, _ in Simulation.MOVES), *NAMED_EVENTS) if not seen[name]]


@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_driven(page_size: int) -> None:
    """A quarter of the moves; every rule and event happens at every page size."""
    seen = drive(page_size, MOVES // 4, seed=0)
    assert MOVES < 20_000 or not missing(seen), seen


@pytest.mark.soak
@pytest.mark.timeout(14_400)
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_soak(page_size: int) -> None:
    """A million moves, with other seeds than the short run's."""
    assert not missing(drive(page_size, SOAK_MOVES // 4, seed=1_000_000))


setups = st.builds(
    lambda page_and_window, **options: Setup(*page_and_window, **options),
    st.sampled_from([(1, 0), (1, 5), (16, 0), (16, 16), (16, 40), (64, 50), (64, 130), (256, 0), (256, 200)]),
    overlap=st.booleans(),
    pair_keys=st.booleans(),
    spare_full_pages=st.sampled_from([0, 3, 12]),
    spare_swa_pages=st.integers(0, 4),
    max_rows=st.integers(2, 6),
    prefix_cache=st.sampled_from([True, True, True, False]),
    seed=st.integers(0, 1000),
)


class LedgerMachine(RuleBasedStateMachine):
    """Each rule is a move of the simulation; what it picks comes from a seed that hypothesis shrinks."""

    simulation: Simulation | None = None

    @initialize(setup=setups)
    def begin(self, setup: Setup) -> None:
        self.simulation = Simulation(setup)

    @invariant()
    def laws_hold(self) -> None:
        if self.simulation is not None:
            self.simulation.verify()

    def teardown(self) -> None:
        if self.simulation is not None:
            self.simulation.drain(random.Random(0))


def _rule(name: str):
    @rule(seed=st.integers(0, 2**16))
    def move(self: LedgerMachine, seed: int) -> None:
        assert self.simulation is not None
        self.simulation.events[f"rule {name}"] += 1
        getattr(self.simulation, name)(random.Random(seed))

    return move


for move_name, weight in Simulation.MOVES:
    for copy in range(1 + weight // 6):  # the moves of every step are offered more often
        setattr(LedgerMachine, f"{move_name}_{copy}", _rule(move_name))

LedgerMachine.TestCase.settings = settings(
    max_examples=60,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
)
TestLedgerMachine = LedgerMachine.TestCase
