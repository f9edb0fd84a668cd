"""What the tests of the native operations share: programs from one-line bodies, KV tables, references in float64."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import numpy as np
import pytest
import torch

from octavo.ops import native_lib
from octavo.ops.meta import KVView, StepMeta
from octavo.ops.weights import GROUP, Matrix

if native_lib.library() is None:
    pytest.skip("native operations are not built or switched off", allow_module_level=True)

from octavo.ops.native import NativeOps

ISAS = native_lib.available_isas()
KINDS = ("int4", "int5", "int8", "int8min", "bf16", "fp32")


def random_matrix(kind: str, out: int, inner: int, seed: int = 0) -> Matrix:
    """A weight with full-range codes, scales of mixed size and sign-free minima."""
    rng = np.random.default_rng(seed)
    if kind in ("bf16", "fp32"):
        dense = torch.from_numpy(rng.normal(size=(out, inner)).astype(np.float32))
        return Matrix(kind, out, inner, dense=dense.bfloat16() if kind == "bf16" else dense)  # type: ignore[arg-type]
    groups = (out, inner // GROUP)
    scale = (rng.uniform(0.001, 0.02, groups) * rng.choice([-1, 1], groups)).astype(np.float16)
    minimum = rng.normal(0, 0.1, groups).astype(np.float16)
    if kind == "int4":
        return Matrix("int4", out, inner, rng.integers(0, 16, (out, inner)).astype(np.uint8), scale, minimum)
    if kind == "int5":
        return Matrix("int5", out, inner, rng.integers(-16, 16, (out, inner)).astype(np.int8), scale, None)
    codes = rng.integers(-128, 128, (out, inner)).astype(np.int8)
    return Matrix("int8", out, inner, codes, scale, minimum if kind == "int8min" else None)


def quantised_rows(x: torch.Tensor) -> torch.Tensor:
    """Activations as the int4/int8 products see them: int8 codes times a scale, per row and group of 32."""
    groups = x.float().view(x.shape[0], -1, GROUP)
    top = groups.abs().amax(-1, keepdim=True)
    inverse = torch.where(top > 0, torch.full_like(top, 127.0) / top, torch.zeros_like(top))  # (127 / top multiplies)
    codes = torch.round(groups * inverse).clamp(-127, 127)
    return (codes.double() * (top / torch.full_like(top, 127.0)).double()).view(x.shape)


def linear_reference(x: torch.Tensor, matrix: Matrix) -> torch.Tensor:
    """In float64, over the inputs as the product sees them."""
    rounded = x.bfloat16() if matrix.kind == "bf16" else x
    seen = quantised_rows(x) if matrix.kind in ("int4", "int5", "int8") else rounded.double()
    return seen @ matrix.dequantize().double().T


def tokens(n: int, *, ids: torch.Tensor | None = None) -> StepMeta:
    """n tokens of one sequence at slots 0 … n-1 of row 0."""
    at = torch.arange(n)
    zero = torch.zeros(1, dtype=torch.int64)
    return StepMeta(
        at if ids is None else ids, at, at, torch.zeros(n, dtype=torch.int64), zero, zero, None, (0, n), n
    )


def run_body(
    ops: NativeOps, body: Callable[..., None], inputs: dict[str, torch.Tensor], meta: StepMeta | None = None,
    kv: KVView | None = None,
) -> dict[str, torch.Tensor]:
    n = next(iter(inputs.values())).shape[0] if inputs else 1
    return ops.program(body).run(meta or tokens(n), kv, inputs)


def paged(
    pages: int, layers: int, kv_heads: int, page_size: int, head_dim: int, rows: int, *, dtype: torch.dtype, seed: int
) -> KVView:
    """Pools filled with noise, page tables a random permutation; the swa pool is a second, independent one."""
    generator = torch.Generator().manual_seed(seed)
    shape = (pages, layers, 2, kv_heads, page_size, head_dim)
    full, swa = (torch.randn(shape, generator=generator).to(dtype) for _ in range(2))
    width = pages // rows
    tables = [torch.randperm(pages, generator=generator)[: rows * width].view(rows, width).int() for _ in range(2)]
    return KVView(full, swa, tables[0].contiguous(), tables[1].contiguous(), page_size)


def merge(parts: list[StepMeta]) -> StepMeta:
    """Several sequences in one step."""
    def cat(name: str) -> torch.Tensor:
        return torch.cat([getattr(p, name) for p in parts])

    indptr = [0]
    for part in parts:
        indptr.append(indptr[-1] + part.num_tokens)
    masks = [p.mask for p in parts]
    seq = torch.cat([torch.full((p.num_tokens,), i, dtype=torch.int64) for i, p in enumerate(parts)])
    mask = None if masks[0] is None else torch.cat([m for m in masks if m is not None])
    return replace(
        parts[0], token_ids=cat("token_ids"), positions=cat("positions"), write_slots=cat("write_slots"), q_seq=seq,
        rows=cat("rows"), kv_start=cat("kv_start"), mask=mask, q_indptr=tuple(indptr),
        max_kv_tokens=max(p.max_kv_tokens for p in parts),
    )  # fmt: skip


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return a.shape == b.shape and bool(torch.equal(a.view(torch.int32), b.view(torch.int32)))
