"""A configuration whose values are of the wrong kind: a ModelError that names the file, or a value that was fine.

Swept over every key and many values, because each key is read somewhere else.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from copy import deepcopy
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import ModelError
from octavo.model.load import gguf_file
from octavo.model.load.expected import expected_tensors
from octavo.model.load.gguf_config import gguf_config
from octavo.model.load.hf_config import ARCHITECTURES, hf_config
from octavo.model.load.tokenizer_gguf import gguf_tokenizer
from octavo.spec.draft_config import config_json, read_draft_config
from tests.unit import spec_reference as ref
from tests.unit.load_files import random_tensors, tiny, write_gguf

WRONG: list[Any] = [
    None, "x", "", -1, 0, 1.5, float("inf"), float("nan"), True, [], {}, [1], [None], ["x"], [-1], {"a": 1}, 10**30,
    {"full_attention": 3}, {"rope_type": 5},
]  # fmt: skip
HF = {
    "vocab_size": 96, "hidden_size": 32, "intermediate_size": 48, "num_hidden_layers": 4, "num_attention_heads": 4,
    "num_key_value_heads": 2, "head_dim": 8, "max_position_embeddings": 128, "rms_norm_eps": 1e-5, "rope_theta": 1e4,
    "tie_word_embeddings": True, "sliding_window": 16, "use_sliding_window": True, "max_window_layers": 2,
    "rope_scaling": {"rope_type": "yarn", "factor": 2.0, "original_max_position_embeddings": 64}, "rope_parameters": {},
    "bos_token_id": 1, "eos_token_id": 2, "pad_token_id": 0, "hidden_act": "silu", "query_pre_attn_scalar": 8,
    "hidden_activation": "gelu_pytorch_tanh", "sliding_window_pattern": 2, "final_logit_softcapping": 30.0,
    "rope_local_base_freq": 1e4, "partial_rotary_factor": 1.0, "layer_types": ["full_attention"] * 4,
    "text_config": None, "quantization_config": None, "vision_config": None, "num_experts": 0, "architectures": None,
}  # fmt: skip


def outcome(read: Callable[[], object], file: Path, what: object) -> str:
    """ "read" or "refused"; anything but a ModelError naming the file fails the test."""
    try:
        read()
        return "read"
    except ModelError as error:
        assert str(file) in str(error), what
        return "refused"


@pytest.mark.parametrize("name", list(ARCHITECTURES)[:5])
def test_hugging_face(name: str) -> None:
    file = Path("/models/odd/config.json")
    seen = set()
    for key in HF:
        for value in WRONG:
            values = {**deepcopy(HF), "architectures": [name], key: value}
            seen.add(outcome(lambda v=values: hf_config(v, file), file, (key, value)))
    assert seen == {"read", "refused"}
    with pytest.raises(ModelError, match="eos_token_id is 'x'; a token id"):
        hf_config({**HF, "architectures": [name], "eos_token_id": "x"}, file)
    with pytest.raises(ModelError, match="rope_scaling is 'x'; an object is needed"):
        hf_config({**HF, "architectures": [name], "rope_scaling": "x"}, file)


@pytest.fixture(scope="module")
def headers(tmp_path_factory: pytest.TempPathFactory) -> list[Path]:
    folder = tmp_path_factory.mktemp("kinds")
    paths = []
    for architecture in ("llama", "gemma3"):
        config = tiny(architecture)
        paths.append(folder / f"{architecture}.gguf")
        write_gguf(paths[-1], config, random_tensors(expected_tensors(config)), tokenizer={})
    return paths


def test_gguf(headers: list[Path], monkeypatch: pytest.MonkeyPatch) -> None:
    arrays = [np.array([1, 2], dtype=np.int32), np.array([], dtype=np.int32), np.array([1.5]), np.array([7] * 7)]
    more = ("split.count", "split.no", "general.type", "general.alignment", "tokenizer.ggml.eot_token_id",
            "tokenizer.ggml.padding_token_id", "tokenizer.ggml.unknown_token_id", "tokenizer.ggml.add_bos_token",
            "tokenizer.ggml.eos_token_ids", "tokenizer.ggml.add_space_prefix", "tokenizer.ggml.scores",
            "X.expert_count", "X.rope.scaling.type", "X.rope.scaling.factor", "X.rope.scale_linear",
            "X.attention.sliding_window", "X.attention.sliding_window_pattern", "X.final_logit_softcapping",
            "X.rope.dimension_count", "X.attention.value_length")  # fmt: skip
    change: list[tuple[str, Any]] = []
    as_read = gguf_file.GGUFFile._checked

    def checked(self: gguf_file.GGUFFile, key: str, value: Any) -> Any:
        """What the file would give if it held other values."""
        return as_read(self, key, dict(change).get(key, value))

    monkeypatch.setattr(gguf_file.GGUFFile, "_checked", checked)
    for path in headers:
        change.clear()
        keys = [*gguf_file.GGUFFile(path).metadata, *(k.replace("X", path.stem) for k in more)]
        seen = set()
        for key in dict.fromkeys(keys):
            for value in [*WRONG[1:9], -(10**18), 2**63, *arrays, ["a"], [[1]]]:
                change[:] = [(key, value)]
                seen.add(outcome(lambda p=path, k=key, v=value: _read_all(p, k, v), path, (key, value)))
        assert seen == {"read", "refused"}


def _read_all(path: Path, key: str, value: Any) -> None:
    (file,) = gguf_file.open_gguf(path)
    if key not in file.metadata:
        file.metadata[key] = file._checked(key, value)
    shapes = {name: info.shape for name, info in file.tensors.items()}
    gguf_config(file.metadata, shapes, path)
    tokenizer = gguf_tokenizer(file, None)
    assert tokenizer.decode(tokenizer.encode("hello 12")).strip() != ""
    assert all(0 <= i < tokenizer.vocab_size for i in tokenizer.eos_ids)


def test_a_token_id_that_stands_for_none(tmp_path: Path) -> None:
    config = tiny("llama", num_layers=1)
    extra = {"padding_token_id": 2**32 - 1, "eot_token_id": 2**32 - 1}
    path = tmp_path / "none.gguf"
    write_gguf(path, config, random_tensors(expected_tensors(config)), tokenizer={})
    file = gguf_file.GGUFFile(path)
    file.metadata.update({f"tokenizer.ggml.{key}": value for key, value in extra.items()})
    tokenizer = gguf_tokenizer(file, None)
    assert tokenizer.pad_id is None and tokenizer.eos_ids and max(tokenizer.eos_ids) < tokenizer.vocab_size


def _places(data: dict[str, Any], path: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    for key, value in data.items():
        yield (*path, key)
        if isinstance(value, dict):
            yield from _places(value, (*path, key))


def test_drafts(tmp_path: Path) -> None:
    eagle, block = config_json(ref.eagle_config(draft_vocab_size=40)), config_json(ref.dflash_config())
    nested = {"mask_token_id": 5, "block_size": 4, "aux_hidden_state_layer_ids": [1, 2, 3]}
    bases = [
        eagle, block, {"speculators_model_type": "eagle3", "transformer_layer_config": eagle, "draft_vocab_size": 40},
        {"speculators_model_type": "dflash", "transformer_layer_config": block, **nested},
    ]  # fmt: skip
    more = ("rope_theta", "rope_scaling", "rope_parameters", "is_causal", "eagle_config", "norm_output")
    extra = [(key,) for key in more]
    file = tmp_path / "config.json"
    seen = set()
    for base in bases:
        for place in [*_places(base), *extra]:
            for value in WRONG:
                data = deepcopy(base)
                inner = data
                for key in place[:-1]:
                    inner = inner[key]
                inner[place[-1]] = value
                file.write_text(json.dumps(data))
                seen.add(outcome(lambda: read_draft_config(tmp_path, ref.TARGET), file, (place, value)))
    assert seen == {"read", "refused"}
