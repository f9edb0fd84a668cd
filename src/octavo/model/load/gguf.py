"""GGUF checkpoints: names, row order and exact dequantisation on top of the container.

Block formats and their dequantisation: https://github.com/ggml-org/ggml (ggml-common.h), computed by the `gguf`
package's NumPy code a few rows at a time.
"""

from __future__ import annotations

import re
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from ...errors import ModelError
from ..config import ModelConfig
from .expected import check_tensors, foreign_kind
from .gguf_config import gguf_architecture, gguf_config
from .gguf_file import GGUFFile, TensorInfo, open_gguf
from .source import Groups32

if TYPE_CHECKING:
    import torch

CHUNK_WEIGHTS = 4 << 20  # dequantise at most so many weights at once (16 MB of float32)

_TOP = {
    "token_embd.weight": "model.embed_tokens.weight",
    "output_norm.weight": "model.norm.weight",
    "output.weight": "lm_head.weight",
}
_LAYER = {
    "attn_norm": "input_layernorm",
    "attn_q": "self_attn.q_proj",
    "attn_k": "self_attn.k_proj",
    "attn_v": "self_attn.v_proj",
    "attn_output": "self_attn.o_proj",
    "attn_q_norm": "self_attn.q_norm",
    "attn_k_norm": "self_attn.k_norm",
    "ffn_norm": "post_attention_layernorm",
    "ffn_gate": "mlp.gate_proj",
    "ffn_up": "mlp.up_proj",
    "ffn_down": "mlp.down_proj",
}
_LAYER_GEMMA = _LAYER | {
    "ffn_norm": "pre_feedforward_layernorm",
    "post_attention_norm": "post_attention_layernorm",
    "post_ffw_norm": "post_feedforward_layernorm",
}
_BLOCK = re.compile(r"^blk\.(\d+)\.(\w+)\.(weight|bias)$")
_CANONICAL = re.compile(r"^model\.layers\.(\d+)\.(.+)\.(weight|bias)$")
ROPE_FREQS = "rope_freqs.weight"


def canonical_name(name: str, architecture: str) -> str:
    """The Hugging Face name of a GGUF tensor; a name without one comes back unchanged."""
    if name in _TOP:
        return _TOP[name]
    match = _BLOCK.match(name)
    stem = (_LAYER_GEMMA if architecture == "gemma3" else _LAYER).get(match[2]) if match else None
    return f"model.layers.{match[1]}.{stem}.{match[3]}" if match and stem else name


def half_split_rows(heads: int, head_dim: int) -> np.ndarray:
    """Where each row of a half-split weight lies in one stored for interleaved pairs: int64 [heads·head_dim].

    llama.cpp's `llama` architecture rotates neighbours (2i, 2i+1); the half-split form rotates (i, i + head_dim/2).
    """
    order = np.arange(heads * head_dim).reshape(heads, head_dim // 2, 2)
    return order.swapaxes(1, 2).reshape(-1)


class GGUFSource:
    """`TensorSource` over the files of one GGUF checkpoint. Building it validates everything and reads no weights."""

    def __init__(self, path: Path) -> None:
        self.files = open_gguf(path)
        self.path = self.files[0].path
        self.metadata = self.files[0].metadata
        self._found: dict[str, tuple[GGUFFile, TensorInfo]] = {}
        architecture = gguf_architecture(self.metadata, self.path)
        raw: dict[str, tuple[GGUFFile, TensorInfo]] = {}
        for file in self.files:
            for info in file.tensors.values():
                if info.name in raw:
                    raise ModelError("is in two parts of the split checkpoint", file=file.path, tensor=info.name)
                raw[info.name] = (file, info)
        foreign = foreign_kind(raw)
        if foreign is not None:
            raise ModelError(f"{foreign[0]} is not supported", file=raw[foreign[1]][0].path, tensor=foreign[1])
        factors = self._rope_factors(raw)
        shapes = {name: info.shape for name, (_, info) in raw.items()}
        self.config: ModelConfig = gguf_config(self.metadata, shapes, self.path, rope_factors=factors)
        self._found = {canonical_name(name, architecture): found for name, found in raw.items() if name != ROPE_FREQS}
        check_tensors(
            self.config,
            {name: info.shape for name, (_, info) in self._found.items()},
            {name: file.path for name, (file, _) in self._found.items()},
            file=self.path,
            shown=lambda name: _file_name(name, architecture),
        )
        self._orders: dict[str, np.ndarray] = {}
        if architecture == "llama":
            self._orders = {
                "q_proj": half_split_rows(self.config.num_heads, self.config.head_dim),
                "k_proj": half_split_rows(self.config.num_kv_heads, self.config.head_dim),
            }

    def _rope_factors(self, raw: dict[str, tuple[GGUFFile, TensorInfo]]) -> tuple[float, ...] | None:
        if ROPE_FREQS not in raw:
            return None
        file, info = raw[ROPE_FREQS]
        heads = self.metadata.get(f"{self.metadata['general.architecture']}.attention.head_count")
        if info.kind != "F32" or len(info.shape) != 1:
            raise ModelError(
                f"{info.kind} in shape {list(info.shape)}; a vector of F32 is needed", file=file.path, tensor=ROPE_FREQS
            )
        factors = tuple(float(v) for v in file.rows(info).reshape(-1).view(np.float32))
        key_length = self.metadata.get(f"{self.metadata['general.architecture']}.attention.key_length")
        hidden = self.metadata.get(f"{self.metadata['general.architecture']}.embedding_length")
        if isinstance(heads, int) and heads > 0 and isinstance(hidden, int):
            head_dim = key_length if isinstance(key_length, int) else hidden // heads
            if len(factors) != head_dim // 2:
                raise ModelError(
                    f"wrong shape [{len(factors)}]; half a head is {head_dim // 2}", file=file.path, tensor=ROPE_FREQS
                )
        if not all(np.isfinite(f) and f > 0 for f in factors):
            raise ModelError("RoPE factors must be positive", file=file.path, tensor=ROPE_FREQS)
        return factors

    # -- TensorSource ------------------------------------------------------------------------------------------------

    def names(self) -> list[str]:
        return list(self._found)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name)[1].shape

    def kind(self, name: str) -> str:
        return self._entry(name)[1].kind

    def nbytes(self) -> int:
        return sum(info.nbytes for _, info in self._found.values())

    def tensor(self, name: str) -> torch.Tensor:
        import torch
        from gguf import GGMLQuantizationType
        from gguf.quants import dequantize

        rows, info = self._rows(name)
        out = torch.empty(info.shape, dtype=torch.float32)
        target = out.numpy().reshape(rows.shape[0], -1)
        step = max(1, CHUNK_WEIGHTS // target.shape[1])
        kind, order = GGMLQuantizationType[info.kind], self._order(name)
        for start in range(0, rows.shape[0], step):
            part = rows[start : start + step] if order is None else rows[order[start : start + step]]
            target[start : start + step] = dequantize(part, kind)
        return out

    def groups32(self, name: str) -> Groups32 | None:
        rows, info = self._rows(name)
        if info.kind not in ("Q4_0", "Q4_1", "Q4_K", "Q5_0", "Q8_0") or len(info.shape) != 2:
            return None
        order = self._order(name)
        return _groups32(rows if order is None else rows[order], info)

    def stored(self, name: str) -> np.ndarray:
        file, info = self._entry(name)
        return file.rows(info).reshape(-1)

    def _entry(self, name: str) -> tuple[GGUFFile, TensorInfo]:
        if name not in self._found:
            raise ModelError("tensor missing", file=self.path, tensor=name)
        return self._found[name]

    def _rows(self, name: str) -> tuple[np.ndarray, TensorInfo]:
        file, info = self._entry(name)
        rows = file.rows(info)
        return (rows.reshape(-1, info.nbytes // info.shape[0]) if len(info.shape) == 1 else rows), info

    def _order(self, name: str) -> np.ndarray | None:
        return self._orders.get(name.rsplit(".", 2)[-2])


def _groups32(rows: np.ndarray, info: TensorInfo) -> Groups32 | None:
    if info.kind == "Q4_K":
        return _groups_of_q4_k(rows, info)
    out_rows, columns = info.shape
    groups = columns // 32
    blocks = rows.reshape(out_rows, groups, -1)
    scale = np.ascontiguousarray(blocks[:, :, :2]).view(np.float16)[:, :, 0]
    if info.kind == "Q8_0":
        codes = np.ascontiguousarray(blocks[:, :, 2:]).view(np.int8).reshape(out_rows, columns)
        return Groups32(codes, np.ascontiguousarray(scale), None, 8)
    if info.kind == "Q5_0":  # 16-bit scale, 32 high bits, then nibbles as in Q4_0; code - 16
        high = np.unpackbits(np.ascontiguousarray(blocks[:, :, 2:6]), axis=2, bitorder="little") << 4
        packed = blocks[:, :, 6:]
        codes = (np.concatenate([packed & 0x0F, packed >> 4], axis=2) | high).astype(np.int8) - np.int8(16)
        return Groups32(codes.reshape(out_rows, columns), np.ascontiguousarray(scale), None, 5)
    start = 2 if info.kind == "Q4_0" else 4
    packed = blocks[:, :, start:]  # low nibbles are the first sixteen weights, high ones the rest
    codes = np.concatenate([packed & 0x0F, packed >> 4], axis=2).reshape(out_rows, columns)
    if info.kind == "Q4_0":
        with np.errstate(over="ignore"):
            minimum = scale * np.float16(-8)  # a power of two: exact unless it overflows
        if not np.isfinite(minimum[np.isfinite(scale)]).all():
            return None
    else:
        minimum = np.ascontiguousarray(blocks[:, :, 2:4]).view(np.float16)[:, :, 0]
    return Groups32(codes, np.ascontiguousarray(scale), np.ascontiguousarray(minimum), 4)


def _groups_of_q4_k(rows: np.ndarray, info: TensorInfo) -> Groups32 | None:
    """Blocks of 256: two fp16 factors, eight 6-bit scales and minima in 12 bytes, then nibbles, 64 weights in 32 bytes.

    Value = d · scale · code - dmin · minimum (ggml-common.h). None where a product does not fit float16.
    """
    out_rows, columns = info.shape
    blocks = rows.reshape(out_rows, columns // 256, -1)
    halves = np.ascontiguousarray(blocks[:, :, :4]).view(np.float16).astype(np.float32)
    six = blocks[:, :, 4:16]
    scales = np.concatenate([six[:, :, :4] & 63, (six[:, :, 8:] & 15) | (six[:, :, :4] >> 6 << 4)], axis=2)
    minima = np.concatenate([six[:, :, 4:8] & 63, (six[:, :, 8:] >> 4) | (six[:, :, 4:8] >> 6 << 4)], axis=2)
    packed = blocks[:, :, 16:].reshape(out_rows, columns // 256, 4, 1, 32)
    codes = np.concatenate([packed & 0x0F, packed >> 4], axis=3).reshape(out_rows, columns)
    with np.errstate(over="ignore"):
        scale = (halves[:, :, :1] * scales).astype(np.float16).reshape(out_rows, -1)
        minimum = (-halves[:, :, 1:] * minima).astype(np.float16).reshape(out_rows, -1)
    if not (np.isfinite(scale).all() and np.isfinite(minimum).all()):
        return None
    return Groups32(codes, scale, minimum, 4)


def _file_name(canonical: str, architecture: str) -> str:
    """A tensor for messages: the file's own name, then the canonical one."""
    for name, known in _TOP.items():
        if canonical == known:
            return f"{name} ({canonical})"
    match = _CANONICAL.match(canonical)
    table = _LAYER_GEMMA if architecture == "gemma3" else _LAYER
    stems = [stem for stem, known in table.items() if match and known == match[2]]
    return f"blk.{match[1]}.{stems[-1]}.{match[3]} ({canonical})" if match and stems else canonical
