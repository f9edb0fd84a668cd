"""The draft length follows acceptance and cost: all numbers are injected, none is timed."""

from __future__ import annotations

import math
import random

import pytest

from octavo.errors import ConfigError
from octavo.spec.adaptive import AdaptiveLength, StepCosts


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


class NoisyWorld:
    """Step times that scatter, with outliers, on a machine that slows down and recovers; draft KV of steps that
    draft nothing is written at the next draft (and then not timed), as the engine does it."""

    def __init__(self, chance: float, costs: list[float], seed: int) -> None:
        self.chance, self.costs, self.rng = chance, costs, random.Random(seed)

    def speed(self, steps: int) -> float:
        """Tokens a second relative to plain decode on the same machine."""
        adaptive, rng = AdaptiveLength(len(self.costs) - 1), self.rng
        tokens, seconds, plain, waiting = 0, 0.0, 0.0, 0
        for i in range(steps):
            length = adaptive.choose(1)
            count = 0
            while count < length and rng.random() < self.chance:
                count += 1
            machine = 1.0 + 0.15 * math.sin(i / 300)
            step = self.costs[length] * machine * rng.uniform(0.9, 1.1) * (2.0 if rng.random() < 0.02 else 1.0)
            behind = waiting if length else 0
            waiting = 0 if length else waiting + 1
            adaptive.record(1, [length], [count], None if behind else step)
            tokens, seconds, plain = tokens + count + 1, seconds + step + 0.004 * behind, plain + 1.02 * machine
        return tokens / seconds / (steps / plain)

    def best_fixed(self) -> float:
        expected = [sum(self.chance**i for i in range(m + 1)) for m in range(len(self.costs))]
        return max(e / c for e, c in zip(expected, self.costs, strict=True))


CHAIN = [1.0, 1.27, 1.45, 1.63]  # what EAGLE-3 and DFlash cost here, relative to a plain step
BLOCK = [1.0, *(1.36 + 0.17 * m for m in range(1, 8))]


@pytest.mark.parametrize("costs", [CHAIN, BLOCK], ids=["chain", "block"])
@pytest.mark.parametrize(("chance", "least"), [(0.0, 0.97), (0.3, 0.93), (0.65, 0.93), (0.9, 0.93)])
def test_under_noise_it_is_near_the_best_fixed_length_and_never_below_plain(
    costs: list[float], chance: float, least: float
) -> None:
    for seed in range(2):
        world = NoisyWorld(chance, costs, seed)
        assert world.speed(1500) >= max(0.97, least * world.best_fixed()), seed


def test_a_length_measured_in_a_bad_moment_is_measured_again() -> None:
    """The first steps of the best length were slow: it is taken all the same before long."""
    adaptive, slow = AdaptiveLength(3), 2
    lengths = []
    for _ in range(600):
        length = adaptive.choose(1)
        lengths.append(length)
        bad, slow = length == 3 and slow > 0, slow - (length == 3)
        adaptive.record(1, [length], [length], 1.0 + 0.1 * length + 2.0 * bad)
    assert lengths[-40:].count(3) >= 36


def test_a_long_draft_that_could_not_pay_is_not_tried() -> None:
    world = World(0.0, 0.3).run(AdaptiveLength(15), 200)
    assert max(world.lengths[3:]) <= 2


@pytest.mark.parametrize(("drafting", "pays"), [(1, False), (2, True), (4, True)])
def test_all_rows_pay_for_a_step_in_which_one_has_a_draft(drafting: int, pays: bool) -> None:
    """Two tokens, both right six times of ten, and a step that costs 1.3 plain ones: with one draft for four rows it
    brings 1.24 tokens a row."""
    lengths = AdaptiveLength(4)
    rng = random.Random(3)
    for step in range(400):
        lengths.record(4, [0] * 4, [0] * 4, 1.0)
        if step % 2:
            continue
        accepted = [2 if rng.random() < 0.36 else int(rng.random() < 0.375) for _ in range(drafting)]
        drafted = [2] * drafting + [0] * (4 - drafting)
        lengths.record(4, drafted, accepted + [0] * (4 - drafting), 1.3)
    assert (lengths.best_length(4) > 0) is pays
    assert lengths.best_length(1) > 0, "nothing is known of one row: whoever drafts is hoped to be right"


def test_an_old_cost_goes_with_the_machine() -> None:
    """A draft that was measured while the machine was fast is no cheaper than it was when the machine is slow."""
    costs = StepCosts()
    for _ in range(9):
        costs.add(0, 0, 1.0)
    for _ in range(3):
        costs.add(0, 2, 2.0)
    assert (costs.of(0, 0), costs.of(0, 1), costs.of(0, 2)) == (1.0, 1.5, 2.0)
    for _ in range(9):
        costs.add(0, 0, 1.5)
    assert (costs.of(0, 0), costs.of(0, 1), costs.of(0, 2)) == (1.5, 2.25, 3.0)
    for _ in range(40):  # all steps draft: now it is the plain step that is old
        costs.add(0, 2, 2.0)
    assert (costs.of(0, 0), costs.of(0, 2)) == (1.5, 2.0)


@pytest.mark.parametrize("now", [0.5, 1.5])
def test_a_cost_is_measured_against_the_plain_steps_of_now(now: float) -> None:
    costs = StepCosts()
    for plain in [1.0] * 9 + [now] * 3:
        costs.add(0, 0, plain)
    for _ in range(2):
        costs.add(0, 2, 2.0 * now)
    for _ in range(9):
        costs.add(0, 0, now)
    assert costs.of(0, 2) == 2.0 * now


def test_costs_of_many_lengths() -> None:
    costs = StepCosts()
    assert costs.line(3, [0, 1, 2]) == []
    costs.add(3, 0, 1.0)
    costs.add(3, 4, 3.0)
    assert costs.line(3, [0, 2, 4]) == [1.0, 2.0, 3.0]
    assert costs.line(3, [4, 6]) == [3.0, 3.75], "beyond what was measured: three quarters of the line"
    assert costs.of(3, 6) == 4.0
