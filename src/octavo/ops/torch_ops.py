"""The operations of `ops/base.py` in torch: each runs at once, on a CPU, on CUDA and under fake tensors.

Nothing here reads a device value on the host; shapes come from the host fields of `StepMeta`. Where a library
kernel's bits depend on the number of rows (torch's rsqrt, sigmoid, silu and gelu differ between the vector body
and the tail of a loop), the operation is composed of kernels whose bits do not.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch
from torch.nn import functional as F

from octavo.ops.base import Activation, Body
from octavo.ops.meta import KVLayer, KVView, StepMeta
from octavo.ops.torch_attention import AttentionStep, prepare_attention
from octavo.ops.torch_sparse import SparseStep
from octavo.ops.torch_weights import TorchWeight, pack
from octavo.ops.weights import Matrix


class TorchOps:
    """`dtype` is the activations' type: float32 (deterministic) or bfloat16."""

    def __init__(self, device: torch.device | str = "cpu", dtype: torch.dtype = torch.float32) -> None:
        self.device, self.dtype = torch.device(device), dtype
        self.name = f"torch {self.device.type}"

    def matrix(self, matrix: Matrix, bias: torch.Tensor | None = None) -> TorchWeight:
        return pack(matrix, bias, self.dtype, self.device)

    def vector(self, weight: torch.Tensor) -> torch.Tensor:
        return weight.to(device=self.device, dtype=torch.float32, copy=True).contiguous()

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        if self.device.type == "cpu":
            prepare_attention(2 * cos.shape[1])
        return cos.to(self.device), sin.to(self.device)

    def program(self, body: Body) -> TorchProgram:
        return TorchProgram(self, body)

    @torch.no_grad()
    def embed(self, table: TorchWeight, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        rows = table.embed(ids).to(self.dtype)
        return rows if scale == 1.0 else rows * scale

    @torch.no_grad()
    def logits(self, hidden: torch.Tensor, head: TorchWeight, softcap: float | None = None) -> torch.Tensor:
        logits = head.linear(hidden.to(self.dtype)).float()
        return logits if softcap is None else softcap * torch.tanh(logits / softcap)

    def argmax(self, hidden: torch.Tensor, head: TorchWeight) -> torch.Tensor:
        return self.logits(hidden, head).argmax(dim=-1)


class TorchProgram:
    """A body, run anew on every call."""

    def __init__(self, ops: TorchOps, body: Body) -> None:
        self._ops, self._body = ops, body

    @torch.no_grad()
    def run(
        self, meta: StepMeta, kv: KVView | None, inputs: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        tape = TorchTape(self._ops, meta, kv, inputs or {})
        self._body(tape)
        return tape.outputs


class TorchTape:
    """One forward. Values are tensors [n, width] of the ops' dtype."""

    def __init__(self, ops: TorchOps, meta: StepMeta, kv: KVView | None, inputs: Mapping[str, torch.Tensor]) -> None:
        self._ops, self._meta, self._inputs = ops, meta, inputs
        self._step = AttentionStep(meta, kv) if kv is not None else None
        self._sparse = SparseStep.of(meta, kv) if kv is not None and kv.sparse is not None else None
        self._angles: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}
        self.outputs: dict[str, torch.Tensor] = {}

    def embed(self, table: TorchWeight, scale: float = 1.0) -> torch.Tensor:
        return self._ops.embed(table, self._meta.token_ids, scale)

    def input(self, name: str, width: int) -> torch.Tensor:
        x = self._inputs[name]
        if x.shape != (self._meta.num_tokens, width):
            raise ValueError(f"input {name}: shape {tuple(x.shape)}, expected ({self._meta.num_tokens}, {width})")
        return x.to(self._ops.dtype)

    def output(self, name: str, x: torch.Tensor, column: int = 0, width: int | None = None) -> None:
        if width is None:
            self.outputs[name] = x
            return
        if name not in self.outputs:
            self.outputs[name] = x.new_empty(x.shape[0], width)
        self.outputs[name][:, column : column + x.shape[1]] = x

    def rms_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        return F.rms_norm(x.float(), (x.shape[-1],), weight, eps).to(x.dtype)

    def head_norm(self, x: torch.Tensor, weight: torch.Tensor, eps: float, head_dim: int) -> torch.Tensor:
        heads = x.reshape(-1, head_dim)
        return self.rms_norm(heads, weight, eps).view(x.shape)

    def linear(self, x: torch.Tensor, weight: TorchWeight) -> torch.Tensor:
        return weight.linear(x)

    def split(self, x: torch.Tensor, widths: Sequence[int]) -> tuple[torch.Tensor, ...]:
        return torch.split(x, list(widths), dim=-1)

    def concat(self, parts: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.cat(list(parts), dim=-1)

    def rope_write(
        self,
        q: torch.Tensor | None,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: KVLayer,
        rope: tuple[torch.Tensor, torch.Tensor],
        head_dim: int,
    ) -> torch.Tensor | None:
        cos, sin = self._cos_sin(rope)
        rotated, kv_heads = _rotate(k, cos, sin, head_dim), k.shape[-1] // head_dim
        turned = None if q is None else _rotate(q, cos, sin, head_dim)
        if layer.pool != "sparse":
            self._attention().write(layer, rotated, v, kv_heads, head_dim)
        elif turned is None:
            raise ValueError("a sparse layer needs queries: draft layers are dense")
        else:
            self._sparse_step().write(layer, turned, rotated, v, kv_heads, head_dim)
        return turned

    def attention(
        self, q: torch.Tensor, layer: KVLayer, scale: float, heads: int, kv_heads: int, head_dim: int
    ) -> torch.Tensor:
        step = self._sparse_step() if layer.pool == "sparse" else self._attention()
        return step.attend(q, layer, scale, heads, kv_heads, head_dim)

    def gated(self, gate_up: torch.Tensor, activation: Activation) -> torch.Tensor:
        gate, up = gate_up.float().chunk(2, dim=-1)
        return (_ACTIVATIONS[activation](gate) * up).to(gate_up.dtype)

    def add(self, a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        return a + b

    def scale(self, x: torch.Tensor, factor: float) -> torch.Tensor:
        return x * factor

    def argmax(self, name: str, x: torch.Tensor, weight: TorchWeight) -> None:
        self.outputs[name] = self._ops.argmax(x, weight)

    def _attention(self) -> AttentionStep:
        if self._step is None:
            raise ValueError("this program attends: run it with a KVView")
        return self._step

    def _sparse_step(self) -> SparseStep:
        if self._sparse is None:
            raise ValueError("this program has sparse layers: run it with a KVView that has them")
        return self._sparse

    def _cos_sin(self, rope: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
        """[n, 1, r] each. A step launched behind the context's end (its result is ignored) stays in the table."""
        key = id(rope[0])
        if key not in self._angles:
            at = self._meta.positions.clamp(0, rope[0].shape[0] - 1)
            self._angles[key] = (rope[0][at][:, None], rope[1][at][:, None])
        return self._angles[key]


def _rotate(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, head_dim: int) -> torch.Tensor:
    """Half-split rotation of the first 2r elements of every head of x [n, heads·head_dim], in float32."""
    heads = x.float().reshape(x.shape[0], -1, head_dim)
    half = cos.shape[-1]
    first, second = heads[..., :half], heads[..., half : 2 * half]
    turned = [first * cos - second * sin, second * cos + first * sin]
    if 2 * half < head_dim:
        turned.append(heads[..., 2 * half :])
    return torch.cat(turned, dim=-1).view(x.shape).to(x.dtype)


def _silu(x: torch.Tensor) -> torch.Tensor:
    return x / (1 + torch.exp(-x))


def _gelu_tanh(x: torch.Tensor) -> torch.Tensor:
    return 0.5 * x * (1 + torch.tanh(math.sqrt(2 / math.pi) * (x + 0.044715 * x * x * x)))


_ACTIVATIONS = {"silu": _silu, "gelu_tanh": _gelu_tanh}
