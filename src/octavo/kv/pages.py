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


def whole_number(value: object) -> int | None:
    """`value` as an int if it is a whole number on the host, else None.

    No bool, and nothing that can only be converted: a fraction would be cut off, a device's number waited for (law 8).
    """
    if isinstance(value, bool) or not isinstance(value, (int, np.integer)):
        return None
    return int(value)


def whole_numbers(values: object) -> Int64Array | None:
    """Whole numbers [n] as int64, narrower types widened; None if they are none, or not all fit into int64."""
    array = np.asarray(values)
    if array.dtype == np.int64 and array.ndim == 1:
        return array
    if array.ndim != 1 or (len(array) and (array.dtype.kind not in "iu" or array.dtype == np.uint64)):
        return None
    return array.astype(np.int64)


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
    size = whole_number(page_size)
    if size is None or size < 1 or size & (size - 1):
        raise ConfigError(option, page_size, allowed)
    return size
