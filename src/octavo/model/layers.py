"""What decoder networks are made of: weight reading for one `Ops`, the attention and MLP halves of a layer.

A network file (llama.py, qwen.py, gemma3.py) says how halves and norms are put together; everything here is
written against `ops.base` alone, so the same lines run eagerly in torch and as a recorded native program.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from octavo.model.config import ModelConfig
from octavo.ops.base import Ops, Tape, Value, Weight
from octavo.ops.meta import KVLayer
from octavo.ops.torch_weights import vectorised
from octavo.ops.weights import Kind, Quantization, TensorSource, read_matrix, stack, storage_kind


@dataclass
class WeightReader:
    """Reads a checkpoint's tensors into the weights of one `Ops` and counts what they take."""

    config: ModelConfig
    source: TensorSource
    ops: Ops
    dtype: torch.dtype
    quantization: Quantization
    native: bool
    device: torch.device
    weight_bytes: int = 0
    kinds: Counter[str] = field(default_factory=Counter)

    def kind(self, name: str) -> Kind:
        """How this tensor is kept. torch has no kernel for int8 in groups, so `auto` holds such tensors dense there;
        it takes torch's int4 kernel only where that has vector instructions."""
        kind = storage_kind(self.source, name, self.quantization, self.dtype)
        dense: Kind = "fp32" if self.dtype == torch.float32 else "bf16"
        if self.native or kind == dense:
            return kind
        packed = self.device.type == "cpu" and vectorised()
        if self.quantization == "auto" and (kind == "int8" or not packed):
            return dense
        return kind

    def vector(self, name: str) -> Weight:
        """A norm weight as it is to be multiplied."""
        tensor = self.source.tensor(name)
        weight = self.ops.vector(tensor + 1 if self.config.norm_plus_one else tensor)
        self.weight_bytes += tensor.numel() * 4
        return weight

    def matrices(self, names: Sequence[str], *, bias: bool = False) -> tuple[Weight, ...]:
        """Tensors side by side over their outputs (q|k|v, gate|up): one weight if all are of one kind, else several."""
        kinds = [self.kind(name + ".weight") for name in names]
        groups = [list(names)] if len(set(kinds)) == 1 else [[name] for name in names]
        return tuple(self._matrix(group, bias) for group in groups)

    def table(self, name: str) -> Weight:
        """An embedding table, also usable as the head."""
        kind = self.kind(name)
        if kind == "int4" and not self.native:
            kind = "int8"  # rows must be readable: torch's int4 layout is opaque
        matrix = read_matrix(self.source, name, kind)
        return self._count(self.ops.matrix(matrix), kind, 1)

    def _matrix(self, names: list[str], bias: bool) -> Weight:
        kind = self.kind(names[0] + ".weight")
        matrix = stack([read_matrix(self.source, name + ".weight", kind) for name in names])
        offset = torch.cat([self.source.tensor(name + ".bias") for name in names]) if bias else None
        return self._count(self.ops.matrix(matrix, offset), kind, len(names))

    def _count(self, weight: Weight, kind: str, tensors: int) -> Weight:
        self.weight_bytes += int(weight.nbytes)
        self.kinds[getattr(weight, "kind", kind)] += tensors
        return weight


def place_layers(windows: Sequence[int | None], dense_layers: int | None = None) -> tuple[KVLayer, ...]:
    """Layers with a window live in pool "swa", the others in "full"; the index counts inside the pool.

    dense_layers   with HiSparse: of the first so many layers those without a window stay in "full", the others without
                   one live in "sparse"; None: no layer does
    """
    counts = {"full": 0, "swa": 0, "sparse": 0}
    places = []
    for layer, window in enumerate(windows):
        sparse = dense_layers is not None and layer >= dense_layers
        pool = "swa" if window is not None else "sparse" if sparse else "full"
        places.append(KVLayer(pool, counts[pool], window))
        counts[pool] += 1
    return tuple(places)


class Attention:
    """q, k, v products (bias and per-head norms where the model has them), rotation, KV write, attention, output."""

    def __init__(self, reader: WeightReader, prefix: str, place: KVLayer, rope: Weight) -> None:
        c = reader.config
        self.config, self.place, self._rope = c, place, rope
        self._widths = (c.num_heads * c.head_dim, c.num_kv_heads * c.head_dim, c.num_kv_heads * c.head_dim)
        self._qkv = reader.matrices([prefix + f"{x}_proj" for x in "qkv"], bias=c.attention_bias)
        (self._out,) = reader.matrices([prefix + "o_proj"], bias=c.attention_out_bias)
        self._q_norm = reader.vector(prefix + "q_norm.weight") if c.qk_norm else None
        self._k_norm = reader.vector(prefix + "k_norm.weight") if c.qk_norm else None

    def run(self, tape: Tape, x: Value) -> Value:
        c = self.config
        parts = _products(tape, x, self._qkv)
        q, k, v = tape.split(parts[0], self._widths) if len(parts) == 1 else parts
        if self._q_norm is not None and self._k_norm is not None:
            q = tape.head_norm(q, self._q_norm, c.rms_eps, c.head_dim)
            k = tape.head_norm(k, self._k_norm, c.rms_eps, c.head_dim)
        q = tape.rope_write(q, k, v, self.place, self._rope, c.head_dim)
        seen = tape.attention(q, self.place, c.attention_scale, c.num_heads, c.num_kv_heads, c.head_dim)
        return tape.linear(seen, self._out)


class GatedMLP:
    """down(act(gate(x)) · up(x))."""

    def __init__(self, reader: WeightReader, prefix: str) -> None:
        c = reader.config
        self._activation = c.activation
        self._gate_up = reader.matrices([prefix + "gate_proj", prefix + "up_proj"], bias=c.mlp_bias)
        (self._down,) = reader.matrices([prefix + "down_proj"], bias=c.mlp_bias)

    def run(self, tape: Tape, x: Value) -> Value:
        parts = _products(tape, x, self._gate_up)
        both = parts[0] if len(parts) == 1 else tape.concat(parts)
        return tape.linear(tape.gated(both, self._activation), self._down)


def _products(tape: Tape, x: Value, weights: Sequence[Weight]) -> list[Value]:
    return [tape.linear(x, weight) for weight in weights]
