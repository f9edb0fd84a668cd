"""GGUF checkpoints of every architecture and tensor type load exactly."""

from __future__ import annotations

import struct
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from octavo.errors import ModelError
from octavo.model.config import ModelConfig
from octavo.model.load import load_model
from octavo.model.load.expected import expected_tensors
from octavo.model.load.gguf import GGUFSource
from octavo.model.load.gguf_file import BLOCKS, SUPPORTED_TYPES, GGUFFile
from tests.unit.load_files import random_tensors, tiny, write_gguf

GGUF_ARCHITECTURES = ("llama", "qwen2", "qwen3", "gemma3")
IQ4 = (-127, -104, -83, -65, -49, -35, -22, -10, 1, 13, 25, 38, 53, 69, 89, 113)


def wrote(tmp_path: Path, config: ModelConfig, **options: Any) -> tuple[Path, dict[str, np.ndarray]]:
    tensors = random_tensors(expected_tensors(config))
    return write_gguf(tmp_path / "model.gguf", config, tensors, **options), tensors


@pytest.mark.parametrize("architecture", GGUF_ARCHITECTURES)
def test_every_architecture_comes_back_as_it_was(architecture: str, tmp_path: Path) -> None:
    config = tiny(architecture)
    path, tensors = wrote(tmp_path, config)
    source = GGUFSource(path)
    assert replace(source.config, rms_eps=config.rms_eps) == replace(config, bos_token_id=None)
    assert source.config.rms_eps == pytest.approx(config.rms_eps)
    assert sorted(source.names()) == sorted(tensors)
    for name, weight in tensors.items():
        assert source.shape(name) == weight.shape
        assert torch.equal(source.tensor(name), torch.from_numpy(weight)), name


@pytest.mark.parametrize(
    "changes",
    [
        {"tie_embeddings": False},
        {"attention_bias": True, "attention_out_bias": True, "mlp_bias": True},
        {"head_dim": 32},
        {"num_kv_heads": 4},
        {"layer_windows": (32,) * 7},
    ],
    ids=str,
)
def test_features_of_llama(changes: dict[str, Any], tmp_path: Path) -> None:
    config = tiny("llama", **changes)
    path, tensors = wrote(tmp_path, config)
    source = GGUFSource(path)
    assert replace(source.config, rms_eps=config.rms_eps) == config
    for name, weight in tensors.items():
        assert torch.equal(source.tensor(name), torch.from_numpy(weight)), name


def test_rows_of_k_are_put_back_by_kv_heads(tmp_path: Path) -> None:
    """Using the number of query heads for K would mix rows of different heads."""
    config = tiny("llama")
    path, tensors = wrote(tmp_path, config)
    stored = GGUFFile(path).tensors["blk.0.attn_k.weight"]
    raw = GGUFFile(path).rows(stored).view(np.float32).reshape(stored.shape)
    name = "model.layers.0.self_attn.k_proj.weight"
    assert not np.array_equal(raw, tensors[name])
    assert torch.equal(GGUFSource(path).tensor(name), torch.from_numpy(tensors[name]))


# -- tensor types: each against a scalar reading of the block's definition -------------------------------------------


def half(data: bytes, at: int) -> np.float32:
    return np.float32(np.frombuffer(data, np.float16, 1, at)[0])


def scale_min_k4(j: int, q: bytes) -> tuple[int, int]:
    if j < 4:
        return q[j] & 63, q[j + 4] & 63
    return (q[j + 4] & 15) | ((q[j - 4] >> 6) << 4), (q[j + 4] >> 4) | ((q[j] >> 6) << 4)


def scales_q3(packed: bytes) -> list[int]:
    a, b, c = struct.unpack("<3I", packed)
    low, high = 0x0F0F0F0F, 0x03030303
    words = [
        (a & low) | ((c & high) << 4), (b & low) | (((c >> 2) & high) << 4),
        ((a >> 4) & low) | (((c >> 4) & high) << 4), ((b >> 4) & low) | (((c >> 6) & high) << 4),
    ]  # fmt: skip
    return [value - 32 for value in struct.pack("<4I", *words)]


def block_values(kind: str, b: bytes) -> list[np.float32]:
    """What one block of bytes stands for, by the format's definition, one weight at a time."""
    f = np.float32
    if kind == "F32":
        return [np.frombuffer(b, np.float32)[0]]
    if kind == "F16":
        return [half(b, 0)]
    if kind == "BF16":
        return [np.frombuffer(b"\0\0" + b, np.float32)[0]]
    if kind == "Q8_0":
        return [half(b, 0) * f(q) for q in struct.unpack("<32b", b[2:])]
    if kind in ("Q4_0", "IQ4_NL"):
        codes = [q & 15 for q in b[2:]] + [q >> 4 for q in b[2:]]
        return [half(b, 0) * f(q - 8 if kind == "Q4_0" else IQ4[q]) for q in codes]
    if kind == "Q4_1":
        return [half(b, 0) * f(q) + half(b, 2) for q in [q & 15 for q in b[4:]] + [q >> 4 for q in b[4:]]]
    if kind in ("Q5_0", "Q5_1"):
        at = 2 if kind == "Q5_0" else 4
        (bits,) = struct.unpack_from("<I", b, at)
        codes = [q & 15 for q in b[at + 4 :]] + [q >> 4 for q in b[at + 4 :]]
        codes = [q | ((bits >> i & 1) << 4) for i, q in enumerate(codes)]
        return [half(b, 0) * f(q - 16) if kind == "Q5_0" else half(b, 0) * f(q) + half(b, 2) for q in codes]
    return block_values_k(kind, b)


def block_values_k(kind: str, b: bytes) -> list[np.float32]:
    f, out = np.float32, []
    if kind == "Q2_K":
        scales, qs, d, m = b[:16], b[16:80], half(b, 80), half(b, 82)
        for i in range(256):
            s = scales[i // 16]
            q = qs[i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3
            out.append(d * f(s & 15) * f(q) - m * f(s >> 4))
    elif kind == "Q3_K":
        mask, qs, scales, d = b[:32], b[32:96], scales_q3(b[96:108]), half(b, 108)
        for i in range(256):
            q = qs[i // 128 * 32 + i % 32] >> (i % 128 // 32 * 2) & 3
            q -= 0 if mask[i % 32] >> (i // 32) & 1 else 4
            out.append(d * f(scales[i // 16]) * f(q))
    elif kind in ("Q4_K", "Q5_K"):
        d, m, scales = half(b, 0), half(b, 2), b[4:16]
        high, qs = (b[16:48], b[48:]) if kind == "Q5_K" else (bytes(32), b[16:])
        for i in range(256):
            s, low = scale_min_k4(i // 32, scales)
            q = qs[i // 64 * 32 + i % 32] >> (i % 64 // 32 * 4) & 15
            q |= (high[i % 32] >> (i // 32) & 1) << 4
            out.append(d * f(s) * f(q) - m * f(low))
    elif kind == "Q6_K":
        ql, qh, scales, d = b[:128], b[128:192], struct.unpack("<16b", b[192:208]), half(b, 208)
        for i in range(256):
            n, r = divmod(i, 128)
            low = ql[n * 64 + r % 64] >> (r // 64 * 4) & 15
            q = (low | (qh[n * 32 + r % 32] >> (r // 32 * 2) & 3) << 4) - 32
            out.append(d * f(scales[i // 16]) * f(q))
    elif kind == "IQ4_XS":
        d, (high,), lows, qs = half(b, 0), struct.unpack_from("<H", b, 2), b[4:8], b[8:]
        for i in range(256):
            group = i // 32
            s = (lows[group // 2] >> (group % 2 * 4) & 15) | ((high >> (2 * group) & 3) << 4)
            q = qs[group * 16 + i % 16] >> (i % 32 // 16 * 4) & 15
            out.append(d * f(s - 32) * f(IQ4[q]))
    return out


def random_blocks(kind: str, rows: int, columns: int, seed: int) -> np.ndarray:
    """Any bytes are valid blocks, but for the half-precision scales, which are made finite and small."""
    _, weights, size = next(row for row in BLOCKS.values() if row[0] == kind)
    rng = np.random.default_rng(seed)
    blocks = rng.integers(0, 256, (rows, columns // weights, size), dtype=np.uint8)
    scales = {"F32": [], "F16": [0], "BF16": [], "Q4_1": [0, 2], "Q5_1": [0, 2], "Q2_K": [80, 82], "Q3_K": [108],
              "Q4_K": [0, 2], "Q5_K": [0, 2], "Q6_K": [208]}.get(kind, [0])  # fmt: skip
    for at in scales:
        halves = rng.uniform(-0.1, 0.1, blocks.shape[:2]).astype(np.float16)
        blocks[:, :, at : at + 2] = halves[:, :, None].view(np.uint8)
    if kind == "F32":
        blocks[:] = rng.standard_normal(blocks.shape[:2]).astype(np.float32)[:, :, None].view(np.uint8)
    if kind == "BF16":
        blocks[:] = rng.standard_normal(blocks.shape[:2]).astype(np.float32)[:, :, None].view(np.uint8)[:, :, 2:]
    return blocks.reshape(rows, -1)


@pytest.mark.parametrize("kind", SUPPORTED_TYPES)
def test_every_tensor_type_is_dequantised_as_defined(kind: str, tmp_path: Path) -> None:
    config = tiny("llama", hidden_size=256, num_layers=1, num_heads=4, num_kv_heads=2, head_dim=64)
    tensors = random_tensors(expected_tensors(config))
    blocks = random_blocks(kind, config.intermediate_size, 256, seed=7)
    del tensors["model.layers.0.mlp.up_proj.weight"]
    name = "blk.0.ffn_up.weight"
    path = write_gguf(tmp_path / "model.gguf", config, tensors, raw={name: (blocks, kind)})
    source = GGUFSource(path)
    got = source.tensor("model.layers.0.mlp.up_proj.weight").numpy()
    assert source.kind("model.layers.0.mlp.up_proj.weight") == kind
    size = next(row[2] for row in BLOCKS.values() if row[0] == kind)
    for row in (0, 1, config.intermediate_size - 1):
        data = blocks[row].tobytes()
        want = [v for at in range(0, len(data), size) for v in block_values(kind, data[at : at + size])]
        np.testing.assert_array_equal(got[row], np.array(want, np.float32))


def test_a_large_tensor_is_dequantised_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    import octavo.model.load.gguf as module

    config = tiny("llama")
    kinds = {"model.layers.0.self_attn.q_proj.weight": "Q8_0", "model.embed_tokens.weight": "Q4_1"}
    path, _ = wrote(tmp_path, config, kinds=kinds)
    whole = {name: GGUFSource(path).tensor(name) for name in kinds}
    monkeypatch.setattr(module, "CHUNK_WEIGHTS", 200)
    for name in kinds:
        assert torch.equal(GGUFSource(path).tensor(name), whole[name])


@pytest.mark.parametrize("kind", ["Q4_0", "Q4_1", "Q5_0", "Q8_0"])
def test_groups_of_32_say_exactly_what_the_tensor_says(kind: str, tmp_path: Path) -> None:
    config = tiny("llama")
    name = "model.layers.1.self_attn.k_proj.weight"
    path, _ = wrote(tmp_path, config, kinds={name: kind})
    source = GGUFSource(path)
    groups = source.groups32(name)
    assert groups is not None
    assert groups.codes.shape == source.shape(name)
    assert groups.scale.shape == (source.shape(name)[0], source.shape(name)[1] // 32)
    assert groups.scale.dtype == np.float16
    assert (groups.bits, groups.minimum is None) == ({"Q8_0": 8, "Q5_0": 5}.get(kind, 4), kind in ("Q8_0", "Q5_0"))
    np.testing.assert_array_equal(groups.dequantize(), source.tensor(name).numpy())


def test_other_types_have_no_groups_of_32(tmp_path: Path) -> None:
    name = "model.layers.1.mlp.up_proj.weight"
    path, _ = wrote(tmp_path, tiny("qwen3"), kinds={name: "Q5_1"})
    assert GGUFSource(path).groups32(name) is None
    assert GGUFSource(path).groups32("model.norm.weight") is None


def test_groups_of_q4_k_say_it_but_for_the_rounding_of_their_scales(tmp_path: Path) -> None:
    config = tiny("qwen3", hidden_size=512, num_layers=1)
    name = "model.layers.0.mlp.up_proj.weight"
    tensors = random_tensors(expected_tensors(config))
    blocks = random_blocks("Q4_K", *tensors.pop(name).shape, seed=4)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, raw={"blk.0.ffn_up.weight": (blocks, "Q4_K")})
    groups, exact = GGUFSource(path).groups32(name), GGUFSource(path).tensor(name).numpy()
    assert groups is not None and groups.bits == 4 and groups.scale.shape == (exact.shape[0], 16)
    assert groups.minimum is not None
    largest = np.abs(groups.scale.astype(np.float32)) * 15 + np.abs(groups.minimum.astype(np.float32))
    assert (np.abs(groups.dequantize() - exact) <= np.repeat(largest, 32, axis=1) * 2.0**-11 + 1e-6).all()
    blocks[0, :2] = np.array([60000.0], np.float16).view(np.uint8)  # times 6 bits: beyond float16
    path = write_gguf(tmp_path / "n.gguf", config, tensors, raw={"blk.0.ffn_up.weight": (blocks, "Q4_K")})
    assert GGUFSource(path).groups32(name) is None


def test_q4_0_whose_minimum_overflows_has_no_groups(tmp_path: Path) -> None:
    """-8 times a scale above 8,188 is no finite float16: the exact form does not exist."""
    config = tiny("qwen3", num_layers=1)
    tensors = random_tensors(expected_tensors(config))
    weight = tensors.pop("model.layers.0.mlp.up_proj.weight")
    blocks = random_blocks("Q4_0", *weight.shape, seed=1)
    blocks[0, :2] = np.array([10000.0], np.float16).view(np.uint8)
    path = write_gguf(tmp_path / "m.gguf", config, tensors, raw={"blk.0.ffn_up.weight": (blocks, "Q4_0")})
    source = GGUFSource(path)
    assert source.groups32("model.layers.0.mlp.up_proj.weight") is None
    assert np.isfinite(source.tensor("model.layers.0.mlp.up_proj.weight").numpy()).all()


# -- configuration ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("values", "scaling", "params"),
    [
        ({"{arch}.rope.scaling.type": "linear", "{arch}.rope.scaling.factor": 4.0}, "linear", {"factor": 4.0}),
        (
            {
                "{arch}.rope.scaling.type": "yarn",
                "{arch}.rope.scaling.factor": 4.0,
                "{arch}.rope.scaling.original_context_length": 64,
            },
            "yarn",
            {"factor": 4.0, "original_max_position_embeddings": 64.0, "beta_fast": 32.0, "beta_slow": 1.0},
        ),
        ({"{arch}.rope.scaling.type": "none"}, None, {}),
    ],
)
def test_rope_scaling_metadata(values: dict[str, Any], scaling: str | None, params: dict[str, float],
                               tmp_path: Path) -> None:  # fmt: skip
    path, _ = wrote(tmp_path, tiny("qwen2"), values=values)
    rope = GGUFSource(path).config.rope
    assert (rope.scaling, rope.params, rope.theta) == (scaling, params, 5000.0)


def test_rope_freqs_become_factors(tmp_path: Path) -> None:
    factors = np.linspace(1, 32, 8).astype(np.float32)
    path, _ = wrote(tmp_path, tiny("llama"), raw={"rope_freqs.weight": (factors, "F32")})
    source = GGUFSource(path)
    assert source.config.rope.scaling == "factors"
    assert source.config.rope.factors == tuple(factors.tolist())
    assert "rope_freqs.weight" not in source.names()


def test_rope_freqs_of_the_wrong_length(tmp_path: Path) -> None:
    path, _ = wrote(tmp_path, tiny("llama"), raw={"rope_freqs.weight": (np.ones(7, np.float32), "F32")})
    with pytest.raises(ModelError, match=r"rope_freqs.*wrong shape \[7\]; half a head is 8"):
        GGUFSource(path)


def test_gemma_pattern_in_the_file_is_honoured(tmp_path: Path) -> None:
    windows = (32, None, 32, None, 32, None, 32)
    path, _ = wrote(tmp_path, tiny("gemma3"), values={"{arch}.attention.sliding_window_pattern": 2})
    assert GGUFSource(path).config.windows == windows
    flags = [w is not None for w in windows]
    path, _ = wrote(tmp_path, tiny("gemma3"), values={"{arch}.attention.sliding_window_pattern": flags})
    assert GGUFSource(path).config.windows == windows


def test_gemma_norms_are_multipliers_as_stored(tmp_path: Path) -> None:
    """The file holds 1 + w already; adding 1 again would be wrong."""
    path, tensors = wrote(tmp_path, tiny("gemma3"))
    source = GGUFSource(path)
    assert source.config.norm_plus_one is False
    assert torch.equal(source.tensor("model.norm.weight"), torch.from_numpy(tensors["model.norm.weight"]))


# -- split files and the whole load ----------------------------------------------------------------------------------


@pytest.mark.parametrize("first", [0, 1, -1])
def test_a_split_checkpoint_opens_from_any_part(first: int, tmp_path: Path) -> None:
    config = tiny("qwen3", num_layers=2)
    _, tensors = wrote(tmp_path, config, split_tensors=6, tokenizer={"pre": "qwen2"})
    parts = sorted(tmp_path.glob("*.gguf"))
    assert len(parts) > 2
    loaded = load_model(parts[first], cache_dir=tmp_path / "cache")
    assert loaded.path == parts[0]
    for name, weight in tensors.items():
        assert torch.equal(loaded.tensors.tensor(name), torch.from_numpy(weight)), name


def test_a_missing_part_is_named(tmp_path: Path) -> None:
    wrote(tmp_path, tiny("qwen3", num_layers=2), split_tensors=6)
    parts = sorted(tmp_path.glob("*.gguf"))
    parts[1].unlink()
    with pytest.raises(ModelError, match=parts[1].name):
        load_model(parts[0])


def test_load_model_fills_every_field(tmp_path: Path) -> None:
    config = tiny("llama")
    matrices = [n for n, s in expected_tensors(config).items() if len(s) == 2]
    path, _ = wrote(tmp_path, config, kinds=dict.fromkeys(matrices, "Q4_1"), tokenizer={})
    loaded = load_model(str(path), cache_dir=tmp_path / "cache")
    assert (loaded.name, loaded.path, loaded.format) == ("model", path, "GGUF Q4_1")
    assert loaded.weight_bytes == sum(t.nbytes for t in GGUFFile(path).tensors.values())
    assert loaded.sha256 is not None and len(loaded.sha256) == 64
    assert loaded.config.eos_token_ids == tuple(sorted(loaded.tokenizer.eos_ids))
    assert loaded.chat_template == loaded.tokenizer.chat_template
    assert loaded.tokenizer.decode(loaded.tokenizer.encode("hello world 12")) == "hello world 12"


def test_loading_reads_no_weights_and_no_torch(tmp_path: Path) -> None:
    import subprocess
    import sys

    path, _ = wrote(tmp_path, tiny("llama"), tokenizer={})
    code = (
        "import sys; from octavo.model.load import load_tokenizer;"
        f"t, c = load_tokenizer({str(path)!r}, cache_dir={str(tmp_path / 'c')!r});"
        "assert t.encode('hello'); assert 'torch' not in sys.modules, 'torch'"
    )
    subprocess.run([sys.executable, "-c", code], check=True)
