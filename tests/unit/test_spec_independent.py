"""Our drafts against three independent implementations: `speculators`, `specforge` and `dflash`.

For each configuration flag one seeded random checkpoint is loaded into both; logits must agree within 1e-4 in
float32 over a prefill, three chained steps and a block. Two planted faults (norms swapped, a layer id shifted) must
be seen. The packages are pinned and installed without their dependencies (tests only).
"""

from __future__ import annotations

import dataclasses
import warnings
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.nn import functional as F

from octavo.spec.checkpoint import DraftWeights, load_draft, random_draft, save_draft
from octavo.spec.dflash import DFlashDrafter
from octavo.spec.draft_config import DFlashConfig, EagleConfig, parse_draft_config
from octavo.spec.drafter import DraftRequest
from octavo.spec.eagle import EagleDrafter
from tests.unit import spec_reference as ref

TOLERANCE = {"rtol": 0.0, "atol": 1e-4}
LENGTH = 20
LAYER_KEYS = {
    "hidden_size": ref.HIDDEN, "intermediate_size": 48, "num_attention_heads": 4, "num_key_value_heads": 2,
    "head_dim": 16, "rms_norm_eps": 1e-5, "vocab_size": ref.VOCAB, "hidden_act": "silu",
    "max_position_embeddings": 512,
}  # fmt: skip


@pytest.fixture(autouse=True)
def eager() -> Iterator[None]:
    """The peers compile pieces of their models; here they run as written."""
    before = torch._dynamo.config.disable
    torch._dynamo.config.disable = True
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        yield
    torch._dynamo.config.disable = before


def text() -> tuple[list[int], torch.Tensor]:
    generator = torch.Generator().manual_seed(12)
    tokens = torch.randint(0, ref.VOCAB, (LENGTH,), generator=generator).tolist()
    return tokens, torch.randn(LENGTH, 3 * ref.HIDDEN, generator=generator)


def our_eagle_logits(weights: DraftWeights, base: int, steps: int = 3) -> list[torch.Tensor]:
    """Logits of `steps` chained steps behind pair `base`, served from paged KV, the true tokens being fed."""
    tokens, features = text()
    target, _ = ref.bind()
    drafter = EagleDrafter(weights, target, steps=steps, max_rows=4)
    view = ref.Pages.make(1, page_size=4).view
    drafter.begin(DraftRequest(0, tuple(tokens), 8, 0))
    prefix = tokens[: base + 2]
    drafter.observe(ref.observe_chunk(view, 0, prefix, features, 0, 7))
    drafter.observe(ref.observe_chunk(view, 0, prefix, features, 7, base + 1))
    seen: list[torch.Tensor] = []
    following = iter([*tokens[base + 2 : base + 1 + steps], 0])

    def fed(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(drafter.network.head.logits(hidden)[0])
        return torch.tensor([next(following)])

    drafter.network.head.argmax = fed  # type: ignore[method-assign]
    drafter.propose(ref.propose_batch(view, [0], [prefix], steps))
    assert len(seen) == steps
    return seen


def speculators_model(config: EagleConfig) -> Any:
    """Their model."""
    with ref.training_readers_stood_in_for():
        from speculators.models.eagle3 import Eagle3DraftModel, Eagle3SpeculatorConfig
    from transformers import LlamaConfig

    shape = config.layer
    keys = {**LAYER_KEYS, "hidden_act": "silu" if shape.activation == "silu" else "gelu_pytorch_tanh"}
    layer = LlamaConfig(**keys, num_hidden_layers=1, rope_theta=10000.0, attention_bias=shape.attention_bias)
    layer._attn_implementation = "eager"
    theirs = Eagle3SpeculatorConfig(
        transformer_layer_config=layer,
        draft_vocab_size=config.draft_vocab_size,
        norm_before_residual=config.norm_before_residual,
        norm_before_fc=config.norm_before_fc,
        fc_norm=config.fc_norm,
        norm_output=config.feed_normed,
        eagle_aux_hidden_state_layer_ids=list(config.taps),
    )
    return Eagle3DraftModel(theirs).float().eval()


def speculators_logits(weights: DraftWeights) -> list[torch.Tensor]:
    """[T, draft vocabulary] for each of three steps; index i is the pair (feature i, token i + 1)."""
    config = weights.config
    assert isinstance(config, EagleConfig)
    model = speculators_model(config)
    state = {name: tensor for name, tensor in weights.tensors.items()}
    _, network = ref.bind()
    state["embed_tokens.weight"] = network.table
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected
    assert not [m for m in missing if "verifier" not in m and m not in ("d2t", "t2d")]
    tokens, features = text()
    seen: list[torch.Tensor] = []
    model.lm_head.register_forward_hook(lambda module, args, out: seen.append(out[0].detach()))
    with torch.no_grad():
        model(
            features[:-1].unsqueeze(0),
            torch.tensor([tokens[1:]]),
            torch.zeros(1, LENGTH - 1, dtype=torch.int64),
            ttt_steps=3,
        )
    return seen


SPECULATORS_FLAGS: list[dict[str, Any]] = [
    {}, {"norm_before_residual": True}, {"fc_norm": True}, {"norm_before_fc": True}, {"feed_normed": True},
    {"draft_vocab_size": 40}, {"layer": dataclasses.replace(ref.SHAPE, attention_bias=True)},
    {"layer": dataclasses.replace(ref.SHAPE, activation="gelu_tanh")},
]  # fmt: skip


@pytest.mark.parametrize("flags", SPECULATORS_FLAGS, ids=str)
def test_eagle_equals_speculators(flags: dict[str, Any], tmp_path: Path) -> None:
    """Through a checkpoint file where the plain layout can say what the flags are."""
    weights = random_draft(ref.eagle_config(**flags), seed=6)
    if weights.config.layer.attention_bias:  # theirs has one behind the attention too
        bias = torch.randn(ref.HIDDEN, generator=torch.Generator().manual_seed(3))
        weights.tensors["layers.0.self_attn.o_proj.bias"] = bias
    if "feed_normed" not in flags:
        save_draft(tmp_path, weights, dtype=torch.float32)
        weights = load_draft(tmp_path, ref.TARGET)
    theirs = speculators_logits(weights)
    for base in (7, 11, LENGTH - 4):
        for k, ours in enumerate(our_eagle_logits(weights, base)):
            torch.testing.assert_close(ours, theirs[k][base], **TOLERANCE)


def test_two_norms_swapped_are_seen() -> None:
    weights = random_draft(ref.eagle_config(), seed=6)
    a, b = "layers.0.hidden_norm.weight", "layers.0.input_layernorm.weight"
    swapped = {**weights.tensors, a: weights.tensors[b], b: weights.tensors[a]}
    theirs = speculators_logits(weights)
    ours = our_eagle_logits(dataclasses.replace(weights, tensors=swapped), 9)
    with pytest.raises(AssertionError):
        torch.testing.assert_close(ours[0], theirs[0][9], **TOLERANCE)


def test_a_speculators_configuration_is_read_as_they_mean_it() -> None:
    config = ref.eagle_config(feed_normed=True, fc_norm=True, draft_vocab_size=40)
    data = speculators_model(config).config.to_dict()
    parsed = parse_draft_config(data, ref.TARGET)
    assert dataclasses.replace(parsed, context_tokens=None) == config


# -- specforge -------------------------------------------------------------------------------------------------------


def specforge_logits(weights: DraftWeights) -> list[torch.Tensor]:
    from specforge.modeling.draft.llama3_eagle import LlamaForCausalLMEagle3
    from transformers import LlamaConfig

    config = weights.config
    assert isinstance(config, EagleConfig)
    theirs = LlamaConfig(**LAYER_KEYS, num_hidden_layers=1, rope_theta=10000.0)
    theirs.draft_vocab_size = config.draft_vocab_size
    theirs.fc_norm, theirs.norm_output = config.fc_norm, config.norm_logits
    model = LlamaForCausalLMEagle3(theirs).float().eval()
    state = {name.replace("layers.0.", "midlayer."): tensor for name, tensor in weights.tensors.items()}
    _, network = ref.bind()
    missing, unexpected = model.load_state_dict(state, strict=False)
    assert not unexpected and set(missing) <= {"embed_tokens.weight", "t2d", "d2t"}
    tokens, features = text()
    length = LENGTH - 1
    causal = torch.full((length, length), torch.finfo(torch.float32).min).triu(1)[None, None]
    cache: list[list[torch.Tensor]] = [[], []]
    positions = torch.arange(length).unsqueeze(0)
    seen = []
    with torch.no_grad():
        hidden = model.project_hidden_states(features[:-1].unsqueeze(0))
        for k in range(3):
            ids = torch.tensor([[*tokens[1 + k :], *[0] * k]])
            hidden = model.backbone(
                input_embeds=F.embedding(ids, network.table),
                hidden_states=hidden,
                cache_hidden=cache,
                attention_mask=causal,
                position_ids=positions,
                use_cache=True,
            )
            seen.append(model.compute_logits(hidden)[0])
    return seen


@pytest.mark.parametrize("flags", [{}, {"fc_norm": True}, {"norm_logits": False}], ids=str)
def test_eagle_equals_specforge(flags: dict[str, Any], tmp_path: Path) -> None:
    """Through a checkpoint file under their tensor names (`midlayer.*`)."""
    from octavo.spec.tensor_file import write_tensors

    weights = random_draft(ref.eagle_config(**flags), seed=8)
    save_draft(tmp_path, weights, dtype=torch.float32)
    renamed = {n.replace("layers.0.", "midlayer."): t for n, t in weights.tensors.items()}
    write_tensors(tmp_path / "model.safetensors", renamed, {})
    loaded = load_draft(tmp_path, ref.TARGET)
    theirs = specforge_logits(weights)
    for base in (7, LENGTH - 4):
        for k, ours in enumerate(our_eagle_logits(loaded, base)):
            torch.testing.assert_close(ours, theirs[k][base], **TOLERANCE)


# -- dflash ----------------------------------------------------------------------------------------------------------

DFLASH_FLAGS: list[dict[str, Any]] = [
    {},
    {"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 9},
    {"layer_types": ["sliding_attention", "full_attention"], "sliding_window": 9, "is_causal": False},
    {"is_causal": True},
    {"rope_theta": 500000.0},
    {"rope_scaling": {"rope_type": "linear", "factor": 3.0}},
    {"rope_scaling": {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 8}},
    {"rope_scaling": {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                      "original_max_position_embeddings": 64}},
    {"attention_bias": True},
    {"hidden_act": "gelu_pytorch_tanh"},
    {"block_size": 3},
]  # fmt: skip


def dflash_json(flags: dict[str, Any]) -> dict[str, Any]:
    return {
        **LAYER_KEYS, "architectures": ["DFlashDraftModel"], "num_hidden_layers": 2, "num_target_layers": ref.LAYERS,
        "block_size": 6, "dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 95},
        "rope_theta": 10000.0, "attention_bias": False, **flags,
    }  # fmt: skip


def hidden_states() -> torch.Tensor:
    """[layers + 1, T, H] of a target, as the common library lists them."""
    return torch.randn(ref.LAYERS + 1, LENGTH, ref.HIDDEN, generator=torch.Generator().manual_seed(4))


def dflash_peer_logits(weights: DraftWeights, flags: dict[str, Any]) -> torch.Tensor:
    from dflash.model import DFlashDraftModel, extract_context_feature
    from transformers import Qwen3Config

    keys = dflash_json(flags)
    rope = {"rope_type": "default", **keys.pop("rope_scaling", {}), "rope_theta": keys.pop("rope_theta")}
    windows = {"use_sliding_window": True} if "layer_types" in keys else {}
    config = Qwen3Config(**keys, **windows, rope_parameters=rope)
    model = DFlashDraftModel(config).float().eval()
    model.load_state_dict(weights.tensors)
    _, network = ref.bind()
    tokens, _ = text()
    anchor, size = LENGTH - 1, keys["block_size"]
    block = torch.tensor([[tokens[-1], *[95] * (size - 1)]])
    context = extract_context_feature([h[:anchor].unsqueeze(0) for h in hidden_states()], model.target_layer_ids)
    with torch.no_grad():
        hidden = model(
            position_ids=torch.arange(anchor + size).unsqueeze(0),
            noise_embedding=F.embedding(block, network.table),
            target_hidden=context,
        )
    return hidden[0, 1:] @ network.head.T


def our_block_logits(weights: DraftWeights, shift: int = 0) -> torch.Tensor:
    config = weights.config
    assert isinstance(config, DFlashConfig)
    target, _ = ref.bind()
    drafter = DFlashDrafter(weights, target, max_rows=4)
    view = ref.Pages.make(2, page_size=4).view
    tokens, _ = text()
    features = torch.cat([hidden_states()[tap + shift] for tap in drafter.taps], dim=1)
    drafter.begin(DraftRequest(1, tuple(tokens), 8, 0))
    drafter.observe(ref.observe_chunk(view, 1, tokens, features, 0, 5))
    drafter.observe(ref.observe_chunk(view, 1, tokens, features, 5, LENGTH - 1))
    seen: list[torch.Tensor] = []

    def kept(hidden: torch.Tensor) -> torch.Tensor:
        seen.append(drafter.network.head.logits(hidden))
        return torch.zeros(hidden.shape[0], dtype=torch.int64)

    drafter.network.head.argmax = kept  # type: ignore[method-assign]
    drafter.propose(ref.propose_batch(view, [1], [tokens], 5))
    return seen[0]


def dflash_weights(flags: dict[str, Any]) -> DraftWeights:
    config = parse_draft_config(dflash_json(flags), ref.TARGET)
    return random_draft(config, seed=7)


@pytest.mark.parametrize("flags", DFLASH_FLAGS, ids=str)
def test_a_block_equals_the_dflash_package(flags: dict[str, Any], tmp_path: Path) -> None:
    """Through a checkpoint file."""
    weights = dflash_weights(flags)
    save_draft(tmp_path, weights, dtype=torch.float32)
    weights = load_draft(tmp_path, ref.TARGET)
    torch.testing.assert_close(our_block_logits(weights), dflash_peer_logits(weights, flags), **TOLERANCE)


def test_a_shifted_layer_id_is_seen() -> None:
    weights = dflash_weights({})
    theirs = dflash_peer_logits(weights, {})
    with pytest.raises(AssertionError):
        torch.testing.assert_close(our_block_logits(weights, shift=-1), theirs, **TOLERANCE)


@pytest.mark.parametrize(("layers", "features"), [(30, 1), (30, 3), (30, 5), (36, 5), (18, 3)])
def test_default_layer_ids_are_theirs(layers: int, features: int) -> None:
    from dflash.model import build_target_layer_ids

    from octavo.spec.draft_config import default_dflash_layers

    assert list(default_dflash_layers(layers, features)) == build_target_layer_ids(layers, features)
