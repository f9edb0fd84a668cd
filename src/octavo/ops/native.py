"""Operations by the compiled module: one call into C++ per program and step, the interpreter lock released.

Weights are packed once (native/types.h), activations are float32; int4, int5 and int8 products quantise them per row
and group of 32. A row's bits do not depend on the other rows, the threads or the page size.
"""

from __future__ import annotations

import ctypes
import os
from collections.abc import Mapping
from ctypes import byref, c_int64, c_void_p
from typing import Any

import numpy as np
import torch

from octavo.errors import ConfigError, OctavoError
from octavo.ops import native_lib as nl
from octavo.ops.base import Body
from octavo.ops.meta import KVView, StepMeta
from octavo.ops.native_sparse import SparseBinding
from octavo.ops.native_tape import POOL_NAMES, NativeTape, lower
from octavo.ops.weights import GROUP, Matrix

_KINDS = {"int4": 0, "int5": 4, "int8": 1, "bf16": 2, "fp32": 3}


def available() -> bool:
    """True where the compiled module can be used (built, not switched off)."""
    return nl.library() is not None


def supports_sparse() -> bool:
    """True where the compiled module runs sparse layers (HiSparse), with page bounds as their selector."""
    return available()


class NativeWeight:
    """A packed matrix [out, in]; frees its memory with itself."""

    def __init__(self, lib: ctypes.CDLL, matrix: Matrix, bias: torch.Tensor | None) -> None:
        self.out_features, self.in_features, self.kind = matrix.out_features, matrix.in_features, matrix.kind
        self.quantised = matrix.kind in ("int4", "int5", "int8")
        if self.quantised and matrix.in_features % GROUP:
            raise ConfigError("quantization", matrix.kind, f"input width must be a multiple of {GROUP}")
        keep: list[Any] = []

        def pointer(array: np.ndarray | torch.Tensor | None) -> int | None:
            if array is None:
                return None
            keep.append(array)
            return array.data_ptr() if isinstance(array, torch.Tensor) else int(array.ctypes.data)

        def groups(array: np.ndarray | None) -> np.ndarray | None:
            return None if array is None else np.ascontiguousarray(array, dtype=np.float16)

        minimum = matrix.minimum
        if matrix.kind == "int4" and minimum is None:
            minimum = np.zeros((matrix.out_features, matrix.in_features // GROUP), np.float16)
        codes = None if matrix.codes is None else np.ascontiguousarray(matrix.codes)
        dense = None if matrix.dense is None else matrix.dense.contiguous()
        offset = None if bias is None else bias.detach().to(torch.float32).contiguous()
        self._lib = lib
        self.handle = lib.octavo_weight(
            _KINDS[matrix.kind],
            matrix.out_features,
            matrix.in_features,
            pointer(codes),
            pointer(groups(matrix.scale)),
            pointer(groups(minimum)),
            pointer(dense),
            pointer(offset),
        )
        self.nbytes = int(lib.octavo_weight_bytes(self.handle))

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._lib.octavo_weight_free(self.handle)
            self.handle = None


class NativeVector:
    """A norm weight, float32."""

    def __init__(self, weight: torch.Tensor) -> None:
        self._data = weight.detach().to(torch.float32).contiguous().clone()
        self.width = self._data.numel()
        self.nbytes = self.width * 4
        self.handle = self._data.data_ptr()


class NativeRope:
    """cos and sin tables; the handle points at {positions, r, cos, sin}."""

    def __init__(self, cos: torch.Tensor, sin: torch.Tensor) -> None:
        self._cos, self._sin = (t.detach().to(torch.float32).contiguous().clone() for t in (cos, sin))
        self.positions, self.half = self._cos.shape
        self.nbytes = 2 * self._cos.numel() * 4
        self._header = nl.int64_array([self.positions, self.half, self._cos.data_ptr(), self._sin.data_ptr()])
        self.handle = ctypes.addressof(self._header)


class NativeProgram:
    """A recorded body. `run` is one call into the compiled module."""

    def __init__(self, lib: ctypes.CDLL, tape: NativeTape, pool: nl.ThreadPool, isa: str) -> None:
        lowered = lower(tape)
        self._lib, self._pool = lib, pool
        self._keep = [node.weight for node in tape.nodes]
        self._inputs = [(name, handle.width) for name, handle in tape.inputs.items()]
        self._outputs = list(tape.outputs.items())
        self._index_outputs = {n.target[0] for n in tape.nodes if n.op == nl.ARGMAX and n.target}
        self._layers = tape.layers
        self._bound_to: KVView | None = None
        self._bound_run = nl.Run()
        self._sparse = SparseBinding()
        code = (nl.Instr * max(1, len(lowered.code)))(*lowered.code)
        external = [width for _, width in lowered.external]
        self.handle = lib.octavo_program(
            code,
            len(lowered.code),
            nl.int64_array(lowered.widths),
            len(lowered.widths),
            nl.int64_array(lowered.quant_widths),
            len(lowered.quant_widths),
            nl.int64_array(external),
            len(external),
            isa.encode(),
        )
        if not self.handle:
            raise MemoryError("cannot build the native program")
        self.stages = int(lib.octavo_program_stages(self.handle))
        self.profile_seconds: np.ndarray | None = None

    def __del__(self) -> None:
        if getattr(self, "handle", None):
            self._lib.octavo_program_free(self.handle)
            self.handle = None

    def run(
        self, meta: StepMeta, kv: KVView | None, inputs: Mapping[str, torch.Tensor] | None = None
    ) -> dict[str, torch.Tensor]:
        """Outputs by name, float32 [n, width] (int64 [n] for arg max). Raises OctavoError for ids, positions or
        pages outside their tables (the step's other results are then void)."""
        run = self._bound(kv) if self._layers else nl.Run()
        run.tokens, run.sequences = meta.num_tokens, meta.num_seqs
        keep = [_int64(t) for t in (meta.token_ids, meta.positions, meta.write_slots, meta.rows, meta.kv_start)]
        run.token_ids, run.positions, run.write_slots, run.rows, run.kv_start = (t.data_ptr() for t in keep)
        if meta.mask is not None:
            keep.append(_int64(meta.mask))
            run.mask = keep[-1].data_ptr()
        indptr = nl.int64_array(list(meta.q_indptr))
        run.q_indptr = ctypes.addressof(indptr)
        if self._layers:
            self._bind_sparse(run, kv, meta.num_decodes)
        return self.run_raw(run, inputs or {})

    def run_raw(self, run: nl.Run, inputs: Mapping[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        """Runs with the step fields of `run` already set; binds inputs and outputs."""
        n = run.tokens
        keep, pointers, outputs = [], [], {}
        for name, width in self._inputs:
            x = inputs[name]
            if tuple(x.shape) != (n, width):
                raise ValueError(f"input {name!r}: shape {tuple(x.shape)} where ({n}, {width}) is needed")
            keep.append(x.detach().to(torch.float32).contiguous())
            pointers.append(keep[-1].data_ptr())
        for name, width in self._outputs:
            if name in self._index_outputs:
                outputs[name] = torch.empty(n, dtype=torch.int64)
            else:
                outputs[name] = torch.empty(n, width, dtype=torch.float32)
            pointers.append(outputs[name].data_ptr())
        external = (c_void_p * max(1, len(pointers)))(*pointers)
        run.external = external
        if self.profile_seconds is not None:
            run.profile = self.profile_seconds.ctypes.data
        flags = self._lib.octavo_program_run(self.handle, self._pool.handle, byref(run))
        if flags:
            _fail(flags)
        return outputs

    def start_profile(self) -> None:
        """From now on seconds are added up by stage (see `profile`)."""
        self.profile_seconds = np.zeros(self.stages + 1)

    def profile(self) -> list[tuple[str, int, float]]:
        """(operation, weight bytes, seconds) of every stage since `start_profile`."""
        seconds = self.profile_seconds if self.profile_seconds is not None else np.zeros(self.stages + 1)
        result = []
        for stage in range(self.stages):
            weight_bytes = c_int64()
            op = self._lib.octavo_program_stage(self.handle, stage, byref(weight_bytes))
            result.append((nl.OP_NAMES[op], int(weight_bytes.value), float(seconds[stage])))
        return result

    def _bound(self, kv: KVView | None) -> nl.Run:
        """A run that knows the pools; every step has the same ones, so they are looked at once."""
        if kv is None or kv is not self._bound_to:
            run = nl.Run()
            self._bind_kv(run, kv)
            self._bound_to, self._bound_run = kv, run
        return nl.Run.from_buffer_copy(self._bound_run)

    def _bind_kv(self, run: nl.Run, kv: KVView | None) -> None:
        if kv is None:
            raise ValueError("this program has attention: it needs a KVView")
        self._check_kv(kv)
        run.page_size = kv.page_size
        for i, (pages, table) in enumerate(((kv.full, kv.full_table), (kv.swa, kv.swa_table))):
            if pages is None or table is None:
                continue
            run.kv[i] = pages.data_ptr()
            run.kv_pages[i] = pages.shape[0]
            run.kv_page_elements[i] = pages[0].numel() if pages.shape[0] else 0
            run.kv_bf16 = int(pages.dtype == torch.bfloat16)
            run.table[i] = table.data_ptr()
            run.table_rows[i], run.table_width[i] = table.shape

    def _bind_sparse(self, run: nl.Run, kv: KVView | None, decodes: int) -> None:
        """State of the sparse layers, where the program has some."""
        needs = [need for need in self._layers if need.pool == POOL_NAMES.index("sparse")]
        if not needs:
            return
        if kv is None or kv.sparse is None:
            raise ValueError("this program has sparse layers: it needs a KVView that has them")
        shape = (needs[0].kv_heads, needs[0].head_dim)
        run.sparse = self._sparse.bind(kv.sparse, decodes, shape, 1 + max(need.layer for need in needs))
        run.kv_bf16 = int(kv.sparse.slots.dtype == torch.bfloat16)

    def _check_kv(self, kv: KVView) -> None:
        """Shapes, types and layers of the pools."""
        for need in self._layers:
            name = POOL_NAMES[need.pool]
            if name == "sparse":
                continue
            pages, table = kv.pool(name)
            want = (2, need.kv_heads, kv.page_size, need.head_dim)
            if tuple(pages.shape[2:]) != want or need.layer >= pages.shape[1]:
                raise ValueError(f"pool of shape {tuple(pages.shape)}: layer {need.layer} needs [*, *, {want}]")
            if pages.dtype not in (torch.float32, torch.bfloat16) or not pages.is_contiguous():
                raise ValueError("KV pages must be contiguous float32 or bfloat16")
            if table.dtype != torch.int32 or not table.is_contiguous():
                raise ValueError("page tables must be contiguous int32")


def _int64(x: torch.Tensor) -> torch.Tensor:
    return x if x.dtype == torch.int64 and x.is_contiguous() else x.to(torch.int64).contiguous()


def _fail(flags: int) -> None:
    if flags < 0:
        raise MemoryError("the native operations ran out of memory")
    reasons = [
        text
        for bit, text in (
            (nl.BAD_TOKEN, "a token id is outside the vocabulary"),
            (nl.BAD_POSITION, "a position is outside the rotation table"),
            (nl.BAD_PAGE, "a visible or written slot has no page"),
        )
        if flags & bit
    ]
    raise OctavoError("native step: " + ", ".join(reasons))


class NativeOps:
    """`ops.base.Ops` by the compiled module, for CPU tensors.

    `threads` defaults to the cores this process may use. The pool is shared by all programs of a process that ask
    for the same number. Keep torch at one thread beside it: two pools would fight for the cores.
    """

    def __init__(self, threads: int | None = None, *, isa: str | None = None) -> None:
        lib = nl.library()
        self.isa = nl.choose_isa(isa)
        if lib is None:
            raise ConfigError("OCTAVO_NATIVE", "1", "the compiled operations are not there")
        self._lib = lib
        self.threads = threads if threads is not None else len(os.sched_getaffinity(0))
        self._pool = nl.shared_pool(self.threads)
        self.name = f"native {self.isa}"
        self._heads: dict[tuple[object, ...], NativeProgram] = {}

    def matrix(self, matrix: Matrix, bias: torch.Tensor | None = None) -> NativeWeight:
        return NativeWeight(self._lib, matrix, bias)

    def vector(self, weight: torch.Tensor) -> NativeVector:
        return NativeVector(weight)

    def rope(self, cos: torch.Tensor, sin: torch.Tensor) -> NativeRope:
        return NativeRope(cos, sin)

    def program(self, body: Body) -> NativeProgram:
        tape = NativeTape()
        body(tape)
        return NativeProgram(self._lib, tape, self._pool, self.isa)

    def embed(self, table: NativeWeight, ids: torch.Tensor, scale: float = 1.0) -> torch.Tensor:
        program = self._head(("embed", table, scale), lambda t: t.output("x", t.embed(table, scale)))
        flat = _int64(ids.reshape(-1))
        run = nl.Run(tokens=flat.numel(), sequences=1, token_ids=flat.data_ptr())
        return program.run_raw(run, {})["x"].view(*ids.shape, table.in_features)

    def logits(self, hidden: torch.Tensor, head: NativeWeight, softcap: float | None = None) -> torch.Tensor:
        def body(tape: NativeTape) -> None:
            x = tape.linear(tape.input("x", head.in_features), head)
            tape.output("logits", x if softcap is None else tape.softcap(x, softcap))

        program = self._head(("logits", head, softcap), body)
        return program.run_raw(nl.Run(tokens=hidden.shape[0], sequences=1), {"x": hidden})["logits"]

    def argmax(self, hidden: torch.Tensor, head: NativeWeight) -> torch.Tensor:
        def body(tape: NativeTape) -> None:
            tape.argmax("ids", tape.input("x", head.in_features), head)

        program = self._head(("argmax", head), body)
        return program.run_raw(nl.Run(tokens=hidden.shape[0], sequences=1), {"x": hidden})["ids"]

    def read_memory_gbps(self, megabytes: int = 96, repeats: int = 5) -> float:
        """Best rate of a plain read of memory with this pool's threads: the floor that decode is measured against."""
        data = torch.ones(megabytes << 20, dtype=torch.uint8)
        best = min(
            self._lib.octavo_read_memory(self._pool.handle, data.data_ptr(), data.numel()) for _ in range(repeats)
        )
        return float(data.numel() / best / 1e9)

    def _head(self, key: tuple[object, ...], body: Any) -> NativeProgram:
        if key not in self._heads:
            self._heads[key] = self.program(body)
        return self._heads[key]
