"""What the second pool saves, in exact numbers: the formula, the longest requests that fit, and the live figure."""

from __future__ import annotations

from typing import Any

import pytest

from octavo.kv.report import held_pages, sliding_report
from octavo.kv.saving import Capacity, PageBytes, longest_requests, two_pool_saving
from octavo.kv.sizing import DecodeReserve, PoolSizes
from tests.laws.helpers import commit, make, prefill, sliding, tokens

GEMMA = PageBytes(full=3 * 32_768, swa=15 * 32_768)  # Gemma 3 270M in float32: 3 and 15 layers of 2·16·256·4 bytes


@pytest.mark.parametrize(
    ("pages", "page_bytes", "expected"),
    [
        # 4,096 tokens of Gemma 3 270M: 256 pages of all layers in one pool; in two, the sliding layers keep 35
        ((256, 35), GEMMA, (256, 35, 42_369_024, 150_994_944, 108_625_920)),
        ((10, 10), GEMMA, (10, 10, 5_898_240, 5_898_240, 0)),  # inside the window both pools hold all of it
        ((0, 0), GEMMA, (0, 0, 0, 0, 0)),
        ((7, 3), PageBytes(0, 100), (7, 3, 300, 700, 400)),  # only sliding layers: full pages have no bytes
        ((7, 3), PageBytes(10, 100), (7, 3, 370, 770, 400)),
    ],
)
def test_the_formula(pages: tuple[int, int], page_bytes: PageBytes, expected: tuple[int, ...]) -> None:
    assert two_pool_saving(PoolSizes(*pages), page_bytes) == expected


def fitting(full_pages: int, swa_pages: int, **changes: Any) -> Capacity:
    """W 512, p 16, plain decode under overlap, chunks of 512: L = 257, D = 35, P = 98 pages."""
    options: dict[str, Any] = {
        "window_tokens": 512, "page_size": 16, "reserve": DecodeReserve.plain(overlap=True), "chunk_tokens": 512,
        "request_slots": 8, "context_tokens": 4096, "overlap": True,
    }  # fmt: skip
    return longest_requests(PoolSizes(full_pages, swa_pages), **(options | changes))


@pytest.mark.parametrize(
    ("full", "swa", "requests", "swa_held"),
    [
        (257, 98, 1, 98),  # one that may still be prefilled
        (513, 200, 1, 98),  # the full pool is one page short of two
        (514, 132, 1, 98),  # the SWA pool is one page short of two
        (514, 133, 2, 133),
        (100_000, 343, 8, 343),
        (100_000, 100_000, 8, 343),  # no more than the request slots
        (256, 98, 0, 0),
        (257, 97, 0, 0),
        (257, 0, 0, 0),
    ],
)
def test_how_many_of_the_longest_requests_fit(full: int, swa: int, requests: int, swa_held: int) -> None:
    assert fitting(full, swa) == Capacity(requests, 4096, PoolSizes(257 * requests, swa_held))


def test_bounds_of_the_longest_requests_follow_the_options() -> None:
    # without overlap one chunk is in flight: P = ceil(1024/16) + 2 = 66, D = ceil(513/16) + 2 = 35, L = 256
    alone = fitting(512, 101, overlap=False, reserve=DecodeReserve.plain(overlap=False))
    assert alone == Capacity(2, 4096, PoolSizes(512, 101))
    # a context inside the window: both pools hold ceil((500 − 1 + 2)/16) = 32 pages of it, and nothing is saved
    short = fitting(64, 98, context_tokens=500)
    assert short == Capacity(2, 500, PoolSizes(64, 64))
    assert two_pool_saving(short.pages, GEMMA).saved_bytes == 0


def test_what_live_requests_hold() -> None:
    """p = 4, W = 8: a row of 30 committed tokens keeps SWA pages from floor_p(28 − 8) = 20 on."""
    ledger = sliding(window_tokens=8, full_pages=32, swa_pages=24)
    assert held_pages(ledger) == (0, 0)
    got = prefill(ledger, tokens(30))
    assert held_pages(ledger) == (8, 8)
    ledger.evict([got.row])
    assert held_pages(ledger) == (8, 3)
    ledger.plan_decode([got.row], 4)  # 30 + 4 tokens: 9 pages
    assert held_pages(ledger) == (9, 4)
    commit(ledger, got, 33)
    ledger.evict([got.row])  # floor_p(32 − 8) = 24
    assert held_pages(ledger) == (9, 3)
    other = ledger.preallocate(tokens(30, 100), 30)  # its tail starts at floor_p(30 − 8) = 20: 3 of 8 pages
    assert held_pages(ledger) == (17, 6)
    ledger.release(got.row)
    assert held_pages(ledger) == (8, 3)  # a transfer holds its leased pages
    ledger.quarantine(other.row, other.generation)
    assert held_pages(ledger) == (8, 3)  # nobody can have them
    ledger.end_quarantine()
    assert held_pages(ledger) == (0, 0)


def test_shared_pages_count_once_and_the_cache_not() -> None:
    ledger = sliding(window_tokens=8, full_pages=32, swa_pages=24)
    first = prefill(ledger, tokens(24), publish=True)
    second = prefill(ledger, tokens(24) + tokens(6, 100))  # shares 6 pages, has 2 of its own
    assert held_pages(ledger) == (8, 8)
    # floors 16 and 20: the first reads two pages of the tree's, the second the last of those
    ledger.evict([first.row, second.row])
    assert held_pages(ledger) == (8, 4)
    ledger.release(second.row)
    assert held_pages(ledger) == (6, 2)
    ledger.release(first.row)
    assert held_pages(ledger) == (0, 0) and ledger.full_pool.by_name()["cached"] == 6


def test_without_a_second_pool_nothing_slides() -> None:
    ledger = make()
    prefill(ledger, tokens(9))
    assert held_pages(ledger) == (3, 0)


def test_the_report() -> None:
    ledger = sliding(window_tokens=8, full_pages=32, swa_pages=24)
    ledger.evict([prefill(ledger, tokens(30)).row])
    capacity = Capacity(2, 64, PoolSizes(36, 10))
    assert sliding_report(ledger, PageBytes(10, 100), PoolSizes(9, 4), capacity) == {
        "full_page_bytes": 10,
        "swa_page_bytes": 100,
        "now": {
            "full_pages": 8, "swa_pages": 3, "two_pools_bytes": 380, "one_pool_bytes": 880, "saved_bytes": 500,
        },
        "peak": {
            "full_pages": 9, "swa_pages": 4, "two_pools_bytes": 490, "one_pool_bytes": 990, "saved_bytes": 500,
        },
        "capacity": {
            "requests": 2, "context_tokens": 64, "full_pages": 36, "swa_pages": 10, "two_pools_bytes": 1360,
            "one_pool_bytes": 3960, "saved_bytes": 2600,
        },
    }  # fmt: skip
