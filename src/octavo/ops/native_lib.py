"""The compiled module seen from Python: finding it, choosing its instruction set, its structures and threads.

Nothing here imports torch. Without the library (no compiler at build time, another platform) `library()` returns
None and the torch operations are used. Environment:

    OCTAVO_NATIVE=0                       never use the compiled operations
    OCTAVO_NATIVE_ISA=avx512bf16|avx512|avx2|neon|generic   use this instruction set instead of the best one
    OCTAVO_NATIVE_LIB=PATH                load this file (sanitizer builds)
"""

from __future__ import annotations

import ctypes
import logging
import os
from ctypes import POINTER, Structure, c_char_p, c_double, c_int, c_int32, c_int64, c_void_p
from functools import lru_cache
from pathlib import Path

from octavo.errors import ConfigError

_ABI = 4
_LOG = logging.getLogger("octavo.ops")
ISAS = ("avx512bf16", "avx512", "avx2", "neon", "generic")

(EMBED, COPY, RMS_NORM, QUANTIZE, LINEAR, ROPE_WRITE, ATTENTION, GATED, ADD, SCALE, SOFTCAP, ARGMAX, SELECT) = range(13)
OP_NAMES = (
    "embed", "copy", "rms_norm", "quantize", "linear", "rope_write", "attention", "gated", "add", "scale", "softcap",
    "argmax", "select",
)  # fmt: skip
BAD_PAGE, BAD_TOKEN, BAD_POSITION = 1, 2, 4


class Instr(Structure):
    """octavo_instr of native/octavo_native.h."""

    _fields_ = [
        ("op", c_int64), ("dst", c_int64), ("dst_offset", c_int64), ("src", c_int64), ("src_offset", c_int64),
        ("src2", c_int64), ("src2_offset", c_int64), ("width", c_int64), ("w", c_void_p), ("i", c_int64 * 8),
        ("f", c_double * 2),
    ]  # fmt: skip


class Sparse(Structure):
    """octavo_sparse of native/octavo_native.h."""

    _fields_ = [
        ("slots", c_void_p), ("host", c_void_p), ("bounds", c_void_p), ("row_slots", c_void_p),
        ("host_table", c_void_p), ("backed", c_void_p), ("slot_map", c_void_p), ("column_of", c_void_p),
        ("order", c_void_p), ("host_layer", c_void_p), ("counts", c_void_p), ("slot_count", c_int64),
        ("host_pages", c_int64), ("layers", c_int64), ("host_page_layers", c_int64), ("rows", c_int64),
        ("width", c_int64), ("device_pages", c_int64), ("topk_pages", c_int64), ("recent_tokens", c_int64),
        ("dense_limit_tokens", c_int64), ("decodes", c_int64),
    ]  # fmt: skip


class Run(Structure):
    """octavo_run of native/octavo_native.h."""

    _fields_ = [
        ("tokens", c_int64), ("sequences", c_int64), ("token_ids", c_void_p), ("positions", c_void_p),
        ("write_slots", c_void_p), ("rows", c_void_p), ("kv_start", c_void_p), ("mask", c_void_p),
        ("q_indptr", c_void_p), ("kv", c_void_p * 2), ("kv_pages", c_int64 * 2), ("kv_page_elements", c_int64 * 2),
        ("table", c_void_p * 2), ("table_width", c_int64 * 2), ("table_rows", c_int64 * 2), ("page_size", c_int64),
        ("kv_bf16", c_int64), ("sparse", c_void_p), ("external", POINTER(c_void_p)), ("profile", c_void_p),
    ]  # fmt: skip


_SIGNATURES: dict[str, tuple[object, list[object]]] = {
    "octavo_abi": (c_int, []),
    "octavo_best_isa": (c_char_p, []),
    "octavo_has_isa": (c_int, [c_char_p]),
    "octavo_pool": (c_void_p, [c_int, POINTER(c_int), c_int, c_double]),
    "octavo_pool_free": (None, [c_void_p]),
    "octavo_weight": (c_void_p, [c_int, c_int64, c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_void_p]),
    "octavo_weight_bytes": (c_int64, [c_void_p]),
    "octavo_weight_free": (None, [c_void_p]),
    "octavo_program": (
        c_void_p,
        [POINTER(Instr), c_int64, POINTER(c_int64), c_int64, POINTER(c_int64), c_int64, POINTER(c_int64), c_int64,
         c_char_p],
    ),
    "octavo_program_stages": (c_int64, [c_void_p]),
    "octavo_program_stage": (c_int64, [c_void_p, c_int64, POINTER(c_int64)]),
    "octavo_program_free": (None, [c_void_p]),
    "octavo_program_run": (c_int, [c_void_p, c_void_p, POINTER(Run)]),
    "octavo_top_p": (c_int, [c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
    "octavo_draw": (None, [c_void_p, c_int64, c_int64, c_void_p, c_void_p]),
    "octavo_lay_chains": (
        None, [c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_void_p],
    ),
    "octavo_keep_chains": (
        None,
        [c_int64, c_void_p, c_void_p, c_void_p, c_void_p, c_int64, c_void_p, c_int64, c_int64, c_void_p, c_void_p,
         c_void_p],
    ),
    "octavo_guard": (c_int, [c_void_p, c_int64]),
    "octavo_guard_lost": (c_int64, [c_int, POINTER(c_int64)]),
    "octavo_guard_reset": (None, [c_int]),
    "octavo_guard_end": (None, [c_int]),
    "octavo_read_memory": (c_double, [c_void_p, c_void_p, c_int64]),
}  # fmt: skip


def library_path() -> Path:
    """Where the compiled module is looked for."""
    override = os.environ.get("OCTAVO_NATIVE_LIB")
    return Path(override) if override else Path(__file__).with_name("liboctavo_native.so")


@lru_cache(maxsize=4)
def _open(path: Path) -> ctypes.CDLL | None:
    try:
        lib = ctypes.CDLL(str(path))
    except OSError as error:
        _LOG.debug("native operations are not there: %s", error)
        return None
    for name, (result, arguments) in _SIGNATURES.items():
        function = getattr(lib, name, None)
        if function is None:
            _LOG.warning("%s has no %s: rebuild it; torch operations are used", path, name)
            return None
        function.restype, function.argtypes = result, arguments
    if lib.octavo_abi() != _ABI:
        _LOG.warning("%s is of another version: rebuild it; torch operations are used", path)
        return None
    return lib


def library() -> ctypes.CDLL | None:
    """The compiled module, or None where it is switched off, absent or of another version."""
    switch = os.environ.get("OCTAVO_NATIVE", "1")
    if switch not in ("0", "1", ""):
        raise ConfigError("OCTAVO_NATIVE", switch, "allowed: 0, 1")
    return None if switch == "0" else _open(library_path())


def choose_isa(name: str | None = None) -> str:
    """The instruction set to run: `name`, else OCTAVO_NATIVE_ISA, else the best this CPU has."""
    lib = library()
    wanted = name or os.environ.get("OCTAVO_NATIVE_ISA") or None
    if wanted is not None and wanted not in ISAS:
        raise ConfigError("OCTAVO_NATIVE_ISA", wanted, f"allowed: {', '.join(ISAS)}")
    if lib is None:
        raise ConfigError("OCTAVO_NATIVE", os.environ.get("OCTAVO_NATIVE", "1"), "the compiled module is not there")
    if wanted is None:
        return str(lib.octavo_best_isa().decode())
    if not lib.octavo_has_isa(wanted.encode()):
        raise ConfigError("OCTAVO_NATIVE_ISA", wanted, f"this machine runs {', '.join(available_isas())}")
    return wanted


def available_isas() -> tuple[str, ...]:
    """Instruction sets this build and this CPU have, best first."""
    lib = library()
    return () if lib is None else tuple(name for name in ISAS if lib.octavo_has_isa(name.encode()))


class ThreadPool:
    """Threads of the compiled module. The caller of a run is one of them; the others are pinned, spin, then sleep."""

    def __init__(self, threads: int, *, pin: bool = True, spin_us: float = 80.0) -> None:
        if threads < 1:
            raise ConfigError("threads", threads, "at least 1")
        lib = library()
        if lib is None:
            raise ConfigError("OCTAVO_NATIVE", "1", "the compiled operations are not there")
        cpus = sorted(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else []
        if not pin or threads > len(cpus):
            cpus = []
        self._lib = lib
        self.threads = threads
        self.handle = lib.octavo_pool(threads, (c_int * max(1, len(cpus)))(*cpus), len(cpus), spin_us)
        if not self.handle:
            raise MemoryError(f"cannot start {threads} threads")

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._lib.octavo_pool_free(self.handle)
            self.handle = None


@lru_cache(maxsize=8)
def shared_pool(threads: int) -> ThreadPool:
    """One pool per thread count and process: target, draft and head never run at the same time."""
    return ThreadPool(threads)


def int64_array(values: tuple[int, ...] | list[int]) -> ctypes.Array[c_int64]:
    return (c_int64 * max(1, len(values)))(*values)


__all__ = [
    "ADD", "ARGMAX", "ATTENTION", "BAD_PAGE", "BAD_POSITION", "BAD_TOKEN", "COPY", "EMBED", "GATED", "ISAS", "LINEAR",
    "OP_NAMES", "QUANTIZE", "RMS_NORM", "ROPE_WRITE", "SCALE", "SELECT", "SOFTCAP", "Instr", "Run", "Sparse",
    "ThreadPool", "available_isas", "c_int32", "choose_isa", "int64_array", "library", "library_path", "shared_pool",
]  # fmt: skip
