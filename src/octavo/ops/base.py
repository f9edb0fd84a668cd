"""The operations a network is written against, once, for every implementation.

A network is a function `body(tape)` that names operations on a `Tape`. Two kinds of tape exist:

* the torch tape runs each operation at once on tensors (`ops/torch_ops.py`, the reference);
* the native tape records a flat program which compiled code then runs in one call a step (`ops/native.py`).

So a body must not look at values, must not branch on the number of tokens, and must take everything that
changes from step to step (token ids, positions, page tables, extra inputs) from the tape. A `Value` is opaque:
[n, width] activations with n = tokens of the step. Values are immutable: every operation returns a new one.

    ops = TorchOps(...) or NativeOps(...)
    w = ops.matrix(read_matrices(source, ["…q_proj.weight", "…k_proj.weight", "…v_proj.weight"], "auto", dtype))
    program = ops.program(body)                     # native: recorded here; torch: kept
    outputs = program.run(meta, kv, {"features": f})  # {"hidden": [n, H], …}

Numerics: activations are float32 on the native tape, and on the torch tape for dtype float32; a result never
depends on how many rows, sequences, pages or threads a step has (design 04, Numerics).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal, Protocol

import torch

from octavo.ops.meta import KVLayer, KVView, StepMeta
from octavo.ops.weights import Matrix

Value = Any
"""Activations of one step, [n, width]. A tensor on the torch tape, a handle on the native one."""

Weight = Any
"""A prepared weight: made by an `Ops`, meaningful only to the `Ops` that made it. Has `.nbytes`."""

Activation = Literal["silu", "gelu_tanh"]


class Tape(Protocol):
    """Operations of one forward over the n tokens of a `StepMeta`."""

    def embed(self, table: Weight, scale: float = 1.0) -> Value:
        """Rows of an embedding matrix for the step's token ids, times `scale`: [n, H]."""

    def input(self, name: str, width: int) -> Value:
        """A tensor [n, width] handed to `Program.run(inputs={name: …})`."""

    def output(self, name: str, x: Value, column: int = 0, width: int | None = None) -> None:
        """Keep x as columns `column:column+x.width` of output `name`, which is [n, width] (None: x alone)."""

    def rms_norm(self, x: Value, weight: Weight, eps: float) -> Value:
        """x / sqrt(mean(x²) + eps) · w, per row, w as it is to be multiplied."""

    def linear(self, x: Value, weight: Weight) -> Value:
        """x Wᵀ (+ bias): [n, in] -> [n, out]."""

    def split(self, x: Value, widths: Sequence[int]) -> tuple[Value, ...]:
        """Columns of x cut into consecutive parts (views)."""

    def concat(self, parts: Sequence[Value]) -> Value:
        """Columns side by side."""

    def head_norm(self, x: Value, weight: Weight, eps: float, head_dim: int) -> Value:
        """RMS norm of every head of x [n, heads·head_dim] on its own; w is [head_dim] (Qwen3, Gemma 3)."""

    def rope_write(self, q: Value | None, k: Value, v: Value, layer: KVLayer, rope: Weight, head_dim: int) -> Value:
        """Rotate q and k at the step's positions, write k and v at its slots, return rotated q.

        q None: write only (context features of a block draft); the returned value is None then.
        """

    def attention(self, q: Value, layer: KVLayer, scale: float, heads: int, kv_heads: int, head_dim: int) -> Value:
        """Softmax attention of the rotated q over the row's pages as `StepMeta` allows: [n, heads·head_dim].

        Must come after the `rope_write` of the same layer.
        """

    def gated(self, gate_up: Value, activation: Activation) -> Value:
        """act(gate) · up for x = [gate | up]: [n, 2·I] -> [n, I]."""

    def add(self, a: Value, b: Value) -> Value:
        """a + b."""

    def scale(self, x: Value, factor: float) -> Value:
        """factor · x."""

    def argmax(self, name: str, x: Value, weight: Weight) -> None:
        """Output `name`: int64 [n], the id of the largest logit x Wᵀ of each row, ties to the lowest id."""


Body = Callable[[Tape], None]


class Program(Protocol):
    """A body made ready to run many times."""

    def run(
        self, meta: StepMeta, kv: KVView | None, inputs: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Outputs by name. `kv` may be None for bodies without attention. Tensors are owned by the caller."""


class Ops(Protocol):
    """Makes weights and programs, and runs the few operations that are not part of a program."""

    name: str  # shown by `octavo doctor`: "torch", "native avx2", …

    def matrix(self, matrix: Matrix, bias: torch.Tensor | None = None) -> Weight:
        """A linear weight (also usable as an embedding table and as a head), with an optional bias [out]."""

    def vector(self, weight: torch.Tensor) -> Weight:
        """A norm weight [H]."""

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> Weight:
        """Rotation tables, float32 [positions, r]; the first 2r elements of a head turn, half-split pairs (i, i+r)."""

    def program(self, body: Body) -> Program:
        """Make a body ready to run."""

    def embed(self, table: Weight, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        """[...] int64 -> [..., H]."""

    def logits(self, hidden: torch.Tensor, head: Weight, softcap: float | None = None) -> torch.Tensor:
        """float32 [m, V] of hidden [m, H]; softcap c: c·tanh(x/c)."""

    def argmax(self, hidden: torch.Tensor, head: Weight) -> torch.Tensor:
        """int64 [m]: id of the largest logit, ties to the lowest id. (A soft cap does not change it.)"""
