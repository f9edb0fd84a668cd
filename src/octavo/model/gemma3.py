"""Gemma 3 (text): norms before and after both halves of a layer, per-head q/k norms, GELU gate, scaled embeddings,
sliding layers with their own rotation base between global ones."""

from __future__ import annotations

from octavo.model.layers import Attention, GatedMLP, WeightReader
from octavo.ops.base import Tape, Value, Weight
from octavo.ops.meta import KVLayer


class Gemma3Layer:
    """x + norm(attention(norm(x))), then x + norm(mlp(norm(x)))."""

    def __init__(self, reader: WeightReader, index: int, place: KVLayer, rope: Weight) -> None:
        prefix = f"model.layers.{index}."
        self._eps = reader.config.rms_eps
        self._before_attention = reader.vector(prefix + "input_layernorm.weight")
        self._attention = Attention(reader, prefix + "self_attn.", place, rope)
        self._after_attention = reader.vector(prefix + "post_attention_layernorm.weight")
        self._before_mlp = reader.vector(prefix + "pre_feedforward_layernorm.weight")
        self._mlp = GatedMLP(reader, prefix + "mlp.")
        self._after_mlp = reader.vector(prefix + "post_feedforward_layernorm.weight")

    def run(self, tape: Tape, x: Value) -> Value:
        attended = self._attention.run(tape, tape.rms_norm(x, self._before_attention, self._eps))
        x = tape.add(x, tape.rms_norm(attended, self._after_attention, self._eps))
        inner = self._mlp.run(tape, tape.rms_norm(x, self._before_mlp, self._eps))
        return tape.add(x, tape.rms_norm(inner, self._after_mlp, self._eps))
