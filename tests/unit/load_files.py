"""Writes tiny random checkpoints, GGUF and safetensors, for the loader's tests."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf.quants import quantize

from octavo.model.config import ModelConfig, RopeConfig

BYTES = 256
MERGES = ["h e", "he l", "hel l", "hell o", "Ġ w", "o r", "1 2"]
CONTROL = ["<|bos|>", "<|eos|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = "{% for m in messages %}<|im_start|>{{ m.role }}\n{{ m.content }}<|im_end|>\n{% endfor %}" \
    "{% if add_generation_prompt %}<|im_start|>assistant\n{% endif %}"  # fmt: skip

TINY = ModelConfig(
    architecture="llama",
    vocab_size=288,
    hidden_size=64,
    intermediate_size=96,
    num_layers=7,
    num_heads=4,
    num_kv_heads=2,
    head_dim=16,
    context_tokens=256,
    rms_eps=1e-5,
    rope=RopeConfig(theta=5000.0),
    tie_embeddings=True,
)

GGUF_NAMES = {
    "input_layernorm": "attn_norm", "self_attn.q_proj": "attn_q", "self_attn.k_proj": "attn_k",
    "self_attn.v_proj": "attn_v", "self_attn.o_proj": "attn_output", "self_attn.q_norm": "attn_q_norm",
    "self_attn.k_norm": "attn_k_norm", "post_attention_layernorm": "ffn_norm", "mlp.gate_proj": "ffn_gate",
    "mlp.up_proj": "ffn_up", "mlp.down_proj": "ffn_down",
}  # fmt: skip
GEMMA_NAMES = GGUF_NAMES | {
    "post_attention_layernorm": "post_attention_norm", "pre_feedforward_layernorm": "ffn_norm",
    "post_feedforward_layernorm": "post_ffw_norm",
}  # fmt: skip
TOP_NAMES = {"model.embed_tokens.weight": "token_embd.weight", "model.norm.weight": "output_norm.weight",
             "lm_head.weight": "output.weight"}  # fmt: skip


def tiny(architecture: str, **changes: Any) -> ModelConfig:
    """A configuration that uses the architecture's features."""
    config = replace(TINY, architecture=architecture)
    if architecture == "qwen2":
        config = replace(config, attention_bias=True)
    if architecture == "qwen3":
        config = replace(config, qk_norm=True, head_dim=24)
    if architecture == "gemma3":
        config = replace(
            config, qk_norm=True, post_norms=True, head_dim=24, activation="gelu_tanh", embed_scale=8.0,
            layer_windows=(32, 32, 32, 32, 32, None, 32), rope_local=RopeConfig(theta=10000.0),
        )  # fmt: skip
    return replace(config, **changes)


def random_tensors(shapes: Mapping[str, tuple[int, ...]], seed: int = 0) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(seed)
    return {name: rng.standard_normal(shape).astype(np.float32) for name, shape in shapes.items()}


def gguf_name(name: str, architecture: str) -> str:
    if name in TOP_NAMES:
        return TOP_NAMES[name]
    _, _, layer, rest = name.split(".", 3)
    stem, _, part = rest.rpartition(".")
    return f"blk.{layer}.{(GEMMA_NAMES if architecture == 'gemma3' else GGUF_NAMES)[stem]}.{part}"


def interleaved(weight: np.ndarray, heads: int) -> np.ndarray:
    """How llama.cpp's converter orders the rows of Q and K for the llama architecture."""
    rows = weight.reshape(heads, 2, weight.shape[0] // heads // 2, *weight.shape[1:])
    return np.ascontiguousarray(rows.swapaxes(1, 2).reshape(weight.shape))


def byte_alphabet() -> list[str]:
    """The 256 characters that stand for bytes in a byte-level vocabulary, in the order of the bytes."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    spare = iter(range(256, 512))
    return [chr(b) if b in plain else chr(next(spare)) for b in range(256)]


def byte_tokens() -> list[str]:
    return byte_alphabet() + [m.replace(" ", "") for m in MERGES] + CONTROL


def add_tokenizer(writer: gguf.GGUFWriter, **options: Any) -> None:
    """A byte-level vocabulary with a few merges and control tokens. `options` are tokenizer.ggml.* values or None."""
    tokens = byte_tokens()
    kinds = [gguf.TokenType.NORMAL] * (len(tokens) - len(CONTROL)) + [gguf.TokenType.CONTROL] * len(CONTROL)
    writer.add_tokenizer_model(options.pop("model", "gpt2"))
    writer.add_tokenizer_pre(options.pop("pre", "smollm"))
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    writer.add_token_merges(options.pop("merges", MERGES))
    writer.add_bos_token_id(tokens.index("<|bos|>"))
    writer.add_eos_token_id(tokens.index("<|eos|>"))
    writer.add_chat_template(options.pop("chat_template", TEMPLATE))
    for key, value in options.items():
        if isinstance(value, bool):
            writer.add_bool(f"tokenizer.ggml.{key}", value)
        else:
            writer.add_uint32(f"tokenizer.ggml.{key}", value)


def add_config(writer: gguf.GGUFWriter, config: ModelConfig) -> None:
    writer.add_context_length(config.context_tokens)
    writer.add_embedding_length(config.hidden_size)
    writer.add_block_count(config.num_layers)
    writer.add_feed_forward_length(config.intermediate_size)
    writer.add_head_count(config.num_heads)
    writer.add_head_count_kv(config.num_kv_heads)
    writer.add_layer_norm_rms_eps(config.rms_eps)
    writer.add_rope_freq_base(config.rope.theta)
    if config.head_dim != config.hidden_size // config.num_heads:
        writer.add_key_length(config.head_dim)
        writer.add_value_length(config.head_dim)
    if config.window_tokens is not None:
        writer.add_sliding_window(config.window_tokens)


def write_gguf(
    path: Path,
    config: ModelConfig,
    tensors: Mapping[str, np.ndarray],
    *,
    kinds: Mapping[str, str] | None = None,
    raw: Mapping[str, tuple[np.ndarray, str]] | None = None,
    values: Mapping[str, Any] | None = None,
    tokenizer: Mapping[str, Any] | None = None,
    architecture: str | None = None,
    split_tensors: int = 0,
) -> Path:
    """Write canonical tensors as a GGUF file.

    `kinds` maps a canonical name to a quantisation (default F32), `raw` a file name to ready bytes and their type,
    `values` adds metadata (integers, floats, booleans, strings, lists).
    """
    arch = architecture or ("llama" if config.architecture == "mistral" else config.architecture)
    writer = gguf.GGUFWriter(path, arch, split_max_tensors=split_tensors)
    add_config(writer, config)
    if tokenizer is not None:
        add_tokenizer(writer, **tokenizer)
    for key, value in (values or {}).items():
        add = {bool: writer.add_bool, int: writer.add_uint32, float: writer.add_float32, str: writer.add_string,
               list: writer.add_array}[type(value)]  # fmt: skip
        add(key.replace("{arch}", arch), value)
    for name, weight in tensors.items():
        if arch == "llama" and ".q_proj." in name:
            weight = interleaved(weight, config.num_heads)
        if arch == "llama" and ".k_proj." in name:
            weight = interleaved(weight, config.num_kv_heads)
        kind = gguf.GGMLQuantizationType[(kinds or {}).get(name, "F32")]
        writer.add_tensor(gguf_name(name, arch), quantize(weight, kind), raw_dtype=kind)
    for name, (data, kind_name) in (raw or {}).items():
        writer.add_tensor(name, data, raw_dtype=gguf.GGMLQuantizationType[kind_name])
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return path


def hf_config_json(config: ModelConfig, name: str, **changes: Any) -> dict[str, Any]:
    return {
        "architectures": [name],
        "vocab_size": config.vocab_size,
        "hidden_size": config.hidden_size,
        "intermediate_size": config.intermediate_size,
        "num_hidden_layers": config.num_layers,
        "num_attention_heads": config.num_heads,
        "num_key_value_heads": config.num_kv_heads,
        "head_dim": config.head_dim,
        "max_position_embeddings": config.context_tokens,
        "rms_norm_eps": config.rms_eps,
        "rope_theta": config.rope.theta,
        "tie_word_embeddings": config.tie_embeddings,
        "eos_token_id": byte_tokens().index("<|eos|>"),
    } | changes


def byte_tokenizer_json() -> str:
    """tokenizer.json of the same vocabulary."""
    from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers

    vocab = {token: index for index, token in enumerate(byte_tokens())}
    backend = Tokenizer(models.BPE(vocab=vocab, merges=[tuple(m.split(" ")) for m in MERGES]))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens([AddedToken(token, special=True, normalized=False) for token in CONTROL])
    return backend.to_str()


def write_folder(
    folder: Path,
    config_json: Mapping[str, Any],
    tensors: Mapping[str, np.ndarray],
    *,
    shards: int = 1,
    tokenizer_config: Mapping[str, Any] | None = None,
) -> Path:
    """Write a safetensors folder with its tokenizer."""
    from safetensors.numpy import save_file

    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config_json))
    (folder / "tokenizer.json").write_text(byte_tokenizer_json())
    options = {"bos_token": "<|bos|>", "eos_token": "<|eos|>", "chat_template": TEMPLATE} | dict(tokenizer_config or {})
    (folder / "tokenizer_config.json").write_text(json.dumps(options))
    if shards == 1:
        save_file(dict(tensors), folder / "model.safetensors")
        return folder
    names = sorted(tensors)
    weight_map = {}
    for index in range(shards):
        file = f"model-{index + 1:05d}-of-{shards:05d}.safetensors"
        part = names[index::shards]
        save_file({name: tensors[name] for name in part}, folder / file)
        weight_map.update(dict.fromkeys(part, file))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": weight_map}))
    return folder
