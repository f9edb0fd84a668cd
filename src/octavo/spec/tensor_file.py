"""Tensors of a draft checkpoint: the safetensors format read and written, pickled `.bin` files read.

Format (https://github.com/huggingface/safetensors): 8 bytes little-endian header length, a JSON header of
{name: {dtype, shape, data_offsets}}, then the raw data.
"""

from __future__ import annotations

import json
import math
import os
import struct
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch

from octavo.errors import ModelError, ModelNotFound

_DTYPES: dict[str, torch.dtype] = {
    "F64": torch.float64,
    "F32": torch.float32,
    "F16": torch.float16,
    "BF16": torch.bfloat16,
    "I64": torch.int64,
    "I32": torch.int32,
    "I16": torch.int16,
    "I8": torch.int8,
    "U8": torch.uint8,
    "BOOL": torch.bool,
}
_NAMES = {dtype: name for name, dtype in _DTYPES.items()}
_MAX_HEADER_BYTES = 100_000_000


def read_tensors(path: Path) -> tuple[dict[str, torch.Tensor], dict[str, str], Path]:
    """(tensors, metadata, file) of a checkpoint folder or file. Raises ModelError naming the file.

    A folder holds `model.safetensors`, shards with an index, or `pytorch_model.bin`.
    """
    file = _find(path)
    if file.name.endswith(".index.json"):
        tensors: dict[str, torch.Tensor] = {}
        for shard in sorted(set(_index(file).values())):
            held = _read_safetensors(file.parent / shard)[0]
            for name in held.keys() & tensors.keys():
                raise ModelError("is in two shards", file=file.parent / shard, tensor=name)
            tensors.update(held)
        return tensors, {}, file
    if file.suffix == ".bin":
        return _read_pickled(file), {}, file
    tensors, metadata = _read_safetensors(file)
    return tensors, metadata, file


def _find(path: Path) -> Path:
    if path.is_file():
        return path
    if not path.is_dir():
        raise ModelNotFound("no such draft folder or file", file=path)
    for name in ("model.safetensors", "model.safetensors.index.json", "pytorch_model.bin"):
        if (path / name).is_file():
            return path / name
    raise ModelNotFound("the folder has no model.safetensors, no index of shards and no pytorch_model.bin", file=path)


def _index(file: Path) -> dict[str, str]:
    """Tensor name -> file name, all in the index's own folder."""
    try:
        shards = json.loads(file.read_text())["weight_map"]
    except (OSError, ValueError, KeyError, TypeError, RecursionError) as error:
        raise ModelError(f"not an index of shards ({error})", file=file) from error
    if not isinstance(shards, dict) or not shards:
        raise ModelError("weight_map names no shard", file=file)
    for name, shard in shards.items():
        if not isinstance(shard, str) or Path(shard).name != shard or not (file.parent / shard).is_file():
            raise ModelError(f"{ascii(shard)} is no file of the folder", file=file, tensor=name)
    return shards


def _read_pickled(file: Path) -> dict[str, torch.Tensor]:
    try:
        loaded = torch.load(file, map_location="cpu", weights_only=True)
    except Exception as error:  # torch raises half a dozen types for a broken archive
        raise ModelError(f"cannot be read ({type(error).__name__})", file=file) from error
    if not isinstance(loaded, dict):
        raise ModelError("holds no named tensors", file=file)
    tensors = {str(name): value for name, value in loaded.items() if isinstance(value, torch.Tensor)}
    for name, tensor in tensors.items():
        plain = tensor.layout is torch.strided and tensor.device.type == "cpu"
        if not plain or tensor.is_nested or tensor.is_quantized:
            raise ModelError("is no plain tensor (sparse, nested, quantised or without data)", file=file, tensor=name)
    return tensors


def _read_safetensors(file: Path) -> tuple[dict[str, torch.Tensor], dict[str, str]]:
    try:
        data = bytearray(file.read_bytes())
    except OSError as error:
        raise ModelError(f"cannot be read ({error.strerror})", file=file) from error
    if len(data) < 8:
        raise ModelError(f"{len(data)} bytes are no safetensors file", file=file)
    (length,) = struct.unpack("<Q", data[:8])
    if length > min(_MAX_HEADER_BYTES, len(data) - 8):
        raise ModelError(f"corrupt: header of {length} bytes in a file of {len(data)}", file=file)
    try:
        header: dict[str, Any] = json.loads(bytes(data[8 : 8 + length]))
        metadata = dict(header.pop("__metadata__", None) or {})
    except (ValueError, AttributeError, TypeError, RecursionError) as error:
        raise ModelError(f"corrupt header ({error})", file=file) from error
    body = memoryview(data)[8 + length :]
    return {name: _tensor(body, entry, name, file) for name, entry in header.items()}, metadata


def _tensor(body: memoryview, entry: Any, name: str, file: Path) -> torch.Tensor:
    try:
        dtype = _DTYPES[entry["dtype"]]
        shape = list(entry["shape"])
        begin, end = entry["data_offsets"]
    except (KeyError, TypeError, ValueError) as error:
        raise ModelError(f"corrupt entry or unknown type ({error})", file=file, tensor=name) from error
    if not all(type(n) is int and n >= 0 for n in (*shape, begin, end)):
        raise ModelError(f"corrupt: shape {shape}, bytes {begin} … {end}", file=file, tensor=name)
    count = math.prod(shape)
    nbytes = count * torch.empty(0, dtype=dtype).element_size()
    if not 0 <= begin <= end <= len(body) or end - begin != nbytes:
        raise ModelError(
            f"corrupt: {nbytes} bytes expected at {begin} … {end}, the file has {len(body)}", file=file, tensor=name
        )
    if count == 0:
        return torch.empty(shape, dtype=dtype)
    return torch.frombuffer(body[begin:end], dtype=dtype).reshape(shape)


def write_tensors(file: Path, tensors: Mapping[str, torch.Tensor], metadata: Mapping[str, str]) -> None:
    """Write a safetensors file; it appears whole or not at all."""
    header: dict[str, Any] = {"__metadata__": dict(metadata)}
    chunks: list[bytes] = []
    offset = 0
    for name, tensor in tensors.items():
        raw = tensor.detach().cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
        header[name] = {
            "dtype": _NAMES[tensor.dtype],
            "shape": list(tensor.shape),
            "data_offsets": [offset, offset + len(raw)],
        }
        chunks.append(raw)
        offset += len(raw)
    encoded = json.dumps(header).encode()
    encoded += b" " * (-len(encoded) % 8)
    partial = file.with_name(file.name + ".part")
    with partial.open("wb") as out:
        out.write(struct.pack("<Q", len(encoded)))
        out.write(encoded)
        for chunk in chunks:
            out.write(chunk)
        out.flush()
        os.fsync(out.fileno())
    partial.replace(file)
