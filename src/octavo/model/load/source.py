"""Where weights come from: one interface for every file format.

Names are those of the architecture's Hugging Face causal language model ("model.layers.0.self_attn.q_proj.weight"),
whatever the file calls them. Nothing is read from disk before `tensor` or `groups32` asks for it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, Protocol

import numpy as np

if TYPE_CHECKING:
    import torch


@dataclass(frozen=True)
class Groups32:
    """A weight in groups of 32 along its input side: value = scale · code + minimum, as the file says.

    `codes` is [out, in], uint8 0..15 for 4 bits, int8 for 5 (-16..15) and 8 bits; `scale` and `minimum` are float16
    [out, in / 32]; `minimum` is None for 5 and 8 bits (symmetric). Codes are the file's own. So are scales and minima,
    but for Q4_K, where each is the product of two numbers, rounded to float16.
    """

    codes: np.ndarray
    scale: np.ndarray
    minimum: np.ndarray | None
    bits: Literal[4, 5, 8]

    def dequantize(self) -> np.ndarray:
        """float32 [out, in]: the product and the sum are taken in float32, as the block formats define them."""
        rows, columns = self.codes.shape
        codes = self.codes.reshape(rows, columns // 32, 32).astype(np.float32)
        values = codes * self.scale.astype(np.float32)[:, :, None]
        if self.minimum is not None:
            values += self.minimum.astype(np.float32)[:, :, None]
        return values.reshape(rows, columns)


class TensorSource(Protocol):
    """The weights of one checkpoint, validated before it exists: every expected tensor is there in its shape."""

    def names(self) -> list[str]:
        """Canonical names of all weights in the file."""
        ...

    def shape(self, name: str) -> tuple[int, ...]:
        """[out, in] of a matrix, [n] of a vector; no data is read."""
        ...

    def kind(self, name: str) -> str:
        """The storage type: "F32", "F16", "BF16", "Q4_1", …"""
        ...

    def tensor(self, name: str) -> torch.Tensor:
        """float32 copy, dequantised exactly, rows in the order a half-split RoPE wants, Gemma norms as multipliers."""
        ...

    def groups32(self, name: str) -> Groups32 | None:
        """The weight in its group-32 form, if the file stores it so (Q4_0, Q4_1, Q4_K, Q5_0, Q8_0); else None."""
        ...

    def stored(self, name: str) -> np.ndarray:
        """uint8 [bytes]: the weight exactly as the file has it, a view; what is not looked at is not read."""
        ...

    def nbytes(self) -> int:
        """Bytes of all weights as stored."""
        ...
