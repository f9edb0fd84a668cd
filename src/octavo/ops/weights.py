"""Weight matrices between the loader and the operations: one value type, four storage kinds.

`Matrix` is what a loader's tensors become before an `Ops` packs them: int4, int5 and int8 in groups of 32 inputs
(value = scale · code + minimum), bf16 or fp32. Q4_0, Q4_1, Q5_0 and Q8_0 files keep their own codes and fp16 scales;
so does Q4_K, whose two-level scales are multiplied out and rounded to fp16 (2⁻¹¹ relative).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal, Protocol

import numpy as np
import torch

from octavo.errors import ConfigError

Kind = Literal["int4", "int5", "int8", "bf16", "fp32"]
Quantization = Literal["auto", "none", "int8", "int4"]
GROUP = 32  # inputs that share a scale
_RANK = {"int4": 0, "int5": 1, "int8": 2, "bf16": 3, "fp32": 4}
_INT8_FILE_KINDS = {"Q5_1", "Q8_0", "Q8_1", "Q2_K", "Q3_K", "Q5_K", "Q6_K", "Q8_K"}


class TensorSource(Protocol):
    """The part of a checkpoint this module reads (see model/load)."""

    def shape(self, name: str) -> tuple[int, ...]: ...
    def kind(self, name: str) -> str: ...
    def tensor(self, name: str) -> torch.Tensor: ...
    def groups32(self, name: str) -> Any: ...


@dataclass(frozen=True)
class Matrix:
    """A weight [out, in] in one storage kind.

    int4  codes uint8 [out, in] in 0..15, scale and minimum fp16 [out, in/32]
    int5  codes int8 [out, in] in -16..15, scale fp16 [out, in/32], minimum None
    int8  codes int8 [out, in], scale fp16 [out, in/32], minimum None or fp16
    bf16  dense torch.bfloat16 [out, in]
    fp32  dense torch.float32 [out, in]
    """

    kind: Kind
    out_features: int
    in_features: int
    codes: np.ndarray | None = None
    scale: np.ndarray | None = None
    minimum: np.ndarray | None = None
    dense: torch.Tensor | None = None

    def dequantize(self) -> torch.Tensor:
        """float32 [out, in], exact: what the reference multiplies with."""
        if self.dense is not None:
            return self.dense.float()
        codes = torch.from_numpy(np.ascontiguousarray(self.codes)).float().view(self.out_features, -1, GROUP)
        w = codes * torch.from_numpy(np.ascontiguousarray(self.scale)).float()[..., None]
        if self.minimum is not None:
            w = w + torch.from_numpy(np.ascontiguousarray(self.minimum)).float()[..., None]
        return w.view(self.out_features, self.in_features)


def storage_kind(source: TensorSource, name: str, quantization: Quantization, dtype: torch.dtype) -> Kind:
    """The kind tensor `name` is kept in. `auto` keeps a quantised file's form and never quantises a float one."""
    dense: Kind = "fp32" if dtype == torch.float32 else "bf16"
    if quantization == "none" or source.shape(name)[-1] % GROUP:
        return dense
    if quantization == "int8":
        return "int8"
    if quantization not in ("auto", "int4"):
        raise ConfigError("quantization", quantization, "allowed: auto, none, int8, int4")
    file_kind = source.kind(name)
    if file_kind in ("Q4_0", "Q4_1", "Q4_K"):
        return "int4"
    if file_kind == "Q5_0":
        return "int5"
    if file_kind in _INT8_FILE_KINDS:
        return "int8"
    return "int4" if quantization == "int4" else dense


def read_matrices(
    source: TensorSource, names: Sequence[str], quantization: Quantization, dtype: torch.dtype
) -> list[Matrix]:
    """Tensors stacked over their outputs (q|k|v, gate|up), fused into as few matrices as kinds allow.

    One matrix when all members share a kind (the usual case); otherwise one per member, in order.
    """
    kinds = [storage_kind(source, name, quantization, dtype) for name in names]
    parts = [read_matrix(source, name, kind) for name, kind in zip(names, kinds, strict=True)]
    return [stack(parts)] if len(set(kinds)) == 1 else parts


def read_fused(
    source: TensorSource, names: Sequence[str], quantization: Quantization, dtype: torch.dtype
) -> Matrix:
    """Tensors stacked over their outputs as one matrix; members of different kinds take the widest kind."""
    kinds = [storage_kind(source, name, quantization, dtype) for name in names]
    widest = max(kinds, key=lambda kind: _RANK[kind])
    return stack([read_matrix(source, name, widest) for name in names])


def read_matrix(source: TensorSource, name: str, kind: Kind) -> Matrix:
    """One tensor in `kind`; exact where the file's own groups already are of that kind."""
    out, inner = source.shape(name)
    if kind in ("bf16", "fp32"):
        dtype = torch.bfloat16 if kind == "bf16" else torch.float32
        return Matrix(kind, out, inner, dense=source.tensor(name).to(dtype).contiguous())
    bits = {"int4": 4, "int5": 5, "int8": 8}[kind]
    groups = source.groups32(name)
    if groups is not None and groups.bits == bits:
        return Matrix(kind, out, inner, codes=groups.codes, scale=groups.scale, minimum=groups.minimum)
    if groups is not None and groups.bits < bits == 8:  # smaller codes are 8-bit codes with the same scale and minimum
        return Matrix(kind, out, inner, groups.codes.astype(np.int8), groups.scale, groups.minimum)
    return quantize(source.tensor(name), kind)


def quantize(weight: torch.Tensor, kind: Kind) -> Matrix:
    """Round-to-nearest in groups of 32. int8: scale = max|w|/127, int5: max|w|/15; int4: 16 levels span min..max."""
    out, inner = weight.shape
    if inner % GROUP:
        raise ConfigError("quantization", kind, f"input width {inner} is not a multiple of {GROUP}: use none")
    w = weight.float().view(out, inner // GROUP, GROUP)
    if kind in ("int5", "int8"):
        most = 15 if kind == "int5" else 127
        scale = (w.abs().amax(-1) / most).to(torch.float16)
        codes = torch.round(w / _nonzero(scale)).clamp(-most, most).to(torch.int8)
        return Matrix(kind, out, inner, codes.view(out, inner).numpy(), scale.numpy(), None)
    low = w.amin(-1).to(torch.float16)
    scale = ((w.amax(-1) - low.float()) / 15).to(torch.float16)
    codes = torch.round((w - low.float()[..., None]) / _nonzero(scale)).clamp(0, 15).to(torch.uint8)
    return Matrix("int4", out, inner, codes.view(out, inner).numpy(), scale.numpy(), low.numpy())


def stack(parts: Sequence[Matrix]) -> Matrix:
    """Matrices of one kind and one input width on top of each other."""
    first = parts[0]
    if any(p.kind != first.kind or p.in_features != first.in_features for p in parts):
        raise ValueError("stack: members differ in kind or input width")
    if len(parts) == 1:
        return first
    out = sum(p.out_features for p in parts)
    if first.dense is not None:
        dense = torch.cat([p.dense for p in parts if p.dense is not None])
        return Matrix(first.kind, out, first.in_features, dense=dense)
    minimum = None
    if any(p.minimum is not None for p in parts):
        minimum = np.concatenate([p.minimum if p.minimum is not None else np.zeros_like(p.scale) for p in parts])
    return Matrix(
        first.kind,
        out,
        first.in_features,
        np.concatenate([p.codes for p in parts if p.codes is not None]),
        np.concatenate([p.scale for p in parts if p.scale is not None]),
        minimum,
    )


def _nonzero(scale: torch.Tensor) -> torch.Tensor:
    wide = scale.float()[..., None]
    return torch.where(wide == 0, torch.ones_like(wide), wide)
