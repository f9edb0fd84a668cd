"""Which looked-up tokens are verified follows their chances and a step's cost: all numbers are injected."""

from __future__ import annotations

import random
from collections.abc import Callable

import pytest
import torch

from octavo.ops.meta import KVView
from octavo.spec.columns import NOTHING, ColumnChooser, Found, kind_of_chance, kind_of_match
from octavo.spec.drafter import DraftRequest, ProposeBatch
from octavo.spec.ngram import NgramDrafter

KV = KVView(None, None, torch.zeros(8, 1, dtype=torch.int32), None, 16)
TRUTH, WRONG = 1, 0
MOST = 5
SURE, LIKELY, RARE = kind_of_match(15), kind_of_match(4), kind_of_chance(0.15)


def asked(rows: int, texts: list[list[int]]) -> ProposeBatch:
    at = torch.arange(rows)
    return ProposeBatch(at, tuple(range(rows)), at, at, MOST, (MOST,) * rows, tuple(texts), KV, 64)


def take(chooser: ColumnChooser, texts: list[list[int]], found: list[Found]) -> list[Found]:
    rows = len(texts)
    return chooser.take(asked(rows, texts), found, chooser.worth(rows)) if chooser.choose(rows) else [NOTHING] * rows


class World:
    """Texts of the token TRUTH; what is looked up is right as often as its kind says."""

    def __init__(self, chances: dict[int, float], token_cost: float, rows: int = 1, seed: int = 0) -> None:
        self.chances, self.token_cost, self.rows, self.rng = chances, token_cost, rows, random.Random(seed)
        self.texts: list[list[int]] = [[TRUTH] for _ in range(rows)]
        self.tokens, self.seconds, self.plain = 0, 0.0, 0.0
        self.taken: list[dict[int, int]] = []  # by step: tokens taken, by kind
        self.noise: Callable[[], float] = lambda: 1.0

    def found(self) -> Found:
        kind = self.rng.choice(list(self.chances))
        return Found([TRUTH if self.rng.random() < self.chances[kind] else WRONG for _ in range(MOST)], [kind] * MOST)

    def step(self, chooser: ColumnChooser, timed: bool = True) -> None:
        rows = self.rows
        taken = take(chooser, self.texts, [self.found() for _ in range(rows)])
        accepted = []
        for row, text in zip(taken, self.texts, strict=True):
            right = 0
            while right < len(row.tokens) and row.tokens[right] == TRUTH:
                right += 1
            text.extend([TRUTH] * (right + 1))
            accepted.append(right)
        drafted = [len(row.tokens) for row in taken]
        machine = self.noise()
        cost = (1.0 + self.token_cost * sum(drafted)) * machine
        chooser.record(rows, drafted, accepted, cost if timed else None)
        self.tokens += sum(accepted) + rows
        self.seconds += cost
        self.plain += machine
        self.taken.append({k: sum(len(row.tokens) for row in taken if row.kinds[:1] == [k]) for k in self.chances})

    def run(self, chooser: ColumnChooser, steps: int, timed: bool = True) -> World:
        for _ in range(steps):
            self.step(chooser, timed)
        return self

    def last(self, kind: int, steps: int = 100) -> float:
        """Tokens of this kind taken per step, of the newest steps."""
        return sum(taken[kind] for taken in self.taken[-steps:]) / min(steps, len(self.taken))

    def speed(self) -> float:
        """Tokens in the time of a plain step, by the tokens of one."""
        return self.tokens / self.rows / (self.seconds / (self.plain / len(self.taken)))


@pytest.mark.parametrize("rows", [1, 4, 16])
@pytest.mark.parametrize("token_cost", [0.02, 0.25])
@pytest.mark.parametrize("kind", [SURE, LIKELY, RARE])
def test_what_is_always_wrong_costs_less_than_three_percent(rows: int, token_cost: float, kind: int) -> None:
    world = World({kind: 0.0}, token_cost, rows).run(ColumnChooser(MOST), 1500)
    assert world.speed() >= 0.97
    assert world.last(kind) <= 0.2


@pytest.mark.parametrize("rows", [1, 4, 16])
def test_what_is_always_right_and_cheap_is_taken_whole(rows: int) -> None:
    world = World({SURE: 1.0}, 0.05 / rows, rows).run(ColumnChooser(MOST), 300)
    assert world.last(SURE) > 0.9 * MOST * rows
    assert world.speed() > 3.5


def test_in_one_step_a_sure_row_is_drafted_and_an_unsure_one_is_not() -> None:
    """Four rows, each more token a quarter of a plain step: what is right half of the time brings less than it costs,
    what is nearly always right brings more."""
    world = World({SURE: 0.97, LIKELY: 0.5}, 0.2, 4).run(ColumnChooser(MOST), 600)
    assert world.last(SURE, 200) > 3.0
    assert world.last(LIKELY, 200) < 0.5
    assert world.speed() > 1.05


def test_chances_are_learned_without_drafting() -> None:
    """Nothing pays, so nothing is verified; that what is looked up has become right is seen all the same."""
    chooser = ColumnChooser(MOST)
    world = World({LIKELY: 0.1}, 0.22, 4).run(chooser, 400)
    assert world.last(LIKELY) == 0
    world.chances[LIKELY] = 1.0
    assert world.run(chooser, 60).last(LIKELY, 20) > 10


def test_costs_that_have_fallen_are_noticed() -> None:
    chooser = ColumnChooser(MOST)
    world = World({LIKELY: 0.7}, 1.0).run(chooser, 400)
    assert world.last(LIKELY) < 0.1
    world.token_cost = 0.05
    assert world.run(chooser, 2500).last(LIKELY) > 2


def test_costs_that_have_risen_are_noticed() -> None:
    chooser = ColumnChooser(MOST)
    world = World({LIKELY: 0.7}, 0.05).run(chooser, 400)
    assert world.last(LIKELY) > 2
    world.token_cost = 1.0
    assert world.run(chooser, 100).last(LIKELY, 50) < 0.5


@pytest.mark.parametrize("rows", [1, 4])
@pytest.mark.parametrize("chance", [0.0, 0.4, 0.75, 0.95])
@pytest.mark.parametrize("token_cost", [0.06, 0.24])
def test_under_noise_it_is_near_the_best_fixed_length_and_never_below_plain(
    rows: int, chance: float, token_cost: float
) -> None:
    best = max(
        sum(chance**i for i in range(count + 1)) / (1.0 + rows * token_cost * count) for count in range(MOST + 1)
    )
    for seed in range(3):
        world = World({LIKELY: chance}, token_cost, rows, seed)
        noise = random.Random(seed)
        world.noise = lambda noise=noise: noise.uniform(0.9, 1.1) * (2.0 if noise.random() < 0.02 else 1.0)  # type: ignore[misc]
        assert world.run(ColumnChooser(MOST), 1500).speed() >= max(0.97, 0.93 * best), seed


def test_a_first_step_in_a_bad_moment_is_forgotten() -> None:
    chooser = ColumnChooser(MOST)
    world = World({SURE: 0.95}, 0.05)
    moments = iter([1.0] * 3 + [4.0] * 2)
    world.noise = lambda: next(moments, 1.0)
    assert world.run(chooser, 600).last(SURE) > 3


def test_without_times_the_chances_decide() -> None:
    assert World({RARE: 0.0}, 0.1).run(ColumnChooser(MOST), 100, timed=False).last(RARE, 20) == 0
    assert World({SURE: 1.0}, 0.1).run(ColumnChooser(MOST), 100, timed=False).last(SURE, 20) == MOST


def test_steps_beside_prompts_are_not_timed_and_draft_all_the_same() -> None:
    chooser = ColumnChooser(MOST)
    world = World({SURE: 1.0}, 0.05).run(chooser, 60)
    assert world.run(chooser, 400, timed=False).last(SURE, 100) > 4
    fresh = World({SURE: 1.0}, 0.05)
    late = ColumnChooser(MOST)
    late.record(1, [MOST], [MOST], 1.2)
    assert fresh.run(late, 100, timed=False).last(SURE, 50) > 4, "a plain step is asked for, but none is ever timed"


def test_every_batch_size_has_its_own_costs() -> None:
    chooser = ColumnChooser(MOST)
    one, many = World({LIKELY: 0.8}, 0.02), World({LIKELY: 0.8}, 0.3, rows=8)
    for _ in range(200):
        one.step(chooser)
        many.step(chooser)
    assert one.last(LIKELY) > 3
    assert many.last(LIKELY) < 0.5


def test_batches_of_one_cost_class_may_differ_in_size() -> None:
    """Sixteen and seventeen rows share what is known of their costs; every row finds all it may."""
    chooser = ColumnChooser(MOST)
    World({SURE: 1.0}, 0.01, 16).run(chooser, 73)
    assert World({SURE: 1.0}, 0.01, 17).run(chooser, 20).last(SURE, 20) > 0.9 * 17 * MOST


def test_while_nothing_pays_little_is_looked_up() -> None:
    chooser = ColumnChooser(MOST)
    world = World({RARE: 0.1}, 0.15, 4).run(chooser, 200)
    looked = sum(chooser.choose(4) > 0 for _ in range(100))
    assert 20 <= looked <= 30
    world.chances[RARE] = 1.0  # a long match at last: the next look sees it, and then every step looks
    world.run(chooser, 400)
    assert world.last(RARE, 50) > 10


def test_it_is_deterministic() -> None:
    runs = [World({SURE: 0.9, LIKELY: 0.5, RARE: 0.1}, 0.1, 4).run(ColumnChooser(MOST), 300).taken for _ in range(2)]
    assert runs[0] == runs[1]


def test_a_row_s_new_owner_is_not_compared_with_the_former_one() -> None:
    chooser = ColumnChooser(MOST)
    before = chooser.chances[SURE]
    take(chooser, [[TRUTH]], [Found([TRUTH], [SURE])])
    chooser.begin(0)
    take(chooser, [[5, 5, 5]], [NOTHING])
    assert chooser.chances[SURE] == before
    take(chooser, [[5, 5, 5]], [Found([7, 8], [SURE, LIKELY])])
    take(chooser, [[5, 5, 5, 7, 9]], [NOTHING])
    assert chooser.chances[SURE] > before
    assert chooser.chances[LIKELY] < ColumnChooser(MOST).chances[LIKELY]


def test_a_long_match_is_drafted_further_than_a_short_one() -> None:
    """What was said at length is said again to its end; two words are followed by something new every time."""
    drafter = NgramDrafter(draft_tokens=MOST)
    chooser = drafter.adapt()
    drafter.begin(DraftRequest(0, (1,), 4096, 0))
    said, pair, new = list(range(100, 140)), [50, 51], iter(range(1000, 2000))
    text = [*said, *pair, next(new)]
    lengths: dict[int, list[int]] = {}

    def go_on(true: list[int]) -> None:
        for token in true:
            draft = drafter.propose(asked(1, [text]))
            lengths.setdefault(len(true), []).append(draft.lengths[0])
            chooser.record(1, draft.lengths, [0], 1.0 + 0.3 * draft.lengths[0])
            text.append(token)

    for _ in range(40):
        go_on(said)
        text.extend([*pair, next(new)])
        for _ in range(5):
            text.extend(pair)
            go_on([next(new)])
    assert sum(lengths[len(said)][-20:]) / 20 > 4
    assert sum(lengths[1][-40:]) / 40 < 1
