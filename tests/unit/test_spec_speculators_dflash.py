"""DFlash drafts in the `speculators` layout against that package: configuration, layer ids, block logits within 1e-4.

Its training code counts a sliding window from the anchor, the `dflash` package (and this project) from each slot, so
windows are wider than the text here; test_spec_independent.py compares narrow ones with `dflash`.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.spec.checkpoint import DraftWeights, load_draft, random_draft, save_draft
from octavo.spec.draft_config import parse_draft_config
from tests.unit import spec_reference as ref
from tests.unit.test_spec_independent import (
    LAYER_KEYS,
    LENGTH,
    TOLERANCE,
    eager,
    hidden_states,
    our_block_logits,
    text,
)

__all__ = ["eager"]

BLOCK = 6
WIDE = {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 400, "use_sliding_window": True}
FLAGS: list[tuple[dict[str, Any], dict[str, Any]]] = [  # of the layer, of the draft
    ({}, {}), ({"attention_bias": True}, {}), ({}, {"draft_vocab_size": 40}), (WIDE, {}),
    (WIDE, {"sliding_window_non_causal": True}),
]  # fmt: skip


def model(layer_flags: dict[str, Any], flags: dict[str, Any]) -> Any:
    """Their model."""
    with ref.training_readers_stood_in_for():
        from speculators.models.dflash import DFlashDraftModel, DFlashSpeculatorConfig
    from transformers import Qwen3Config

    rope = {"rope_type": "default", "rope_theta": 10000.0}
    layer = Qwen3Config(**LAYER_KEYS, num_hidden_layers=2, rope_parameters=rope, **layer_flags)
    layer._attn_implementation = "eager"
    given = {"draft_vocab_size": ref.VOCAB, "block_size": BLOCK, "mask_token_id": 95, **flags}
    config = DFlashSpeculatorConfig(transformer_layer_config=layer, aux_hidden_state_layer_ids=[2, 4], **given)
    return DFlashDraftModel(config).float().eval()


def their_logits(theirs: Any, weights: DraftWeights) -> torch.Tensor:
    """[BLOCK - 1, draft vocabulary] of one block behind the text, whose newest token is the anchor."""
    _, network = ref.bind()
    head = network.head if weights.token_ids is None else network.head[weights.token_ids]
    state = {**weights.tensors, "embed_tokens.weight": network.table, "lm_head.weight": head}
    missing, unexpected = theirs.load_state_dict(state, strict=False)
    assert not unexpected and all("verifier" in m or m in ("d2t", "t2d") for m in missing)
    tokens, _ = text()
    anchors = torch.zeros(1, LENGTH + BLOCK)
    anchors[0, LENGTH - 1] = 1
    features = torch.cat([hidden_states()[2], hidden_states()[4]], dim=1)
    features = torch.nn.functional.pad(features, (0, 0, 0, BLOCK)).unsqueeze(0)
    ids = torch.tensor([[*tokens, *[0] * BLOCK]])
    seen: list[torch.Tensor] = []
    theirs.lm_head.register_forward_hook(lambda module, args, out: seen.append(out[0].detach()))
    last, documents = torch.zeros(1, LENGTH + BLOCK, ref.HIDDEN), torch.zeros(1, LENGTH + BLOCK, dtype=torch.int64)
    with torch.no_grad():
        theirs._backbone_forward(features, ids, anchors, last, documents, max_anchors=1)
    return seen[0][1:BLOCK]


@pytest.mark.parametrize(("layer_flags", "flags"), FLAGS, ids=str)
def test_a_block_equals_speculators(layer_flags: dict[str, Any], flags: dict[str, Any], tmp_path: Path) -> None:
    theirs = model(layer_flags, flags)
    config = parse_draft_config(theirs.config.to_dict(), ref.TARGET)
    assert config.taps == (2, 4)
    weights = random_draft(config, seed=7)
    save_draft(tmp_path, weights, dtype=torch.float32)
    loaded = load_draft(tmp_path, ref.TARGET)  # the plain layout names the same layers by other ids
    torch.testing.assert_close(our_block_logits(loaded), their_logits(theirs, weights), **TOLERANCE)
