"""Qwen 2 (biases on q, k, v) and Qwen 3 (RMS norm of every q and k head, no biases).

Both differences are fields of `ModelConfig` that `layers.Attention` reads, so a layer is put together like Llama's.
"""

from __future__ import annotations

from octavo.model.llama import LlamaLayer


class Qwen2Layer(LlamaLayer):
    """A Llama layer; the checkpoint's configuration has attention_bias."""


class Qwen3Layer(LlamaLayer):
    """A Llama layer; the checkpoint's configuration has qk_norm."""
