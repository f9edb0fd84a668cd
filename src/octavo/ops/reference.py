"""Slow, obvious references in float64: one query and one head at a time. Tests and `octavo doctor` compare
the fast operations with these."""

from __future__ import annotations

import math

import torch

from octavo.ops.meta import KVLayer, KVView, StepMeta
from octavo.ops.weights import Matrix


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x²) + eps) · w over the last axis."""
    wide = x.double()
    return wide / torch.sqrt(wide.pow(2).mean(-1, keepdim=True) + eps) * weight.double()


def linear(x: torch.Tensor, matrix: Matrix, bias: torch.Tensor | None = None) -> torch.Tensor:
    """x Wᵀ + b with the exact values of the stored weight."""
    y = x.double() @ matrix.dequantize().double().T
    return y if bias is None else y + bias.double()


def rotate(x: torch.Tensor, position: int, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """One head vector [head_dim] at one position; tables [positions, r] turn the first 2r elements."""
    half = cos.shape[1]
    out = x.double().clone()
    for i in range(half):
        a, b = float(x[i]), float(x[half + i])
        c, s = float(cos[position, i]), float(sin[position, i])
        out[i], out[half + i] = a * c - b * s, b * c + a * s
    return out


def gated(gate_up: torch.Tensor, activation: str) -> torch.Tensor:
    """act(gate) · up of [n, 2·I]."""
    gate, up = gate_up.double().chunk(2, dim=-1)
    if activation == "silu":
        return gate / (1 + torch.exp(-gate)) * up
    inner = math.sqrt(2 / math.pi) * (gate + 0.044715 * gate**3)
    return 0.5 * gate * (1 + torch.tanh(inner)) * up


def visible_slots(meta: StepMeta, token: int, window_tokens: int | None) -> list[int]:
    """KV slots that one token of the step may read, as `StepMeta` defines them."""
    sequence = int(meta.q_seq[token])
    start, position = int(meta.kv_start[sequence]), int(meta.positions[token])
    if meta.mask is None:
        slots = list(range(int(meta.write_slots[token]) + 1))
    else:
        bits = int(meta.mask[token]) & (2**64 - 1)
        slots = [*range(start), *(start + j for j in range(64) if bits >> j & 1)]
    own = {
        int(meta.write_slots[i]): int(meta.positions[i])
        for i in range(meta.q_indptr[sequence], meta.q_indptr[sequence + 1])
    }
    # Inside a tree a slot's position is its token's depth, everywhere else it is the slot itself.
    at = own if meta.mask is not None else {}
    return [s for s in slots if window_tokens is None or at.get(s, s) > position - window_tokens]


def paged_attention(
    q: torch.Tensor, meta: StepMeta, kv: KVView, layer: KVLayer, scale: float, heads: int, kv_heads: int, head_dim: int
) -> torch.Tensor:
    """float64 [n, heads·head_dim] of rotated q [n, heads·head_dim]; the step's own K/V are already in the pages."""
    pool, table = kv.pool(layer.pool)
    out = torch.zeros(q.shape, dtype=torch.float64)
    for token in range(meta.num_tokens):
        row = int(meta.rows[int(meta.q_seq[token])])
        slots = visible_slots(meta, token, layer.window_tokens)
        places = [(int(table[row, slot // kv.page_size]), slot % kv.page_size) for slot in slots]
        seen = torch.stack([pool[page, layer.index, :, :, offset] for page, offset in places]).double()
        for head in range(heads):
            columns = slice(head * head_dim, (head + 1) * head_dim)
            keys, values = seen[:, 0, head // (heads // kv_heads)], seen[:, 1, head // (heads // kv_heads)]
            weights = torch.softmax(keys @ q[token, columns].double() * scale, dim=0)
            out[token, columns] = weights @ values
    return out


def page_vote(q: torch.Tensor, keys: torch.Tensor) -> float:
    """Page bounds of one query [heads, head_dim] for one page of keys [kv_heads, page_size, head_dim]: the upper
    bounds of q·k of the query heads of one KV head added up, the largest sum of any KV head."""
    votes = []
    group = q.shape[0] // keys.shape[0]
    for kv_head in range(keys.shape[0]):
        low, high = keys[kv_head].double().amin(0), keys[kv_head].double().amax(0)
        heads = q[kv_head * group : (kv_head + 1) * group].double()
        votes.append(sum(float(torch.maximum(head * low, head * high).sum()) for head in heads))
    return max(votes)


def counted_pages(
    position: int, votes: list[float], page_size: int, topk_pages: int, recent_tokens: int, dense_limit_tokens: int
) -> list[int]:
    """Pages a query at `position` counts, ascending; `votes` by page (only those of complete pages are looked at)."""
    pages = list(range(position // page_size + 1))
    if position + 1 <= dense_limit_tokens:
        return pages
    always = {0, *(c for c in pages if (c + 1) * page_size > position - recent_tokens + 1)}
    candidates = [c for c in pages if c not in always]
    best = sorted(candidates, key=lambda c: (-votes[c], c))[:topk_pages]
    return sorted([*always, *best])


def place_columns(
    order: list[int], column_of: list[int], needed: list[int], written: list[int], backed: int
) -> tuple[list[int], list[int], list[tuple[int, int]]]:
    """(order, column_of, [(place, column) that took one]) of a row's places after a step that needs `needed` columns.

    `order` lists the places, least recently used first; column_of[place] is -1 where empty.
    """
    hits = [place for place in order if column_of[place] in needed]
    new = [c for c in written if c not in column_of]
    missing = [*new, *(c for c in needed if c not in written and c not in column_of)]
    free = [place for place in order if place not in hits and column_of[place] < backed]
    if len(free) < len(new):  # a column to be written must have a place: better read a hit in the host tier
        free += [place for place in hits if column_of[place] < backed and column_of[place] not in written]
        missing = new
    taken = list(zip(free, missing, strict=False))
    after = list(column_of)
    for place, column in taken:
        after[place] = column
    loaded = [place for place, _ in taken]
    stale = [place for place in order if place not in hits and place not in loaded]
    return [*stale, *loaded, *(place for place in hits if place not in loaded)], after, taken
