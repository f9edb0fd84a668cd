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
