"""Paged attention of the compiled module: against float64 softmax, and the same bits whatever the company."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.ops.meta import KVLayer, KVView, StepMeta
from octavo.ops.native import NativeOps
from tests.unit.native_support import ISAS, merge, paged, run_body, same_bits


def step(
    start: int, n: int, *, row: int = 0, masks: list[int] | None = None, depths: list[int] | None = None
) -> StepMeta:
    """n tokens after `start` committed ones: causal, or a tree given by ancestor masks and depths."""
    slots = torch.arange(start, start + n)
    mask = None
    if masks is not None:
        mask = torch.tensor([m - (1 << 64) if m >> 63 else m for m in masks], dtype=torch.int64)
    positions = slots if depths is None else start + torch.tensor(depths)
    one = torch.tensor([row])
    return StepMeta(
        torch.zeros(n, dtype=torch.int64), positions, slots, torch.zeros(n, dtype=torch.int64), one,
        torch.tensor([start]), mask, (0, n), start + n,
    )  # fmt: skip


def attend(
    ops: NativeOps, q: torch.Tensor, meta: StepMeta, kv: KVView, heads: int, layer: KVLayer, scale: float = 0.2
) -> torch.Tensor:
    pages, _ = kv.pool(layer.pool)
    kv_heads, head_dim = pages.shape[3], pages.shape[5]

    def body(tape: Any) -> None:
        x = tape.input("q", heads * head_dim)
        tape.output("y", tape.attention(x, layer, scale, heads, kv_heads, head_dim))

    return run_body(ops, body, {"q": q}, meta, kv)["y"]


def visible_slots(meta: StepMeta, token: int, window: int | None) -> list[int]:
    """The contract of ops/meta.py, written out."""
    start = int(meta.kv_start[meta.q_seq[token]])
    if meta.mask is None:
        slots = list(range(int(meta.write_slots[token]) + 1))
        at = slots
    else:
        bits = int(meta.mask[token]) % (1 << 64)
        own = [j for j in range(64) if bits >> j & 1]
        slots = [*range(start), *(start + j for j in own)]
        at = [*range(start), *(start + rank for rank in range(len(own)))]
    low = 0 if window is None else int(meta.positions[token]) - window + 1
    return [slot for slot, position in zip(slots, at, strict=True) if position >= low]


def reference(q: torch.Tensor, meta: StepMeta, kv: KVView, heads: int, layer: KVLayer, scale: float) -> torch.Tensor:
    pages, table = kv.pool(layer.pool)
    kv_heads, head_dim = pages.shape[3], pages.shape[5]
    out = torch.zeros(q.shape[0], heads, head_dim, dtype=torch.float64)
    for t in range(q.shape[0]):
        row = int(meta.rows[meta.q_seq[t]])
        slots = visible_slots(meta, t, layer.window_tokens)
        if not slots:
            continue
        where = [(int(table[row, s // kv.page_size]), s % kv.page_size) for s in slots]
        keys = torch.stack([pages[p, layer.index, 0, :, o] for p, o in where]).double()
        values = torch.stack([pages[p, layer.index, 1, :, o] for p, o in where]).double()
        for h in range(heads):
            group = h * kv_heads // heads
            scores = keys[:, group] @ q[t].view(heads, head_dim)[h].double() * scale
            out[t, h] = torch.softmax(scores, 0) @ values[:, group]
    return out.view(q.shape[0], -1)


@pytest.mark.parametrize("isa", ISAS)
@settings(max_examples=40, deadline=None)
@given(
    start=st.integers(0, 300), n=st.integers(1, 12), group=st.sampled_from([1, 2, 3, 5, 8, 17]),
    kv_heads=st.integers(1, 3),
    page_size=st.sampled_from([1, 3, 16, 64]), window=st.sampled_from([None, 1, 7, 128, 200]),
    head_dim=st.sampled_from([8, 16, 20, 64, 128]), bf16=st.booleans(), tree=st.booleans(), seed=st.integers(0, 9),
)  # fmt: skip
def test_against_float64(
    isa: str, start: int, n: int, group: int, kv_heads: int, page_size: int, window: int | None, head_dim: int,
    bf16: bool, tree: bool, seed: int,
) -> None:  # fmt: skip
    generator = torch.Generator().manual_seed(seed)
    masks = depths = None
    if tree:
        parents = [-1] + [int(torch.randint(-1, i, (1,), generator=generator)) for i in range(1, n)]
        masks, depths = [], []
        for i, parent in enumerate(parents):
            masks.append((masks[parent] if parent >= 0 else 0) | 1 << i)
            depths.append(depths[parent] + 1 if parent >= 0 else 0)
    pages = 2 * -(-(start + n) // page_size)
    kv = paged(pages, 2, kv_heads, page_size, head_dim, 2, dtype=torch.bfloat16 if bf16 else torch.float32, seed=seed)
    meta = step(start, n, row=1, masks=masks, depths=depths)
    q = torch.randn(n, group * kv_heads * head_dim, generator=generator)
    layer = KVLayer("swa", 1, window)
    got = attend(NativeOps(2, isa=isa), q, meta, kv, group * kv_heads, layer)
    rounding = 3e-6 * max(1.0, head_dim / 64)  # scores of random vectors, and their error, grow with the length
    want = reference(q, meta, kv, group * kv_heads, layer, 0.2)
    assert torch.allclose(got.double(), want, atol=rounding, rtol=1e-5)


@pytest.mark.parametrize("bf16", [False, True])
@pytest.mark.parametrize("window", [None, 150])
def test_bits_do_not_depend_on_company_pages_chunks_threads_or_instruction_set(bf16: bool, window: int | None) -> None:
    """One row of 400 tokens, its last 40 asked one by one, then in every other way."""
    length, asked, heads, kv_heads, head_dim = 400, 40, 6, 2, 64
    dtype = torch.bfloat16 if bf16 else torch.float32
    data = torch.randn(2, kv_heads, length, head_dim, generator=torch.Generator().manual_seed(5)).to(dtype)
    q = torch.randn(asked, heads * head_dim, generator=torch.Generator().manual_seed(6))
    layer = KVLayer("full", 0, window)

    def table(page_size: int, seed: int) -> KVView:
        per_row = -(-length // page_size)
        kv = paged(3 * per_row, 1, kv_heads, page_size, head_dim, 3, dtype=dtype, seed=seed)
        assert kv.full is not None
        for slot in range(length):
            page = int(kv.full_table[1, slot // page_size])
            kv.full[page, 0, :, :, slot % page_size] = data[:, :, slot]
        return kv

    kv = table(16, 0)
    one = NativeOps(1, isa=ISAS[0])
    single = [attend(one, q[i : i + 1], step(length - asked + i, 1, row=1), kv, heads, layer) for i in range(asked)]
    want = torch.cat(single)
    for isa in ISAS:
        for threads in (1, 2, 3):
            ops = NativeOps(threads, isa=isa)
            for page_size in (1, 7, 16, 64):
                other = table(page_size, page_size)
                whole = attend(ops, q, step(length - asked, asked, row=1), other, heads, layer)
                assert same_bits(whole, want), (isa, threads, page_size)
                company = merge([step(30, 3, row=0), step(length - 5, 5, row=1), step(399, 1, row=2)])
                mixed = torch.cat([torch.randn(3, q.shape[1]), q[-5:], torch.randn(1, q.shape[1])])
                assert same_bits(attend(ops, mixed, company, other, heads, layer)[3:8], want[-5:])


@pytest.mark.parametrize("window", [None, 20])
def test_a_path_of_a_tree_has_the_bits_of_the_plain_row(window: int | None) -> None:
    """Keys of two branches interleaved in the slots; each branch equals a row that holds only its path."""
    start, heads, kv_heads, head_dim, page_size = 250, 4, 2, 32, 4
    kv = paged(160, 1, kv_heads, page_size, head_dim, 2, dtype=torch.float32, seed=3)
    assert kv.full is not None
    depth = 6  # slots start + 2d: branch a, start + 2d + 1: branch b
    masks = [sum(1 << (2 * e + i % 2) for e in range(i // 2 + 1)) for i in range(2 * depth)]
    meta = step(start, 2 * depth, row=0, masks=masks, depths=[i // 2 for i in range(2 * depth)])
    q = torch.randn(2 * depth, heads * head_dim)
    layer = KVLayer("full", 0, window)
    ops = NativeOps(2)
    tree = attend(ops, q, meta, kv, heads, layer)
    for branch in (0, 1):
        for slot in range(start + depth):  # row 1 gets the path's keys at consecutive slots
            source = slot if slot < start else start + 2 * (slot - start) + branch
            page, to = int(kv.full_table[0, source // page_size]), int(kv.full_table[1, slot // page_size])
            kv.full[to, 0, :, :, slot % page_size] = kv.full[page, 0, :, :, source % page_size]
        plain = attend(ops, q[branch::2], step(start, depth, row=1), kv, heads, layer)
        assert same_bits(tree[branch::2].contiguous(), plain)


def test_block_mask_sees_the_whole_block() -> None:
    """A block draft: every token sees all tokens of its block, later ones too (64 bits, the sign bit among them)."""
    kv = paged(10, 1, 1, 16, 16, 1, dtype=torch.float32, seed=1)
    meta = step(70, 64, masks=[(1 << 64) - 1] * 64)
    q = torch.randn(64, 2 * 16)
    got = attend(NativeOps(2), q, meta, kv, 2, KVLayer("full", 0))
    assert torch.allclose(got.double(), reference(q, meta, kv, 2, KVLayer("full", 0), 0.2), atol=2e-6)


@pytest.mark.parametrize("page_size", [1, 16])
def test_pages_below_the_window_are_not_looked_up(page_size: int) -> None:
    window, start = 40, 200
    kv = paged(2 * -(-210 // page_size), 1, 1, page_size, 16, 2, dtype=torch.float32, seed=2)
    layer = KVLayer("swa", 0, window)
    meta = step(start, 3)
    q = torch.randn(3, 16)
    want = attend(NativeOps(1), q, meta, kv, 1, layer)
    assert kv.swa_table is not None
    kv.swa_table[0, : (start - window + 1) // page_size] = -1
    assert same_bits(attend(NativeOps(1), q, meta, kv, 1, layer), want)


def test_keys_that_are_not_visible_do_not_matter_even_as_nan() -> None:
    kv = paged(8, 1, 2, 16, 64, 1, dtype=torch.float32, seed=4)
    assert kv.full is not None
    meta = step(20, 4, masks=[1, 2, 1 | 4, 2 | 8], depths=[0, 0, 1, 1])
    q = torch.randn(4, 4 * 64)
    want = attend(NativeOps(1), q, meta, kv, 4, KVLayer("full", 0))
    page, other = int(kv.full_table[0, 1]), int(kv.full_table[0, 2])
    kv.full[page, 0, :, :, 24 % 16 :] = float("nan")
    kv.full[other] = float("nan")
    assert same_bits(attend(NativeOps(1), q, meta, kv, 4, KVLayer("full", 0)), want)
    # row 0 and 2 see slot 20, not 21
    kv.full[page, 0, :, :, 21 % 16] = float("nan")
    again = attend(NativeOps(1), q, meta, kv, 4, KVLayer("full", 0))
    assert same_bits(again[[0, 2]], want[[0, 2]]) and bool(again[[1, 3]].isnan().all())


def test_long_rows_split_over_threads_have_the_bits_of_one_thread() -> None:
    kv = paged(600, 1, 1, 16, 64, 2, dtype=torch.float32, seed=8)
    q = torch.randn(1, 3 * 64)
    meta = step(4700, 1)
    want = attend(NativeOps(1), q, meta, kv, 3, KVLayer("full", 0))
    for _ in range(20):
        assert same_bits(attend(NativeOps(3), q, meta, kv, 3, KVLayer("full", 0)), want)
    batch = merge([meta] + [replace(step(100 + i, 2), rows=torch.tensor([1])) for i in range(30)])
    many = attend(NativeOps(2), torch.cat([q, torch.randn(60, 192)]), batch, kv, 3, KVLayer("full", 0))
    assert same_bits(many[:1], want)
