"""Draft checkpoints: both layouts load, what does not fit the target is refused by name, files survive the disk."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ConfigError, ModelError
from octavo.spec.checkpoint import load_draft, random_draft, save_draft
from octavo.spec.choose import plan_draft
from octavo.spec.draft_config import default_dflash_layers, default_eagle_taps, parse_draft_config
from octavo.spec.learned import algorithm_of, shipped_draft
from octavo.spec.tensor_file import read_tensors, write_tensors
from tests.tiny import config_of, loaded_model
from tests.unit import spec_reference as ref

SMOLLM2 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"  # the file that `smollm2` names


def edited(folder: Path, **changes: Any) -> Path:
    """Change keys of a saved draft's config (None removes one)."""
    file = folder / "config.json"
    data = json.loads(file.read_text())
    for key, value in changes.items():
        data.pop(key, None) if value is None else data.update({key: value})
    file.write_text(json.dumps(data))
    return folder


def retensored(folder: Path, change: Any) -> Path:
    tensors, metadata, file = read_tensors(folder)
    tensors = {n: t.clone() for n, t in tensors.items()}
    change(tensors)
    write_tensors(file, tensors, metadata)
    return folder


@pytest.fixture
def eagle(tmp_path: Path) -> Path:
    save_draft(tmp_path / "eagle", random_draft(ref.eagle_config(draft_vocab_size=40), seed=1), dtype=torch.float32)
    return tmp_path / "eagle"


@pytest.fixture
def dflash(tmp_path: Path) -> Path:
    save_draft(tmp_path / "dflash", random_draft(ref.dflash_config(), seed=1), dtype=torch.float32)
    return tmp_path / "dflash"


@pytest.mark.parametrize(
    "config",
    [
        ref.eagle_config(), ref.eagle_config(draft_vocab_size=40, fc_norm=True), ref.eagle_config(norm_before_fc=True),
        ref.eagle_config(norm_before_residual=True, norm_logits=False),
        ref.eagle_config(target_head=True, draft_vocab_size=50, target_sha256="ab", context_tokens=99),
        ref.dflash_config(), ref.dflash_config(windows=(None, 9), causal=(False, False), draft_vocab_size=60),
        ref.dflash_config(windows=(None, 9), causal=(False, True), embed_scale=0.5),
        ref.dflash_config(causal=(True, True)), ref.dflash_config(windows=(None, 9), causal=(True, True)),
        ref.dflash_config(windows=(9, 9), causal=(False, False)),
        ref.dflash_config(windows=(9, 9), causal=(True, True)),
    ],
    ids=str,
)  # fmt: skip
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_draft_survives_the_disk(config: Any, dtype: torch.dtype, tmp_path: Path) -> None:
    weights = random_draft(config, seed=5)
    save_draft(tmp_path, weights, dtype=dtype, card={"seed": 5})
    loaded = load_draft(tmp_path, ref.TARGET, config.target_sha256)
    assert loaded.config == config
    assert set(loaded.tensors) == set(weights.tensors)
    for name, tensor in weights.tensors.items():
        assert torch.equal(loaded.tensors[name], tensor.to(dtype).float())
    if weights.token_ids is None:
        assert loaded.token_ids is None
    else:
        assert loaded.token_ids is not None and torch.equal(loaded.token_ids, weights.token_ids)
    assert algorithm_of(tmp_path) == config.algorithm


@pytest.mark.parametrize(
    "config",
    [
        ref.dflash_config(windows=(7, 9), causal=(True, True)), ref.dflash_config(causal=(True, False)),
        ref.eagle_config(feed_normed=True),
    ],
    ids=str,
)  # fmt: skip
def test_what_the_layout_cannot_say_is_not_saved(config: Any, tmp_path: Path) -> None:
    with pytest.raises(ModelError, match="layout cannot say"):
        save_draft(tmp_path, random_draft(config))
    assert not (tmp_path / "model.safetensors").exists()


CONFIG_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"hidden_size": 64}, "hidden size is 64, the target's 32.*another target"),
    ({"vocab_size": 500}, "vocabulary has 500 tokens, the target's 96.*another target"),
    ({"num_key_value_heads": 4}, "4 KV heads of 16"),
    ({"num_hidden_layers": 2}, "2 decoder layers"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [2, 3, 7]}}, "the target has 0 … 6"),
    ({"octavo_format": 99}, "format 99"),
    ({"hidden_act": "relu"}, "relu"),
    ({"intermediate_size": None}, "KeyError: 'intermediate_size'"),
    ({"draft_vocab_size": 97}, "draft_vocab_size 97"),
    ({"num_attention_heads": 0, "head_dim": None}, "num_attention_heads 0"),
    ({"num_key_value_heads": 3}, "a multiple of the 3 KV heads"),
    ({"intermediate_size": 0}, "intermediate_size 0"),
    ({"rms_norm_eps": -1e-6}, "rms_norm_eps"),
    ({"rms_norm_eps": float("nan")}, "rms_norm_eps is nan"),
    ({"max_position_embeddings": 0}, "max_position_embeddings 0"),
    ({"max_position_embeddings": "99"}, "max_position_embeddings is '99'; a whole number"),
    ({"intermediate_size": 48.0}, "intermediate_size is 48.0; a whole number"),
    ({"rms_norm_eps": "1e-5"}, "rms_norm_eps is '1e-5'; a finite number"),
    ({"norm_before_residual": "false"}, "norm_before_residual is 'false'; true or false"),
    ({"norm_output": 0}, "norm_output is 0; true or false"),
    ({"attention_bias": "no"}, "attention_bias is 'no'; true or false"),
    ({"draft_vocab_size": True}, "draft_vocab_size is True; a whole number"),
    ({"draft_vocab_size": 0}, "draft_vocab_size 0"),
    ({"target_sha256": 5}, "target_sha256 is 5; a text"),
    ({"eagle_config": "x"}, "eagle_config is 'x'; an object"),
    ({"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, "2", 3]}}, "a list of whole numbers"),
    ({"eagle_aux_hidden_state_layer_ids": []}, r"hidden states \[\]"),
    ({"octavo_format": True}, "format True"),
    ({"architectures": ["MedusaModel"], "eagle_config": None, "draft_vocab_size": None}, "not an EAGLE-3 or DFlash"),
]


@pytest.mark.parametrize(("changes", "message"), CONFIG_FAULTS, ids=lambda v: str(v)[:40])
def test_a_configuration_that_does_not_fit_is_refused(eagle: Path, changes: dict[str, Any], message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_draft(edited(eagle, **changes), ref.TARGET)
    assert caught.value.file is not None or "eagle" in str(caught.value)


def test_a_draft_for_another_file_of_the_same_shape_is_refused(eagle: Path) -> None:
    edited(eagle, target_sha256="aa" * 32)
    load_draft(eagle, ref.TARGET, "aa" * 32)
    with pytest.raises(ModelError, match="SHA-256 aaaaaaaaaaaaaaaa…, this one is bbbb"):
        load_draft(eagle, ref.TARGET, "bb" * 32)


def _drop(name: str) -> Any:
    return lambda tensors: tensors.pop(name)


def _put(name: str, value: torch.Tensor) -> Any:
    return lambda tensors: tensors.update({name: value})


TENSOR_FAULTS: list[tuple[Any, str]] = [
    (_drop("fc.weight"), "'fc.weight'.*missing"),
    (_drop("lm_head.weight"), "'lm_head.weight'.*missing"),
    (_drop("d2t"), "'d2t'.*40 needs its map"),
    (_drop("layers.0.hidden_norm.weight"), "'layers.0.hidden_norm.weight'.*missing"),
    (_put("fc.weight", torch.zeros(32, 32)), r"'fc.weight'.*\(32, 32\), expected \(32, 96\)"),
    (_put("lm_head.weight", torch.zeros(41, 32)), r"'lm_head.weight'.*\(41, 32\)"),
    (_put("d2t", torch.zeros(39, dtype=torch.int64)), r"'d2t'.*\(39,\)"),
    (_put("d2t", torch.full((40,), 60)), "'d2t'.*different target ids"),
    (_put("d2t", torch.arange(40).flip(0) - torch.arange(40) - 1), "'d2t'.*different target ids"),
    (_put("t2d", torch.zeros(96, dtype=torch.bool)), "'t2d'.*other tokens"),
    (_put("norm.weight", torch.full((32,), float("nan"))), "'norm.weight'.*not finite"),
    (_put("norm.weight", torch.zeros(32, dtype=torch.int32)), "'norm.weight'.*floating point"),
    (_put("layers.1.mlp.up_proj.weight", torch.zeros(2, 2)), "'layers.1.mlp.up_proj.weight'.*unexpected"),
    (_put("fc_norm.0.weight", torch.ones(32)), "'fc_norm.0.weight'.*unexpected"),
    (_put("model.norm.weight", torch.ones(32)), "'norm.weight'.*there twice"),
    (_put("d2t", torch.full((40,), 0.5)), "'d2t'.*whole numbers expected"),
    (_put("d2t", torch.zeros(40, dtype=torch.bool)), "'d2t'.*whole numbers expected"),
    (_put("t2d", torch.zeros(40, dtype=torch.bool)), r"'t2d'.*\(40,\), expected \(96,\)"),
]


@pytest.mark.parametrize(("change", "message"), TENSOR_FAULTS, ids=[m for _, m in TENSOR_FAULTS])
def test_tensors_that_do_not_fit_are_refused_by_name(eagle: Path, change: Any, message: str) -> None:
    with pytest.raises(ModelError, match=message) as caught:
        load_draft(retensored(eagle, change), ref.TARGET)
    assert "model.safetensors" in str(caught.value)


def test_dflash_faults(dflash: Path) -> None:
    inner = {"target_layer_ids": [1, 3], "mask_token_id": 5}
    cases: list[tuple[dict[str, Any], str]] = [
        ({"block_size": 0}, "block_size 0"),
        ({"dflash_config": {"target_layer_ids": [1, 3]}}, "mask_token_id is not set"),
        ({"dflash_config": {"target_layer_ids": [1, 3], "mask_token_id": 96}}, "mask_token_id 96"),
        ({"dflash_config": {"target_layer_ids": [1, 6], "mask_token_id": 5}}, "hidden states"),
        ({"layer_types": ["full_attention"]}, "names 1 layers of 2"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": None}, "sliding_window"),
        ({"layer_types": ["full_attention", "sliding_attention"], "sliding_window": 0}, "sliding_window 0"),
        ({"dflash_config": {**inner, "input_embedding_scale": 0}}, "input_embedding_scale 0"),
        ({"dflash_config": {**inner, "input_embedding_scale": float("inf")}}, "input_embedding_scale is inf"),
        ({"rope_theta": 0}, "rope_theta 0"),
        ({"rope_theta": float("nan")}, "rope_theta is nan"),
        ({"rope_scaling": {"rope_type": "linear"}}, "linear.*factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": 0}}, "linear.*factor"),
        ({"rope_scaling": {"rope_type": "linear", "factor": float("inf")}}, "factor is inf"),
        ({"rope_scaling": ["linear"]}, "rope_scaling is .*an object"),
        ({"layer_types": "full_attention"}, "layer_types is .*a list of texts"),
        ({"layer_types": ["full_attention", "chunked_attention"]}, "layer_types has 'chunked_attention'"),
        ({"num_hidden_layers": 0, "layer_types": None}, "num_hidden_layers 0: allowed 1 to 64"),
        ({"num_hidden_layers": 10**9, "layer_types": None}, "num_hidden_layers 1000000000: allowed 1 to 64"),
        ({"is_causal": "false"}, "is_causal is 'false'; true or false"),
        ({"block_size": "5"}, "block_size is '5'; a whole number"),
        ({"block_size": -1}, "block_size -1"),
        ({"block_size": 65}, "block_size 65"),
    ]
    original = (dflash / "config.json").read_text()
    for changes, message in cases:
        (dflash / "config.json").write_text(original)
        with pytest.raises(ModelError, match=message):
            load_draft(edited(dflash, **changes), ref.TARGET)


def test_a_file_without_configuration_is_refused(eagle: Path) -> None:
    (eagle / "config.json").write_text("{")
    with pytest.raises(ModelError, match="config.json.*not JSON"):
        load_draft(eagle, ref.TARGET)
    (eagle / "config.json").unlink()
    with pytest.raises(ModelError, match="config.json.*needs its configuration"):
        load_draft(eagle, ref.TARGET)


def test_norm_output_means_what_its_layout_means() -> None:
    plain = {**json.loads('{"architectures": ["LlamaForCausalLMEagle3"]}'), "hidden_size": 32, "intermediate_size": 48,
             "num_attention_heads": 4, "num_key_value_heads": 2, "head_dim": 16, "vocab_size": 96}  # fmt: skip
    default = parse_draft_config(plain, ref.TARGET)
    assert (default.norm_logits, default.feed_normed, default.taps) == (True, False, (2, 3, 3))  # type: ignore[union-attr]
    off = parse_draft_config({**plain, "norm_output": False}, ref.TARGET)
    assert (off.norm_logits, off.feed_normed) == (False, False)  # type: ignore[union-attr]
    theirs = {"speculators_model_type": "eagle3", "transformer_layer_config": plain, "norm_output": True}
    fed = parse_draft_config(theirs, ref.TARGET)
    assert (fed.norm_logits, fed.feed_normed) == (True, True)  # type: ignore[union-attr]
    both = {**plain, "fc_norm": True, "norm_before_fc": True}
    with pytest.raises(ModelError, match="exclude each other"):
        parse_draft_config(both, ref.TARGET)


def test_default_layers() -> None:
    assert default_eagle_taps(30) == (2, 15, 27) and default_eagle_taps(18) == (2, 9, 15)
    assert default_dflash_layers(30, 3) == (1, 14, 27) and default_dflash_layers(30, 5) == (1, 8, 14, 20, 27)
    assert default_dflash_layers(30, 1) == (15,)


# -- options ---------------------------------------------------------------------------------------------------------


def planned(folder: Path | None, **options: Any) -> Any:
    from octavo.config import EngineConfig

    given = {"draft_model": None if folder is None else str(folder), **options}
    return plan_draft(EngineConfig.from_options(given, environ={}), loaded_model("llama"))


@pytest.fixture
def tiny_eagle(tmp_path: Path) -> Path:
    from octavo.spec.draft_config import EagleConfig, LayerShape

    config = EagleConfig(LayerShape.of(config_of("llama")), 288, 288, (1, 2, 3))
    save_draft(tmp_path / "tiny", random_draft(config))
    return tmp_path / "tiny"


def test_options_make_the_reserve_and_bad_ones_are_named(tiny_eagle: Path) -> None:
    plan = planned(tiny_eagle, draft="eagle3", draft_steps=4, overlap=True)
    assert (plan.reserve.footprint, plan.reserve.commit_lag, plan.kv_layers, plan.key_mode) == (5, 5, 1, "pair")
    tree = planned(tiny_eagle, draft="eagle3", draft_steps=5, draft_topk=8, draft_tokens=64, overlap=True)
    assert (tree.reserve.footprint, tree.reserve.commit_lag) == (64, 6)
    faults: list[tuple[dict[str, Any], str]] = [
        ({"draft_steps": 3, "draft_topk": 2, "draft_tokens": 40}, "draft_tokens"),
        ({"draft_steps": 20, "draft_topk": 8}, "draft_topk"),
        ({"draft_tokens": 20, "max_model_len": 16}, "draft_tokens"),
        ({"draft_topk": 0}, "draft_topk"),
    ]
    for options, name in faults:
        with pytest.raises(ConfigError, match=name):
            planned(tiny_eagle, draft="eagle3", **options)
    for name in ("scripted", "ngram", "tests.unit.test_spec_example:Odd"):
        for options in ({"draft_tokens": 1}, {"draft_tokens": 20, "max_model_len": 20}):
            with pytest.raises(ConfigError, match="draft_tokens"):
                planned(None, draft=name, **options)
    with pytest.raises(ConfigError, match="holds a draft for eagle3"):
        planned(tiny_eagle, draft="dflash")
    with pytest.raises(ConfigError, match="no dflash draft ships"):
        planned(None, draft="dflash")


def test_no_shipped_draft_is_taken_for_an_unknown_target() -> None:
    assert shipped_draft(None) is None and shipped_draft("00" * 32) is None


@pytest.mark.parametrize("algorithm", ["eagle3", "dflash", "table"])
def test_drafts_ship_for_smollm2(algorithm: str) -> None:
    """Under 16 MB each, for the very file `smollm2` names; `auto` takes one only where it is marked as the default."""
    folder = shipped_draft(SMOLLM2, algorithm)
    assert folder is not None and algorithm_of(folder) == algorithm
    assert sum(file.stat().st_size for file in folder.iterdir()) < 16e6
    card = json.loads((folder / "config.json").read_text())["octavo"]
    assert card["options"] and card["corpus"]["recipe"] and card["licence"]
    default = shipped_draft(SMOLLM2)
    assert (default == folder) == bool(card["default"])


def test_a_draft_of_another_target_never_runs(tmp_path: Path) -> None:
    save_draft(tmp_path, random_draft(ref.eagle_config()))
    with pytest.raises(ModelError, match="another target"):
        planned(tmp_path, draft="eagle3")
    assert dataclasses.is_dataclass(ref.eagle_config())
