"""Folders of safetensors: single files and shards, mapped and checked before a weight is read.

Format: https://github.com/huggingface/safetensors#format (8 bytes of header length, a JSON header, raw data).
"""

from __future__ import annotations

import json
import math
import mmap
import struct
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from ...errors import ModelError
from ..config import ModelConfig
from .expected import check_tensors, foreign_kind
from .hf_config import hf_config, read_json
from .source import Groups32

if TYPE_CHECKING:
    import torch

MAX_HEADER_BYTES = 100 << 20
CHUNK_WEIGHTS = 4 << 20
_WIDTHS = {"F64": 8, "F32": 4, "F16": 2, "BF16": 2}
_PREFIXES = ("language_model.", "model.language_model.")  # text models cut out of multimodal checkpoints


@dataclass(frozen=True)
class Entry:
    file: SafetensorsFile
    name: str  # in the file
    kind: str
    shape: tuple[int, ...]
    start: int
    nbytes: int


class SafetensorsFile:
    """One `.safetensors` file, mapped read-only. Raises `ModelError` naming file and tensor if anything is off."""

    def __init__(self, path: Path) -> None:
        self.path = path
        try:
            with open(path, "rb") as handle:
                self.data = mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
        except ValueError:
            raise ModelError("truncated: the file is empty", file=path) from None
        except OSError as error:
            raise ModelError(f"cannot be read: {error.strerror}", file=path) from None
        self.entries = self._read()

    def _read(self) -> dict[str, Entry]:
        size = len(self.data)
        length = struct.unpack_from("<Q", self.data, 0)[0] if size >= 8 else size
        if length > MAX_HEADER_BYTES or 8 + length > size:
            raise ModelError(
                f"truncated or not safetensors: a header of {length} bytes does not fit into {size}", file=self.path
            )
        try:
            header = json.loads(self.data[8 : 8 + length].decode("utf-8"))
        except (UnicodeDecodeError, json.JSONDecodeError, RecursionError) as error:
            raise ModelError(f"not a safetensors file: {error}", file=self.path) from None
        if not isinstance(header, dict):
            raise ModelError("not a safetensors file: the header is no object", file=self.path)
        header.pop("__metadata__", None)
        return {name: self._entry(name, row, 8 + length) for name, row in header.items()}

    def _entry(self, name: str, row: Any, base: int) -> Entry:
        try:
            kind, shape, (begin, end) = str(row["dtype"]), tuple(row["shape"]), row["data_offsets"]
        except (KeyError, TypeError, ValueError):
            raise ModelError(f"malformed header entry {row!r}", file=self.path, tensor=name) from None
        if not all(isinstance(n, int) and n >= 0 for n in (*shape, begin, end)):
            raise ModelError(f"malformed header entry {row!r}", file=self.path, tensor=name)
        if base + end > len(self.data):
            raise ModelError(
                f"truncated: its data ends at byte {base + end}, the file at {len(self.data)}",
                file=self.path,
                tensor=name,
            )
        width = _WIDTHS.get(kind)
        if width is not None and end - begin != math.prod(shape) * width:
            raise ModelError(f"{end - begin} bytes for {kind} in shape {list(shape)}", file=self.path, tensor=name)
        return Entry(self, name, kind, shape, base + begin, end - begin)


class SafetensorsSource:
    """`TensorSource` over a folder. Building it validates everything and reads no weights."""

    def __init__(self, folder: Path) -> None:
        self.path = folder
        adapter = folder / "adapter_config.json"
        if adapter.exists():
            raise ModelError(
                "this is a LoRA adapter (adapter_config.json), which is not supported; merge it into its base "
                "model first",
                file=adapter,
            )
        config_path = folder / "config.json"
        if not config_path.exists():
            raise ModelError("missing: a safetensors folder needs it", file=config_path)
        self.raw_config = read_json(config_path)
        self.config: ModelConfig = hf_config(self.raw_config, config_path)
        entries = _collect(folder)
        foreign = foreign_kind(entries)
        if foreign is not None:
            raise ModelError(f"{foreign[0]} is not supported", file=entries[foreign[1]].file.path, tensor=foreign[1])
        self._found = {_canonical(name): entry for name, entry in entries.items()}
        check_tensors(
            self.config,
            {name: entry.shape for name, entry in self._found.items()},
            {name: entry.file.path for name, entry in self._found.items()},
            file=folder,
        )
        for entry in self._found.values():
            if entry.kind not in _WIDTHS:
                raise ModelError(
                    f"tensor type {entry.kind} is not supported{_hint(entry.kind)}; allowed: {', '.join(_WIDTHS)}",
                    file=entry.file.path,
                    tensor=entry.name,
                )
        self._plus_one = self.config.architecture == "gemma3"

    def names(self) -> list[str]:
        return list(self._found)

    def shape(self, name: str) -> tuple[int, ...]:
        return self._entry(name).shape

    def kind(self, name: str) -> str:
        return self._entry(name).kind

    def nbytes(self) -> int:
        return sum(entry.nbytes for entry in self._found.values())

    def groups32(self, name: str) -> Groups32 | None:
        self._entry(name)
        return None

    def paths(self) -> tuple[Path, ...]:
        """The files that hold the weights, by name."""
        return tuple(sorted({entry.file.path for entry in self._found.values()}))

    def tensor(self, name: str) -> torch.Tensor:
        import torch

        entry = self._entry(name)
        out = torch.empty(entry.shape, dtype=torch.float32)
        target = out.numpy().reshape(-1)
        dtype = {"F64": "<f8", "F32": "<f4", "F16": "<f2", "BF16": "<u2"}[entry.kind]
        stored = np.frombuffer(entry.file.data, dtype, count=target.size, offset=entry.start) if target.size else target
        for start in range(0, target.size, CHUNK_WEIGHTS):
            part = stored[start : start + CHUNK_WEIGHTS]
            if entry.kind == "BF16":  # the upper half of a float32
                target[start : start + part.size].view(np.uint32)[:] = part.astype(np.uint32) << 16
            else:
                target[start : start + part.size] = part
        if self._plus_one and name.endswith("norm.weight"):
            out += 1.0
        return out

    def stored(self, name: str) -> np.ndarray:
        entry = self._entry(name)
        return np.frombuffer(entry.file.data, np.uint8, count=entry.nbytes, offset=entry.start)

    def _entry(self, name: str) -> Entry:
        if name not in self._found:
            raise ModelError("tensor missing", file=self.path, tensor=name)
        return self._found[name]


def _canonical(name: str) -> str:
    for prefix in _PREFIXES:
        if name.startswith(prefix):
            rest = name[len(prefix) :]
            return rest if rest.startswith(("model.", "lm_head.")) else f"model.{rest}"
    return name


def _hint(kind: str) -> str:
    return " (FP8 weights)" if kind.startswith("F8") else " (quantised weights)" if kind.startswith(("I", "U")) else ""


def _collect(folder: Path) -> dict[str, Entry]:
    """Every tensor of the folder. A folder with an index has exactly the tensors and files the index names."""
    index_path = folder / "model.safetensors.index.json"
    if not index_path.exists():
        paths = sorted(folder.glob("*.safetensors"))
        if (folder / "model.safetensors").exists():
            paths = [folder / "model.safetensors"]
        if not paths:
            others = sorted(p.name for pattern in ("*.bin", "*.pt", "*.pth") for p in folder.glob(pattern))
            also = f" (found {others[0]}: pickled weights are not read)" if others else ""
            raise ModelError(
                f"missing{also}; a folder needs model.safetensors or an index with shards",
                file=folder / "model.safetensors",
            )
        found: dict[str, Entry] = {}
        for path in paths:
            for name, entry in SafetensorsFile(path).entries.items():
                if name in found:
                    raise ModelError("is in two files of the folder", file=path, tensor=name)
                found[name] = entry
        return found
    weight_map = read_json(index_path).get("weight_map")
    if not isinstance(weight_map, dict) or not all(isinstance(v, str) for v in weight_map.values()):
        raise ModelError("weight_map is missing", file=index_path)
    files: dict[str, SafetensorsFile] = {}
    for file_name in sorted(set(weight_map.values())):
        path = folder / file_name
        if Path(file_name).name != file_name:
            raise ModelError(f"names a file outside the folder: {file_name!r}", file=index_path)
        if not path.exists():
            raise ModelError("missing: a shard that model.safetensors.index.json names", file=path)
        files[file_name] = SafetensorsFile(path)
    found = {}
    for name, file_name in weight_map.items():
        if name not in files[file_name].entries:
            raise ModelError(
                "tensor missing, though model.safetensors.index.json names it", file=folder / file_name, tensor=name
            )
        found[name] = files[file_name].entries[name]
    return found
