"""Layouts of a step: rows of different lengths, flat and padded."""

from __future__ import annotations

import random

import numpy as np
import pytest
import torch

from octavo.backend.batches import Batch, Flat
from octavo.spec.verify import accept, chain_parents

CPU = torch.device("cpu")


def layout(lengths: tuple[int, ...]) -> tuple[Batch, Flat]:
    rows, width = tuple(3 + 2 * i for i in range(len(lengths))), 1 + max(lengths)
    real = np.concatenate([np.arange(i * width, i * width + 1 + n) for i, n in enumerate(lengths)])
    return Batch.of(rows, lengths, CPU), Flat(width, lengths, torch.as_tensor(real))


@pytest.mark.parametrize("seed", range(30))
def test_a_ragged_batch_is_the_padded_one_without_its_padding(seed: int) -> None:
    rng = random.Random(seed)
    b = rng.randint(1, 9)
    lengths = tuple(rng.choice((0, rng.randint(0, 7))) for _ in range(b))
    batch, flat = layout(lengths)
    padded = torch.arange(b * batch.width * 2).reshape(b, batch.width, 2)
    tokens = batch.cut(padded)
    assert torch.equal(tokens, flat.cut(padded))
    assert batch.q_indptr == tuple(np.cumsum([0, *(1 + n for n in lengths)]))
    start = torch.randint(0, 90, (b,))
    assert torch.equal(batch.slots(start), flat.cut(start[:, None] + torch.arange(batch.width)))
    assert torch.equal(batch.node_rows, flat.cut(batch.rows[:, None].expand(b, batch.width)))
    assert torch.equal(batch.q_seq, flat.cut(torch.arange(b)[:, None].expand(b, batch.width)))
    ids = torch.arange(len(tokens)) + 10
    back, places = batch.pad(ids), flat.pad(ids)
    for i, n in enumerate(lengths):
        assert back[i].tolist() == places[i, : n + 1].tolist() + [int(places[i, n])] * (batch.width - 1 - n)


@pytest.mark.parametrize("seed", range(30))
def test_what_a_ragged_batch_accepts(seed: int) -> None:
    """The same as the tree of the same chains, whatever stands in the padding."""
    generator, rng = torch.Generator().manual_seed(seed), random.Random(seed)
    b = rng.randint(1, 9)
    lengths = tuple(rng.randint(0, 6) for _ in range(b))
    batch, flat = layout(lengths)
    m = batch.width - 1
    drafted = torch.randint(0, 2, (b, m), generator=generator)
    sampled = torch.randint(0, 2, (b + sum(lengths),), generator=generator)
    nodes, counts, run = accept(drafted, None, batch.real, batch.pad(sampled))
    tree = accept(drafted, chain_parents(b, m), lengths, flat.pad(sampled))
    assert torch.equal(counts, tree[1])
    for i in range(b):
        kept = int(counts[i])
        assert kept <= lengths[i]
        assert run[i, : kept + 1].tolist() == tree[2][i, : kept + 1].tolist()
        assert nodes[i].tolist() == [min(j, kept) for j in range(batch.width)]
