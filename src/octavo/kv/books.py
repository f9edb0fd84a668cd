"""What the ledger keeps: its configuration, the lengths of every row, page tables and their dirty cells."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Final, NamedTuple

import numpy as np

from octavo.errors import ConfigError, OctavoError
from octavo.kv.pages import NO_PAGE, Int32Array, Int64Array, ceil_pages, check_page_size, distinct
from octavo.kv.sizing import min_swa_pages, row_width_pages
from octavo.kv.tiers import TierConfig


class OutOfRows(OctavoError):
    """All request slots are taken: nothing has changed."""

    code = "out_of_rows"

    def __init__(self, max_rows: int) -> None:
        self.max_rows = max_rows
        super().__init__(f"all {max_rows} request rows are in use")


class NoSuchRow(OctavoError, IndexError):
    """A row, or rows, that the ledger does not have: nothing has changed."""

    code = "no_such_row"

    def __init__(self, row: object, max_rows: int) -> None:
        self.row, self.max_rows = row, max_rows
        super().__init__(f"row {row!r}: the rows of this ledger are whole numbers, 0 … {max_rows - 1}")


class RowState:
    """Values of `Ledger.row_state`: plain integers."""

    FREE: Final = 0
    ACTIVE: Final = 1  # may be extended, planned, committed, published, evicted
    TRANSFER: Final = 2  # its KV is on the way: only `land`, `fail_transfer`, `quarantine` and `release` apply
    DRAINING: Final = 3  # released, but an operation in flight still names it (law 14)


ROW_STATE_NAMES = ("free", "active", "in transfer", "draining")


LOG_LIMIT = 65_536  # logged cells of a table before duplicates are swept


@dataclass(frozen=True)
class LedgerConfig:
    """Sizes of the books. Raises `ConfigError` naming the option.

    page_size                tokens per page, a power of two
    full_pages, swa_pages    pool sizes in pages; swa_pages 0: no sliding layers
    window_tokens            W of the sliding layers; 0: none
    max_rows                 requests that may hold KV at the same time
    context_tokens           longest sequence; rows are `ceil_p(context + largest reserve)/p` pages wide (law 10)
    largest_reserve_tokens   largest reserve any plan will use
    key_mode                 "token", or "pair" when an EAGLE draft is loaded
    chunk_tokens, overlap    largest prefill chunk, and whether a step is planned before the last one's result
    tiers                    sizes of the host tier and of the device slots (HiSparse); None: none
    """

    page_size: int
    full_pages: int
    swa_pages: int = 0
    window_tokens: int = 0
    max_rows: int = 256
    context_tokens: int = 2048
    largest_reserve_tokens: int = 1
    key_mode: str = "token"
    prefix_cache: bool = True
    chunk_tokens: int = 0
    overlap: bool = False
    tiers: TierConfig | None = None

    def __post_init__(self) -> None:
        p = check_page_size(self.page_size)
        for option in ("max_rows", "context_tokens", "largest_reserve_tokens"):
            if getattr(self, option) < 1:
                raise ConfigError(option, getattr(self, option), "must be at least 1")
        for option in ("swa_pages", "window_tokens", "chunk_tokens"):
            if getattr(self, option) < 0:
                raise ConfigError(option, getattr(self, option), "must be at least 0")
        if self.key_mode not in ("token", "pair"):
            raise ConfigError("key_mode", self.key_mode, "'token' or 'pair'")
        least_full = ceil_pages(1 + self.largest_reserve_tokens, p)
        if self.full_pages < least_full:
            raise ConfigError("num_pages", self.full_pages, f"one request needs at least {least_full} pages of {p}")
        if (self.window_tokens == 0) != (self.swa_pages == 0):
            raise ConfigError(
                "swa_pages", self.swa_pages, f"a pool exactly if there is a window ({self.window_tokens})"
            )
        if self.window_tokens and self.swa_pages < self.least_swa_pages:
            raise ConfigError(
                "swa_pages",
                self.swa_pages,
                f"at least {self.least_swa_pages} = ceil((window {self.window_tokens} + max(reserve "
                f"{self.largest_reserve_tokens}, {2 if self.overlap else 1}·chunk {self.chunk_tokens}))/{p}) + 2",
            )

    @property
    def least_swa_pages(self) -> int:
        return min_swa_pages(
            self.window_tokens, self.largest_reserve_tokens, self.chunk_tokens, self.page_size, overlap=self.overlap
        )

    @property
    def width_pages(self) -> int:
        return row_width_pages(self.context_tokens, self.largest_reserve_tokens, self.page_size)


class Admission(NamedTuple):
    """A row was given: `cached_tokens` of the prompt are in the cache already (always fewer than all)."""

    row: int
    generation: int
    cached_tokens: int


class Preallocation(NamedTuple):
    """A row whose KV will come by transfer: tokens [cached, fill); SWA tokens [max(tail_start, cached), fill). Where it
    comes from a ticket: SWA tokens [max(tail_start, protected), fill) and those of `healed_columns`."""

    row: int
    generation: int
    cached_tokens: int
    tail_start_tokens: int
    healed_columns: tuple[int, ...]


class DecodePlan(NamedTuple):
    """Watermarks of a decode plan, tokens per row: before, after, and Σ(after − before)."""

    current: Int64Array
    next: Int64Array
    needed_tokens: int


class Table:
    """Page table of one pool, int32 [max_rows, width]; -1 means no page. Remembers which cells changed.

    The log holds flat cell numbers. What is sent is read from the table when it is fetched, every cell once.
    """

    def __init__(self, max_rows: int, width_pages: int) -> None:
        self.cells: Int32Array = np.full((max_rows, width_pages), NO_PAGE, np.int32)
        self._flat = self.cells.ravel()  # a view
        self._width = width_pages
        self._log: list[Int64Array] = []
        self._logged = 0
        self._limit = LOG_LIMIT

    def write(self, row: int, first: int, last: int, pages: Int32Array | int) -> None:
        """cells[row, first:last] = pages."""
        if first >= last:
            return
        self.cells[row, first:last] = pages
        start = row * self._width
        self._note(np.arange(start + first, start + last))

    def write_cells(self, rows: Int64Array, columns: Int64Array, pages: Int32Array) -> None:
        """cells[rows[i], columns[i]] = pages[i]; no cell occurs twice."""
        cells = rows * self._width + columns
        self._flat[cells] = pages
        self._note(cells)

    def _note(self, cells: Int64Array) -> None:
        self._log.append(cells)
        self._logged += len(cells)
        if self._logged > self._limit:  # nobody fetches: keep one entry per cell
            self._log = [distinct(np.concatenate(self._log))]
            self._logged = len(self._log[0])
            self._limit = 2 * self._logged + LOG_LIMIT

    def take_updates(self) -> tuple[Int64Array, Int64Array, Int32Array]:
        """(rows, columns, pages) of all cells that may have changed since the last call; every cell once."""
        if not self._log:
            none = np.empty(0, np.int64)
            return none, none, np.empty(0, np.int32)
        cells = self._log[0] if len(self._log) == 1 else distinct(np.concatenate(self._log))
        self._log, self._logged, self._limit = [], 0, LOG_LIMIT
        rows, columns = np.divmod(cells, self._width)
        return rows, columns, self._flat[cells]


def cell_runs(rows: Int64Array, first: Int64Array, counts: Int64Array) -> tuple[Int64Array, Int64Array]:
    """(row, column) of every cell of runs: `counts[i]` columns of `rows[i]` from `first[i]` on."""
    before = np.cumsum(counts) - counts
    total = int(counts.sum())
    return np.repeat(rows, counts), np.arange(total) - np.repeat(before - first, counts)


def as_tokens(tokens: Sequence[int] | Int32Array | Any) -> Int32Array:
    """Token ids as a contiguous int32 array."""
    return np.ascontiguousarray(tokens, dtype=np.int32)


def read_only(array: Any) -> Any:
    """A view of `array` that cannot be written through (law 7)."""
    view = array.view()
    view.flags.writeable = False
    return view
