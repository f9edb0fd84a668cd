"""`ModelConfig` from GGUF metadata (keys of https://github.com/ggml-org/ggml/blob/master/docs/gguf.md)."""

from __future__ import annotations

import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ModelError
from ..config import ModelConfig, RopeConfig
from .expected import MAX_LAYERS

SUPPORTED = ("llama", "qwen2", "qwen3", "gemma3")
VISION = ("clip", "mllama", "mmproj", "qwen2vl", "qwen3vl", "llava", "cogvlm")

GEMMA_LOCAL_THETA = 10000.0  # neither of the two is in the file
GEMMA_PATTERN = 6  # every sixth layer sees the whole context
GEMMA_27B_LAYERS = 62  # the one size whose query scale is not head_dim ** -0.5


class Metadata:
    """Typed look-ups under one architecture's prefix. Raises `ModelError` naming the key."""

    def __init__(self, values: Mapping[str, Any], architecture: str, file: Path) -> None:
        self._values, self._prefix, self.file = values, architecture, file

    def get(self, key: str, default: Any = None) -> Any:
        return self._values.get(f"{self._prefix}.{key}", default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key, default)
        if isinstance(value, np.ndarray):  # one value a layer
            if len({int(v) for v in value}) != 1:
                raise ModelError(
                    f"metadata {self._prefix}.{key} differs from layer to layer ({value.tolist()}); "
                    "such models are not supported",
                    file=self.file,
                )
            value = int(value[0])
        if not isinstance(value, int) or isinstance(value, bool) or value <= 0:
            raise ModelError(f"metadata {self._prefix}.{key} is {value!r}; a positive number is needed", file=self.file)
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
            raise ModelError(f"metadata {self._prefix}.{key} is {value!r}; a positive number is needed", file=self.file)
        return float(value)


def gguf_architecture(values: Mapping[str, Any], file: Path) -> str:
    """The file's architecture, or `ModelError` naming what it is instead of a supported text model."""
    architecture = values.get("general.architecture")
    kind = values.get("general.type", "model")
    if kind == "adapter" or any(key.startswith("adapter.") for key in values):
        raise ModelError(
            "this is a LoRA adapter, which is not supported; merge it into its base model first", file=file
        )
    if kind in ("mmproj", "imatrix") or architecture in VISION:
        found = "an importance matrix" if kind == "imatrix" else f"the vision part of a model ({architecture})"
        raise ModelError(f"this is {found}, not a text model; pass the language model's file", file=file)
    if not isinstance(architecture, str):
        raise ModelError("metadata general.architecture is missing", file=file)
    if values.get(f"{architecture}.expert_count", 0) or architecture.endswith("moe"):
        count = values.get(f"{architecture}.expert_count", "several")
        raise ModelError(
            f"a mixture of experts (MoE, {count} experts, architecture {architecture!r}) is not supported", file=file
        )
    if architecture not in SUPPORTED:
        raise ModelError(f"architecture {architecture!r} is not supported; allowed: {', '.join(SUPPORTED)}", file=file)
    return architecture


def gguf_config(
    values: Mapping[str, Any],
    shapes: Mapping[str, tuple[int, ...]],
    file: Path,
    *,
    rope_factors: tuple[float, ...] | None = None,
) -> ModelConfig:
    """Build the configuration. `shapes` are the file's tensors ([out, in]) under the file's own names."""
    architecture = gguf_architecture(values, file)
    meta = Metadata(values, architecture, file)
    hidden, heads = meta.integer("embedding_length"), meta.integer("attention.head_count")
    head_dim = meta.integer("attention.key_length", hidden // heads)
    if meta.integer("attention.value_length", head_dim) != head_dim:
        raise ModelError(
            f"keys of {head_dim} and values of {meta.get('attention.value_length')} elements a head: "
            "they must be of one size",
            file=file,
        )
    if meta.integer("rope.dimension_count", head_dim) != head_dim:
        raise ModelError(
            f"partial rotary embedding ({meta.get('rope.dimension_count')} of {head_dim} elements a head) "
            "is not supported",
            file=file,
        )
    kv_heads = meta.integer("attention.head_count_kv", heads)
    if heads % kv_heads:
        raise ModelError(f"{heads} heads cannot share {kv_heads} KV heads evenly", file=file)
    embedding = shapes.get("token_embd.weight")
    if embedding is None or len(embedding) != 2:
        raise ModelError(
            "tensor missing" if embedding is None else f"wrong shape {list(embedding)}; a matrix is needed",
            file=file,
            tensor="token_embd.weight",
        )
    layers = meta.integer("block_count")
    if layers > MAX_LAYERS:
        raise ModelError(f"metadata {architecture}.block_count is {layers}; allowed: up to {MAX_LAYERS}", file=file)
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": embedding[0],
        "hidden_size": hidden,
        "intermediate_size": meta.integer("feed_forward_length"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "context_tokens": meta.integer("context_length"),
        "rms_eps": meta.number("attention.layer_norm_rms_epsilon", 1e-5),
        "rope": _rope(meta, rope_factors),
        "attention_bias": "blk.0.attn_q.bias" in shapes,
        "attention_out_bias": "blk.0.attn_output.bias" in shapes,
        "mlp_bias": "blk.0.ffn_gate.bias" in shapes,
        "qk_norm": architecture in ("qwen3", "gemma3"),
        "tie_embeddings": "output.weight" not in shapes,
        "bos_token_id": values.get("tokenizer.ggml.bos_token_id"),
        "pad_token_id": values.get("tokenizer.ggml.padding_token_id"),
    }
    fields.update(_gemma3(meta, layers, hidden, heads) if architecture == "gemma3" else _windows(meta, layers))
    return ModelConfig(**fields)


def _windows(meta: Metadata, layers: int) -> dict[str, Any]:
    if not meta.get("attention.sliding_window"):
        return {}
    return {"layer_windows": (meta.integer("attention.sliding_window"),) * layers}


def _gemma3(meta: Metadata, layers: int, hidden: int, heads: int) -> dict[str, Any]:
    window = meta.integer("attention.sliding_window")
    pattern = meta.get("attention.sliding_window_pattern", GEMMA_PATTERN)
    if isinstance(pattern, np.ndarray | list):  # one flag a layer: does it slide?
        if len(pattern) < layers:
            raise ModelError(
                f"metadata gemma3.attention.sliding_window_pattern names {len(pattern)} layers of {layers}",
                file=meta.file,
            )
        sliding = [bool(flag) for flag in pattern[:layers]]
    else:
        every = meta.integer("attention.sliding_window_pattern", GEMMA_PATTERN)
        sliding = [(index + 1) % every != 0 for index in range(layers)]
    softcap = meta.get("final_logit_softcapping")
    return {
        "layer_windows": tuple(window if s else None for s in sliding),
        "rope_local": RopeConfig(theta=meta.number("rope.freq_base_swa", GEMMA_LOCAL_THETA)),
        "activation": "gelu_tanh",
        "post_norms": True,
        "embed_scale": math.sqrt(hidden),
        "query_scale": (hidden / heads) ** -0.5 if layers == GEMMA_27B_LAYERS else None,
        "final_logit_softcap": float(softcap) if softcap else None,
    }


def _rope(meta: Metadata, factors: tuple[float, ...] | None) -> RopeConfig:
    theta = meta.number("rope.freq_base", 10000.0)
    if factors is not None:
        return RopeConfig(theta=theta, scaling="factors", factors=factors)
    kind = meta.get("rope.scaling.type", "none")
    if kind == "none" and meta.get("rope.scale_linear"):
        return RopeConfig(theta=theta, scaling="linear", params={"factor": meta.number("rope.scale_linear")})
    if kind == "none":
        return RopeConfig(theta=theta)
    factor = meta.number("rope.scaling.factor", 1.0)
    if kind == "linear":
        return RopeConfig(theta=theta, scaling="linear", params={"factor": factor})
    if kind != "yarn":
        raise ModelError(
            f"RoPE scaling {kind!r} is not supported; allowed: none, linear, yarn, rope_freqs tensor", file=meta.file
        )
    params = {
        "factor": factor,
        "original_max_position_embeddings": float(
            meta.integer("rope.scaling.original_context_length", meta.integer("context_length"))
        ),
        "beta_fast": meta.number("rope.scaling.yarn_beta_fast", 32.0),
        "beta_slow": meta.number("rope.scaling.yarn_beta_slow", 1.0),
    }
    attention = meta.number("rope.scaling.attn_factor", meta.number("rope.scaling.yarn_attn_factor", 1.0))
    if attention != 1.0:  # the file's number multiplies YaRN's own
        params["attention_factor"] = attention * (0.1 * math.log(factor) + 1.0 if factor > 1 else 1.0)
    return RopeConfig(theta=theta, scaling="yarn", params=params)
