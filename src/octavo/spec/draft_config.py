"""Configurations of draft networks, from both layouts in which they are published.

    plain         the keys of a transformers config next to `eagle_config` or `dflash_config`
    speculators   `speculators_model_type`, the layer's keys under `transformer_layer_config`

The layouts disagree on two keys of one name, so which one a file has matters:

    norm_output   plain: False means that logits skip the final norm
                  speculators: True means that the state fed back is the one after the final norm
    layer ids     DFlash plain: 0-based outputs (HF[id + 1]); speculators: indices of HF
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal

from octavo.errors import ConfigError, ModelError, ModelNotFound
from octavo.model.config import ModelConfig, RopeConfig
from octavo.spec.draft_keys import Keys
from octavo.spec.verify import MAX_NODES

FORMAT_VERSION = 1
MAX_DRAFT_LAYERS = 64  # a checkpoint that claims more is damaged; nothing is built from such a number
Algorithm = Literal["eagle3", "dflash", "table"]
_ROPE_SCALINGS: dict[str, Literal["linear", "llama3", "yarn"]] = {
    "linear": "linear", "llama3": "llama3", "yarn": "yarn",
}  # fmt: skip


@dataclass(frozen=True)
class LayerShape:
    """Sizes of one draft decoder layer."""

    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    rms_eps: float = 1e-5
    activation: Literal["silu", "gelu_tanh"] = "silu"
    attention_bias: bool = False

    def __post_init__(self) -> None:
        for name in ("hidden_size", "intermediate_size", "num_heads", "num_kv_heads", "head_dim"):
            if getattr(self, name) < 1:
                raise ModelError(f"{name} {getattr(self, name)}: at least 1")
        if self.num_heads % self.num_kv_heads:
            raise ModelError(f"{self.num_heads} heads: a multiple of the {self.num_kv_heads} KV heads")
        if not 0 <= self.rms_eps < math.inf:
            raise ModelError(f"rms_norm_eps {self.rms_eps}: a finite number from 0")

    @property
    def q_width(self) -> int:
        return self.num_heads * self.head_dim

    @property
    def kv_width(self) -> int:
        return self.num_kv_heads * self.head_dim

    @classmethod
    def of(cls, target: ModelConfig) -> LayerShape:
        """The shape of one of the target's own layers: what a new draft gets."""
        return cls(
            target.hidden_size,
            target.intermediate_size,
            target.num_heads,
            target.num_kv_heads,
            target.head_dim,
            target.rms_eps,
            target.activation,
        )


@dataclass(frozen=True)
class EagleConfig:
    """One EAGLE-3 draft. `taps` are HF indices; `target_sha256` names the one target it is for, if known."""

    layer: LayerShape
    vocab_size: int
    draft_vocab_size: int
    taps: tuple[int, ...]
    context_tokens: int | None = None
    fc_norm: bool = False  # a norm for every feature before they are concatenated
    norm_before_fc: bool = False  # one norm for all of them
    norm_before_residual: bool = False
    feed_normed: bool = False  # the state fed back is the one after the final norm
    norm_logits: bool = True  # logits see the final norm
    target_head: bool = False  # head rows are the target's, cut by d2t: the file has none
    target_sha256: str | None = None
    algorithm: Algorithm = "eagle3"

    @property
    def num_layers(self) -> int:
        return 1


@dataclass(frozen=True)
class DFlashConfig:
    """One DFlash draft. `target_layer_ids` are 0-based outputs; `taps` the same as HF indices."""

    layer: LayerShape
    vocab_size: int
    draft_vocab_size: int
    num_layers: int
    target_layer_ids: tuple[int, ...]
    block_size: int
    mask_token_id: int
    windows: tuple[int | None, ...]  # one a layer
    causal: tuple[bool, ...]  # block slots of the layer see earlier slots only
    rope: RopeConfig | None = None  # None: the target's
    context_tokens: int | None = None
    embed_scale: float = 1.0
    target_sha256: str | None = None
    algorithm: Algorithm = "dflash"

    def __post_init__(self) -> None:
        if not 1 <= self.block_size <= MAX_NODES:
            raise ModelError(f"block_size {self.block_size}: allowed 1 to {MAX_NODES}")
        narrow = [window for window in self.windows if window is not None and window < 1]
        if narrow:
            raise ModelError(f"sliding_window {narrow[0]}: at least 1")
        if not math.isfinite(self.embed_scale) or self.embed_scale == 0:
            raise ModelError(f"input_embedding_scale {self.embed_scale}: a finite number, not 0")

    @property
    def taps(self) -> tuple[int, ...]:
        return tuple(i + 1 for i in self.target_layer_ids)


DraftConfig = EagleConfig | DFlashConfig


def default_eagle_taps(num_layers: int) -> tuple[int, ...]:
    """HF[2], HF[L/2], HF[L-3] (EAGLE-3 paper and its reference implementation)."""
    if num_layers < 4:
        return tuple(range(1, min(num_layers, 3) + 1))
    return (2, num_layers // 2, num_layers - 3)


def default_dflash_layers(num_layers: int, features: int) -> tuple[int, ...]:
    """0-based output ids, round(1 + i(L-4)/(n-1)) with banker's rounding; [L // 2] for one feature."""
    if features < 1:
        raise ConfigError("features", features, "at least 1")
    if features == 1:
        return (num_layers // 2,)
    return tuple(round(1 + i * (num_layers - 4) / (features - 1)) for i in range(features))


def read_draft_config(path: str | Path, target: ModelConfig) -> DraftConfig:
    """Read `config.json` of a draft folder (or beside a draft file). Raises ModelError naming the file."""
    file, data = read_draft_json(path)
    try:
        return parse_draft_config(data, target)
    except ModelError as error:
        raise ModelError(str(error), file=file) from error
    except (KeyError, TypeError, ValueError, OverflowError, AttributeError) as error:
        raise ModelError(f"missing or malformed key ({type(error).__name__}: {error})", file=file) from error


def read_draft_json(path: str | Path) -> tuple[Path, dict[str, Any]]:
    """(config.json, its content) of a draft folder, or of the folder a draft file is in.

    Raises ModelNotFound for a path that is not there, ModelError for one without a configuration.
    """
    folder = Path(path)
    if not folder.exists():
        raise ModelNotFound("no such draft folder or file", file=folder)
    file = (folder if folder.is_dir() else folder.parent) / "config.json"
    try:
        data = json.loads(file.read_text())
    except OSError as error:
        raise ModelError(f"a draft needs its configuration ({error.strerror})", file=file) from error
    except (ValueError, RecursionError) as error:
        raise ModelError(f"not JSON ({error})", file=file) from error
    if not isinstance(data, dict):
        raise ModelError("not a JSON object", file=file)
    return file, data


def algorithm_of(data: Mapping[str, Any]) -> Algorithm:
    """Which algorithm a config is for. Raises ModelError if it names none that is supported."""
    kind = data.get("speculators_model_type")
    named = data.get("architectures")
    architectures = " ".join(map(str, named)) if isinstance(named, list) else ""
    if "NgramTable" in architectures:
        return "table"
    if kind == "dflash" or "dflash_config" in data or "DFlashDraft" in architectures:
        return "dflash"
    if kind == "eagle3" or "eagle_config" in data or "Eagle3" in architectures or "draft_vocab_size" in data:
        return "eagle3"
    raise ModelError(f"not an EAGLE-3 or DFlash draft, nor a table (architectures: {architectures or kind or 'none'})")


def parse_draft_config(data: Mapping[str, Any], target: ModelConfig) -> DraftConfig:
    """A config from its JSON. Raises ModelError, or KeyError for a key that is missing."""
    version = data.get("octavo_format", FORMAT_VERSION)
    if isinstance(version, bool) or version != FORMAT_VERSION:
        raise ModelError(f"draft format {version}; this version reads {FORMAT_VERSION}: train it again")
    algorithm = algorithm_of(data)
    if algorithm == "table":
        raise ModelError("a table of phrases: it has no network")
    keys = Keys(data)
    parse = _parse_eagle if algorithm == "eagle3" else _parse_dflash
    return replace(parse(keys, target), target_sha256=keys.text("target_sha256"))


def _layer_keys(data: Keys) -> Keys:
    return data.part("transformer_layer_config") if "transformer_layer_config" in data else data


def _shape(keys: Keys) -> LayerShape:
    hidden, heads = keys.whole("hidden_size"), keys.whole("num_attention_heads")
    if heads < 1:
        raise ModelError(f"num_attention_heads {heads}: at least 1")
    act = keys.text("hidden_act", "silu")
    if act not in ("silu", "gelu_pytorch_tanh"):
        raise ModelError(f"hidden_act {act!r}: allowed silu, gelu_pytorch_tanh")
    return LayerShape(
        hidden_size=hidden,
        intermediate_size=keys.whole("intermediate_size"),
        num_heads=heads,
        num_kv_heads=keys.whole("num_key_value_heads", heads),
        head_dim=keys.whole("head_dim", hidden // heads),
        rms_eps=keys.number("rms_norm_eps", 1e-6),
        activation="silu" if act == "silu" else "gelu_tanh",
        attention_bias=keys.flag("attention_bias"),
    )


def _context(keys: Keys) -> int | None:
    if "max_position_embeddings" not in keys:
        return None
    value = keys.whole("max_position_embeddings")
    if value < 1:
        raise ModelError(f"max_position_embeddings {value}: at least 1")
    return value


def _parse_eagle(data: Keys, target: ModelConfig) -> EagleConfig:
    keys = _layer_keys(data)
    speculators = "speculators_model_type" in data
    layers = keys.whole("num_hidden_layers", 1)
    if layers != 1:
        raise ModelError(f"{layers} decoder layers: EAGLE-3 drafts of one layer are supported")
    vocab = data.whole("vocab_size", keys.whole("vocab_size", target.vocab_size))
    taps = data.whole_numbers("eagle_aux_hidden_state_layer_ids")
    if taps is None:
        taps = data.part("eagle_config").whole_numbers("eagle_aux_hidden_state_layer_ids")
    if data.flag("fc_norm") and data.flag("norm_before_fc"):
        raise ModelError("fc_norm and norm_before_fc exclude each other")
    return EagleConfig(
        layer=_shape(keys),
        vocab_size=vocab,
        draft_vocab_size=data.whole("draft_vocab_size", vocab),
        taps=default_eagle_taps(target.num_layers) if taps is None else taps,
        context_tokens=_context(keys),
        fc_norm=data.flag("fc_norm"),
        norm_before_fc=data.flag("norm_before_fc"),
        norm_before_residual=data.flag("norm_before_residual"),
        feed_normed=speculators and data.flag("norm_output"),
        norm_logits=speculators or data.flag("norm_output", True),
        target_head=data.flag("target_head"),
    )


def _parse_dflash(data: Keys, target: ModelConfig) -> DFlashConfig:
    keys, inner = _layer_keys(data), data.part("dflash_config")
    layers = keys.whole("num_hidden_layers")
    if not 1 <= layers <= MAX_DRAFT_LAYERS:
        raise ModelError(f"num_hidden_layers {layers}: allowed 1 to {MAX_DRAFT_LAYERS} in a draft")
    vocab = keys.whole("vocab_size", target.vocab_size)
    speculators = "speculators_model_type" in data
    if speculators:
        taps = data.whole_numbers("aux_hidden_state_layer_ids")
        target_ids = tuple(i - 1 for i in (default_eagle_taps(target.num_layers) if taps is None else taps))
        causal_sliding = not data.flag("sliding_window_non_causal")
        if data.flag("sample_from_anchor"):
            raise ModelError("sample_from_anchor is not supported")
    else:
        ids = _either(inner, data, "target_layer_ids").whole_numbers("target_layer_ids")
        target_ids = default_dflash_layers(target.num_layers, layers) if ids is None else ids
        causal_sliding = data.flag("is_causal", True)
    kinds = keys.texts("layer_types") or ["full_attention"] * layers
    if len(kinds) != layers:
        raise ModelError(f"layer_types names {len(kinds)} layers of {layers}")
    odd = next((kind for kind in kinds if kind not in ("full_attention", "sliding_attention")), None)
    if odd is not None:
        raise ModelError(f"layer_types has {odd!r}: allowed full_attention, sliding_attention")
    sliding = [kind == "sliding_attention" for kind in kinds]
    if any(sliding) and "sliding_window" not in keys:
        raise ModelError("layer_types has sliding layers but sliding_window is not set")
    if "mask_token_id" not in inner and "mask_token_id" not in data:
        raise ModelError("mask_token_id is not set")
    always_causal = not speculators and data.flag("is_causal")
    return DFlashConfig(
        layer=_shape(keys),
        vocab_size=vocab,
        draft_vocab_size=data.whole("draft_vocab_size", vocab),
        num_layers=layers,
        target_layer_ids=target_ids,
        block_size=_either(inner, data, "block_size").whole("block_size", 8 if speculators else 16),
        mask_token_id=_either(inner, data, "mask_token_id").whole("mask_token_id"),
        windows=tuple(keys.whole("sliding_window") if s else None for s in sliding),
        causal=tuple((s and causal_sliding) or always_causal for s in sliding),
        rope=_rope(keys),
        context_tokens=_context(keys),
        embed_scale=_either(inner, data, "input_embedding_scale").number("input_embedding_scale", 1.0),
    )


def _either(inner: Keys, outer: Keys, key: str) -> Keys:
    """Where a key is: published files keep it in `dflash_config` or beside it."""
    return inner if key in inner else outer


def _rope(keys: Keys) -> RopeConfig | None:
    """Rotation of a draft that has its own (DFlash); None if the config says nothing."""
    params = keys.part("rope_parameters")
    if "full_attention" in params:
        params = params.part("full_attention")
    scaling = keys.part("rope_scaling") if "rope_scaling" in keys else params
    kind = scaling.text("rope_type", scaling.text("type", "default"))
    holder = keys if "rope_theta" in keys else params
    if "rope_theta" not in holder and kind == "default":
        return None
    theta = holder.number("rope_theta", 10000.0)
    if theta <= 0:
        raise ModelError(f"rope_theta {theta}: a finite number above 0")
    if kind == "default":
        return RopeConfig(theta)
    scaled = _ROPE_SCALINGS.get(str(kind))
    if scaled is None:
        raise ModelError(f"rope_type {kind!r}: allowed default, {', '.join(_ROPE_SCALINGS)}")
    numbers = scaling.numbers()
    numbers.pop("rope_theta", None)
    if numbers.get("factor", 0) <= 0:
        raise ModelError(f"rope_type {kind}: a factor above 0 is needed, got {numbers.get('factor')}")
    return RopeConfig(theta, scaling=scaled, params=numbers)


def config_json(config: DraftConfig, extra: Mapping[str, Any] | None = None) -> dict[str, Any]:
    """The plain layout of a config, as `save_draft` writes it."""
    layer = config.layer
    data: dict[str, Any] = {
        "octavo_format": FORMAT_VERSION,
        "hidden_size": layer.hidden_size,
        "intermediate_size": layer.intermediate_size,
        "num_attention_heads": layer.num_heads,
        "num_key_value_heads": layer.num_kv_heads,
        "head_dim": layer.head_dim,
        "rms_norm_eps": layer.rms_eps,
        "hidden_act": "silu" if layer.activation == "silu" else "gelu_pytorch_tanh",
        "attention_bias": layer.attention_bias,
        "num_hidden_layers": config.num_layers,
        "vocab_size": config.vocab_size,
        "draft_vocab_size": config.draft_vocab_size,
        "target_sha256": config.target_sha256,
    }
    if config.context_tokens is not None:
        data["max_position_embeddings"] = config.context_tokens
    if isinstance(config, EagleConfig):
        data["architectures"] = ["LlamaForCausalLMEagle3"]
        data["eagle_config"] = {"eagle_aux_hidden_state_layer_ids": list(config.taps), "use_aux_hidden_state": True}
        data.update(
            fc_norm=config.fc_norm,
            norm_before_fc=config.norm_before_fc,
            norm_before_residual=config.norm_before_residual,
            norm_output=config.norm_logits,
            target_head=config.target_head,
        )
        if config.feed_normed:
            raise ModelError("the plain layout cannot say that the normed state is fed back")
    else:
        data["architectures"] = ["DFlashDraftModel"]
        data["block_size"] = config.block_size
        data["dflash_config"] = {
            "target_layer_ids": list(config.target_layer_ids),
            "mask_token_id": config.mask_token_id,
            "input_embedding_scale": config.embed_scale,
        }
        data["layer_types"] = ["full_attention" if w is None else "sliding_attention" for w in config.windows]
        windows = {w for w in config.windows if w is not None}
        if len(windows) > 1:
            raise ModelError(f"the plain layout cannot say that windows differ ({sorted(windows)})")
        data["sliding_window"] = min(windows, default=None)
        if config.causal != tuple(w is not None for w in config.windows):  # else it need not be said
            if len(set(config.causal)) > 1:
                raise ModelError("the plain layout cannot say that full layers are causal and sliding ones are not")
            data["is_causal"] = all(config.causal)
        if config.rope is not None:
            data["rope_theta"] = config.rope.theta
            if config.rope.scaling is not None:
                data["rope_scaling"] = {"rope_type": config.rope.scaling, **config.rope.params}
    data.update(extra or {})
    return data
