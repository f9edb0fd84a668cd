"""Pages and positions: rounding, typed page ids (law 15).

A page id is an index into one pool. Four index spaces exist and must never mix, so each has its own type: a
function that wants `FullPages` does not type-check with `SwaPages`. At run time all of them are int32 arrays.
"""

from __future__ import annotations

from typing import NewType

import numpy as np
from numpy.typing import NDArray

from octavo.errors import ConfigError

Int32Array = NDArray[np.int32]
Int64Array = NDArray[np.int64]
BoolArray = NDArray[np.bool_]

FullPage = NewType("FullPage", int)
SwaPage = NewType("SwaPage", int)
HostPage = NewType("HostPage", int)

FullPages = NewType("FullPages", np.ndarray[tuple[int, ...], np.dtype[np.int32]])
SwaPages = NewType("SwaPages", np.ndarray[tuple[int, ...], np.dtype[np.int32]])
HostPages = NewType("HostPages", np.ndarray[tuple[int, ...], np.dtype[np.int32]])
DeviceSlots = NewType("DeviceSlots", np.ndarray[tuple[int, ...], np.dtype[np.int32]])

NO_PAGE = -1  # a table entry that names no page


def ceil_p(tokens: int, page_size: int) -> int:
    """Smallest multiple of `page_size` that is >= `tokens` (both in tokens)."""
    return -(-tokens // page_size) * page_size


def floor_p(tokens: int, page_size: int) -> int:
    """Largest multiple of `page_size` that is <= `tokens` (both in tokens)."""
    return tokens // page_size * page_size


def ceil_pages(tokens: int, page_size: int) -> int:
    """Pages that hold `tokens` tokens."""
    return -(-tokens // page_size)


def distinct(values: Int64Array) -> Int64Array:
    """The different values, ascending. (`np.unique` hashes, which is many times slower for page and cell numbers.)

    A merge sort: what comes here is made of ascending runs, the pages or cells of one row after another.
    """
    ordered = np.sort(values, kind="stable")
    keep = np.ones(len(ordered), np.bool_)
    np.not_equal(ordered[1:], ordered[:-1], out=keep[1:])
    return ordered[keep]


def check_page_size(page_size: object, option: str = "page_size") -> int:
    """Return `page_size` if it is a power of two >= 1, else raise `ConfigError` naming `option`."""
    allowed = "a power of two: 1, 2, 4, 8, 16, 32, …"
    if isinstance(page_size, bool) or not isinstance(page_size, (int, np.integer)):
        raise ConfigError(option, page_size, allowed)
    size = int(page_size)
    if size < 1 or size & (size - 1):
        raise ConfigError(option, page_size, allowed)
    return size
