"""The tables of the accounting rules, and the formulas behind them as properties."""

from __future__ import annotations

import re
from types import SimpleNamespace

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from octavo.errors import ConfigError, LawViolation
from octavo.kv.pages import ceil_p, ceil_pages, check_page_size, distinct, floor_p
from octavo.kv.sizing import (
    DecodeReserve,
    PoolSizes,
    ReserveError,
    RowsView,
    decode_admission_pages,
    decode_watermark,
    full_budget_pages,
    min_swa_pages,
    page_aligned_decode_alloc_lens,
    pool_sizes,
    row_width_pages,
    swa_budget_pages,
    swa_decode_bound_pages,
    swa_prefill_bound_pages,
)
from octavo.kv.sliding import eviction_floor, eviction_floors, swa_tail, swa_tail_pages

PAGE_SIZES = (1, 16, 64, 256)

WATERMARKS = [
    (0, 0, 8, 16, 16, 16),
    (16, 9, 8, 16, 32, 16),
    (16, 8, 8, 16, 16, 0),
    (64, 20, 8, 16, 64, 0),
    (37, 37, 8, 1, 45, 8),
    (256, 250, 32, 256, 512, 256),
]


def _nested(allocated: int, committed: int) -> SimpleNamespace:
    return SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=allocated, kv_committed_len=committed))


def _flat(allocated: int, committed: int) -> SimpleNamespace:
    return SimpleNamespace(kv_allocated_len=allocated, kv_committed_len=committed)


def _mixed(allocated: int, committed: int) -> SimpleNamespace:
    return SimpleNamespace(kv=SimpleNamespace(kv_allocated_len=allocated), kv_committed_len=committed)


@pytest.mark.parametrize("make", [_nested, _flat, _mixed])
@pytest.mark.parametrize(("allocated", "committed", "reserve", "p", "after", "needed"), WATERMARKS)
def test_watermark_table(make, allocated, committed, reserve, p, after, needed) -> None:
    got = page_aligned_decode_alloc_lens([make(allocated, committed)], reserve=reserve, page_size=p)
    assert got == ([allocated], [after], needed)


@pytest.mark.parametrize(("allocated", "committed", "reserve", "p", "after", "needed"), WATERMARKS)
def test_watermark_table_of_rows(allocated, committed, reserve, p, after, needed) -> None:
    rows = RowsView(np.array([allocated, allocated]), np.array([committed, committed]))
    current, grown, total = page_aligned_decode_alloc_lens(rows, reserve=reserve, page_size=p)
    assert (current.tolist(), grown.tolist(), total) == ([allocated] * 2, [after] * 2, 2 * needed)


def test_watermark_of_nobody() -> None:
    assert page_aligned_decode_alloc_lens([], reserve=16, page_size=4) == ([], [], 0)


def test_watermark_takes_a_typed_reserve() -> None:
    reserve = DecodeReserve(5, 3)
    assert page_aligned_decode_alloc_lens([_flat(0, 0)], reserve=reserve, page_size=16) == ([0], [16], 16)
    assert page_aligned_decode_alloc_lens([_flat(0, 9)], reserve=reserve, page_size=16) == ([0], [32], 32)


def test_watermark_does_not_change_what_it_reads() -> None:
    rows = RowsView(np.array([16, 0]), np.array([9, 0]))
    page_aligned_decode_alloc_lens(rows, reserve=8, page_size=16)
    assert rows.allocated.tolist() == [16, 0] and rows.known.tolist() == [9, 0]


@pytest.mark.parametrize("p", [0, 3, -4])
def test_watermark_refuses_page_sizes(p: int) -> None:
    for rows in ([_flat(0, 0)], RowsView(np.array([0]), np.array([0]))):
        with pytest.raises(ConfigError):
            page_aligned_decode_alloc_lens(rows, reserve=8, page_size=p)


def test_negative_reserve_is_refused() -> None:
    with pytest.raises(ValueError, match="-1"):
        page_aligned_decode_alloc_lens([_flat(0, 0)], reserve=-1, page_size=4)
    assert page_aligned_decode_alloc_lens([_flat(0, 4)], reserve=0, page_size=4) == ([0], [4], 4)


@given(
    st.lists(st.tuples(st.integers(0, 40), st.integers(0, 5000)), min_size=1, max_size=8),
    st.integers(0, 600),
    st.sampled_from(PAGE_SIZES),
)
def test_watermark_properties(rows, reserve, p) -> None:
    pairs = [(pages * p, committed) for pages, committed in rows]
    objects = page_aligned_decode_alloc_lens([_nested(*pair) for pair in pairs], reserve=reserve, page_size=p)
    view = RowsView(np.array([a for a, _ in pairs]), np.array([c for _, c in pairs]))
    arrays = page_aligned_decode_alloc_lens(view, reserve=reserve, page_size=p)
    assert objects == (arrays.current.tolist(), arrays.next.tolist(), arrays.needed_tokens)
    for (allocated, committed), after in zip(pairs, objects.next, strict=True):
        assert after % p == 0 and after >= allocated and after >= committed + reserve
        assert after == allocated or after - p < committed + reserve
    assert objects.needed_tokens == sum(objects.next) - sum(a for a, _ in pairs)


# --- pages -----------------------------------------------------------------------------------------------------


@given(st.integers(0, 10**6), st.sampled_from((1, 2, 16, 64, 256)))
def test_rounding(tokens: int, p: int) -> None:
    assert floor_p(tokens, p) <= tokens <= ceil_p(tokens, p)
    assert floor_p(tokens, p) % p == ceil_p(tokens, p) % p == 0
    assert ceil_p(tokens, p) - tokens < p and tokens - floor_p(tokens, p) < p
    assert ceil_pages(tokens, p) * p == ceil_p(tokens, p)


@given(st.lists(st.integers(-5, 30)))
def test_distinct(values: list[int]) -> None:
    assert distinct(np.array(values, np.int64)).tolist() == sorted(set(values))


@pytest.mark.parametrize("bad", [0, 3, -1, -16, 24, 1.0, "16", None, True])
def test_bad_page_size_is_named(bad: object) -> None:
    with pytest.raises(ConfigError, match="page_size"):
        check_page_size(bad)


def test_good_page_sizes() -> None:
    assert [check_page_size(1 << k) for k in range(9)] == [1, 2, 4, 8, 16, 32, 64, 128, 256]
    assert type(check_page_size(np.int64(16))) is int


# --- reserves --------------------------------------------------------------------------------------------------


def test_plain_reserve() -> None:
    assert DecodeReserve.plain(overlap=False) == DecodeReserve(1, 0)
    assert DecodeReserve.plain(overlap=True) == DecodeReserve(1, 1)


def test_eagle_chain_is_the_doubled_buffer() -> None:
    reserve = DecodeReserve.eagle(steps=5, topk=1, draft_tokens=6, overlap=True)
    assert (reserve.footprint, reserve.commit_lag, reserve.tokens) == (6, 6, 12)
    assert DecodeReserve.eagle(steps=5, topk=1, draft_tokens=6, overlap=False).tokens == 6
    # Fewer tokens than the steps write: the footprint is what the draft writes.
    assert DecodeReserve.eagle(steps=5, topk=1, draft_tokens=4, overlap=True) == DecodeReserve(5, 4)


def test_eagle_tree_is_much_smaller() -> None:
    reserve = DecodeReserve.eagle(steps=5, topk=8, draft_tokens=64, overlap=True)
    assert (reserve.footprint, reserve.commit_lag, reserve.tokens) == (64, 6, 70)
    assert DecodeReserve.eagle(steps=5, topk=8, draft_tokens=3, overlap=True) == DecodeReserve(40, 3)
    assert DecodeReserve.eagle(steps=5, topk=8, draft_tokens=64, overlap=False).tokens == 64


def test_eagle_tree_size_is_checked() -> None:
    # K + (S-1)·K² candidates: 8 + 4·64 = 264
    assert DecodeReserve.eagle(steps=5, topk=8, draft_tokens=265, overlap=False).footprint == 265
    with pytest.raises(ReserveError, match="266.*at most 265 with steps=5 and topk=8"):
        DecodeReserve.eagle(steps=5, topk=8, draft_tokens=266, overlap=False)
    assert DecodeReserve.eagle(steps=3, topk=1, draft_tokens=4, overlap=False).footprint == 4
    with pytest.raises(ValueError, match="5"):
        DecodeReserve.eagle(steps=3, topk=1, draft_tokens=5, overlap=False)


@pytest.mark.parametrize("name", ["steps", "topk", "draft_tokens"])
def test_eagle_values_are_at_least_one(name: str) -> None:
    good = {"steps": 1, "topk": 1, "draft_tokens": 1}
    assert DecodeReserve.eagle(**good, overlap=True) == DecodeReserve(1, 1)
    with pytest.raises(ReserveError, match=name):
        DecodeReserve.eagle(**{**good, name: 0}, overlap=True)


@pytest.mark.parametrize("block_size", [0, -1, -16])
def test_dflash_block_size_is_named(block_size: int) -> None:
    with pytest.raises(ValueError, match=f"block_size: got {block_size};"):
        DecodeReserve.dflash(block_size=block_size, overlap=True)


def test_dflash_and_ngram_reserves() -> None:
    assert DecodeReserve.dflash(block_size=16, overlap=True).tokens == 32
    assert DecodeReserve.dflash(block_size=1, overlap=False).tokens == 1
    assert DecodeReserve.ngram(max_draft=4, overlap=True) == DecodeReserve(5, 5)
    assert DecodeReserve.ngram(max_draft=0, overlap=False) == DecodeReserve(1, 0)
    with pytest.raises(ReserveError, match="-1"):
        DecodeReserve.ngram(max_draft=-1, overlap=False)


def test_a_reserve_is_typed_frozen_and_bounded() -> None:
    with pytest.raises(AttributeError):
        DecodeReserve(1, 1).footprint = 2  # type: ignore[misc]
    for footprint, lag in [(0, 0), (-1, 0), (1, 2), (4, -1), (4, 5)]:
        with pytest.raises(ReserveError):
            DecodeReserve(footprint, lag)
    assert DecodeReserve(4, 4).tokens == 8 and DecodeReserve(4).tokens == 4
    for footprint, lag, name in [(2.5, 0, "footprint"), ("4", 0, "footprint"), (4, 1.5, "commit_lag")]:
        with pytest.raises(ReserveError, match=name):
            DecodeReserve(footprint, lag)  # type: ignore[arg-type]
    assert DecodeReserve(np.int64(4), np.int32(2)).tokens == 6  # type: ignore[arg-type]


def test_every_formula_takes_the_typed_reserve() -> None:
    typed = DecodeReserve(8, 4)
    for formula in (
        lambda r: decode_watermark(16, 9, r, 16),
        lambda r: swa_decode_bound_pages(128, r, 16),
        lambda r: min_swa_pages(128, r, 1, 4, overlap=False),
        lambda r: full_budget_pages(30, 40, 500, r, 4),
        lambda r: swa_budget_pages(900, 128, r, 1, 4, overlap=False),
        lambda r: decode_admission_pages(
            30, reserved_decode_tokens=2, tokens_left=9, clip_tokens=8, retractable_tokens=0, reserve=r, page_size=4
        ),
    ):
        assert formula(typed) == formula(12) > formula(0)


@pytest.mark.parametrize("length", [2.5, "9", -1, None, np.float64(3), np.ones(1, int)], ids=repr)
@pytest.mark.parametrize("name", ["kv_allocated_len", "kv_committed_len"])
def test_a_length_that_is_no_whole_number_on_the_host_is_named(name: str, length: object) -> None:
    """A fraction would be cut off, and reading a device's number would wait for the device (law 8)."""
    lengths = {"kv_allocated_len": 0, "kv_committed_len": 0, name: length}
    with pytest.raises(ConfigError, match=name):
        page_aligned_decode_alloc_lens([SimpleNamespace(**lengths)], reserve=1, page_size=16)
    good = SimpleNamespace(kv_allocated_len=np.int32(16), kv_committed_len=0)
    assert page_aligned_decode_alloc_lens([good], reserve=1, page_size=16) == ([16], [16], 0)


@pytest.mark.parametrize("reserve", [1.5, "8", None, [8], -1], ids=repr)
def test_a_bare_reserve_that_is_no_number_of_tokens_is_named(reserve: object) -> None:
    """1.5 tokens would be cut to one: less than the caller asked for."""
    with pytest.raises(ReserveError, match=re.escape(f"reserve: got {reserve!r}")):
        page_aligned_decode_alloc_lens([], reserve=reserve, page_size=16)  # type: ignore[arg-type]
    assert page_aligned_decode_alloc_lens([], reserve=np.int32(8), page_size=16).needed_tokens == 0  # type: ignore[arg-type]


@given(st.integers(1, 8), st.integers(1, 8), st.integers(1, 64), st.booleans())
def test_reserve_is_at_most_twice_the_footprint(steps: int, topk: int, tokens: int, overlap: bool) -> None:
    tokens = min(tokens, 1 + topk + (steps - 1) * topk * topk)
    reserve = DecodeReserve.eagle(steps=steps, topk=topk, draft_tokens=tokens, overlap=overlap)
    assert reserve.footprint <= reserve.tokens <= 2 * reserve.footprint
    assert reserve.footprint >= tokens and reserve.footprint >= steps * topk


STEADY = [
    (DecodeReserve.plain(overlap=True), 1),
    (DecodeReserve.eagle(steps=3, topk=1, draft_tokens=4, overlap=True), 4),
    (DecodeReserve.eagle(steps=5, topk=8, draft_tokens=64, overlap=True), 6),
    (DecodeReserve.dflash(block_size=8, overlap=True), 8),
    (DecodeReserve.ngram(max_draft=5, overlap=True), 6),
]


def _steady_decode(reserve: int, footprint: int, most: int, p: int) -> tuple[bool, int]:
    """Steady decode of 64 rows with a lag of one step. Returns (a write left the watermark, max(allocated − known))."""
    rng = np.random.default_rng(p)
    device = rng.integers(0, 3 * p, 64)
    host, allocated = device.copy(), -(-device // p) * p
    widest, short = 0, False
    for _ in range(400):
        _, after, _ = page_aligned_decode_alloc_lens(RowsView(allocated, host), reserve=reserve, page_size=p)
        widest = max(widest, int(np.where(after > allocated, after - host, 0).max()))
        allocated = after
        short |= bool((device + footprint > allocated).any())
        run = np.where(rng.random(64) < 0.5, most, rng.integers(1, most + 1, 64))
        host, device = device, device + run
    return short, widest


@pytest.mark.parametrize("p", PAGE_SIZES)
@pytest.mark.parametrize(("reserve", "most"), STEADY)
def test_the_reserve_is_exactly_enough(reserve: DecodeReserve, most: int, p: int) -> None:
    short, widest = _steady_decode(reserve.tokens, reserve.footprint, most, p)
    assert not short, "under-reserved"
    assert widest <= reserve.tokens + p - 1
    assert _steady_decode(reserve.tokens - 1, reserve.footprint, most, p)[0], "one token less is enough: too large"


def test_the_widest_gap_is_reached() -> None:
    # known = 1, reserve 8, p 16 -> 16; known 9 -> 32: 32 − 9 = 8 + 16 − 1
    assert page_aligned_decode_alloc_lens([_flat(16, 9)], reserve=8, page_size=16).next[0] - 9 == 8 + 16 - 1


# --- sliding window --------------------------------------------------------------------------------------------

TAILS = [
    (512, 200, 256, 256, 256, 1),
    (513, 200, 256, 257, 256, 2),
    (456, 200, 256, 200, 256, 1),
    (455, 200, 256, 455, 0, 2),
    (100, 200, 256, 100, 0, 1),
    (50, 32, 16, 34, 16, 3),
]


@pytest.mark.parametrize(("fill", "window", "p", "tail", "evicted", "pages"), TAILS)
def test_tail_table(fill, window, p, tail, evicted, pages) -> None:
    assert swa_tail(fill, window, p) == (evicted, tail)
    assert swa_tail_pages(fill, window, p) == pages


@given(st.integers(1, 5000), st.integers(1, 600), st.sampled_from(PAGE_SIZES), st.integers(0, 40))
def test_tail_properties(fill: int, window: int, p: int, prefix_pages: int) -> None:
    start, tail = swa_tail(fill, window, p)
    assert 0 <= start <= fill and start % p == 0 and start + tail == fill
    assert start <= max(0, fill - window) < start + p  # the whole window, and not a page more
    prefix = min(prefix_pages * p, floor_p(fill, p))
    taken = swa_tail_pages(fill, window, p, prefix)
    assert taken == len({pos // p for pos in range(max(start, prefix), fill)})


def test_a_tail_that_cannot_be_is_a_broken_law() -> None:
    with pytest.raises(LawViolation, match="law 1.*start=32"):
        swa_tail(20, -12, 16)


@given(st.integers(0, 5000), st.integers(1, 600), st.sampled_from(PAGE_SIZES))
def test_eviction_floor(committed: int, window: int, p: int) -> None:
    floor = eviction_floor(committed, window, p)
    assert floor % p == 0 and 0 <= floor
    boundary = committed // p * p
    # The window before the next insertion boundary stays, and so does that of every later query.
    assert floor <= max(0, boundary - window) < floor + p
    assert floor <= max(0, committed - window + 1)
    assert eviction_floors(np.array([committed, 0]), window, p).tolist() == [floor, 0]


# --- widths, bounds, budgets -----------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("context", "reserve", "p", "pages"), [(8192, 2, 16, 513), (100, 12, 1, 112), (64, 64, 64, 2), (65, 64, 64, 3)]
)
def test_row_width(context, reserve, p, pages) -> None:
    assert row_width_pages(context, reserve, p) == pages


def test_sliding_bounds() -> None:
    assert swa_decode_bound_pages(512, 12, 16) == 33 + 2
    assert swa_prefill_bound_pages(512, 256, 16, overlap=False) == 48 + 2
    assert swa_prefill_bound_pages(512, 256, 16, overlap=True) == 64 + 2
    assert min_swa_pages(512, 12, 256, 16, overlap=True) == 64 + 2
    assert min_swa_pages(512, 300, 256, 16, overlap=False) == 51 + 2
    assert min_swa_pages(5, 12, 0, 1, overlap=True) == 17 + 2


def test_budgets() -> None:
    assert full_budget_pages(100, 50, 8192, 2, 16) == 10  # 151 tokens
    assert full_budget_pages(100, 43, 8192, 2, 16) == 9  # 144 tokens: exactly nine pages
    assert full_budget_pages(100, 10**9, 256, 2, 16) == 17  # cut at the context: 257 tokens
    assert swa_budget_pages(10, 32, 2, 16, 16, overlap=False) == 5
    assert swa_budget_pages(3, 32, 2, 16, 16, overlap=False) == 3


def test_decode_admission() -> None:
    def pages(**changed: int) -> int:
        values = {"reserved_decode_tokens": 64, "tokens_left": 500, "clip_tokens": 300, "retractable_tokens": 100}
        return decode_admission_pages(1000, **{**values, **changed}, reserve=8, page_size=16)

    assert pages() == 76  # 1000 + 300 − 100 + 8 = 1208
    assert pages(retractable_tokens=250) == 67  # 1000 + 64 + 8 = 1072
    assert pages(tokens_left=20) == 67
    assert pages(tokens_left=200, clip_tokens=300, retractable_tokens=0) == 76


def _sizes(kv_bytes: int, **changed: int) -> PoolSizes:
    values = {
        "full_page_bytes": 1000, "swa_page_bytes": 5000, "window_tokens": 512, "page_size": 16,
        "largest_reserve_tokens": 12, "chunk_tokens": 256, "request_slots": 8, "context_tokens": 4096,
    }  # fmt: skip
    return pool_sizes(kv_bytes, **{**values, **changed})


def test_pool_sizes_without_a_window() -> None:
    assert _sizes(1_000_999, swa_page_bytes=0, window_tokens=0) == (1000, 0)
    assert _sizes(1000, swa_page_bytes=0, window_tokens=0) == (1, 0)
    with pytest.raises(ConfigError, match="kv_bytes.* 0 full and 0 sliding-window pages; at least 1 and 0 needed"):
        _sizes(999, swa_page_bytes=0, window_tokens=0)


def test_pool_sizes_need_no_word_about_windows() -> None:
    sizes = {"page_size": 16, "largest_reserve_tokens": 1, "chunk_tokens": 0, "request_slots": 1, "context_tokens": 64}
    assert pool_sizes(1009, full_page_bytes=10, **sizes) == (100, 0)
    # window 32, no chunk, no overlap: at least ceil(33/16) + 2 = 5 sliding pages
    assert pool_sizes(100, full_page_bytes=10, swa_page_bytes=10, window_tokens=32, **sizes) == (5, 5)


def test_pool_sizes_of_a_hybrid() -> None:
    # 8 slots · 35 pages + the least pool (50) = 330 sliding pages; the rest is full
    assert _sizes(10_000_000) == (10_000 - 330 * 5, 330)
    # little memory: half of it, as long as the full pool is not the smaller one
    assert _sizes(2_000_000) == (1000, 200)
    assert _sizes(2_000_000, full_page_bytes=20_000) == (80, 80)
    assert _sizes(500_000) == (250, 50)
    with pytest.raises(ConfigError, match="at least 1 and 50"):
        _sizes(240_000)


def test_pool_sizes_never_spend_more_than_there_is() -> None:
    for kv_bytes in range(260_000, 4_000_000, 90_001):
        full, swa = _sizes(kv_bytes)
        assert full * 1000 + swa * 5000 <= kv_bytes and full >= 1 and swa >= 50


def test_pool_sizes_of_an_all_sliding_model() -> None:
    width = row_width_pages(4096, 12, 16)
    assert _sizes(5_000_000, full_page_bytes=0) == (8 * width + 1000, 1000)
    for kv_bytes, pages in ((5_000 * 49, 49), (-1, 0)):
        with pytest.raises(ConfigError, match=f"full and {pages} sliding-window pages; at least 1 and 50 needed"):
            _sizes(kv_bytes, full_page_bytes=0)
    with pytest.raises(ConfigError, match="full_page_bytes"):
        _sizes(5_000_000, full_page_bytes=0, swa_page_bytes=0)
    with pytest.raises(ConfigError, match="full_page_bytes"):
        _sizes(5_000_000, full_page_bytes=-1)
    with pytest.raises(ConfigError, match="full_page_bytes"):
        _sizes(5_000_000, swa_page_bytes=-1)


def test_a_prefix_behind_the_fill_leaves_no_tail() -> None:
    assert [swa_tail_pages(10, 8, 4, prefix) for prefix in (0, 8, 10, 20)] == [3, 1, 0, 0]


def test_no_tail_of_nothing_and_no_prefix_unless_given() -> None:
    assert swa_tail(0, 8, 4) == (0, 0) and swa_tail_pages(0, 8, 4) == 0
    assert [swa_tail_pages(fill, 8, 1) for fill in (1, 8, 9)] == [1, 8, 8]
