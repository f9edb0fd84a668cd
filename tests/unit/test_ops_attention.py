"""Paged attention in torch: against the slow reference, and bit for bit against itself under other company."""

from __future__ import annotations

from dataclasses import dataclass, replace

import pytest
import torch

from octavo.ops import reference
from octavo.ops.meta import KVLayer, KVView, StepMeta
from octavo.ops.torch_attention import AttentionStep

HEADS, KV_HEADS, DIM = 6, 2, 24
WIDTH = HEADS * DIM
SLOTS = 320


@dataclass
class Case:
    """Sequences with random keys, values and queries that depend on (sequence, slot) alone."""

    lengths: list[int]  # slots present after the step
    queries: list[int]  # the last so many of them are this step's tokens
    page_size: int = 16
    masks: list[list[int]] | None = None  # per sequence, per token
    depths: list[list[int]] | None = None
    window: int | None = None
    seed: int = 0
    garbage: float = 0.0  # what pages hold where nothing was written

    def vectors(self, sequence: int, kind: int, width: int) -> torch.Tensor:
        generator = torch.Generator().manual_seed(self.seed * 100 + sequence * 10 + kind)
        return torch.randn(SLOTS, width, generator=generator)

    def build(self, order: list[int] | None = None) -> tuple[StepMeta, KVView, torch.Tensor, KVLayer]:
        order = order if order is not None else list(range(len(self.lengths)))
        p, width = self.page_size, -(-SLOTS // self.page_size)
        count = width * len(order)
        pages = torch.randperm(count, generator=torch.Generator().manual_seed(9)).to(torch.int32)
        table = torch.full((len(order) + 2, width), -1, dtype=torch.int32)
        kv = torch.full((count + 1, 3, 2, KV_HEADS, p, DIM), self.garbage)
        ids, positions, slots, seqs, masks, indptr, q = [], [], [], [], [], [0], []
        layer = KVLayer("full", 1, self.window)
        for at, s in enumerate(order):
            used = -(-self.lengths[s] // p)
            table[at + 1, :used] = pages[at * width : at * width + used]
            for half in (0, 1):
                data = self.vectors(s, half, KV_HEADS * DIM)[: self.lengths[s]].view(-1, KV_HEADS, DIM)
                for slot in range(self.lengths[s]):
                    kv[table[at + 1, slot // p], layer.index, half, :, slot % p] = data[slot]
            start = self.lengths[s] - self.queries[s]
            own = list(range(start, self.lengths[s]))
            depths = self.depths[s] if self.depths is not None else list(range(self.queries[s]))
            slots += own
            positions += [start + d for d in depths]
            ids += [0] * len(own)
            seqs += [at] * len(own)
            masks += self.masks[s] if self.masks is not None else []
            indptr.append(indptr[-1] + len(own))
            q.append(self.vectors(s, 2, WIDTH)[own])
        meta = StepMeta(
            token_ids=torch.tensor(ids),
            positions=torch.tensor(positions),
            write_slots=torch.tensor(slots),
            q_seq=torch.tensor(seqs),
            rows=torch.arange(1, len(order) + 1),
            kv_start=torch.tensor([self.lengths[s] - self.queries[s] for s in order]),
            mask=torch.tensor(masks) if self.masks is not None else None,
            q_indptr=tuple(indptr),
            max_kv_tokens=max(self.lengths[s] for s in order),
        )
        return meta, KVView(kv, None, table, None, p), torch.cat(q), layer

    def run(self, order: list[int] | None = None, extra_slots: int = 0) -> list[torch.Tensor]:
        """Attention output of each sequence of `order`."""
        meta, kv, q, layer = self.build(order)
        meta = replace(meta, max_kv_tokens=meta.max_kv_tokens + extra_slots)
        out = AttentionStep(meta, kv).attend(q, layer, 0.37, HEADS, KV_HEADS, DIM)
        return list(out.split([b - a for a, b in zip(meta.q_indptr, meta.q_indptr[1:], strict=False)]))


TREE = Case(
    lengths=[7 + 100, 7 + 30, 7],
    queries=[7, 7, 7],
    masks=[[0b1, 0b11, 0b101, 0b1011, 0b10101, 0b100101, 0b1001011]] * 3,
    depths=[[0, 1, 1, 2, 2, 2, 3]] * 3,
)
CASES = {
    "decode": Case([1, 17, 64, 65, 300], [1, 1, 1, 1, 1]),
    "prefill": Case([90], [90]),
    "ragged": Case([5, 130, 64, 200], [5, 40, 1, 7]),
    "window 5": Case([5, 130, 64, 300], [5, 40, 1, 7], window=5),
    "window 64": Case([5, 130, 64, 300], [5, 40, 1, 7], window=64),
    "window 1": Case([3, 70], [3, 2], window=1),
    "tree": TREE,
    "tree, window 3": replace(TREE, window=3),
    "block, not causal": Case([40, 12], [8, 8], masks=[[0xFF] * 8] * 2),
    "all 64 bits": Case([100], [64], masks=[[(1 << (j + 1)) - 1 if j < 63 else -1 for j in range(64)]]),
    "long windowed tail": Case([300, 290], [1, 1], window=20),
}


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("page_size", [1, 16, 64, 256])
def test_equals_the_slow_reference(name: str, page_size: int) -> None:
    case = replace(CASES[name], page_size=page_size, garbage=float("nan"))
    meta, kv, q, layer = case.build()
    ours = AttentionStep(meta, kv).attend(q, layer, 0.37, HEADS, KV_HEADS, DIM)
    expected = reference.paged_attention(q, meta, kv, layer, 0.37, HEADS, KV_HEADS, DIM)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("name", CASES)
def test_bits_do_not_depend_on_company_page_size_or_bounds(name: str) -> None:
    case = CASES[name]
    together = case.run()
    count = len(case.lengths)
    for order in ([*range(count)][::-1], *([s] for s in range(count))):
        for got, s in zip(case.run(order), order, strict=True):
            assert torch.equal(got, together[s]), (order, s)
    for page_size in (1, 2, 64, 128):
        for got, expected in zip(replace(case, page_size=page_size).run(), together, strict=True):
            assert torch.equal(got, expected), page_size
    for got, expected in zip(case.run(extra_slots=170), together, strict=True):
        assert torch.equal(got, expected)


@pytest.mark.parametrize("window", [None, 5, 70])
def test_bits_do_not_depend_on_chunks(window: int | None) -> None:
    """The last token's output: prefilled in one chunk of 290, in chunks of 7, or decoded alone."""
    whole = Case([290], [290], window=window).run()[0]
    for chunk in (1, 2, 3, 7, 64, 129):
        assert torch.equal(Case([290], [chunk], window=window).run()[0], whole[-chunk:]), chunk


def test_a_drafted_row_sees_what_a_plain_row_sees() -> None:
    """Every path of a tree against plain decode of the same keys: same bits."""
    chain = Case([50], [4], masks=[[0b1, 0b11, 0b111, 0b1111]])
    plain = Case([50], [4])
    assert torch.equal(chain.run()[0], plain.run()[0])
    for count in range(1, 5):
        one = replace(plain, lengths=[46 + count], queries=[1])
        assert torch.equal(one.run()[0][0], plain.run()[0][count - 1])


def test_writes_go_where_the_table_says_and_only_there() -> None:
    meta, kv, _, layer = Case([20, 40], [3, 5], page_size=16).build()
    before = kv.full.clone()
    k = torch.arange(8 * KV_HEADS * DIM).float().view(8, -1)
    AttentionStep(meta, kv).write(layer, k, -k, KV_HEADS, DIM)
    changed = (kv.full != before).flatten(1).any(1).nonzero().flatten().tolist()
    expected = set()
    for token in range(8):
        row = int(meta.rows[int(meta.q_seq[token])])
        slot = int(meta.write_slots[token])
        page = int(kv.full_table[row, slot // 16])
        expected.add(page)
        stored = kv.full[page, layer.index, :, :, slot % 16]
        assert torch.equal(stored[0].flatten(), k[token]) and torch.equal(stored[1].flatten(), -k[token])
    assert set(changed) == expected
    assert torch.equal(kv.full[:, 0], before[:, 0]) and torch.equal(kv.full[:, 2], before[:, 2])


def test_a_write_without_a_page_lands_in_the_spare_page() -> None:
    meta, kv, _, layer = Case([20, 40], [3, 5], page_size=16).build()
    kv.full_table.fill_(-1)
    before = kv.full.clone()
    k = torch.ones(8, KV_HEADS * DIM)
    AttentionStep(meta, kv).write(layer, k, k, KV_HEADS, DIM)
    assert torch.equal(kv.full[:-1], before[:-1])


def test_bf16_pages_are_read_in_float32() -> None:
    meta, kv, q, layer = CASES["ragged"].build()
    rounded = replace(kv, full=kv.full.bfloat16())
    ours = AttentionStep(meta, rounded).attend(q, layer, 0.37, HEADS, KV_HEADS, DIM)
    expected = reference.paged_attention(q, meta, rounded, layer, 0.37, HEADS, KV_HEADS, DIM)
    torch.testing.assert_close(ours.double(), expected, rtol=1e-4, atol=1e-5)
