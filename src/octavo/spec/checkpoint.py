"""Loading and saving draft checkpoints, checked against the target before anything else is built.

Both tensor namings of EAGLE-3 (`midlayer.*`, `layers.0.*`) and DFlash's `layers.N.*` are read. Whatever does not fit
the target is refused with the tensor's name: a wrong draft never runs with an accept length of 1.00.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from octavo.errors import ModelError
from octavo.model.config import ModelConfig
from octavo.spec.draft_config import DFlashConfig, DraftConfig, EagleConfig, config_json, read_draft_config
from octavo.spec.tensor_file import read_tensors, write_tensors

# Stored by some exporters, never read here: the target's own embeddings and head are used.
_IGNORED = ("embed_tokens.weight", "t2d", "verifier_norm.weight", "verifier_lm_head.weight")


@dataclass(frozen=True)
class DraftWeights:
    """A draft that fits its target. `tensors` are float32 under canonical names (`layers.0.…`).

    token_ids [draft_vocab_size] int64 target id of every draft id, ascending draft id; None: the whole vocabulary
    """

    config: DraftConfig
    tensors: dict[str, torch.Tensor]
    token_ids: torch.Tensor | None
    path: Path | None = None

    @property
    def fingerprint(self) -> str:
        """12 hex digits that tell drafts apart: names, shapes and sums of the tensors."""
        digest = hashlib.blake2b(digest_size=6)
        for name, tensor in sorted(self.tensors.items()):
            digest.update(f"{name} {tuple(tensor.shape)} {tensor.double().sum().item():.9e}".encode())
        return digest.hexdigest()

    @property
    def weight_bytes(self) -> int:
        """Bytes as kept in memory before an implementation packs them."""
        return sum(t.numel() * t.element_size() for t in self.tensors.values())


def load_draft(path: str | Path, target: ModelConfig, target_sha256: str | None = None) -> DraftWeights:
    """Read and check a draft folder or file. Raises ModelError (file and tensor named) or ModelNotFound."""
    raw, _, file = read_tensors(Path(path))
    config = read_draft_config(path, target)
    try:
        check_target(config, target, target_sha256)
        tensors, token_ids = _canonical(raw, config)
    except ModelError as error:
        if error.file is None:
            raise ModelError(str(error), file=file) from error
        raise
    return DraftWeights(config, tensors, token_ids, file)


def check_target(config: DraftConfig, target: ModelConfig, target_sha256: str | None = None) -> None:
    """Raise ModelError if the draft is for another target."""
    if config.layer.hidden_size != target.hidden_size:
        raise ModelError(
            f"the draft's hidden size is {config.layer.hidden_size}, the target's {target.hidden_size}:"
            " this draft is for another target"
        )
    if config.vocab_size != target.vocab_size:
        raise ModelError(
            f"the draft's vocabulary has {config.vocab_size} tokens, the target's {target.vocab_size}:"
            " this draft is for another target"
        )
    if config.layer.num_kv_heads != target.num_kv_heads or config.layer.head_dim != target.head_dim:
        raise ModelError(
            f"the draft has {config.layer.num_kv_heads} KV heads of {config.layer.head_dim}, the target's pages hold"
            f" {target.num_kv_heads} of {target.head_dim}"
        )
    bad = [tap for tap in config.taps if not 0 <= tap <= target.num_layers]
    if bad or not config.taps:
        raise ModelError(f"features from hidden states {list(config.taps)}; the target has 0 … {target.num_layers}")
    if config.target_sha256 is not None and target_sha256 is not None and config.target_sha256 != target_sha256:
        raise ModelError(
            f"the draft is for the target with SHA-256 {config.target_sha256[:16]}…, this one is {target_sha256[:16]}…"
        )
    if isinstance(config, DFlashConfig) and not 0 <= config.mask_token_id < target.vocab_size:
        raise ModelError(f"mask_token_id {config.mask_token_id}: allowed 0 to {target.vocab_size - 1}")
    if not 1 <= config.draft_vocab_size <= target.vocab_size:
        raise ModelError(f"draft_vocab_size {config.draft_vocab_size}: allowed 1 to {target.vocab_size}")


def _layer_tensors(config: DraftConfig, prefix: str, inputs: int) -> dict[str, tuple[int, ...]]:
    layer = config.layer
    hidden = layer.hidden_size
    shapes: dict[str, tuple[int, ...]] = {
        "input_layernorm.weight": (hidden,),
        "post_attention_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (layer.q_width, inputs),
        "self_attn.k_proj.weight": (layer.kv_width, inputs),
        "self_attn.v_proj.weight": (layer.kv_width, inputs),
        "self_attn.o_proj.weight": (hidden, layer.q_width),
        "mlp.gate_proj.weight": (layer.intermediate_size, hidden),
        "mlp.up_proj.weight": (layer.intermediate_size, hidden),
        "mlp.down_proj.weight": (hidden, layer.intermediate_size),
    }
    if layer.attention_bias:
        shapes["self_attn.q_proj.bias"] = (layer.q_width,)
        shapes["self_attn.k_proj.bias"] = (layer.kv_width,)
        shapes["self_attn.v_proj.bias"] = (layer.kv_width,)
    return {prefix + name: shape for name, shape in shapes.items()}


def expected_tensors(config: DraftConfig) -> dict[str, tuple[int, ...]]:
    """Canonical name -> shape of every tensor the draft's networks read (the head apart)."""
    hidden = config.layer.hidden_size
    taps = len(config.taps)
    shapes: dict[str, tuple[int, ...]] = {"fc.weight": (hidden, taps * hidden), "norm.weight": (hidden,)}
    if isinstance(config, EagleConfig):
        shapes.update(_layer_tensors(config, "layers.0.", 2 * hidden))
        shapes["layers.0.hidden_norm.weight"] = (hidden,)
        if config.norm_before_fc:
            shapes["input_norm.weight"] = (taps * hidden,)
        if config.fc_norm:
            shapes.update({f"fc_norm.{i}.weight": (hidden,) for i in range(taps)})
        return shapes
    shapes["hidden_norm.weight"] = (hidden,)
    for i in range(config.num_layers):
        prefix = f"layers.{i}."
        shapes.update(_layer_tensors(config, prefix, hidden))
        shapes[prefix + "self_attn.q_norm.weight"] = (config.layer.head_dim,)
        shapes[prefix + "self_attn.k_norm.weight"] = (config.layer.head_dim,)
        if config.layer.attention_bias:
            shapes[prefix + "self_attn.o_proj.bias"] = (hidden,)
    return shapes


def _canonical(
    raw: Mapping[str, torch.Tensor], config: DraftConfig
) -> tuple[dict[str, torch.Tensor], torch.Tensor | None]:
    """Tensors under canonical names in float32, and the vocabulary map."""
    named: dict[str, torch.Tensor] = {}
    for original, tensor in raw.items():
        if _rename(original) in named:
            raise ModelError("there twice, under two namings", tensor=_rename(original))
        named[_rename(original)] = tensor
    token_ids = _token_ids(named, config)
    expected = expected_tensors(config)
    # a reduced vocabulary has its own head, unless the head is the target's by declaration
    if "lm_head.weight" in named or (isinstance(config, EagleConfig) and not config.target_head):
        expected["lm_head.weight"] = (config.draft_vocab_size, config.layer.hidden_size)
    out_bias = "layers.0.self_attn.o_proj.bias"
    if config.layer.attention_bias and out_bias in named:  # Llama's layer has one beside those of q, k, v, Qwen's not
        expected[out_bias] = (config.layer.hidden_size,)
    for name, shape in expected.items():
        if name not in named:
            raise ModelError(f"missing from the draft; shape {shape} expected", tensor=name)
        if tuple(named[name].shape) != shape:
            raise ModelError(f"shape {tuple(named[name].shape)}, expected {shape}", tensor=name)
        if not named[name].is_floating_point():
            raise ModelError(f"type {named[name].dtype}, a floating point type expected", tensor=name)
    known = {*expected, "d2t", *_IGNORED}
    extra = sorted(name for name in named if name not in known and "rotary_emb" not in name)
    if extra:
        message = f"unexpected ({len(extra)} such tensors): the configuration has no place for it"
        raise ModelError(message, tensor=extra[0])
    tensors = {name: named[name].float().contiguous() for name in expected}
    for name, tensor in tensors.items():
        if not bool(torch.isfinite(tensor).all()):
            raise ModelError("holds a value that is not finite", tensor=name)
    return tensors, token_ids


def _rename(name: str) -> str:
    name = name.removeprefix("model.")
    return "layers.0." + name.removeprefix("midlayer.") if name.startswith("midlayer.") else name


def _token_ids(named: Mapping[str, torch.Tensor], config: DraftConfig) -> torch.Tensor | None:
    """Target ids of the draft's vocabulary: i + d2t[i]."""
    size = config.draft_vocab_size
    offsets = named.get("d2t")
    if offsets is None:
        if size != config.vocab_size:
            raise ModelError(f"missing: a draft vocabulary of {size} needs its map to target ids", tensor="d2t")
        return None
    if tuple(offsets.shape) != (size,):
        raise ModelError(f"shape {tuple(offsets.shape)}, expected ({size},)", tensor="d2t")
    if offsets.is_floating_point() or offsets.is_complex() or offsets.dtype == torch.bool:
        raise ModelError(f"type {offsets.dtype}, whole numbers expected", tensor="d2t")
    ids = torch.arange(size) + offsets.to(torch.int64)
    if bool(((ids < 0) | (ids >= config.vocab_size)).any()) or len(set(ids.tolist())) != size:
        raise ModelError(f"does not map to {size} different target ids below {config.vocab_size}", tensor="d2t")
    seen = named.get("t2d")
    if seen is None:
        return ids
    if tuple(seen.shape) != (config.vocab_size,):
        raise ModelError(f"shape {tuple(seen.shape)}, expected ({config.vocab_size},)", tensor="t2d")
    if seen.dtype == torch.bool and (not bool(seen[ids].all()) or int(seen.sum()) != size):
        raise ModelError("names other tokens than d2t", tensor="t2d")
    return ids


def save_draft(
    folder: str | Path,
    weights: DraftWeights,
    *,
    dtype: torch.dtype = torch.bfloat16,
    card: Mapping[str, Any] | None = None,
) -> Path:
    """Write `model.safetensors` and `config.json`; `card` is kept under "octavo" (seed, recipe, figures)."""
    path = Path(folder)
    path.mkdir(parents=True, exist_ok=True)
    config = weights.config
    drop_head = isinstance(config, EagleConfig) and config.target_head
    kept = {n: t for n, t in weights.tensors.items() if not (drop_head and n == "lm_head.weight")}
    tensors = {name: tensor.to(dtype) for name, tensor in kept.items()}
    if weights.token_ids is not None:
        tensors["d2t"] = (weights.token_ids - torch.arange(config.draft_vocab_size)).to(torch.int32)
    data = config_json(config, {"octavo": dict(card)} if card else None)
    partial = path / "config.json.part"
    partial.write_text(json.dumps(data, indent=1) + "\n")
    write_tensors(path / "model.safetensors", tensors, {"format": "pt"})
    partial.replace(path / "config.json")
    return path / "model.safetensors"


def random_draft(config: DraftConfig, *, seed: int = 0, scale: float = 1.0, target_head: bool = False) -> DraftWeights:
    """A draft with random weights for tests and as the start of training.

    Norm weights are scattered around 1, so that swapping two of them shows.
    """
    generator = torch.Generator().manual_seed(seed)
    shapes = expected_tensors(config)
    if isinstance(config, EagleConfig) and not (config.target_head or target_head):
        shapes["lm_head.weight"] = (config.draft_vocab_size, config.layer.hidden_size)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in shapes.items():
        noise = torch.randn(shape, generator=generator)
        if len(shape) == 1:
            tensors[name] = 0.1 * noise if name.endswith("bias") else 1.0 + 0.3 * noise
        else:
            tensors[name] = noise * (scale / shape[1] ** 0.5)
    ids = None
    if config.draft_vocab_size < config.vocab_size:
        ids = torch.randperm(config.vocab_size, generator=generator)[: config.draft_vocab_size].sort().values
    return DraftWeights(config, tensors, ids)
