"""`ModelConfig` from a Hugging Face `config.json`, in the spelling of transformers 4 and of 5.

Keys that a file leaves out take the defaults of the architecture's configuration class, because `save_pretrained`
of some versions writes only what differs from them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ...errors import ModelError
from ..config import ModelConfig, RopeConfig
from .expected import MAX_LAYERS

ARCHITECTURES = {
    "LlamaForCausalLM": "llama",
    "MistralForCausalLM": "mistral",
    "Qwen2ForCausalLM": "qwen2",
    "Qwen3ForCausalLM": "qwen3",
    "Gemma3ForCausalLM": "gemma3",
    "Gemma3ForConditionalGeneration": "gemma3",
}
_MODEL_TYPES = {"llama": "llama", "mistral": "mistral", "qwen2": "qwen2", "qwen3": "qwen3", "gemma3_text": "gemma3",
                "gemma3": "gemma3"}  # fmt: skip

_DEFAULTS: dict[str, dict[str, Any]] = {
    "llama": {"max_position_embeddings": 2048, "bos_token_id": 1, "eos_token_id": 2},
    "mistral": {"max_position_embeddings": 131072, "num_key_value_heads": 8, "sliding_window": 4096,
                "bos_token_id": 1, "eos_token_id": 2},
    "qwen2": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "sliding_window": 4096},
    "qwen3": {"max_position_embeddings": 32768, "num_key_value_heads": 32, "head_dim": 128, "sliding_window": 4096},
    "gemma3": {"max_position_embeddings": 131072, "num_key_value_heads": 4, "head_dim": 256, "sliding_window": 4096,
               "vocab_size": 262208, "hidden_size": 2304, "intermediate_size": 9216, "num_hidden_layers": 26,
               "num_attention_heads": 8, "tie_word_embeddings": True, "query_pre_attn_scalar": 256,
               "bos_token_id": 2, "eos_token_id": 1, "pad_token_id": 0},
}  # fmt: skip

_YARN_KEYS = ("beta_fast", "beta_slow", "attention_factor", "mscale", "mscale_all_dim")
_LLAMA3_KEYS = ("factor", "low_freq_factor", "high_freq_factor", "original_max_position_embeddings")


def read_json(path: Path) -> dict[str, Any]:
    """A JSON object from a file. Raises `ModelError` naming it."""
    try:
        value = json.loads(path.read_text(encoding="utf-8"))
    except (json.JSONDecodeError, UnicodeDecodeError, RecursionError) as error:  # the last: nested without end
        raise ModelError(f"not valid JSON: {error}", file=path) from None
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", file=path) from None
    if not isinstance(value, dict):
        raise ModelError("an object is needed at the top", file=path)
    return value


class Fields:
    """Typed look-ups in one configuration with the architecture's defaults. Raises `ModelError` naming the key."""

    def __init__(self, values: Mapping[str, Any], architecture: str, file: Path) -> None:
        self._values, self.architecture, self.file = values, architecture, file
        self._defaults = _DEFAULTS[architecture]

    def get(self, key: str, default: Any = None) -> Any:
        return self._values[key] if key in self._values else self._defaults.get(key, default)

    def integer(self, key: str, default: int | None = None) -> int:
        value = self.get(key)
        value = default if value is None else value
        if isinstance(value, bool) or not isinstance(value, int) or value <= 0:
            raise ModelError(f"{key} is {value!r}; a positive whole number is needed", file=self.file)
        return value

    def number(self, key: str, default: float) -> float:
        value = self.get(key)
        return positive(default if value is None else value, key, self.file)


def positive(value: Any, key: str, file: Path) -> float:
    if isinstance(value, bool) or not isinstance(value, int | float) or not math.isfinite(value) or value <= 0:
        raise ModelError(f"{key} is {value!r}; a positive number is needed", file=file)
    return float(value)


def architecture_of(values: Mapping[str, Any], file: Path) -> tuple[str, Mapping[str, Any]]:
    """(registry name, the text model's part of the configuration), or `ModelError` naming what was found instead."""
    quantised = values.get("quantization_config") or values.get("compression_config")
    if quantised:
        method = quantised.get("quant_method", "unknown method") if isinstance(quantised, Mapping) else quantised
        raise ModelError(
            f"weights quantised with {str(method).upper()} are not supported; use the unquantised "
            "checkpoint (--quantization int4 packs it here) or a GGUF file",
            file=file,
        )
    text = values.get("text_config")
    inner = text if isinstance(text, Mapping) else {}
    for source in (values, inner):
        for key in ("num_experts", "num_local_experts", "n_routed_experts", "moe_intermediate_size"):
            if source.get(key):
                raise ModelError(f"a mixture of experts (MoE, {key} = {source[key]}) is not supported", file=file)
    for key in ("vision_config", "audio_config"):
        if values.get(key):
            raise ModelError(
                f"a multimodal model ({key}) is not supported; a checkpoint of the text model alone is", file=file
            )
    listed = values.get("architectures") or []
    name = listed[0] if isinstance(listed, list) and listed else None
    architecture = ARCHITECTURES.get(str(name)) if name is not None else _MODEL_TYPES.get(str(values.get("model_type")))
    if architecture is None:
        found = name if name is not None else f"model_type {values.get('model_type')!r}"
        raise ModelError(f"architecture {found} is not supported; allowed: {', '.join(ARCHITECTURES)}", file=file)
    return architecture, (inner or values)


def hf_config(values: Mapping[str, Any], file: Path) -> ModelConfig:
    """Build the configuration from the parsed `config.json`."""
    architecture, text = architecture_of(values, file)
    tied = values.get("tie_word_embeddings", text.get("tie_word_embeddings"))
    get = Fields(text, architecture, file)
    heads, hidden = get.integer("num_attention_heads"), get.integer("hidden_size")
    kv_heads, layers = get.integer("num_key_value_heads", heads), get.integer("num_hidden_layers")
    if layers > MAX_LAYERS:
        raise ModelError(f"num_hidden_layers is {layers}; allowed: up to {MAX_LAYERS}", file=file)
    if heads % kv_heads:
        raise ModelError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}", file=file)
    head_dim = get.integer("head_dim", hidden // heads)
    if head_dim % 2:
        raise ModelError(f"head_dim is {head_dim}; an even number is needed", file=file)
    bias = bool(get.get("attention_bias", False))
    fields: dict[str, Any] = {
        "architecture": architecture,
        "vocab_size": get.integer("vocab_size"),
        "hidden_size": hidden,
        "intermediate_size": get.integer("intermediate_size"),
        "num_layers": layers,
        "num_heads": heads,
        "num_kv_heads": kv_heads,
        "head_dim": head_dim,
        "context_tokens": get.integer("max_position_embeddings"),
        "rms_eps": get.number("rms_norm_eps", 1e-6),
        "rope": _rope(get, "full_attention"),
        "layer_windows": _windows(get, layers),
        "activation": _activation(get),
        "attention_bias": architecture == "qwen2" or (bias and architecture != "mistral"),
        "attention_out_bias": bias and architecture not in ("qwen2", "mistral"),
        "mlp_bias": architecture == "llama" and bool(get.get("mlp_bias", False)),
        "qk_norm": architecture in ("qwen3", "gemma3"),
        "tie_embeddings": bool(get.get("tie_word_embeddings", False) if tied is None else tied),
        "bos_token_id": _token_id(get.get("bos_token_id"), "bos_token_id", file),
        "eos_token_ids": token_ids(get.get("eos_token_id"), file),
        "pad_token_id": _token_id(get.get("pad_token_id"), "pad_token_id", file),
    }
    if architecture == "gemma3":
        fields.update(_gemma3(get, hidden, head_dim))
    return ModelConfig(**fields)


def token_ids(value: Any, file: Path) -> tuple[int, ...]:
    """`eos_token_id` may be a number, a list or null. Raises `ModelError` naming the file."""
    listed = value if isinstance(value, list | tuple) else [value]
    found = [_token_id(item, "eos_token_id", file) for item in listed]
    return tuple(item for item in found if item is not None)


def _token_id(value: Any, key: str, file: Path) -> int | None:
    """One token id; null and a negative number mean "none"."""
    if value is None:
        return None
    if isinstance(value, bool) or not isinstance(value, int):
        raise ModelError(f"{key} is {value!r}; a token id (a whole number) is needed", file=file)
    return value if value >= 0 else None


def _activation(get: Fields) -> str:
    key = "hidden_activation" if get.architecture == "gemma3" else "hidden_act"
    wanted = ("gelu_pytorch_tanh", "gelu_tanh") if get.architecture == "gemma3" else ("silu",)
    value = get.get(key)
    if value is None:
        value = wanted[0]
    if value not in wanted:
        raise ModelError(f"{key} is {value!r}; allowed: {', '.join(wanted)}", file=get.file)
    return "gelu_tanh" if get.architecture == "gemma3" else "silu"


def _windows(get: Fields, layers: int) -> tuple[int | None, ...]:
    """One window a layer, None for full attention; empty if no layer slides."""
    if get.architecture == "llama":
        return ()
    if get.architecture in ("qwen2", "qwen3") and not get.get("use_sliding_window", False):
        return ()
    if get.get("sliding_window") is None:
        return ()
    window = get.integer("sliding_window")
    if get.architecture == "mistral":
        return (window,) * layers
    kinds = get.get("layer_types")
    if kinds is None:
        if get.architecture == "gemma3":
            every = get.integer("sliding_window_pattern", 6)
            kinds = ["sliding_attention" if (i + 1) % every else "full_attention" for i in range(layers)]
        else:
            first = get.get("max_window_layers", 28)
            if isinstance(first, bool) or not isinstance(first, int):
                raise ModelError(f"max_window_layers is {first!r}; a whole number is needed", file=get.file)
            kinds = ["sliding_attention" if i >= first else "full_attention" for i in range(layers)]
    known = ("sliding_attention", "full_attention")
    if not isinstance(kinds, list) or len(kinds) != layers or any(kind not in known for kind in kinds):
        raise ModelError(
            f"layer_types is {kinds!r}; {layers} entries of sliding_attention or full_attention are needed",
            file=get.file,
        )
    windows = tuple(window if kind == "sliding_attention" else None for kind in kinds)
    return windows if any(windows) else ()


def _gemma3(get: Fields, hidden: int, head_dim: int) -> dict[str, Any]:
    if get.get("attn_logit_softcapping"):
        raise ModelError(f"attn_logit_softcapping {get.get('attn_logit_softcapping')} is not supported", file=get.file)
    if get.get("use_bidirectional_attention"):
        raise ModelError(
            "use_bidirectional_attention: an embedding model, not a causal one, is not supported", file=get.file
        )
    scalar = get.number("query_pre_attn_scalar", 256)
    softcap = get.get("final_logit_softcapping")
    return {
        "rope_local": _rope(get, "sliding_attention"),
        "post_norms": True,
        # The loader returns norm weights as multipliers (1 + w), so the network must not add 1 again.
        "norm_plus_one": False,
        "embed_scale": math.sqrt(hidden),
        "query_scale": None if scalar == head_dim else scalar**-0.5,
        "final_logit_softcap": positive(softcap, "final_logit_softcapping", get.file) if softcap else None,
    }


def _rope(get: Fields, layer_type: str) -> RopeConfig:
    """RoPE of one layer type, from `rope_parameters` (flat or per layer type) or `rope_theta` and `rope_scaling`."""
    local = layer_type == "sliding_attention"
    theta = get.get("rope_local_base_freq", 10000.0) if local else get.get("rope_theta")
    if theta is None:
        theta = 1_000_000.0 if get.architecture == "gemma3" else 10000.0
    given = _object(get.get("rope_parameters"), "rope_parameters", get.file)
    if "full_attention" in given or "sliding_attention" in given:
        given = _object(given.get(layer_type), f"rope_parameters.{layer_type}", get.file)
    elif local:  # flat parameters describe the layers that see everything
        given = {}
    scaling = {} if local else _object(get.get("rope_scaling"), "rope_scaling", get.file)
    merged = {**given, **scaling}
    theta = positive(merged.get("rope_theta") or theta, "rope_theta", get.file)
    if (merged.get("partial_rotary_factor") or get.get("partial_rotary_factor") or 1.0) != 1.0:
        raise ModelError("partial_rotary_factor: only a whole head can be rotated (1.0)", file=get.file)
    kind = merged.get("rope_type", merged.get("type", "default"))
    if kind in (None, "default"):
        return RopeConfig(theta=theta)
    if kind not in ("linear", "llama3", "yarn"):
        raise ModelError(
            f"RoPE scaling {kind!r} is not supported; allowed: default, linear, llama3, yarn", file=get.file
        )
    return RopeConfig(theta=theta, scaling=kind, params=_scaling(get, kind, dict(merged)))


def _object(value: Any, key: str, file: Path) -> Mapping[str, Any]:
    """A JSON object, or an empty one where the key says nothing."""
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise ModelError(f"{key} is {value!r}; an object is needed", file=file)
    return value


def _scaling(get: Fields, kind: str, given: dict[str, Any]) -> dict[str, float]:
    outer = get.get("original_max_position_embeddings")
    context = get.integer("max_position_embeddings")
    original = outer or given.get("original_max_position_embeddings") or context
    if kind == "yarn" and given.get("factor") is None:
        given["factor"] = context / original
    if kind == "linear":
        return {"factor": positive(given.get("factor"), "rope_scaling.factor", get.file)}
    given["original_max_position_embeddings"] = original
    if kind == "llama3":
        return {key: positive(given.get(key), f"rope_scaling.{key}", get.file) for key in _LLAMA3_KEYS}
    params = {
        key: positive(given[key], f"rope_scaling.{key}", get.file)
        for key in ("factor", "original_max_position_embeddings")
    }
    params.update(
        {key: positive(given[key], f"rope_scaling.{key}", get.file) for key in _YARN_KEYS if given.get(key) is not None}
    )
    if "mscale" in params and "mscale_all_dim" in params and "attention_factor" not in params:
        params["attention_factor"] = _mscale(params["factor"], params["mscale"]) / _mscale(
            params["factor"], params["mscale_all_dim"]
        )
    if given.get("truncate") is not None:
        params["truncate"] = float(bool(given["truncate"]))
    return params


def _mscale(scale: float, mscale: float) -> float:
    return 1.0 if scale <= 1 else 0.1 * mscale * math.log(scale) + 1.0
