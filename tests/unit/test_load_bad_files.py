"""Broken and foreign checkpoints: a typed error that names file and tensor, before anything is allocated."""

from __future__ import annotations

import random
import re
import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ModelError, ModelNotFound
from octavo.model.config import ModelConfig
from octavo.model.load import load_model
from octavo.model.load.expected import expected_tensors
from octavo.model.load.gguf_file import GGUFFile
from tests.unit.load_files import hf_config_json, random_tensors, tiny, write_folder, write_gguf

SMALL = tiny("llama", num_layers=2)


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> bytes:
    path = tmp_path_factory.mktemp("good") / "good.gguf"
    write_gguf(path, SMALL, random_tensors(expected_tensors(SMALL)), tokenizer={})
    return path.read_bytes()


def load(path: Path) -> Any:
    return load_model(path, cache_dir=path.parent / "cache", progress=False)


def refused(path: Path, *words: str) -> ModelError:
    """The load fails with a `ModelError` whose message holds all the words."""
    with pytest.raises(ModelError) as caught:
        load(path)
    for word in words:
        assert word in str(caught.value), str(caught.value)
    return caught.value


def stored(tmp_path: Path, data: bytes, name: str = "bad.gguf") -> Path:
    path = tmp_path / name
    path.write_bytes(data)
    return path


# -- GGUF: the container ---------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda d: b"", ("empty",)),
        (lambda d: b"GG", ("not a GGUF file",)),
        (lambda d: b"ggml" + d[4:], ("not a GGUF file", "ggml")),
        (lambda d: d[:4] + struct.pack("<I", 1) + d[8:], ("version 1", "allowed: 2, 3")),
        (lambda d: d[:4] + struct.pack(">I", 3) + d[8:], ("big-endian",)),
        (lambda d: d[:4] + struct.pack("<I", 99) + d[8:], ("version 99",)),
        (lambda d: d[:8] + struct.pack("<Q", 2**60) + d[16:], ("tensors", "do not fit")),
        (lambda d: d[:16] + struct.pack("<Q", 2**63) + d[24:], ("metadata entries", "do not fit")),
        (lambda d: d[:24] + struct.pack("<Q", 2**64 - 1) + d[32:], ("truncated",)),
        (lambda d: d[:200], ("truncated",)),
    ],
)
def test_a_malformed_container(change: Callable[[bytes], bytes], words: tuple[str, ...], good: bytes,
                               tmp_path: Path) -> None:  # fmt: skip
    path = stored(tmp_path, change(good))
    assert refused(path, *words, str(path)).file == path


@pytest.mark.parametrize("levels", [9, 1_000, 100_000])
def test_metadata_that_is_nested_without_end(levels: int, tmp_path: Path) -> None:
    nested = struct.pack("<Q1sI", 1, b"a", 9) + struct.pack("<IQ", 9, 1) * (levels - 1) + struct.pack("<IQ", 4, 0)
    path = stored(tmp_path, b"GGUF" + struct.pack("<IQQ", 3, 0, 1) + nested)
    assert refused(path, "array in an array", str(path)).file == path


def test_a_truncated_file_names_the_tensor(good: bytes, tmp_path: Path) -> None:
    whole = GGUFFile(stored(tmp_path, good, "good.gguf"))
    last = max(whole.tensors.values(), key=lambda info: info.offset)
    path = stored(tmp_path, good[: last.offset + last.nbytes - 1])
    error = refused(path, "truncated", last.name, str(last.offset + last.nbytes))
    assert error.tensor == last.name


def test_every_cut_is_refused(good: bytes, tmp_path: Path) -> None:
    """Wherever the file ends early, the answer is a ModelError that names it: no crash, no partial model."""
    data_end = max(i.offset + i.nbytes for i in GGUFFile(stored(tmp_path, good, "good.gguf")).tensors.values())
    header = GGUFFile(tmp_path / "good.gguf").header_bytes
    random.seed(3)
    cuts = {*range(64), *random.sample(range(header), 150), *random.sample(range(header, data_end), 20)}
    for cut in sorted(cuts):
        path = stored(tmp_path, good[:cut])
        assert refused(path).file == path


def test_flipped_header_bytes_never_crash(good: bytes, tmp_path: Path) -> None:
    """Damage in the header either leaves a model that passes every check or gives a ModelError."""
    header = GGUFFile(stored(tmp_path, good, "good.gguf")).header_bytes
    random.seed(5)
    outcomes = {"loaded": 0, "refused": 0}
    for _ in range(300):
        damaged = bytearray(good)
        for at in random.sample(range(header), random.choice((1, 1, 4))):
            damaged[at] = random.randrange(256)
        path = stored(tmp_path, bytes(damaged))
        try:
            load(path)
            outcomes["loaded"] += 1
        except ModelError as error:
            assert str(path) in str(error)
            outcomes["refused"] += 1
    assert min(outcomes.values()) > 0


def patched_type(data: bytes, name: str, kind: int) -> bytes:
    """The file with another type id in one row of the tensor table."""
    at = data.index(struct.pack("<Q", len(name)) + name.encode()) + 8 + len(name)
    (dims,) = struct.unpack_from("<I", data, at)
    place = at + 4 + 8 * dims
    return data[:place] + struct.pack("<I", kind) + data[place + 4 :]


@pytest.mark.parametrize(("kind", "shown"), [(16, "IQ2_XXS"), (39, "MXFP4"), (35, "TQ2_0"), (4, "4"), (1234, "1234")])
def test_an_unknown_tensor_type_is_named(kind: int, shown: str, good: bytes, tmp_path: Path) -> None:
    path = stored(tmp_path, patched_type(good, "blk.0.ffn_up.weight", kind))
    error = refused(path, f"tensor type {shown}", "not supported", "Q4_1", "IQ4_XS")
    assert (error.file, error.tensor) == (path, "blk.0.ffn_up.weight")


def test_rows_that_are_no_whole_blocks(tmp_path: Path, good: bytes) -> None:
    config = tiny("llama", hidden_size=72, num_layers=1, head_dim=18)
    path = tmp_path / "good.gguf"
    write_gguf(path, config, random_tensors(expected_tensors(config)))
    refused(stored(tmp_path, patched_type(path.read_bytes(), "blk.0.ffn_up.weight", 3)), "multiple of 32", "ffn_up")


# -- GGUF: the model -------------------------------------------------------------------------------------------------


def test_a_missing_tensor_is_named_as_the_file_would(tmp_path: Path) -> None:
    tensors = random_tensors(expected_tensors(SMALL))
    del tensors["model.layers.1.mlp.down_proj.weight"]
    path = write_gguf(tmp_path / "m.gguf", SMALL, tensors, tokenizer={})
    refused(path, str(path), "missing", "blk.1.ffn_down.weight", "model.layers.1.mlp.down_proj.weight", "[64, 96]")


@pytest.mark.parametrize("name", ["token_embd.weight", "output_norm.weight"])
def test_a_missing_top_tensor(name: str, tmp_path: Path) -> None:
    canonical = {"token_embd.weight": "model.embed_tokens.weight", "output_norm.weight": "model.norm.weight"}[name]
    tensors = random_tensors(expected_tensors(SMALL))
    del tensors[canonical]
    refused(write_gguf(tmp_path / "m.gguf", SMALL, tensors, tokenizer={}), "missing", name)


def test_a_wrong_shape_is_named(tmp_path: Path) -> None:
    tensors = random_tensors(expected_tensors(SMALL))
    name = "model.layers.0.mlp.up_proj.weight"
    tensors[name] = np.zeros((95, 64), np.float32)
    path = write_gguf(tmp_path / "m.gguf", SMALL, tensors, tokenizer={})
    refused(path, "wrong shape [95, 64]", "[96, 64]", "blk.0.ffn_up.weight", str(path))


def test_a_weight_nobody_reads_is_refused(tmp_path: Path) -> None:
    """A Qwen 3 file under the name qwen2 has q/k norms that a Qwen 2 network would leave out."""
    raw = {"blk.0.attn_q_norm.weight": (np.ones(16, np.float32), "F32")}
    tensors = random_tensors(expected_tensors(SMALL))
    refused(write_gguf(tmp_path / "m.gguf", SMALL, tensors, raw=raw, tokenizer={}), "unexpected", "attn_q_norm")


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"llama.expert_count": 8}, ("mixture of experts", "MoE", "8")),
        ({"general.type": "adapter", "adapter.type": "lora"}, ("LoRA adapter",)),
        ({"llama.rope.scaling.type": "longrope"}, ("longrope", "linear, yarn")),
        ({"llama.block_count": 2**31}, ("block_count", "1024")),
        ({"llama.rope.dimension_count": 8}, ("partial rotary", "8 of 16")),
        ({"llama.attention.value_length": 32}, ("keys of 16", "values of 32")),
        ({"general.alignment": 33}, ("general.alignment", "power of two")),
    ],
    ids=lambda v: str(v)[:40],
)
def test_what_is_not_supported_is_named(values: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    tensors = random_tensors(expected_tensors(SMALL))
    refused(write_gguf(tmp_path / "m.gguf", SMALL, tensors, values=values, tokenizer={}), *words)


@pytest.mark.parametrize(
    ("architecture", "words"),
    [
        ("clip", ("vision", "clip")),
        ("qwen2moe", ("mixture of experts", "qwen2moe")),
        ("mamba", ("'mamba'", "llama, qwen2, qwen3, gemma3")),
    ],
)
def test_another_architecture_is_named(architecture: str, words: tuple[str, ...], tmp_path: Path) -> None:
    tensors = random_tensors(expected_tensors(SMALL))
    refused(write_gguf(tmp_path / "m.gguf", SMALL, tensors, architecture=architecture, tokenizer={}), *words)


def test_expert_tensors_without_metadata(tmp_path: Path) -> None:
    raw = {"blk.0.ffn_gate_exps.weight": (np.ones((2, 96, 64), np.float32), "F32")}
    tensors = random_tensors(expected_tensors(SMALL))
    refused(write_gguf(tmp_path / "m.gguf", SMALL, tensors, raw=raw, tokenizer={}), "MoE", "ffn_gate_exps")


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"model": "bert"}, ("tokenizer model 'bert'", "gpt2, llama")),
        ({"pre": "new-thing"}, ("pre-tokenizer 'new-thing'", "smollm", "qwen2")),
        ({"merges": ["h e", "onlyone"]}, ("merge 'onlyone'",)),
        ({"merges": ["h e", "q zz"]}, ("merges do not fit",)),
    ],
    ids=str,
)
def test_a_bad_tokenizer_is_named(options: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    tensors = random_tensors(expected_tensors(SMALL))
    refused(write_gguf(tmp_path / "m.gguf", SMALL, tensors, tokenizer=options), *words)


def test_a_file_without_tokenizer(tmp_path: Path) -> None:
    path = write_gguf(tmp_path / "m.gguf", SMALL, random_tensors(expected_tensors(SMALL)))
    refused(path, "tokenizer.ggml.tokens", str(path))


def test_more_tokens_than_embeddings(tmp_path: Path) -> None:
    config = tiny("llama", num_layers=1, vocab_size=100)
    path = write_gguf(tmp_path / "m.gguf", config, random_tensors(expected_tensors(config)), tokenizer={})
    refused(path, "267 tokens", "100 rows")


# -- safetensors -----------------------------------------------------------------------------------------------------


def folder(tmp_path: Path, config: ModelConfig = SMALL, *, shards: int = 1, name: str = "LlamaForCausalLM",
           **changes: Any) -> Path:  # fmt: skip
    tensors = random_tensors(expected_tensors(config))
    return write_folder(tmp_path / "model", hf_config_json(config, name, **changes), tensors, shards=shards)


@pytest.mark.parametrize(
    ("changes", "words"),
    [
        ({"quantization_config": {"quant_method": "gptq", "bits": 4}}, ("GPTQ",)),
        ({"quantization_config": {"quant_method": "awq"}}, ("AWQ",)),
        ({"quantization_config": {"quant_method": "fp8"}}, ("FP8",)),
        ({"num_local_experts": 8}, ("MoE", "num_local_experts = 8")),
        ({"num_experts": 64}, ("MoE", "num_experts = 64")),
        ({"vision_config": {"hidden_size": 8}}, ("vision_config",)),
        ({"architectures": ["MambaForCausalLM"]}, ("MambaForCausalLM", "LlamaForCausalLM, MistralForCausalLM")),
        ({"architectures": None, "model_type": "gpt2"}, ("'gpt2'",)),
        ({"hidden_act": "relu"}, ("hidden_act", "'relu'", "silu")),
        ({"rope_scaling": {"type": "dynamic", "factor": 2.0}}, ("dynamic", "linear, llama3, yarn")),
        ({"rope_scaling": {"rope_type": "llama3", "factor": 8.0}}, ("low_freq_factor",)),
        ({"rope_parameters": {"rope_theta": 1e4, "partial_rotary_factor": 0.5}}, ("partial_rotary_factor",)),
        ({"num_key_value_heads": 3}, ("num_attention_heads 4", "num_key_value_heads 3")),
        ({"num_hidden_layers": "two"}, ("num_hidden_layers", "'two'")),
        ({"rms_norm_eps": -1}, ("rms_norm_eps", "-1")),
        ({"num_hidden_layers": 10**9}, ("num_hidden_layers", "1024")),
        ({"num_hidden_layers": 3}, ("missing", "model.layers.2.")),
        ({"num_hidden_layers": 1}, ("unexpected", "model.layers.1.")),
        ({"intermediate_size": 128}, ("wrong shape [96, 64]", "[128, 64]", "mlp.")),
    ],
    ids=lambda v: str(v)[:50],
)
def test_folders_that_cannot_be_used(changes: dict[str, Any], words: tuple[str, ...], tmp_path: Path) -> None:
    path = folder(tmp_path, **changes)
    refused(path, *words, str(path))


def rewrite_tensor(path: Path, name: str, array: np.ndarray | None) -> None:
    from safetensors.numpy import load_file, save_file

    tensors = load_file(path)
    if array is None:
        del tensors[name]
    else:
        tensors[name] = array
    save_file(tensors, path)


def test_a_missing_safetensor(tmp_path: Path) -> None:
    path = folder(tmp_path)
    rewrite_tensor(path / "model.safetensors", "model.norm.weight", None)
    refused(path, "missing", "model.norm.weight")


def test_a_tensor_of_integers(tmp_path: Path) -> None:
    path = folder(tmp_path)
    rewrite_tensor(path / "model.safetensors", "model.norm.weight", np.ones(64, np.int8))
    refused(path, "I8", "model.norm.weight", "model.safetensors")


@pytest.mark.parametrize("extra", ["model.layers.0.self_attn.q_proj.qweight", "model.layers.0.mlp.experts.0.w1.weight",
                                   "vision_tower.patch.weight", "base_model.model.q_proj.lora_A.weight"])  # fmt: skip
def test_foreign_tensors(extra: str, tmp_path: Path) -> None:
    path = folder(tmp_path)
    rewrite_tensor(path / "model.safetensors", extra, np.ones(4, np.float32))
    refused(path, "not supported", extra)


def test_every_cut_of_a_safetensors_file(tmp_path: Path) -> None:
    path = folder(tmp_path)
    file = path / "model.safetensors"
    data = file.read_bytes()
    random.seed(1)
    for cut in sorted({0, 1, 7, 8, 9, len(data) - 1, *random.sample(range(len(data)), 60)}):
        file.write_bytes(data[:cut])
        assert refused(path).file == file


def test_malformed_safetensors_headers(tmp_path: Path) -> None:
    path = folder(tmp_path)
    file = path / "model.safetensors"
    for header in (b"{", b"[]", b'{"a": 1}', b'{"a": {"dtype": "F32", "shape": [2], "data_offsets": [0, 4]}}',
                   b'{"a": {"dtype": "F32", "shape": [-1], "data_offsets": [0, 4]}}', b"\xff\xfe",
                   b'{"a":' * 100_000):  # fmt: skip
        file.write_bytes(struct.pack("<Q", len(header)) + header + b"\0" * 4)
        refused(path, "model.safetensors")
    file.write_bytes(struct.pack("<Q", 2**62) + b"{}")
    refused(path, "header of", "model.safetensors")


@pytest.mark.parametrize(
    ("file", "words"),
    [("config.json", ("config.json", "missing")), ("tokenizer.json", ("tokenizer.json", "missing")),
     ("model.safetensors", ("model.safetensors", "missing"))],
)  # fmt: skip
def test_a_missing_file_is_named(file: str, words: tuple[str, ...], tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / file).unlink()
    refused(path, *words)


@pytest.mark.parametrize("text", ['{"cut', '{"a":' * 100_000, "[" * 100_000], ids=["cut", "deep", "deep list"])
@pytest.mark.parametrize("file", ["config.json", "tokenizer.json", "tokenizer_config.json", "generation_config.json",
                                  "model.safetensors.index.json"])  # fmt: skip
def test_damaged_json_is_named(file: str, text: str, tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / file).write_text(text)
    refused(path, file)


def test_a_missing_shard_and_a_lying_index(tmp_path: Path) -> None:
    path = folder(tmp_path, shards=3)
    index = path / "model.safetensors.index.json"
    text = index.read_text()
    shard = path / "model-00002-of-00003.safetensors"
    data = shard.read_bytes()
    shard.unlink()
    refused(path, "missing", shard.name)
    shard.write_bytes(data)
    index.write_text(text.replace("model-00001-of", "../model-00001-of"))
    refused(path, "outside the folder")
    index.write_text(re.sub(r"model-0000\d-of", "model-00001-of", text))
    refused(path, "missing", "model-00001-of-00003.safetensors")
    index.write_text('{"metadata": {}}')
    refused(path, "weight_map")


def test_pickles_and_adapters_are_named(tmp_path: Path) -> None:
    path = folder(tmp_path)
    (path / "model.safetensors").rename(path / "pytorch_model.bin")
    refused(path, "pytorch_model.bin", "pickled")
    refused(path / "pytorch_model.bin", "pickled")
    (path / "adapter_config.json").write_text("{}")
    refused(path, "LoRA adapter", "adapter_config.json")


def test_paths_that_are_not_there(tmp_path: Path) -> None:
    for spec in (tmp_path / "nope.gguf", "./nope", "nope.gguf", str(tmp_path / "no/such/folder")):
        with pytest.raises(ModelNotFound, match="no such file"):
            load_model(spec, progress=False)
    with pytest.raises(ModelNotFound, match="smollm2, gemma3-270m"):
        load_model("smollm3", progress=False)
    (tmp_path / "empty").mkdir()
    refused(tmp_path / "empty", "config.json")
    for name in ("a.gguf", "b.gguf"):
        write_gguf(tmp_path / "empty" / name, SMALL, random_tensors(expected_tensors(SMALL)), tokenizer={})
    refused(tmp_path / "empty", "a.gguf", "b.gguf")
