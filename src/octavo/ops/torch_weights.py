"""Packed weights of the torch operations: dense, int4 in groups of 32, int8 with one scale per output.

torch's int4 and int8 kernels for float32 activations are scalar loops (2 ms where bf16 activations take 0.16 ms),
so activations are rounded to bf16 for them and scales are kept in bf16: about 2e-3 relative weight error.
They are vectorised from AVX2 on; without it a quantised matrix is held dense (`vectorised`).
"""

from __future__ import annotations

from typing import Protocol

import torch
from torch.nn import functional as F

from octavo.ops.rows import linear_rows, prepare_linear
from octavo.ops.weights import GROUP, Matrix

_VECTOR_CAPABILITIES = ("AVX2", "AVX512", "AVX512_VNNI", "AVX10", "AMX")


def vectorised() -> bool:
    """Does this CPU run torch's int4 and int8 kernels with vector instructions?"""
    capability = torch.backends.cpu.get_cpu_capability().upper()
    return any(capability.startswith(name) for name in _VECTOR_CAPABILITIES)


class TorchWeight(Protocol):
    """A matrix [out, in] ready to be multiplied with."""

    kind: str
    out_features: int
    nbytes: int

    def linear(self, x: torch.Tensor) -> torch.Tensor: ...

    def embed(self, ids: torch.Tensor) -> torch.Tensor: ...


class DenseWeight:
    """fp32 or bf16; activations are cast to the weight's type and back."""

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.weight, self.bias = weight, bias
        self.kind = "bf16" if weight.dtype == torch.bfloat16 else "fp32"
        self.out_features, self.in_features = weight.shape
        self.nbytes = weight.nbytes + (bias.nbytes if bias is not None else 0)
        self._key = ("linear", self.kind, tuple(weight.shape))
        if weight.device.type == "cpu":
            prepare_linear(self._key, self._product, self.in_features, self.out_features, weight.dtype)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        y = linear_rows(x.to(self.weight.dtype), self._key, self._product, self.out_features).to(x.dtype)
        return y if self.bias is None else y + self.bias

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.weight)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.weight)


class Int4Weight:
    """value = (code − 8) · scale + zero with zero = minimum + 8 · scale, in torch's packed CPU layout."""

    kind = "int4"

    def __init__(self, matrix: Matrix, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = matrix.out_features, matrix.in_features
        codes = torch.from_numpy(matrix.codes).to(torch.int32).contiguous()
        self.packed = torch.ops.aten._convert_weight_to_int4pack_for_cpu(codes, 1)
        scale = torch.from_numpy(matrix.scale).float()
        low = torch.from_numpy(matrix.minimum).float() if matrix.minimum is not None else torch.zeros_like(scale)
        both = torch.stack((scale, low + 8 * scale), dim=-1)  # [out, groups, 2]
        self.scales_and_zeros = both.transpose(0, 1).contiguous().to(torch.bfloat16)
        self.bias = bias
        self.nbytes = self.packed.nbytes + self.scales_and_zeros.nbytes + (bias.nbytes if bias is not None else 0)
        self._key = ("int4", self.out_features, self.in_features)
        prepare_linear(self._key, self._product, self.in_features, self.out_features, torch.bfloat16)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        y = linear_rows(x.to(torch.bfloat16), self._key, self._product, self.out_features).to(x.dtype)
        return y if self.bias is None else y + self.bias

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = torch.ops.aten._weight_int4pack_mm_for_cpu(x, self.packed, GROUP, self.scales_and_zeros)
        return y

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        raise TypeError("an int4 matrix cannot serve as an embedding table: keep the table int8 or dense")


class Int8Weight:
    """Symmetric, one scale per output row: the form torch's kernel takes (groups of 32 do not fit it)."""

    kind = "int8"

    def __init__(self, weight: torch.Tensor, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features = weight.shape
        scale = weight.float().abs().amax(dim=1, keepdim=True) / 127
        codes = torch.round(weight.float() / scale.clamp(min=1e-30)).clamp(-127, 127)
        self.codes, self.scale, self.bias = codes.to(torch.int8), scale[:, 0].to(torch.bfloat16), bias
        self.nbytes = self.codes.nbytes + self.scale.nbytes + (bias.nbytes if bias is not None else 0)
        self._key = ("int8", self.out_features, self.in_features)
        prepare_linear(self._key, self._product, self.in_features, self.out_features, torch.bfloat16)

    def linear(self, x: torch.Tensor) -> torch.Tensor:
        y = linear_rows(x.to(torch.bfloat16), self._key, self._product, self.out_features).to(x.dtype)
        return y if self.bias is None else y + self.bias

    def _product(self, x: torch.Tensor) -> torch.Tensor:
        return torch._weight_int8pack_mm(x, self.codes, self.scale)

    def embed(self, ids: torch.Tensor) -> torch.Tensor:
        return F.embedding(ids, self.codes).float() * F.embedding(ids, self.scale.float()[:, None])


def pack(matrix: Matrix, bias: torch.Tensor | None, dtype: torch.dtype, device: torch.device) -> TorchWeight:
    """The form of `matrix` that torch runs on `device`; `dtype` is the activations' type.

    int4, int5 (as int8) and int8 stay packed on a CPU with vector instructions and become dense elsewhere.
    """
    bias = bias.to(device=device, dtype=dtype).contiguous() if bias is not None else None
    packed = device.type == "cpu" and vectorised()
    if matrix.kind == "int4" and packed and matrix.out_features % 16 == 0:
        return Int4Weight(matrix, bias)
    if matrix.kind in ("int5", "int8") and packed:
        return Int8Weight(matrix.dequantize(), bias)
    if matrix.dense is not None:
        return DenseWeight(_owned(matrix.dense, device), bias)
    return DenseWeight(matrix.dequantize().to(device=device, dtype=dtype), bias)


def _owned(weight: torch.Tensor, device: torch.device) -> torch.Tensor:
    """On `device`, contiguous and aligned: a mapped file may start anywhere, and kernels care."""
    if device.type != "cpu":
        return weight.to(device)
    return weight.clone(memory_format=torch.contiguous_format)
