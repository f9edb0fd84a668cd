"""Host side of a decode step for each drafting algorithm: checks and statistics that save a device read-back.

Everything here is integers and numpy arrays on the host; no torch (01, law 8).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from octavo.errors import ConfigError, LawViolation


class LengthBooks(Protocol):
    """The part of the ledger that is read here: lengths in tokens by row."""

    width_tokens: int

    @property
    def committed(self) -> np.ndarray: ...

    @property
    def allocated(self) -> np.ndarray: ...


@dataclass(frozen=True)
class EaglePrep:
    """`decode_index` [b, N] flat slot index of every verify node: row * row_width + committed + j."""

    decode_index: np.ndarray
    max_allocated_tokens: int


@dataclass(frozen=True)
class DFlashPrep:
    """Batch statistics of a block step.

    max_top_k      largest top_k of the batch
    uniform_top_k  the top_k all rows agree on, or None
    committed_sum  sum of committed lengths (tokens)
    next_sum       sum of lengths after the whole block (tokens)
    """

    max_top_k: int
    uniform_top_k: int | None
    committed_sum: int
    next_sum: int


def check_row_width(rows: np.ndarray, next_tokens: np.ndarray, width_tokens: int) -> None:
    """Law 10: every row has room for its next watermark. Raises LawViolation naming the first bad row."""
    wide = np.asarray(next_tokens) > width_tokens
    if wide.any():
        at = int(wide.argmax())
        raise LawViolation(
            10,
            "the row is too narrow for its watermark",
            row=int(np.asarray(rows)[at]),
            next_tokens=int(np.asarray(next_tokens)[at]),
            width_tokens=width_tokens,
        )


def _same_length(**arrays: np.ndarray) -> None:
    """One entry a row in each. Raises ValueError: numpy would stretch an array of one over all rows."""
    if len({array.shape for array in arrays.values()}) != 1:
        shapes = ", ".join(f"{name} {array.shape}" for name, array in arrays.items())
        raise ValueError(f"one value per row is needed, got {shapes}")


def prepare_eagle(
    rows: Sequence[int] | np.ndarray,
    committed: Sequence[int] | np.ndarray,
    allocated: Sequence[int] | np.ndarray,
    *,
    draft_tokens: int,
    width_tokens: int,
) -> EaglePrep:
    """EAGLE: the row-width check and the decode index of N = `draft_tokens` verify nodes (root included).

    `committed` and `allocated` are per row in `rows`' order, after the plan. Raises LawViolation (law 9 or 10).
    """
    if draft_tokens < 1:
        raise ConfigError("draft_tokens", draft_tokens, "at least 1")
    row = np.asarray(rows, dtype=np.int64)
    start = np.asarray(committed, dtype=np.int64)
    room = np.asarray(allocated, dtype=np.int64)
    _same_length(rows=row, committed=start, allocated=room)
    check_row_width(row, room, width_tokens)
    short = start + draft_tokens > room
    if short.any():
        at = int(short.argmax())
        raise LawViolation(
            9,
            "verify nodes beyond the watermark",
            row=int(row[at]),
            committed=int(start[at]),
            draft_tokens=draft_tokens,
            allocated=int(room[at]),
        )
    index = (row * width_tokens + start)[:, None] + np.arange(draft_tokens, dtype=np.int64)
    return EaglePrep(index, int(room.max(initial=0)))


def prepare_dflash(
    top_ks: Sequence[int] | np.ndarray,
    committed: Sequence[int] | np.ndarray,
    *,
    block_size: int,
    vocab_size: int,
) -> DFlashPrep:
    """DFlash: the block-size check, the top_k statistics and the length sums.

    A `top_k` below 1 means no limit and counts as `vocab_size` before any statistic; so does one above it.
    Raises ValueError for a block size of 0 or less.
    """
    if block_size <= 0:
        raise ValueError(f"block_size must be positive, got {block_size}")
    top_k = np.asarray(top_ks, dtype=np.int64)
    top_k = np.where((top_k < 1) | (top_k > vocab_size), vocab_size, top_k)
    lengths = np.asarray(committed, dtype=np.int64)
    _same_length(top_ks=top_k, committed=lengths)
    largest = int(top_k.max(initial=0))
    uniform = largest if top_k.size and int(top_k.min()) == largest else None
    total = int(lengths.sum())
    return DFlashPrep(largest, uniform, total, total + block_size * lengths.size)


def prepare_step(
    drafter: Any, rows: Sequence[int], ledger: LengthBooks, top_ks: Sequence[int], vocab_size: int
) -> EaglePrep | DFlashPrep | None:
    """The drafter's own host checks of a planned step, or None if it has none. Raises LawViolation or ValueError."""
    if not rows or not hasattr(drafter, "prepare_for_decode"):
        return None
    at = list(rows)
    committed = ledger.committed[at]
    prepared: EaglePrep | DFlashPrep
    if drafter.name == "dflash":
        prepared = drafter.prepare_for_decode(top_ks, committed, vocab_size=vocab_size)
    else:
        prepared = drafter.prepare_for_decode(at, committed, ledger.allocated[at], width_tokens=ledger.width_tokens)
    return prepared
