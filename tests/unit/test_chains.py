"""Laying out and keeping chains: the compiled calls, the torch operations and a plain loop agree."""

from __future__ import annotations

import random

import pytest
import torch

from octavo.backend.batches import Batch
from octavo.backend.chains import Chains
from octavo.backend.relay import Relay
from octavo.ops import native_lib

CPU = torch.device("cpu")
CONTEXT_TOKENS = 40
ROWS = 12


def kept_by_hand(drafted: list[int], own: list[int], start: int, width: int) -> tuple[list[int], int, int]:
    """([count, run …], KV slots, newest token) of one row: `own` are the target's tokens behind root and drafts."""
    count = 0
    while count < len(drafted) and drafted[count] == own[count]:
        count += 1
    run = [own[min(j, count)] for j in range(width)]
    count = min(count, max(0, CONTEXT_TOKENS - 1 - start))
    return [count, *run], min(start + count + 1, CONTEXT_TOKENS), run[count]


@pytest.mark.parametrize("compiled", [True, False])
@pytest.mark.parametrize("seed", range(40))
def test_one_call_is_the_plain_loop(compiled: bool, seed: int) -> None:
    draw = random.Random(seed)
    rows = draw.sample(range(ROWS), draw.randint(1, 9))
    lengths = [draw.choice([0, 1, 2, 5, 16]) if seed % 3 else 4 for _ in rows]
    width = 1 + max(lengths)
    # a drafter may draft more columns than are verified; a third of the tokens agree
    drafted = torch.tensor([[draw.randrange(3) for _ in range(width + 1)] for _ in rows])
    starts = [draw.choice([0, 7, CONTEXT_TOKENS - width, CONTEXT_TOKENS - 1, CONTEXT_TOKENS]) for _ in rows]
    newest = [draw.randrange(100) for _ in rows]
    relay = Relay(torch.full((ROWS,), -1), torch.full((ROWS,), -1))
    chains = Chains(relay, CONTEXT_TOKENS)
    if compiled and native_lib.library() is None:
        pytest.fail("the tests need the compiled module: make native")
    if not compiled:
        chains._lib = None
    batch = Batch.of(tuple(rows), tuple(lengths), CPU)
    columns = drafted[:, : width - 1]
    start = torch.tensor(starts)
    tokens, slots = chains.lay(batch, start, torch.tensor(newest), columns)
    assert tokens.tolist() == [t for r, n in enumerate(lengths) for t in (newest[r], *drafted[r, :n].tolist())]
    assert slots.tolist() == [s + j for s, n in zip(starts, lengths, strict=True) for j in range(n + 1)]
    sampled = torch.tensor([draw.randrange(3) for _ in range(len(tokens))])
    kept = chains.keep(batch, start, columns, sampled)
    at = 0
    for r, n in enumerate(lengths):
        line, slots_kept, last = kept_by_hand(
            drafted[r, :n].tolist(), sampled[at : at + n + 1].tolist(), starts[r], width
        )
        assert kept[r].tolist() == line
        assert (int(relay.seq_lens[rows[r]]), int(relay.last_tokens[rows[r]])) == (slots_kept, last)
        at += n + 1
    others = [r for r in range(ROWS) if r not in rows]
    assert (relay.seq_lens[others] == -1).all() and (relay.last_tokens[others] == -1).all()


@pytest.mark.parametrize(
    "drafted", [torch.tensor([[5, 9], [6, 9]]).T, torch.tensor([[5, 6], [9, 9]], dtype=torch.int32)]
)
def test_drafts_of_any_layout(drafted: torch.Tensor) -> None:
    relay = Relay.create(2, CPU)
    chains, batch = Chains(relay, 100), Batch.of((0, 1), (2, 2), CPU)
    start, last = torch.tensor([3, 4]), torch.tensor([1, 2])
    assert chains.lay(batch, start, last, drafted)[0].tolist() == [1, 5, 6, 2, 9, 9]
    kept = chains.keep(batch, start, drafted, torch.tensor([5, 6, 7, 9, 8, 8]))
    assert kept.tolist() == [[2, 5, 6, 7], [1, 9, 8, 8]]
    assert relay.seq_lens.tolist() == [6, 6] and relay.last_tokens.tolist() == [7, 8]
