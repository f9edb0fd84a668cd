"""What counts as a whole number of tokens: narrow arrays are widened, what is no whole number is named."""

from __future__ import annotations

import re
from collections.abc import Callable
from types import SimpleNamespace

import numpy as np
import pytest

from octavo.errors import ConfigError
from octavo.kv.pages import check_page_size, whole_number, whole_numbers
from octavo.kv.sizing import DecodeReserve, RowsView, page_aligned_decode_alloc_lens, reserve_tokens


@pytest.mark.parametrize("kind", [np.int8, np.uint8, np.int16, np.int32, np.uint32])
def test_narrow_arrays_of_lengths_are_widened(kind: type[np.integer]) -> None:
    """Near the end of their range the sum of a length and a reserve would wrap round, to a watermark below zero."""
    most = int(np.iinfo(kind).max)
    view = RowsView(np.array([0, 16], kind), np.array([most, 9], kind))
    current, after, needed = page_aligned_decode_alloc_lens(view, reserve=8, page_size=16)
    expected = -(-(most + 8) // 16) * 16
    assert (current.tolist(), after.tolist(), needed) == ([0, 16], [expected, 32], expected + 16)
    assert after.dtype == np.int64


@pytest.mark.parametrize("name", ["allocated", "known"])
@pytest.mark.parametrize(
    "values",
    [np.array([9.0]), np.array([True]), np.array([2**63], np.uint64), np.array([[9]]), np.array(["9"])],
    ids=repr,
)
def test_arrays_that_are_no_lengths_are_named(name: str, values: np.ndarray) -> None:
    view = RowsView(**({"allocated": np.array([16]), "known": np.array([9])} | {name: values}))
    with pytest.raises(ConfigError, match=f"RowsView.{name}"):
        page_aligned_decode_alloc_lens(view, reserve=8, page_size=16)


def test_arrays_of_whole_numbers() -> None:
    given = np.array([3, 1])
    assert whole_numbers(given) is given
    assert all(whole_numbers(other) is None for other in (3, np.array(3), [[3]], [3.0], [2**64]))


def test_no_rows_need_nothing() -> None:
    current, after, needed = page_aligned_decode_alloc_lens(RowsView([], []), reserve=8, page_size=16)  # type: ignore[arg-type]
    assert (len(current), len(after), needed) == (0, 0, 0)


@pytest.mark.parametrize("value", [True, np.bool_(True), 1.0, "1", None, np.ones(1, int)], ids=repr)
def test_one_form_of_whole_number_everywhere(value: object) -> None:
    """Page sizes, reserves, lengths: none takes a bool for 1, nor anything that would have to be converted."""
    refusals: list[Callable[[], object]] = [
        lambda: check_page_size(value),
        lambda: DecodeReserve(value),  # type: ignore[arg-type]
        lambda: DecodeReserve(4, value),  # type: ignore[arg-type]
        lambda: reserve_tokens(value),  # type: ignore[arg-type]
        lambda: page_aligned_decode_alloc_lens(
            [SimpleNamespace(kv_allocated_len=value, kv_committed_len=0)], reserve=1, page_size=16
        ),
    ]
    for refused in refusals:
        with pytest.raises(ConfigError, match=re.escape(f"got {value!r}")):
            refused()
    assert whole_number(value) is None
    assert [whole_number(good) for good in (3, np.int8(3), np.uint64(3))] == [3, 3, 3]
    assert all(type(whole_number(good)) is int for good in (3, np.int8(3), np.uint64(3)))
