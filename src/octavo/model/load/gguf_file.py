"""The GGUF container: header, metadata and tensor table, checked against the file before any data is touched.

Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md (versions 2 and 3, little endian). Own reader
because a header must never make us allocate what it claims, and because a vocabulary of 262,144 tokens should cost
milliseconds: long string arrays are walked once and decoded only if asked for.
"""

from __future__ import annotations

import mmap
import re
import struct
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from ...errors import ModelError, ModelNotFound

MAGIC = b"GGUF"
DEFAULT_ALIGNMENT = 32
MAX_DIMENSIONS = 4
MAX_ARRAY_DEPTH = 8  # of metadata; no key has arrays in arrays

# type id: (name, weights per block, bytes per block)
BLOCKS: dict[int, tuple[str, int, int]] = {
    0: ("F32", 1, 4),
    1: ("F16", 1, 2),
    30: ("BF16", 1, 2),
    2: ("Q4_0", 32, 18),
    3: ("Q4_1", 32, 20),
    6: ("Q5_0", 32, 22),
    7: ("Q5_1", 32, 24),
    8: ("Q8_0", 32, 34),
    10: ("Q2_K", 256, 84),
    11: ("Q3_K", 256, 110),
    12: ("Q4_K", 256, 144),
    13: ("Q5_K", 256, 176),
    14: ("Q6_K", 256, 210),
    20: ("IQ4_NL", 32, 18),
    23: ("IQ4_XS", 256, 136),
}
SUPPORTED_TYPES = tuple(name for name, _, _ in BLOCKS.values())

_KNOWN_UNSUPPORTED = {
    9: "Q8_1", 15: "Q8_K", 16: "IQ2_XXS", 17: "IQ2_XS", 18: "IQ3_XXS", 19: "IQ1_S", 21: "IQ3_S", 22: "IQ2_S", 24: "I8",
    25: "I16", 26: "I32", 27: "I64", 28: "F64", 29: "IQ1_M", 34: "TQ1_0", 35: "TQ2_0", 39: "MXFP4", 40: "NVFP4",
}  # fmt: skip

_U32, _U64 = struct.Struct("<I"), struct.Struct("<Q")
_SCALARS = {
    0: struct.Struct("<B"), 1: struct.Struct("<b"), 2: struct.Struct("<H"), 3: struct.Struct("<h"), 4: _U32,
    5: struct.Struct("<i"), 6: struct.Struct("<f"), 7: struct.Struct("<?"), 10: _U64, 11: struct.Struct("<q"),
    12: struct.Struct("<d"),
}  # fmt: skip
_ARRAY_DTYPES = {
    0: "u1",
    1: "i1",
    2: "<u2",
    3: "<i2",
    4: "<u4",
    5: "<i4",
    6: "<f4",
    7: "?",
    10: "<u8",
    11: "<i8",
    12: "<f8",
}
_STRING, _ARRAY = 8, 9


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_whole(value: Any) -> bool:
    return isinstance(value, int) and not isinstance(value, bool)


# What a key must hold where it is read without looking: (keys, what is needed, whether a value is that).
_KINDS: tuple[tuple[re.Pattern[str], str, Callable[[Any], bool]], ...] = (
    (
        re.compile(
            r"general\.(architecture|type)|tokenizer\.(chat_template|ggml\.(model|pre))|\w+\.rope\.scaling\.type"
        ),
        "text",
        lambda value: isinstance(value, str),
    ),
    (re.compile(r"tokenizer\.ggml\.(tokens|merges)"), "a list of texts", lambda value: isinstance(value, StringArray)),
    (
        re.compile(r"tokenizer\.ggml\.(token_type|eos_token_ids)"),
        "a list of whole numbers",
        lambda value: isinstance(value, np.ndarray) and value.dtype.kind in "iu",
    ),
    (
        re.compile(r"tokenizer\.ggml\.scores"),
        "a list of numbers",
        lambda value: isinstance(value, np.ndarray) and value.dtype.kind in "fiu",
    ),
    (re.compile(r"tokenizer\.ggml\.\w+_token_id|split\.(count|no|tensors\.count)"), "a whole number", _is_whole),
    (re.compile(r"tokenizer\.ggml\.add_\w+"), "true or false", lambda value: isinstance(value, bool)),
    (
        re.compile(r"\w+\.(expert_count|rope\.scale_linear|final_logit_softcapping|attention\.sliding_window)"),
        "a number",
        _is_number,
    ),
)


@dataclass(frozen=True)
class TensorInfo:
    """One row of the tensor table. `shape` is [out, in] (the file lists it the other way round)."""

    name: str
    kind: str
    shape: tuple[int, ...]
    offset: int  # bytes from the start of the file
    nbytes: int
    row_bytes: int


class StringArray:
    """A long array of strings that is decoded when somebody wants it."""

    def __init__(self, data: mmap.mmap, start: int, count: int) -> None:
        self._data, self._start, self._count = data, start, count

    def __len__(self) -> int:
        return self._count

    def to_list(self) -> list[str]:
        data, position, out = self._data, self._start, []
        for _ in range(self._count):
            (length,) = _U64.unpack_from(data, position)
            position += 8
            out.append(data[position : position + length].decode("utf-8", "replace"))
            position += length
        return out


class GGUFFile:
    """One `.gguf` file, mapped read-only.

    Raises `ModelError` naming the file (and the tensor) for anything malformed: wrong magic, unsupported version,
    a truncated header, a tensor that reaches beyond the end, a type or a shape that cannot be.
    """

    def __init__(self, path: Path) -> None:
        self.path = path
        self.metadata: dict[str, Any] = {}
        self.tensors: dict[str, TensorInfo] = {}
        self._data = _map(path)
        self.size_bytes = len(self._data)
        try:
            self._read()
        except (struct.error, OverflowError):
            raise self._error("truncated: the file ends inside its header") from None

    # -- reading the header ------------------------------------------------------------------------------------------

    def _error(self, message: str, tensor: str | None = None) -> ModelError:
        return ModelError(message, file=self.path, tensor=tensor)

    def _read(self) -> None:
        data = self._data
        if data[:4] != MAGIC:
            raise self._error(f"not a GGUF file (begins with {bytes(data[:4])!r}, expected {MAGIC!r})")
        (self.version,) = _U32.unpack_from(data, 4)
        if self.version & 0xFFFF == 0 and self.version:
            raise self._error("big-endian GGUF is not supported; convert it to little endian")
        if self.version not in (2, 3):
            raise self._error(f"GGUF version {self.version} is not supported; allowed: 2, 3")
        (tensor_count,), (pair_count,) = _U64.unpack_from(data, 8), _U64.unpack_from(data, 16)
        self._check_count(pair_count, 13, "metadata entries")
        self._check_count(tensor_count, 24, "tensors")
        position = 24
        for _ in range(pair_count):
            key, position = self._string(position)
            (kind,) = _U32.unpack_from(data, position)
            value, position = self._value(key, kind, position + 4)
            self.metadata[key] = self._checked(key, value)
        rows = []
        for _ in range(tensor_count):
            row, position = self._tensor_row(position)
            rows.append(row)
        alignment = self.metadata.get("general.alignment", DEFAULT_ALIGNMENT)
        if not isinstance(alignment, int) or alignment <= 0 or alignment & (alignment - 1):
            raise self._error(f"general.alignment is {alignment!r}; it must be a power of two")
        self.header_bytes = position
        self.data_start = -(-position // alignment) * alignment
        for name, dims, kind_id, offset in rows:
            self._place(name, dims, kind_id, offset, alignment)

    def _checked(self, key: str, value: Any) -> Any:
        """`value`, if it is of the kind that the key's readers take for granted."""
        for keys, needed, fits in _KINDS:
            if keys.fullmatch(key) and not fits(value):
                shown = repr(value) if isinstance(value, str | int | float) else type(value).__name__
                raise self._error(f"metadata {key} is {shown[:60]}; {needed} is needed")
        return value

    def _check_count(self, count: int, least_bytes: int, what: str) -> None:
        if count * least_bytes > self.size_bytes:
            raise self._error(f"truncated or corrupt: {count} {what} do not fit into {self.size_bytes} bytes")

    def _string(self, position: int) -> tuple[str, int]:
        (length,) = _U64.unpack_from(self._data, position)
        start, end = position + 8, position + 8 + length
        if end > self.size_bytes:
            raise self._error("truncated: the file ends inside its header")
        return self._data[start:end].decode("utf-8", "replace"), end

    def _value(self, key: str, kind: int, position: int) -> tuple[Any, int]:
        if kind == _STRING:
            return self._string(position)
        if kind == _ARRAY:
            return self._array(key, position)
        scalar = _SCALARS.get(kind)
        if scalar is None:
            raise self._error(f"metadata {key!r} has unknown type {kind}")
        (value,) = scalar.unpack_from(self._data, position)
        return value, position + scalar.size

    def _array(self, key: str, position: int, depth: int = 1) -> tuple[Any, int]:
        if depth > MAX_ARRAY_DEPTH:
            raise self._error(f"metadata {key!r} is an array in an array, {depth} deep; allowed: {MAX_ARRAY_DEPTH}")
        (kind,), (count,) = _U32.unpack_from(self._data, position), _U64.unpack_from(self._data, position + 4)
        position += 12
        if kind == _STRING:
            self._check_count(count, 8, f"strings of {key!r}")
            return StringArray(self._data, position, count), self._skip_strings(position, count)
        if kind == _ARRAY:
            self._check_count(count, 12, f"arrays of {key!r}")
            nested = []
            for _ in range(count):
                value, position = self._array(key, position, depth + 1)
                nested.append(value)
            return nested, position
        if kind not in _ARRAY_DTYPES:
            raise self._error(f"metadata {key!r} is an array of unknown type {kind}")
        dtype = np.dtype(_ARRAY_DTYPES[kind])
        end = position + count * dtype.itemsize
        if end > self.size_bytes:
            raise self._error("truncated: the file ends inside its header")
        return np.frombuffer(self._data[position:end], dtype), end

    def _skip_strings(self, position: int, count: int) -> int:
        data, unpack = self._data, _U64.unpack_from
        for _ in range(count):
            position += 8 + unpack(data, position)[0]
        if position > self.size_bytes:
            raise self._error("truncated: the file ends inside its header")
        return position

    def _tensor_row(self, position: int) -> tuple[tuple[str, tuple[int, ...], int, int], int]:
        name, position = self._string(position)
        (count,) = _U32.unpack_from(self._data, position)
        if not 1 <= count <= MAX_DIMENSIONS:
            raise self._error(f"{count} dimensions; allowed: 1 to {MAX_DIMENSIONS}", name)
        dims = struct.unpack_from(f"<{count}Q", self._data, position + 4)
        position += 4 + 8 * count
        kind, offset = struct.unpack_from("<IQ", self._data, position)
        return (name, dims, kind, offset), position + 12

    def _place(self, name: str, dims: tuple[int, ...], kind_id: int, offset: int, alignment: int) -> None:
        if name in self.tensors:
            raise self._error("listed twice", name)
        if kind_id not in BLOCKS:
            shown = f"{_KNOWN_UNSUPPORTED[kind_id]} ({kind_id})" if kind_id in _KNOWN_UNSUPPORTED else str(kind_id)
            raise self._error(f"tensor type {shown} is not supported; allowed: {', '.join(SUPPORTED_TYPES)}", name)
        kind, block, block_bytes = BLOCKS[kind_id]
        if any(d == 0 for d in dims) or dims[0] % block:
            raise self._error(f"wrong shape {list(reversed(dims))}: rows of {kind} hold a multiple of {block}", name)
        row_bytes = dims[0] // block * block_bytes
        nbytes = row_bytes
        for d in dims[1:]:
            nbytes *= d
        start = self.data_start + offset
        if offset % alignment:
            raise self._error(f"offset {offset} is not a multiple of the alignment {alignment}", name)
        if start + nbytes > self.size_bytes:
            raise self._error(f"truncated: its data ends at byte {start + nbytes}, the file at {self.size_bytes}", name)
        self.tensors[name] = TensorInfo(name, kind, tuple(reversed(dims)), start, nbytes, row_bytes)

    # -- data --------------------------------------------------------------------------------------------------------

    def rows(self, info: TensorInfo) -> np.ndarray:
        """The tensor's bytes as stored: uint8 [rows, bytes per row], a view of the mapped file."""
        flat = np.frombuffer(self._data, np.uint8, count=info.nbytes, offset=info.offset)
        return flat.reshape(-1, info.row_bytes)

    def header(self) -> bytes:
        """Everything before the tensor data: what a cached conversion of the tokenizer depends on."""
        return self._data[: self.header_bytes]


def _map(path: Path) -> mmap.mmap:
    try:
        with open(path, "rb") as handle:
            return mmap.mmap(handle.fileno(), 0, access=mmap.ACCESS_READ)
    except FileNotFoundError:
        raise ModelNotFound("no such file", file=path) from None
    except ValueError:  # mmap refuses an empty file
        raise ModelError("truncated: the file is empty", file=path) from None
    except OSError as error:
        raise ModelError(f"cannot be read: {error.strerror}", file=path) from None


_SPLIT_NAME = re.compile(r"^(?P<stem>.*)-(?P<part>\d{5})-of-(?P<count>\d{5})\.gguf$")


def open_gguf(path: Path) -> list[GGUFFile]:
    """All files of a checkpoint, the one with the metadata first. `path` may be any part of a split one."""
    match = _SPLIT_NAME.match(path.name)
    if match is None:
        first = GGUFFile(path)
        if first.metadata.get("split.count", 1) > 1:
            raise ModelError(
                f"part {first.metadata.get('split.no', 0) + 1} of {first.metadata['split.count']}, but its "
                "name does not end in -00001-of-0000N.gguf, so the others cannot be found",
                file=path,
            )
        return [first]
    count = int(match["count"])
    parts = [path.with_name(f"{match['stem']}-{part:05d}-of-{count:05d}.gguf") for part in range(1, count + 1)]
    for part in parts:
        if not part.exists():
            raise ModelError(f"missing: the checkpoint is split into {count} files", file=part)
    files = [GGUFFile(part) for part in parts]
    for number, file in enumerate(files):
        if file.metadata.get("split.no", number) != number or file.metadata.get("split.count", count) != count:
            raise ModelError(
                f"says it is part {file.metadata.get('split.no', 0) + 1} of "
                f"{file.metadata.get('split.count')}; expected {number + 1} of {count}",
                file=file.path,
            )
    listed = files[0].metadata.get("split.tensors.count")
    found = sum(len(file.tensors) for file in files)
    if listed is not None and listed != found:
        raise ModelError(f"split.tensors.count is {listed}, but the {count} files hold {found} tensors", file=path)
    return files
