"""Llama and Mistral: pre-norm layers, grouped heads, SiLU-gated MLP. Mistral adds a sliding window, which is a
property of a layer's place in the KV pools and not of the arithmetic here."""

from __future__ import annotations

from octavo.model.layers import Attention, GatedMLP, WeightReader
from octavo.ops.base import Tape, Value, Weight
from octavo.ops.meta import KVLayer


class LlamaLayer:
    """x + attention(norm(x)), then x + mlp(norm(x)). Qwen layers are these with biases or head norms."""

    def __init__(self, reader: WeightReader, index: int, place: KVLayer, rope: Weight) -> None:
        prefix = f"model.layers.{index}."
        self._eps = reader.config.rms_eps
        self._input_norm = reader.vector(prefix + "input_layernorm.weight")
        self._attention = Attention(reader, prefix + "self_attn.", place, rope)
        self._mlp_norm = reader.vector(prefix + "post_attention_layernorm.weight")
        self._mlp = GatedMLP(reader, prefix + "mlp.")

    def run(self, tape: Tape, x: Value) -> Value:
        x = tape.add(x, self._attention.run(tape, tape.rms_norm(x, self._input_norm, self._eps)))
        return tape.add(x, self._mlp.run(tape, tape.rms_norm(x, self._mlp_norm, self._eps)))
