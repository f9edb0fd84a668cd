"""Safetensors folders of every architecture: configuration in both spellings, shards, dtypes, Gemma's norms."""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.model.config import RopeConfig
from octavo.model.load import load_model
from octavo.model.load.expected import expected_tensors
from octavo.model.load.hf_config import hf_config
from octavo.model.load.safetensors import SafetensorsSource
from tests.unit.load_files import byte_tokens, hf_config_json, random_tensors, tiny, write_folder

BASE = {"vocab_size": 320, "hidden_size": 64, "intermediate_size": 96, "num_hidden_layers": 7,
        "num_attention_heads": 4, "num_key_value_heads": 2, "max_position_embeddings": 256}  # fmt: skip


def transformers_cases() -> dict[str, Any]:
    import transformers as tf

    llama3 = {"rope_type": "llama3", "factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
              "original_max_position_embeddings": 64, "rope_theta": 5e5}  # fmt: skip
    yarn = {"rope_type": "yarn", "factor": 4.0, "original_max_position_embeddings": 64}
    return {
        "llama": tf.LlamaForCausalLM(tf.LlamaConfig(**BASE, head_dim=32, attention_bias=True, mlp_bias=True,
                                                    rope_parameters=llama3)),
        "mistral": tf.MistralForCausalLM(tf.MistralConfig(**BASE, sliding_window=16)),
        "qwen2": tf.Qwen2ForCausalLM(tf.Qwen2Config(**BASE, use_sliding_window=True, sliding_window=16,
                                                    max_window_layers=3, tie_word_embeddings=True)),
        "qwen3": tf.Qwen3ForCausalLM(tf.Qwen3Config(**BASE, head_dim=24, rope_parameters=yarn)),
        "gemma3": tf.Gemma3ForCausalLM(tf.Gemma3TextConfig(**BASE, head_dim=24, sliding_window=16,
                                                           query_pre_attn_scalar=20)),
    }  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("architecture", ["llama", "mistral", "qwen2", "qwen3", "gemma3"])
def test_what_transformers_saves_comes_back_exactly(architecture: str, dtype: torch.dtype, tmp_path: Path) -> None:
    model = transformers_cases()[architecture].to(dtype)
    with torch.no_grad():
        for name, weight in model.named_parameters():  # its norms start as constants, which would hide a mix-up
            if name.endswith(("norm.weight", "bias")):
                weight.normal_()
    model.save_pretrained(tmp_path, max_shard_size="60KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 3
    source = SafetensorsSource(tmp_path)
    state = model.state_dict()
    assert set(source.names()) == set(expected_tensors(source.config))
    for name in source.names():
        want = state[name].float()
        if architecture == "gemma3" and name.endswith("norm.weight"):
            want = want + 1
        assert torch.equal(source.tensor(name), want), name
        assert source.kind(name) == {torch.float32: "F32", torch.bfloat16: "BF16", torch.float16: "F16"}[dtype]


def test_the_configuration_of_what_transformers_saves(tmp_path: Path) -> None:
    configs = {}
    for architecture, model in transformers_cases().items():
        model.config.save_pretrained(tmp_path / architecture)
        path = tmp_path / architecture / "config.json"
        values = json.loads(path.read_text()) | {"architectures": [type(model).__name__]}
        configs[architecture] = hf_config(values, path)
    llama = configs["llama"]
    assert llama.rope.scaling == "llama3" and llama.rope.theta == 5e5
    assert llama.rope.params == {"factor": 8.0, "low_freq_factor": 1.0, "high_freq_factor": 4.0,
                                 "original_max_position_embeddings": 64.0}  # fmt: skip
    assert (llama.head_dim, llama.attention_bias, llama.attention_out_bias, llama.mlp_bias) == (32, True, True, True)
    assert configs["mistral"].windows == (16,) * 7
    assert configs["qwen2"].windows == (None, None, None, 16, 16, 16, 16)
    assert configs["qwen2"].attention_bias and not configs["qwen2"].attention_out_bias
    assert configs["qwen2"].tie_embeddings
    assert configs["qwen3"].qk_norm and configs["qwen3"].windows == (None,) * 7
    assert configs["qwen3"].rope.params == {"factor": 4.0, "original_max_position_embeddings": 64.0}
    gemma = configs["gemma3"]
    assert gemma.windows == (16, 16, 16, 16, 16, None, 16)
    assert (gemma.rope.theta, gemma.rope_local) == (1e6, RopeConfig(theta=1e4))
    assert gemma.query_scale == pytest.approx(20**-0.5) and gemma.embed_scale == 8.0
    assert gemma.tie_embeddings and gemma.post_norms and gemma.activation == "gelu_tanh"
    assert gemma.norm_plus_one is False  # the loader has folded it in


@pytest.mark.parametrize(
    ("name", "changes", "want"),
    [
        ("LlamaForCausalLM", {"rope_scaling": {"type": "linear", "factor": 2.0}},
         RopeConfig(5000.0, "linear", {"factor": 2.0})),
        ("LlamaForCausalLM", {"rope_parameters": {"rope_type": "default", "rope_theta": 7.0}}, RopeConfig(7.0)),
        ("LlamaForCausalLM", {"rope_scaling": None}, RopeConfig(5000.0)),
        ("Qwen2ForCausalLM", {"rope_scaling": {"type": "yarn", "factor": 4.0, "attention_factor": 1.5,
                                               "beta_fast": 16, "truncate": False}},
         RopeConfig(5000.0, "yarn", {"factor": 4.0, "original_max_position_embeddings": 256.0, "beta_fast": 16.0,
                                     "attention_factor": 1.5, "truncate": 0.0})),
        ("Gemma3ForCausalLM", {"rope_scaling": {"rope_type": "linear", "factor": 8.0}},
         RopeConfig(5000.0, "linear", {"factor": 8.0})),
        ("Gemma3ForCausalLM", {"rope_parameters": {"full_attention": {"rope_type": "default", "rope_theta": 3.0},
                                                   "sliding_attention": {"rope_type": "default", "rope_theta": 2.0}}},
         RopeConfig(3.0)),
    ],
)  # fmt: skip
def test_rope_in_the_spelling_of_transformers_4_and_5(name: str, changes: dict[str, Any], want: RopeConfig) -> None:
    config = hf_config(hf_config_json(tiny("llama"), name, **changes), Path("config.json"))
    assert config.rope == want
    if "full_attention" in changes.get("rope_parameters", {}):
        assert config.rope_local == RopeConfig(2.0)
    elif name.startswith("Gemma"):
        assert config.rope_local == RopeConfig(10000.0)


@pytest.mark.parametrize(
    ("name", "changes", "windows"),
    [
        ("MistralForCausalLM", {"sliding_window": None}, ()),
        ("MistralForCausalLM", {"sliding_window": 8}, (8,) * 7),
        ("LlamaForCausalLM", {"sliding_window": 8}, ()),
        ("Qwen2ForCausalLM", {"sliding_window": 8, "use_sliding_window": False}, ()),
        ("Qwen3ForCausalLM", {"sliding_window": 8, "use_sliding_window": True, "max_window_layers": 7}, ()),
        ("Qwen3ForCausalLM", {"sliding_window": 8, "use_sliding_window": True,
                              "layer_types": ["full_attention", "sliding_attention"] * 3 + ["full_attention"]},
         (None, 8) * 3 + (None,)),
        ("Gemma3ForCausalLM", {"sliding_window": 8, "sliding_window_pattern": 2}, (8, None) * 3 + (8,)),
    ],
)  # fmt: skip
def test_windows(name: str, changes: dict[str, Any], windows: tuple[int | None, ...]) -> None:
    assert hf_config(hf_config_json(tiny("llama"), name, **changes), Path("c")).layer_windows == windows


def test_a_text_model_cut_out_of_a_multimodal_one(tmp_path: Path) -> None:
    config = tiny("gemma3")
    text = hf_config_json(config, "x", model_type="gemma3_text", sliding_window=32, query_pre_attn_scalar=24)
    outer = {"architectures": ["Gemma3ForConditionalGeneration"], "model_type": "gemma3", "text_config": text}
    tensors = random_tensors(expected_tensors(config))
    folder = write_folder(tmp_path / "m", outer, {f"language_model.{name}": w for name, w in tensors.items()})
    source = SafetensorsSource(folder)
    assert source.config.architecture == "gemma3"
    assert set(source.names()) == set(tensors)
    want = torch.from_numpy(tensors["model.norm.weight"]) + 1
    assert torch.equal(source.tensor("model.norm.weight"), want)


def test_a_saved_copy_of_a_tied_head_is_no_fault(tmp_path: Path) -> None:
    config = tiny("llama", num_layers=1)
    tensors = random_tensors(expected_tensors(config))
    tensors["lm_head.weight"] = tensors["model.embed_tokens.weight"].copy()
    tensors["model.layers.0.self_attn.rotary_emb.inv_freq"] = np.ones(8, np.float32)
    source = SafetensorsSource(write_folder(tmp_path / "m", hf_config_json(config, "LlamaForCausalLM"), tensors))
    assert source.config.tie_embeddings


def test_load_model_of_a_folder(tmp_path: Path) -> None:
    config = tiny("llama")
    tensors = random_tensors(expected_tensors(config))
    folder = write_folder(tmp_path / "my-model", hf_config_json(config, "LlamaForCausalLM"), tensors, shards=3)
    tokens = byte_tokens()
    (folder / "generation_config.json").write_text(json.dumps({"eos_token_id": [tokens.index("<|bos|>")]}))
    loaded = load_model(folder, progress=False)
    assert (loaded.name, loaded.path, loaded.format) == ("my-model", folder, "safetensors F32")
    assert loaded.weight_bytes == sum(w.nbytes for w in tensors.values())
    assert [file.name for file in loaded.weight_files] == [f"model-{i:05d}-of-00003.safetensors" for i in (1, 2, 3)]
    assert loaded.tensors.groups32("model.layers.0.mlp.up_proj.weight") is None
    ends = {tokens.index(t) for t in ("<|eos|>", "<|bos|>", "<|im_end|>")}
    assert loaded.tokenizer.eos_ids == ends and set(loaded.config.eos_token_ids) == ends
    assert loaded.tokenizer.eos_id == tokens.index("<|eos|>")
    for name, weight in tensors.items():
        assert torch.equal(loaded.tensors.tensor(name), torch.from_numpy(weight))


def test_loader_and_registry_know_the_same_architectures() -> None:
    from octavo.model.load.gguf_config import SUPPORTED
    from octavo.model.load.hf_config import ARCHITECTURES as loaded
    from octavo.model.registry import ARCHITECTURES as networks

    assert loaded == {hf: name for name, entry in networks.items() for hf in entry.hf_names}
    assert set(SUPPORTED) <= set(networks)


def test_the_hash_of_a_checkpoint_covers_all_its_files(tmp_path: Path) -> None:
    """A draft names the target it is for by this hash, so a shard that differs must show."""
    config = tiny("llama", num_layers=2)
    tensors = random_tensors(expected_tensors(config))
    write_folder(tmp_path / "one", hf_config_json(config, "LlamaForCausalLM"), tensors)
    one = load_model(tmp_path / "one", cache_dir=tmp_path, progress=False)
    assert one.sha256 == hashlib.sha256((tmp_path / "one" / "model.safetensors").read_bytes()).hexdigest()
    write_folder(tmp_path / "many", hf_config_json(config, "LlamaForCausalLM"), tensors, shards=3)
    many = load_model(tmp_path / "many", cache_dir=tmp_path, progress=False)
    assert len(many.weight_files) == 3 and many.sha256 not in (None, one.sha256)
    last = many.weight_files[-1]
    last.write_bytes(last.read_bytes()[:-1] + b"\x01")
    assert load_model(tmp_path / "many", cache_dir=tmp_path, progress=False).sha256 != many.sha256
