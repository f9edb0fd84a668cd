"""The smallest pools that are accepted at start let one request at a time run to its end; bounds hold at every step."""

from __future__ import annotations

import random

import pytest

from octavo.errors import OutOfPages
from octavo.kv import balance
from octavo.kv.ledger import Ledger, LedgerConfig
from octavo.kv.sizing import (
    DecodeReserve,
    full_budget_pages,
    min_swa_pages,
    swa_decode_bound_pages,
    swa_prefill_bound_pages,
)
from tests.laws.helpers import ok

CASES = [(1, 5, 7), (16, 16, 33), (16, 40, 16), (16, 41, 5), (64, 50, 64), (64, 200, 100), (256, 200, 300)]


def reserves(overlap: bool) -> list[tuple[DecodeReserve, int]]:
    """(reserve, most tokens one step commits)."""
    return [
        (DecodeReserve.plain(overlap=overlap), 1),
        (DecodeReserve.eagle(steps=3, topk=2, draft_tokens=8, overlap=overlap), 4),
        (DecodeReserve.dflash(block_size=7, overlap=overlap), 7),
    ]


class Lone:
    """One request after another, with at most one step in flight when the next is planned."""

    def __init__(self, p: int, window: int, chunk: int, reserve: DecodeReserve, most: int, overlap: bool) -> None:
        self.context = {1: 53, 16: 101, 64: 325, 256: 1100}[p]
        full = full_budget_pages(self.context, 1, self.context, reserve.tokens, p)
        swa = min_swa_pages(window, reserve.tokens, chunk, p, overlap=overlap)
        self.ledger = Ledger(
            LedgerConfig(
                page_size=p, full_pages=full, swa_pages=swa, window_tokens=window, max_rows=2,
                context_tokens=self.context, largest_reserve_tokens=reserve.tokens, chunk_tokens=chunk, overlap=overlap,
            )
        )  # fmt: skip
        self.chunk, self.reserve, self.most, self.overlap = chunk, reserve, most, overlap
        self.prefill_bound = swa_prefill_bound_pages(window, chunk, p, overlap=overlap)
        self.decode_bound = swa_decode_bound_pages(window, reserve.tokens, p)

    def run(self, prompt: list[int], stream: list[int], rng: random.Random) -> None:
        ledger = self.ledger
        ledger.can_ever_fit(len(prompt), self.context - len(prompt), self.reserve)
        got = ledger.admit(prompt)
        flying: list[tuple[int, int]] = []  # (operation, committed length it brings), oldest first
        device = got.cached_tokens
        while device < self.context - 1:
            if device < len(prompt):
                device = min(len(prompt), device + self.chunk)
                ledger.extend(got.row, device)
                bound = self.prefill_bound
            else:
                self.plan(got, flying, stream)
                assert device + self.reserve.footprint <= ledger.allocated[got.row], "law 9"
                device = min(self.context - 1, device + rng.randint(1, self.most))
                bound = max(self.decode_bound, self.prefill_bound if flying else 0)
            held = int(ledger.allocated[got.row] - ledger.evicted[got.row]) // ledger.page_size
            assert held <= bound, (held, bound)
            flying.append((ledger.begin_op([got.row]), device))
            while len(flying) > (1 if self.overlap else 0):
                self.settle(got, flying, stream)
        while flying:
            self.settle(got, flying, stream)
        ledger.release(got.row, stream[: self.context])
        ok(ledger, at_rest=True)

    def plan(self, got, flying: list[tuple[int, int]], stream: list[int]) -> None:
        """A first plan behind a chunk in flight may want window, chunk and reserve at once. With a reserve larger than
        the chunk that is more than the smallest pool holds; once the chunk is settled it is not."""
        try:
            self.ledger.plan_decode([got.row], self.reserve)
        except OutOfPages:
            assert flying and self.reserve.tokens > self.chunk
            self.settle(got, flying, stream)
            self.ledger.plan_decode([got.row], self.reserve)

    def settle(self, got, flying: list[tuple[int, int]], stream: list[int]) -> None:
        op, committed = flying.pop(0)
        self.ledger.end_op(op)
        self.ledger.commit([got.row], [got.generation], [committed])
        self.ledger.publish(got.row, stream[: committed + 1])
        self.ledger.evict([got.row])
        balance.raise_on(self.ledger, deep=False)


@pytest.mark.parametrize("overlap", [False, True], ids=["settled", "overlap"])
@pytest.mark.parametrize(("p", "window", "chunk"), CASES)
def test_one_request_always_gets_to_its_end(p: int, window: int, chunk: int, overlap: bool) -> None:
    rng = random.Random(p + window)
    for reserve, most in reserves(overlap):
        lone = Lone(p, window, chunk, reserve, most, overlap)
        base = [rng.randrange(9) for _ in range(lone.context)]
        for turn in range(3):  # later requests find the pools full of cached pages, some of them their own prefix
            stream = base[: rng.randrange(lone.context)] if turn else []
            stream = stream + [rng.randrange(9) for _ in range(lone.context - len(stream))]
            lone.run(stream[: rng.randint(1, lone.context - 1)], stream, rng)
