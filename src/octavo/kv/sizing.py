"""Every size that is computed from lengths: reserves, the shared decode watermark, row width, pools, budgets."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import numpy as np

from octavo.errors import ConfigError
from octavo.kv.pages import Int64Array, ceil_p, ceil_pages, check_page_size, whole_number, whole_numbers


class ReserveError(ConfigError, ValueError):
    """A reserve that cannot be: names the value. A `ValueError` too."""


@dataclass(frozen=True)
class DecodeReserve:
    """Tokens a decode step must find allocated beyond what the host knows as committed.

    footprint    positions one step may write
    commit_lag   what the one step in flight may still commit under overlap; 0 without overlap

    Keep the reserve constant over the switches of an adaptive drafter. Whoever changes it between two steps must use
    the lag of the step that is in flight, not that of the step being planned.
    """

    footprint: int
    commit_lag: int = 0

    def __post_init__(self) -> None:
        for name, value in (("footprint", self.footprint), ("commit_lag", self.commit_lag)):
            if whole_number(value) is None:
                raise ReserveError(name, value, "a whole number of tokens")
        if self.footprint < 1:
            raise ReserveError("footprint", self.footprint, "a step writes at least one position")
        if not 0 <= self.commit_lag <= self.footprint:
            raise ReserveError("commit_lag", self.commit_lag, f"0 … footprint ({self.footprint})")

    @property
    def tokens(self) -> int:
        return self.footprint + self.commit_lag

    @classmethod
    def plain(cls, *, overlap: bool) -> DecodeReserve:
        """One token per step."""
        return cls(1, 1 if overlap else 0)

    @classmethod
    def eagle(cls, *, steps: int, topk: int, draft_tokens: int, overlap: bool) -> DecodeReserve:
        """EAGLE chain (topk 1) or tree: max(steps·topk, draft_tokens) written, at most steps+1 committed.

        `draft_tokens` counts the root. The slots of a tree are packed, so a tree has K + (S-1)·K² candidates.
        Raises `ReserveError` (a `ValueError`) when the draft tokens cannot come from so many steps.
        """
        for name, value in (("steps", steps), ("topk", topk), ("draft_tokens", draft_tokens)):
            if value < 1:
                raise ReserveError(name, value, "must be at least 1")
        candidates = topk + (steps - 1) * topk * topk
        if draft_tokens - 1 > candidates:
            raise ReserveError(
                "draft_tokens", draft_tokens, f"at most {candidates + 1} with steps={steps} and topk={topk}"
            )
        lag = draft_tokens if topk == 1 else min(steps + 1, draft_tokens)
        return cls(max(steps * topk, draft_tokens), lag if overlap else 0)

    @classmethod
    def dflash(cls, *, block_size: int, overlap: bool) -> DecodeReserve:
        """DFlash: a block is written and verified at once. `block_size` <= 0 raises `ReserveError`."""
        if block_size <= 0:
            raise ReserveError("block_size", block_size, "must be at least 1")
        return cls(block_size, block_size if overlap else 0)

    @classmethod
    def ngram(cls, *, max_draft: int, overlap: bool) -> DecodeReserve:
        """Prompt lookup: up to `max_draft` proposed tokens behind the newest one."""
        if max_draft < 0:
            raise ReserveError("max_draft", max_draft, "must be at least 0")
        return cls(max_draft + 1, max_draft + 1 if overlap else 0)


def reserve_tokens(reserve: DecodeReserve | int) -> int:
    """The reserve in tokens. A bare number that is not whole or below 0 raises `ReserveError`."""
    if isinstance(reserve, DecodeReserve):
        return reserve.tokens
    tokens = whole_number(reserve)
    if tokens is None:
        raise ReserveError("reserve", reserve, "a DecodeReserve or a whole number of tokens")
    if tokens < 0:
        raise ReserveError("reserve", reserve, "must be at least 0")
    return tokens


class RowsView(NamedTuple):
    """Rows of a ledger, as arrays [n] of lengths in tokens: the fast form of the watermark's input.

    `known` is committed plus the exact length of a prefill chunk in flight (law 4). Arrays of narrower integers are
    widened to int64, where a length plus a reserve cannot wrap round.
    """

    allocated: Int64Array
    known: Int64Array


class AllocLens(NamedTuple):
    """Watermarks before and after a decode plan; unpacks as (current, next, needed_tokens)."""

    current: Any  # list[int] for request objects, int64 array for ledger rows
    next: Any
    needed_tokens: int


def decode_watermark(allocated: int, known: int, reserve: DecodeReserve | int, page_size: int) -> int:
    """Law 4 for one row, in tokens: max(allocated, ceil_p(known + reserve))."""
    return max(allocated, ceil_p(known + reserve_tokens(reserve), page_size))


def page_aligned_decode_alloc_lens(
    requests: Sequence[Any] | RowsView, *, reserve: DecodeReserve | int, page_size: int
) -> AllocLens:
    """The one place where decode growth is computed (law 4): next = max(allocated, ceil_p(known + reserve)).

    requests   objects with `kv.kv_allocated_len` and `kv.kv_committed_len` (or the same names on the object
               itself), or a `RowsView` of ledger rows
    returns    (current, next, needed_tokens); needed_tokens = Σ(next − current). Lists for objects, arrays for rows.
    Pure host arithmetic; nothing is changed. Raises `ConfigError` naming what is no whole number of tokens.
    """
    tokens = reserve_tokens(reserve)
    p = check_page_size(page_size)
    if isinstance(requests, RowsView):
        allocated, known = _lengths("allocated", requests.allocated), _lengths("known", requests.known)
        grown = known + (tokens + p - 1)
        grown &= -p
        np.maximum(grown, allocated, out=grown)
        return AllocLens(allocated, grown, int((grown - allocated).sum()))
    current = [_length(r, "kv_allocated_len") for r in requests]
    after = [
        decode_watermark(have, _length(request, "kv_committed_len"), tokens, p)
        for have, request in zip(current, requests, strict=True)
    ]
    return AllocLens(current, after, sum(after) - sum(current))


def _length(request: Any, name: str) -> int:
    """`request.kv.<name>` where it exists, else `request.<name>`: a host integer (law 8), else `ConfigError`."""
    value = getattr(getattr(request, "kv", None), name, None)
    value = getattr(request, name) if value is None else value
    tokens = whole_number(value)
    if tokens is None or tokens < 0:
        raise ConfigError(name, value, "a whole number of tokens from 0, on the host")
    return tokens


def _lengths(name: str, values: object) -> Int64Array:
    """A field of `RowsView` as int64 [n], else `ConfigError`."""
    lengths = whole_numbers(values)
    if lengths is None:
        raise ConfigError(f"RowsView.{name}", values, "whole numbers of tokens [n] that a signed 64-bit integer holds")
    return lengths


def row_width_pages(context_tokens: int, largest_reserve_tokens: int, page_size: int) -> int:
    """Law 10: pages a row has room for."""
    return ceil_pages(context_tokens + largest_reserve_tokens, page_size)


# --- sliding-window bounds -------------------------------------------------------------------------------------


def swa_decode_bound_pages(window_tokens: int, reserve: DecodeReserve | int, page_size: int) -> int:
    """Most SWA pages a decoding request holds: ceil((W + reserve)/p) + 2."""
    return ceil_pages(window_tokens + reserve_tokens(reserve), page_size) + 2


def swa_prefill_bound_pages(window_tokens: int, chunk_tokens: int, page_size: int, *, overlap: bool) -> int:
    """Most SWA pages a prefilling request holds: ceil((W + q·chunk)/p) + 2, q = 2 with overlap, else 1."""
    return ceil_pages(window_tokens + (2 if overlap else 1) * chunk_tokens, page_size) + 2


def min_swa_pages(
    window_tokens: int, reserve: DecodeReserve | int, chunk_tokens: int, page_size: int, *, overlap: bool
) -> int:
    """Smallest SWA pool that is accepted at start: one request, decoding or prefilling, can always go on."""
    q = 2 if overlap else 1
    return ceil_pages(window_tokens + max(reserve_tokens(reserve), q * chunk_tokens), page_size) + 2


# --- budgets ---------------------------------------------------------------------------------------------------


def full_budget_pages(
    prompt_tokens: int, max_tokens: int, context_tokens: int, reserve: DecodeReserve | int, page_size: int
) -> int:
    """Full-pool pages a request needs to run to its end, alone: ceil_p(min(context, prompt+max) − 1 + reserve)/p."""
    return ceil_pages(min(context_tokens, prompt_tokens + max_tokens) - 1 + reserve_tokens(reserve), page_size)


def swa_budget_pages(
    full_pages: int,
    window_tokens: int,
    reserve: DecodeReserve | int,
    chunk_tokens: int,
    page_size: int,
    *,
    overlap: bool,
) -> int:
    """SWA pages a request needs: its full budget or its window's bound, whichever is smaller."""
    return min(full_pages, min_swa_pages(window_tokens, reserve, chunk_tokens, page_size, overlap=overlap))


def decode_admission_pages(
    fill_tokens: int,
    *,
    reserved_decode_tokens: int,
    tokens_left: int,
    clip_tokens: int,
    retractable_tokens: int,
    reserve: DecodeReserve | int,
    page_size: int,
) -> int:
    """Pages that admitting a request to decode must find:

    ceil_p(max(fill + reserved_decode, fill + min(tokens_left, clip) − retractable) + reserve)/p
    """
    near = fill_tokens + reserved_decode_tokens
    far = fill_tokens + min(tokens_left, clip_tokens) - retractable_tokens
    return ceil_pages(max(near, far) + reserve_tokens(reserve), page_size)


# --- pool sizes ------------------------------------------------------------------------------------------------


class PoolSizes(NamedTuple):
    full_pages: int
    swa_pages: int


def pool_sizes(
    kv_bytes: int,
    *,
    full_page_bytes: int,
    swa_page_bytes: int = 0,
    window_tokens: int = 0,
    page_size: int,
    largest_reserve_tokens: int,
    chunk_tokens: int,
    request_slots: int,
    context_tokens: int,
    overlap: bool = False,
) -> PoolSizes:
    """Split `kv_bytes` into pages of the two pools.

    full_page_bytes   one page of all full-attention layers (draft layers included); 0 for an all-sliding model
    swa_page_bytes    one page of all sliding layers; 0 if there are none

    The SWA pool gets its bound for every request slot, at most half of the memory and never more pages than the
    full pool (every SWA page in use sits beside a full page). What an SWA pool cannot use goes to the full pool.
    Raises `ConfigError` when not even one request could run.
    """
    p = check_page_size(page_size)
    if full_page_bytes < 0 or swa_page_bytes < 0 or full_page_bytes + swa_page_bytes == 0:
        raise ConfigError("full_page_bytes", full_page_bytes, "a page of at least one pool must have a size")
    width = row_width_pages(context_tokens, largest_reserve_tokens, p)
    if swa_page_bytes == 0:
        return _sized(kv_bytes // full_page_bytes, 0, 1, 0, kv_bytes)
    least = min_swa_pages(window_tokens, largest_reserve_tokens, chunk_tokens, p, overlap=overlap)
    if full_page_bytes == 0:
        swa = kv_bytes // swa_page_bytes
        # Pages of zero bytes: enough that the full pool never limits anything.
        return _sized(request_slots * width + swa, swa, 1, least, kv_bytes)
    per_request = swa_decode_bound_pages(window_tokens, largest_reserve_tokens, p)
    swa = max(least, min(request_slots * per_request + least, kv_bytes // 2 // swa_page_bytes))
    full = (kv_bytes - swa * swa_page_bytes) // full_page_bytes
    if swa > full:
        swa = max(least, kv_bytes // (full_page_bytes + swa_page_bytes))
        full = (kv_bytes - swa * swa_page_bytes) // full_page_bytes
    return _sized(full, swa, 1, least, kv_bytes)


def _sized(full: int, swa: int, least_full: int, least_swa: int, kv_bytes: int) -> PoolSizes:
    if full < least_full or swa < least_swa:
        raise ConfigError(
            "kv_bytes",
            kv_bytes,
            f"gives {full} full and {max(swa, 0)} sliding-window pages; at least {least_full} and {least_swa} needed",
        )
    return PoolSizes(full, swa)
