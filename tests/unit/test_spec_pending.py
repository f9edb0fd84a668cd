"""Plain steps shown to a drafter together: the same draft KV, seeds and proposals, bit for bit, as one by one."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest
import torch

from octavo.ops.meta import KVView
from octavo.spec.checkpoint import random_draft
from octavo.spec.dflash import DFlashDrafter
from octavo.spec.drafter import DraftRequest, Observation
from octavo.spec.eagle import EagleDrafter
from octavo.spec.pending import PendingSteps
from tests.unit import spec_reference as ref

TEXTS = {0: [(7 * i) % 90 for i in range(40)], 2: [(5 * i + 3) % 90 for i in range(40)], 3: list(range(40))}
BEGUN = {0: 9, 2: 17, 3: 4}  # tokens whose features were shown with the prompt


def drafter_of(name: str) -> Any:
    target, _ = ref.bind()
    if name == "eagle3":
        return EagleDrafter(random_draft(ref.eagle_config(), seed=3), target, steps=4, max_rows=4)
    return DFlashDrafter(random_draft(ref.dflash_config(), seed=3), target, max_rows=4)


def step_of(view: KVView, rows: list[int], at: dict[int, int], taps: int) -> Observation:
    """One plain step: position at[row] of each row's text."""
    features = [ref.features_of(TEXTS[r], taps)[at[r]] for r in rows]
    return Observation(
        rows=torch.tensor(rows),
        host_rows=tuple(rows),
        indptr=tuple(range(len(rows) + 1)),
        start=torch.tensor([at[r] for r in rows]),
        counts=torch.ones(len(rows), dtype=torch.int64),
        features=torch.stack(features),
        next_tokens=torch.tensor([TEXTS[r][at[r] + 1] for r in rows]),
        is_last=(True,) * len(rows),
        kv=view,
        max_kv_tokens=256,
    )


def begun(drafter: Any, view: KVView) -> dict[int, int]:
    for row, stop in BEGUN.items():
        drafter.begin(DraftRequest(row, tuple(TEXTS[row][:stop]), 64, 0))
        features = ref.features_of(TEXTS[row], len(drafter.taps))
        drafter.observe(ref.observe_chunk(view, row, TEXTS[row][: stop + 1], features, 0, stop))
    return dict(BEGUN)


COMPANY = [
    [[0, 2], [2, 0], [0, 2, 3], [3], [3, 0], [0], [2, 3, 0], [0, 3], [0]],  # a row joins, one leaves, the order turns
    [[3, 0, 2]] * 5,
    [[2]] * 3,
]


@pytest.mark.parametrize("company", COMPANY, ids=["changes", "three rows", "one row"])
@pytest.mark.parametrize("name", ["eagle3", "dflash"])
def test_together_is_one_by_one_bit_for_bit(name: str, company: list[list[int]]) -> None:
    results = []
    for together in (False, True):
        drafter = drafter_of(name)
        view = ref.Pages.make(drafter.kv_layers, page_size=4).view
        at = begun(drafter, view)
        pending = PendingSteps()
        for rows in company:
            step = step_of(view, rows, at, len(drafter.taps))
            if together:
                pending.add(step)
            else:
                drafter.observe(step)
            at |= {row: at[row] + 1 for row in rows}
        if together:
            merged = pending.take()
            assert merged is not None
            drafter.observe(merged)
        assert view.full is not None
        kept = view.full.clone()
        known = [TEXTS[row][: at[row] + 1] for row in (0, 2, 3)]
        draft = drafter.propose(ref.propose_batch(view, [0, 2, 3], known, 4))
        seeds = [drafter.export_seed(row) for row in (0, 2, 3)] if name == "eagle3" else []
        results.append((kept, draft.tokens, seeds))
    (kv, tokens, seeds), (kv_late, tokens_late, seeds_late) = results
    assert torch.equal(kv, kv_late)
    assert torch.equal(tokens, tokens_late)
    assert all(torch.equal(a, b) for a, b in zip(seeds, seeds_late, strict=True))


@pytest.mark.parametrize("company", COMPANY, ids=["changes", "three rows", "one row"])
def test_what_is_taken_is_ragged_in_order_of_position(company: list[list[int]]) -> None:
    view = ref.Pages.make(1).view
    at, pending = dict(BEGUN), PendingSteps()
    for rows in company:
        pending.add(step_of(view, rows, at, 3))
        at |= {row: at[row] + 1 for row in rows}
    assert pending.tokens == sum(map(len, company))
    merged = pending.take()
    assert merged is not None
    assert pending.tokens == 0 and pending.take() is None
    for i, row in enumerate(merged.host_rows):
        first, last = merged.indptr[i : i + 2]
        count = sum(row in rows for rows in company)
        assert last - first == count == int(merged.counts[i])
        assert int(merged.rows[i]) == row and int(merged.start[i]) == BEGUN[row]
        where = slice(BEGUN[row], BEGUN[row] + count)
        assert merged.features is not None
        assert torch.equal(merged.features[first:last], ref.features_of(TEXTS[row], 3)[where])
        assert merged.next_tokens[first:last].tolist() == TEXTS[row][where.start + 1 : where.stop + 1]


def test_a_row_that_ended_is_forgotten_and_its_successor_is_not() -> None:
    view = ref.Pages.make(1).view
    pending = PendingSteps()
    pending.add(step_of(view, [0, 2], {0: 9, 2: 17}, 3))
    pending.add(step_of(view, [0, 2], {0: 10, 2: 18}, 3))
    pending.forget(0)
    assert pending.holds([2, 5]) and not pending.holds([0, 3])
    pending.add(step_of(view, [2, 0], {0: 4, 2: 19}, 3))  # the row's next owner
    assert pending.holds([0])
    merged = pending.take()
    assert merged is not None
    assert dict(zip(merged.host_rows, merged.start.tolist(), strict=True)) == {2: 17, 0: 4}
    assert dict(zip(merged.host_rows, merged.counts.tolist(), strict=True)) == {2: 3, 0: 1}
    pending.add(step_of(view, [0], {0: 5}, 3))
    pending.forget(0)
    pending.forget(0)
    assert pending.take() is None


def test_a_single_step_is_given_as_it_came() -> None:
    view = ref.Pages.make(1).view
    step = step_of(view, [0, 2], BEGUN, 3)
    pending = PendingSteps()
    pending.add(step)
    assert pending.take() is step


def test_the_bound_counts_tokens_of_all_rows() -> None:
    view = ref.Pages.make(1).view
    pending = PendingSteps(5)
    for n, full in ((2, False), (4, False), (6, True)):
        pending.add(step_of(view, [0, 2], BEGUN, 3))
        assert pending.tokens == n and pending.full is full


def test_a_step_of_several_tokens_a_row_cannot_wait() -> None:
    view = ref.Pages.make(1).view
    step = dataclasses.replace(step_of(view, [0, 2], BEGUN, 3), indptr=(0, 2, 3))
    with pytest.raises(ValueError, match="3 tokens of 2 rows"):
        PendingSteps().add(step)


def test_without_features_there_are_none() -> None:
    view = ref.Pages.make(1).view
    pending = PendingSteps()
    for at in (4, 5):
        pending.add(dataclasses.replace(step_of(view, [3], {3: at}, 3), features=None))
    merged = pending.take()
    assert merged is not None and merged.features is None and merged.next_tokens.tolist() == [5, 6]
