"""The draft length follows acceptance and cost: all numbers are injected, none is timed."""

from __future__ import annotations

import random

import pytest

from octavo.errors import ConfigError
from octavo.spec.adaptive import AdaptiveLength


class World:
    """A machine and a drafter: cost of a step and chance of acceptance, both given."""

    def __init__(self, chance: float, row_cost: float, seed: int = 0) -> None:
        self.chance, self.row_cost, self.rng = chance, row_cost, random.Random(seed)
        self.tokens, self.seconds = 0, 0.0
        self.lengths: list[int] = []

    def step(self, adaptive: AdaptiveLength, batch: int = 1, timed: bool = True) -> None:
        length = adaptive.choose(batch)
        accepted = []
        for _ in range(batch):
            count = 0
            while count < length and self.rng.random() < self.chance:
                count += 1
            accepted.append(count)
        cost = 1.0 + self.row_cost * length
        adaptive.record(batch, [length] * batch, accepted, cost if timed else None)
        self.tokens += sum(accepted) + batch
        self.seconds += cost
        self.lengths.append(length)

    def run(self, adaptive: AdaptiveLength, steps: int, batch: int = 1, timed: bool = True) -> World:
        for _ in range(steps):
            self.step(adaptive, batch, timed)
        return self


def test_a_good_cheap_draft_is_used_at_length() -> None:
    world = World(0.9, 0.05).run(AdaptiveLength(7), 300)
    assert sum(world.lengths[100:]) / 200 > 5
    assert world.tokens / world.seconds > 2.5


@pytest.mark.parametrize("batch", [1, 4, 16])
@pytest.mark.parametrize("row_cost", [0.05, 0.5])
def test_a_draft_that_is_always_wrong_costs_less_than_three_percent(batch: int, row_cost: float) -> None:
    adaptive = AdaptiveLength(7)
    world = World(0.0, row_cost).run(adaptive, 2560, batch)
    assert world.tokens / world.seconds >= 0.97 * batch
    assert world.lengths[-40:].count(0) >= 36


def test_expensive_rows_switch_drafting_off() -> None:
    world = World(0.6, 1.0).run(AdaptiveLength(5), 400)
    assert world.lengths[100:].count(0) > 250


def test_it_probes_and_comes_back() -> None:
    adaptive = AdaptiveLength(5)
    World(0.0, 0.1).run(adaptive, 400)
    back = World(0.95, 0.1).run(adaptive, 400)
    assert sum(back.lengths[-50:]) / 50 > 3


def test_the_length_depends_on_what_a_row_costs_at_this_batch_size() -> None:
    adaptive = AdaptiveLength(6)
    for _ in range(120):
        World(0.8, 0.02, seed=1).step(adaptive, 1)
        World(0.8, 2.0, seed=2).step(adaptive, 16)
    assert adaptive.best_length(1) > 0
    assert adaptive.best_length(16) == 0


def test_without_times_acceptance_alone_decides() -> None:
    assert World(0.0, 0.1).run(AdaptiveLength(5), 100, timed=False).lengths[-10:].count(0) >= 8
    assert World(0.95, 0.1).run(AdaptiveLength(5), 100, timed=False).lengths[-1] == 5


def test_a_tree_is_drafted_whole_or_not_at_all() -> None:
    adaptive = AdaptiveLength(12, max_depth=4)
    for _ in range(200):
        length = adaptive.choose(1)
        assert length in (0, 12)
        adaptive.record(1, [length], [min(3, length)], 1.0 + 0.02 * length)
    assert adaptive.best_length(1) == 12


def test_it_is_deterministic_and_can_be_switched_off() -> None:
    runs = [World(0.5, 0.2, seed=3).run(AdaptiveLength(5), 200).lengths for _ in range(2)]
    assert runs[0] == runs[1]
    assert set(World(0.0, 1.0).run(AdaptiveLength(5, enabled=False), 50).lengths) == {5}
    assert AdaptiveLength(0).choose(3) == 0
    with pytest.raises(ConfigError, match="draft_tokens"):
        AdaptiveLength(-1)


def test_steps_without_a_match_are_not_held_against_the_draft() -> None:
    adaptive = AdaptiveLength(4)
    for i in range(200):
        length = adaptive.choose(1)
        matched = length if i % 10 == 0 else 0
        adaptive.record(1, [matched], [matched], 1.0 + 0.1 * matched)
    assert adaptive.best_length(1) == 4
