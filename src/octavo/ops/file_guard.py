"""A file mapped into memory that somebody else may cut while it is read or written.

Behind the new end every access is a bus error, in whatever thread and code it happens: the compiled operations, torch,
a transport. The compiled module (native/guard.cpp) turns it into an empty page and counts it, so that the work ends as
usual and its owner can ask what was lost before anybody uses the results.
"""

from __future__ import annotations

import ctypes
import mmap
import weakref

from octavo.ops import native_lib as nl


class FileGuard:
    """Guards `nbytes` from `address` on, memory of `mapping`, until `close` or until the mapping is gone."""

    def __init__(self, mapping: mmap.mmap, address: int, nbytes: int) -> None:
        """Guards nothing where the compiled module is not there, or 16 files are guarded already."""
        lib = nl.library()
        self._lib, self._nbytes, self._before = lib, nbytes, 0
        self._id = -1 if lib is None else int(lib.octavo_guard(address, nbytes))
        self._end = None if lib is None else weakref.finalize(mapping, lib.octavo_guard_end, self._id)

    @property
    def active(self) -> bool:
        return self._id >= 0

    def _lost(self) -> tuple[int, int]:
        """Pages of the system lost since the last reset, and the offset in bytes of the first (-1: none)."""
        if self._lib is None or self._id < 0:
            return 0, -1
        first = ctypes.c_int64(-1)
        return int(self._lib.octavo_guard_lost(self._id, ctypes.byref(first))), first.value

    def intact_bytes(self) -> int:
        """All of them, or those before the first page that was asked for in vain."""
        lost, first = self._lost()
        return first if lost else self._nbytes

    def total_lost(self) -> int:
        """Pages of the system asked for in vain, resets included."""
        return self._before + self._lost()[0]

    def reset(self) -> None:
        """The file is whole and mapped anew."""
        if self._lib is not None and self._id >= 0:
            self._before = self.total_lost()
            self._lib.octavo_guard_reset(self._id)

    def close(self) -> None:
        if self._end is not None:
            self._before, self._id = self.total_lost(), -1
            self._end()
