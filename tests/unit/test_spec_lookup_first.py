"""Prompt lookup before a draft with weights: who drafts which row, how many tokens, and when draft KV is caught up."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from octavo.errors import ConfigError
from octavo.ops.meta import KVView
from octavo.spec.adaptive import AdaptiveLength
from octavo.spec.columns import ColumnChooser
from octavo.spec.drafter import Draft, Drafter, DraftRequest, Observation, ProposeBatch, kv_owner
from octavo.spec.lookup_first import LEARNED, LOOKED_UP, LookupFirstDrafter, TwoSources
from octavo.spec.ngram import NgramDrafter

KV = KVView(None, None, torch.zeros(8, 1, dtype=torch.int32), None, 16)
REPEATS, NEW = [5, 6, 7, 8, 5, 6], [1, 2, 3, 4]


class Ninety:
    """Stands in for a draft with weights: 90, 91, … for every row, as long as its limit allows."""

    name, needs_host_tokens, needs_draft_kv, kv_layers, key_mode, taps = "ninety", False, True, 2, "pair", (1, 2)
    max_draft_tokens = max_depth = 3
    footprint_tokens, commit_lag_tokens, top_k = 4, 4, 1

    def __init__(self) -> None:
        self.calls: list[tuple[int, tuple[int, ...]]] = []
        self.life: list[object] = []

    def begin(self, request: DraftRequest) -> None:
        self.life.append(request)

    def end(self, row: int) -> None:
        self.life.append(row)

    def observe(self, observation: Observation) -> None:
        self.life.append(observation)

    def propose(self, batch: ProposeBatch) -> Draft:
        self.calls.append((batch.draft_tokens, batch.host_limits))
        width = min(batch.draft_tokens, self.max_draft_tokens)
        tokens = torch.arange(90, 90 + width).expand(len(batch.host_rows), width)
        return Draft(tokens, None, None, tuple(min(width, limit) for limit in batch.host_limits))


def drafter(lookup_tokens: int = 5) -> tuple[LookupFirstDrafter, Ninety]:
    learned = Ninety()
    both = LookupFirstDrafter(NgramDrafter(draft_tokens=lookup_tokens), learned)
    for row in (3, 4):
        both.begin(DraftRequest(row, (1,), 64, 0))
    return both, learned


def drafted(both: LookupFirstDrafter, texts: list[list[int]], tokens: int = 5, **given: Any) -> Draft:
    rows = (3, 4)[: len(texts)]
    limits = given.pop("limits", (9,) * len(texts))
    draft = both.propose(
        ProposeBatch(torch.tensor(rows), rows, torch.tensor([len(t) - 1 for t in texts]),
                     torch.tensor([t[-1] for t in texts]), tokens, limits, tuple(texts), KV, 64, **given)
    )  # fmt: skip
    assert draft.tokens.shape[0] == len(texts) and draft.tokens.shape[1] >= max(draft.lengths)
    return draft


def chains(draft: Draft) -> list[list[int]]:
    return [line[:n] for line, n in zip(draft.tokens.tolist(), draft.lengths, strict=True)]


def propose(both: LookupFirstDrafter, texts: list[list[int]], tokens: int = 5, **given: Any) -> list[list[int]]:
    return chains(drafted(both, texts, tokens, **given))


def test_it_is_one_drafter_with_the_larger_reserve() -> None:
    both, learned = drafter()
    assert isinstance(both, Drafter)
    assert both.name == "ngram+ninety" and (both.max_draft_tokens, both.max_depth) == (5, 5)
    assert (both.footprint_tokens, both.commit_lag_tokens) == (6, 6)
    assert (both.kv_layers, both.key_mode, both.taps) == (2, "pair", (1, 2))
    assert kv_owner(both) is learned and kv_owner(learned) is learned
    both.end(3)
    assert [type(event) for event in learned.life] == [DraftRequest, DraftRequest, int]


def test_each_row_is_drafted_by_its_own_source() -> None:
    both, learned = drafter()
    assert propose(both, [REPEATS, NEW]) == [[7, 8, 5, 6, 7], [90, 91, 92]]
    assert learned.calls == [(3, (0, 9))]
    assert propose(both, [REPEATS + [7], NEW + [9]], limits=(2, 1)) == [[8, 5], [90]]


@pytest.mark.parametrize("text", [REPEATS, NEW])
def test_draft_kv_is_caught_up_only_for_the_weights(text: list[int]) -> None:
    caught: list[int] = []
    both, learned = drafter()
    both_drafts = propose(both, [text], catch_up=lambda: caught.append(len(learned.calls)))
    assert (caught, len(learned.calls)) == (([], 0) if text is REPEATS else ([0], 1))
    assert both_drafts == [[7, 8, 5, 6, 7] if text is REPEATS else [90, 91, 92]]


def test_lengths_by_source() -> None:
    """What is looked up is right, what the weights draft is wrong: then only the one is drafted."""
    both, learned = drafter()
    lengths = both.adapt()
    text, new = [5, 6, 7, 8], 1000
    by_lookup, by_weights = [], []
    for step in range(200):
        if step % 2:
            new += 1
            text.append(new)  # never said before
        else:
            text.extend([5, 6, 7])
        draft = drafted(both, [text], lengths.choose(1))
        count, source = draft.lengths[0], draft.sources[0]
        (by_lookup if source == LOOKED_UP else by_weights).append(count)
        accepted = count if source == LOOKED_UP else 0
        lengths.record(1, [count], [accepted], 1.0 + 0.1 * count, draft.sources)
        if source == LOOKED_UP:
            text.extend(chains(draft)[0][:accepted])
    assert min(by_lookup[-10:]) == 5
    assert sum(by_weights[-40:]) <= 4


@pytest.mark.parametrize("rows", [1, 2])
@pytest.mark.parametrize("right", [0, 2, 3])
def test_rows_that_copy_are_looked_up_whatever_the_weights_can(rows: int, right: int) -> None:
    """Of the three tokens of the weights `right` are right; every looked-up one is, and costs no forward."""
    both, learned = drafter()
    lengths = both.adapt()
    period = list(range(200, 230))
    texts = [period * 2 for _ in range(rows)]
    by_lookup = []
    for _ in range(600):
        if lengths.choose(rows) == 0:
            counts, sources = [0] * rows, ()
        else:
            before = len(learned.calls)
            draft = drafted(both, texts, lengths.choose(rows))
            counts, sources = list(draft.lengths), draft.sources
        accepted = []
        for i, text in enumerate(texts):
            source = sources[i] if sources else LEARNED
            accepted.append(counts[i] if source == LOOKED_UP else min(counts[i], right))
            at = len(text)
            text.extend([period[(at + j) % 30] for j in range(accepted[-1] + 1)])
        forward = 0.3 if sources and len(learned.calls) > before else 0.0
        lengths.record(rows, counts, accepted, 1.0 + forward + 0.1 * sum(counts), sources)
        by_lookup.append(sum(n for n, s in zip(counts, sources, strict=False) if s == LOOKED_UP))
    assert sum(by_lookup[-200:]) / 200 > 4.5 * rows


def test_looking_up_that_never_pays_leaves_the_row_to_the_weights() -> None:
    both, _ = drafter()
    lengths = both.adapt()
    text, said = list(REPEATS), []
    for step in range(80):
        draft = drafted(both, [text], lengths.choose(1))
        count, wrong = draft.lengths[0], draft.sources[0] == LOOKED_UP
        lengths.record(1, [count], [0 if wrong else count], 1.0 + 0.1 * count, draft.sources)
        text.extend([2000 + step, 5, 6])  # behind 5 6 comes something new every time
        said.append(wrong)
    assert sum(said[-30:]) <= 4


def seconds(columns: ColumnChooser) -> list[float]:
    return columns.worth(2).seconds


def test_a_step_belongs_to_its_sources() -> None:
    columns, lengths = ColumnChooser(5), AdaptiveLength(3)
    both = TwoSources(columns, lengths)
    assert both.choose(4) == 5
    for _ in range(40):
        both.record(2, [5, 3], [5, 0], 1.0, (LOOKED_UP, LEARNED))
    assert lengths.best_length(2) == 0, "the tokens of the weights were all wrong"
    assert seconds(columns) == [], "what a step of the weights costs says nothing about lookups"
    before = lengths.expected_tokens()
    both.record(2, [5, 0], [5, 0], 3.0, (LOOKED_UP, LEARNED))
    assert lengths.expected_tokens() == before
    assert seconds(columns)[5] == 3.0
    both.record(2, [0, 0], [0, 0], 0.5)  # nothing was proposed: a plain step
    assert lengths.expected_tokens() == before
    assert seconds(columns)[0] == 0.5


def test_a_tree_is_refused() -> None:
    tree = Ninety()
    tree.max_depth = 2
    with pytest.raises(ConfigError, match="draft_topk"):
        LookupFirstDrafter(NgramDrafter(draft_tokens=3), tree)
