"""The draft that training starts from: shaped like the target's layers, head rows and final norm from the target."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import torch

from octavo.errors import ConfigError
from octavo.model.config import ModelConfig
from octavo.spec.checkpoint import DraftWeights, expected_tensors, load_draft
from octavo.spec.draft_config import (
    DFlashConfig,
    DraftConfig,
    EagleConfig,
    LayerShape,
    default_dflash_layers,
    default_eagle_taps,
)


def head_name(source: Any) -> str:
    """Canonical name of the target's head: its own, or the tied embedding."""
    return "lm_head.weight" if "lm_head.weight" in source.names() else "model.embed_tokens.weight"


def _shape(target: ModelConfig, intermediate: int | None) -> LayerShape:
    shape = LayerShape.of(target)
    return shape if intermediate is None else replace(shape, intermediate_size=intermediate)


def new_eagle_config(
    target: ModelConfig, token_ids: torch.Tensor, sha256: str | None, intermediate: int | None = None
) -> EagleConfig:
    """EAGLE-3 for a target: a norm per feature (they differ a hundredfold in scale), head rows from the target."""
    return EagleConfig(
        layer=_shape(target, intermediate),
        vocab_size=target.vocab_size,
        draft_vocab_size=len(token_ids),
        taps=default_eagle_taps(target.num_layers),
        context_tokens=target.context_tokens,
        fc_norm=True,
        target_head=True,
        target_sha256=sha256,
    )


def new_dflash_config(
    target: ModelConfig,
    token_ids: torch.Tensor,
    *,
    layers: int,
    features: int,
    block_size: int,
    mask_token_id: int,
    sha256: str | None,
    intermediate: int | None = None,
) -> DFlashConfig:
    """DFlash for a target. It says the same words as it is trained on: the others were never pushed down."""
    if layers < 1:
        raise ConfigError("layers", layers, "at least 1")
    if not 2 <= block_size <= 64:
        raise ConfigError("block_size", block_size, "2 to 64")
    return DFlashConfig(
        layer=_shape(target, intermediate),
        vocab_size=target.vocab_size,
        draft_vocab_size=len(token_ids),
        num_layers=layers,
        target_layer_ids=default_dflash_layers(target.num_layers, features),
        block_size=block_size,
        mask_token_id=mask_token_id,
        windows=(None,) * layers,
        causal=(False,) * layers,
        context_tokens=target.context_tokens,
        target_sha256=sha256,
    )


def unused_token(tokenizer: Any, vocab_size: int, seen: set[int]) -> int:
    """An id no text of the corpus has: rather a spare control token than a rare word. Raises ConfigError."""
    spoken_for = {tokenizer.bos_id, tokenizer.eos_id, tokenizer.pad_id, tokenizer.unk_id, *tokenizer.eos_ids}
    spare = sorted(i for i in tokenizer.special_ids if i not in spoken_for and i not in seen)
    if spare:
        return int(spare[-1])
    free = [i for i in range(vocab_size - 1, -1, -1) if i not in seen and i not in spoken_for]
    if not free:
        raise ConfigError("target", "its vocabulary", "one id that no text uses is needed as the mask token")
    return free[0]


def earlier_draft(folder: Path, target: ModelConfig, algorithm: str, sha256: str | None) -> DraftWeights:
    """An earlier draft of the same target to go on from; its shape and vocabulary stay.

    Raises ConfigError if it is of another kind, ModelError or ModelNotFound if it cannot be read or does not fit.
    """
    weights = load_draft(folder, target, sha256)
    if weights.config.algorithm != algorithm:
        raise ConfigError("init", str(folder), f"a draft of kind {algorithm}; this one is {weights.config.algorithm}")
    tensors = {name: tensor.float() for name, tensor in weights.tensors.items()}
    ids = torch.arange(target.vocab_size) if weights.token_ids is None else weights.token_ids
    return replace(weights, tensors=tensors, token_ids=ids)


def initial_weights(config: DraftConfig, source: Any, token_ids: torch.Tensor, seed: int) -> DraftWeights:
    """Random matrices at the scale of their inputs; output projections small, so that a layer starts as a nudge."""
    generator = torch.Generator().manual_seed(seed)
    tensors: dict[str, torch.Tensor] = {}
    for name, shape in expected_tensors(config).items():
        if len(shape) == 1:
            tensors[name] = torch.zeros(shape) if name.endswith("bias") else torch.ones(shape)
            continue
        scale = 0.5 if name.endswith(("o_proj.weight", "down_proj.weight")) else 1.0
        tensors[name] = torch.randn(shape, generator=generator) * (scale / shape[1] ** 0.5)
    tensors["norm.weight"] = source.tensor("model.norm.weight").float().clone()
    return DraftWeights(config, tensors, token_ids)
