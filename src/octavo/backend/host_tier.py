"""The memory of the host tier (HiSparse) and what moves pages in and out of it.

Memory of this machine, pinned on CUDA, or a file mapped into memory. The file is allocated whole at start, so that a
full disk is refused there, and looked at before every step and around every batch of copies. Cut in between, missing
pages become empty ones (`ops/file_guard.py`), which the next look finds. So a file that was removed or cut is a typed
error of the requests whose pages it held, never a bus error; without the compiled module only the looks remain.
"""

from __future__ import annotations

import errno
import mmap
import os
from pathlib import Path
from typing import Any

import numpy as np
import torch

from octavo.backend.relay import upload
from octavo.errors import ConfigError, HostTierLost
from octavo.ops.file_guard import FileGuard
from octavo.ops.meta import KVView, SparseView
from octavo.ops.sparse_state import back_up, load_dense, load_slots, summarise_host_pages
from octavo.options import format_size


class HostTier:
    """`tensor` [pages + 1, layers, 2, kv_heads, page_size, head_dim]; the last page is spare."""

    def __init__(
        self, shape: tuple[int, ...], dtype: torch.dtype, *, path: str | None = None, device: torch.device | str = "cpu"
    ) -> None:
        """Take the memory. Raises ConfigError (host_tier_path) for a file that cannot be made or allocated."""
        self.path = None if path is None else Path(path)
        self._words = np.dtype(np.float32 if dtype.itemsize == 4 else np.uint16)
        self._file: Any = None
        self._map: mmap.mmap | None = None
        self._guard: FileGuard | None = None
        self.nbytes = int(np.prod(shape)) * dtype.itemsize
        self.page_bytes = self.nbytes // shape[0]
        if self.path is None:
            words = np.zeros(shape, self._words)  # untouched memory costs nothing
        else:
            words = self._mapped(self.path).reshape(shape)
        self.tensor = torch.from_numpy(words).view(dtype)
        if torch.device(device).type == "cuda":
            self.tensor = _device_addressable(self.tensor)

    def _mapped(self, path: Path) -> np.ndarray:
        try:
            self._file = open(path, "w+b", buffering=0)
            self._allocate()
        except OSError as error:
            self._forget_file()
            raise ConfigError("host_tier_path", str(path), _why(error, self.nbytes)) from error
        self._map = mmap.mmap(self._file.fileno(), self.nbytes)
        words = np.frombuffer(self._map, self._words)
        self._guard = FileGuard(self._map, words.ctypes.data, self.nbytes)
        return words

    def _allocate(self) -> None:
        """Every block of the file exists afterwards: a store into the map cannot find the disk full."""
        os.posix_fallocate(self._file.fileno(), 0, self.nbytes)

    def _forget_file(self) -> None:
        if self._file is not None:
            self._file.close()
            self.path.unlink(missing_ok=True) if self.path is not None else None
            self._file = None

    # -- faults --

    def intact_pages(self) -> int | None:
        """None: all is well. Else how many pages from the first on can still be read (0: the file was removed)."""
        if self._file is None:
            return None
        state = os.fstat(self._file.fileno())
        if state.st_nlink == 0:
            return 0
        intact = min(self.nbytes, state.st_size, self.nbytes if self._guard is None else self._guard.intact_bytes())
        return None if intact == self.nbytes else intact // self.page_bytes

    @property
    def missed_accesses(self) -> int:
        """Pages of the system that were asked for behind the end of a cut file, since the start."""
        return 0 if self._guard is None else self._guard.total_lost()

    def check(self) -> None:
        """Raises HostTierLost if the file was removed or cut."""
        pages = self.intact_pages()
        if pages is not None:
            what = "was removed" if pages == 0 and os.fstat(self._file.fileno()).st_nlink == 0 else "was cut short"
            raise HostTierLost(f"the host tier's file {self.path} {what}", intact_pages=pages)

    def repair(self) -> None:
        """Give a cut file its length back (what was cut is zero), or a removed one a new life under its name. Raises
        HostTierLost if that cannot be done."""
        if self._file is None or self.path is None or self._map is None:
            return
        try:
            if os.fstat(self._file.fileno()).st_nlink == 0:
                # the map goes on living without a name; the new file takes the name so that the next check passes
                fresh = open(self.path, "w+b", buffering=0)
                self._file.close()
                self._file = fresh
            self._allocate()
            self._map_again()
        except OSError as error:
            raise HostTierLost(
                f"the host tier's file {self.path}: {_why(error, self.nbytes)}", intact_pages=0
            ) from error

    def _map_again(self) -> None:
        """The file at the addresses of the old mapping, which every tensor and pointer keeps."""
        import ctypes

        libc = ctypes.CDLL(None, use_errno=True)
        libc.mmap.restype = ctypes.c_void_p
        libc.mmap.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int, ctypes.c_int, ctypes.c_int, ctypes.c_long]
        address = self.tensor.data_ptr()
        shared_fixed = mmap.MAP_SHARED | 0x10  # MAP_FIXED: replaces the old mapping in one step
        got = libc.mmap(address, self.nbytes, mmap.PROT_READ | mmap.PROT_WRITE, shared_fixed, self._file.fileno(), 0)
        if got != address:
            raise OSError(ctypes.get_errno(), "cannot map the file again")
        if self._guard is not None:
            self._guard.reset()

    def close(self) -> None:
        """Remove the file. The memory goes with the last tensor."""
        if self._guard is not None:
            self._guard.close()
        if self._file is not None:
            self._file.close()
            self._file = None
            if self.path is not None:
                self.path.unlink(missing_ok=True)


def _why(error: OSError, nbytes: int) -> str:
    if error.errno == errno.ENOSPC:
        return f"{format_size(nbytes)} do not fit the disk; lower --host-memory"
    return f"{error.strerror or error}; allowed: a file this process may write, {format_size(nbytes)} large"


def _device_addressable(host: torch.Tensor) -> torch.Tensor:
    """A CUDA tensor over pinned host memory: kernels read and write it through the bus."""
    pinned = host.pin_memory()

    class Alias:
        def __init__(self, tensor: torch.Tensor) -> None:
            self.keep = tensor
            words = {2: "<i2", 4: "<f4"}[tensor.element_size()]
            self.__cuda_array_interface__ = {
                "shape": tuple(tensor.shape), "typestr": words, "data": (tensor.data_ptr(), False), "version": 3,
            }  # fmt: skip

    return torch.as_tensor(Alias(pinned), device="cuda").view(host.dtype)


class TierMover:
    """Copies between slots, pages and the host tier, for rows and columns the ledger names."""

    def __init__(self, tier: HostTier, kv: KVView, device: torch.device) -> None:
        if kv.sparse is None:
            raise ValueError("this view has no sparse layers")
        self.tier, self.kv, self._device = tier, kv, device
        self.view: SparseView = kv.sparse

    def back_up(self, rows: np.ndarray, columns: np.ndarray) -> None:
        """Pages (rows[i], columns[i]) into the host tier. Raises HostTierLost if they are not in it afterwards."""
        self.tier.check()
        back_up(self.kv, upload(rows, self._device), upload(columns, self._device))
        self.tier.check()

    def load(self, row: int, dense: tuple[int, int], recent: tuple[int, int]) -> None:
        """Columns [dense) of the row's dense and draft layers, [recent) of its sparse layers, from the host tier. The
        row's slots are fresh. A file that is cut meanwhile is found before the row's next results are used."""
        for (first, last), copy in ((dense, load_dense), (recent, load_slots)):
            columns = np.arange(first, last)
            copy(self.kv, upload(np.full_like(columns, row), self._device), upload(columns, self._device))

    def sum_up(self, pages: np.ndarray) -> None:
        """Bounds of complete host pages that no forward pass of this engine wrote."""
        if len(pages):
            summarise_host_pages(self.view, upload(pages, self._device))
