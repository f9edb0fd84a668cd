"""Files of draft checkpoints: pickled and sharded ones load, corrupt ones are refused by name."""

from __future__ import annotations

import json
import struct
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.errors import ModelError, ModelNotFound
from octavo.spec.checkpoint import load_draft
from octavo.spec.tensor_file import read_tensors, write_tensors
from tests.unit import spec_reference as ref
from tests.unit.test_spec_checkpoint import eagle

__all__ = ["eagle"]


def test_pickled_and_sharded_checkpoints_load(eagle: Path) -> None:
    tensors, _, file = read_tensors(eagle)
    expected = load_draft(eagle, ref.TARGET)
    file.unlink()
    torch.save({n.replace("layers.0.", "midlayer."): t for n, t in tensors.items()}, eagle / "pytorch_model.bin")
    pickled = load_draft(eagle, ref.TARGET)
    (eagle / "pytorch_model.bin").unlink()
    names = sorted(tensors)
    parts = {"a.safetensors": names[:4], "b.safetensors": names[4:]}
    for part, held in parts.items():
        write_tensors(eagle / part, {n: tensors[n] for n in held}, {})
    index = {"weight_map": {n: part for part, held in parts.items() for n in held}}
    (eagle / "model.safetensors.index.json").write_text(json.dumps(index))
    sharded = load_draft(eagle, ref.TARGET)
    for other in (pickled, sharded):
        assert all(torch.equal(other.tensors[n], t) for n, t in expected.tensors.items())


def test_corrupt_files_are_refused(eagle: Path) -> None:
    file = eagle / "model.safetensors"
    whole = file.read_bytes()
    broken = {
        "empty": b"",
        "short": whole[: len(whole) // 2],
        "header": whole[:8] + b"\xff" + whole[9:],
        "length": struct.pack("<Q", 1 << 60) + whole[8:],
        "text": b"not a tensor file at all, only words",
        "type": whole.replace(b'"F32"', b'"F99"', 1),
        "nested": struct.pack("<Q", 100_000) + b"[" * 100_000,
    }
    for name, data in broken.items():
        file.write_bytes(data)
        with pytest.raises(ModelError, match="model.safetensors"):
            load_draft(eagle, ref.TARGET)
        assert name
    file.unlink()
    with pytest.raises(ModelNotFound, match="no model.safetensors"):
        load_draft(eagle, ref.TARGET)
    (eagle / "pytorch_model.bin").write_bytes(b"PK\x03\x04 nothing")
    with pytest.raises(ModelError, match="pytorch_model.bin"):
        load_draft(eagle, ref.TARGET)
    with pytest.raises(ModelNotFound):
        load_draft(eagle / "nowhere", ref.TARGET)


def _entry(name: str, **changes: Any) -> Any:
    return lambda header: header[name].update(changes)


HEADER_FAULTS = [
    _entry("fc.weight", shape=[-32, -96]), _entry("fc.weight", shape=[float("inf")]),
    _entry("fc.weight", shape=[32, 96.0]), _entry("fc.weight", shape="3296"), _entry("fc.weight", shape=5),
    _entry("fc.weight", shape=[True, 3072]), _entry("fc.weight", shape=[0, -1]),
    _entry("norm.weight", data_offsets=[0]),
    _entry("norm.weight", data_offsets=[float("inf")] * 2), _entry("norm.weight", data_offsets=[-128, 0]),
    _entry("norm.weight", data_offsets=[10**30, 10**30 + 128]), _entry("norm.weight", dtype=["F32"]),
    lambda header: header.update({"norm.weight": None}), lambda header: header.update({"__metadata__": [1]}),
]  # fmt: skip


@pytest.mark.parametrize("change", HEADER_FAULTS, ids=range(len(HEADER_FAULTS)))
def test_headers_with_values_that_cannot_be_are_refused(eagle: Path, change: Any) -> None:
    file = eagle / "model.safetensors"
    whole = file.read_bytes()
    (length,) = struct.unpack("<Q", whole[:8])
    header = json.loads(whole[8 : 8 + length])
    change(header)
    encoded = json.dumps(header).encode()
    file.write_bytes(struct.pack("<Q", len(encoded)) + encoded + whole[8 + length :])
    with pytest.raises(ModelError, match="model.safetensors.*corrupt"):
        load_draft(eagle, ref.TARGET)


@pytest.mark.parametrize("shards", [
    {"a": 5}, {"a": ["x"]}, {"a": "whole.safetensors", "b": 3}, {"a": None}, {"a": "a\0b"}, {"a": ""}, {}, None, "x",
    {"a": "../eagle/whole.safetensors"}, {"a": "none.safetensors"}, [["a", "whole.safetensors"]],
], ids=str)  # fmt: skip
def test_an_index_that_names_no_shards_is_refused(eagle: Path, shards: Any) -> None:
    (eagle / "model.safetensors").rename(eagle / "whole.safetensors")
    (eagle / "model.safetensors.index.json").write_text(json.dumps({"weight_map": shards}))
    with pytest.raises(ModelError, match=r"index.json"):
        load_draft(eagle, ref.TARGET)


def test_a_tensor_in_two_shards_is_refused(eagle: Path) -> None:
    whole = (eagle / "model.safetensors").read_bytes()
    for name in ("a", "b"):
        (eagle / f"{name}.safetensors").write_bytes(whole)
    (eagle / "model.safetensors").unlink()
    index = {"weight_map": {"norm.weight": "a.safetensors", "fc.weight": "b.safetensors"}}
    (eagle / "model.safetensors.index.json").write_text(json.dumps(index))
    with pytest.raises(ModelError, match=r"b.safetensors.*in two shards"):
        load_draft(eagle, ref.TARGET)


@pytest.mark.parametrize("kind", ["sparse", "meta"])
def test_pickled_tensors_without_plain_data_are_refused(eagle: Path, kind: str) -> None:
    tensors, _, file = read_tensors(eagle)
    file.unlink()
    norm = tensors["norm.weight"]
    tensors["norm.weight"] = norm.to_sparse() if kind == "sparse" else norm.to("meta")
    torch.save(tensors, eagle / "pytorch_model.bin")
    with pytest.raises(ModelError, match="pytorch_model.bin.*'norm.weight'.*no plain tensor"):
        load_draft(eagle, ref.TARGET)
