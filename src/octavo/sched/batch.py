"""The immutable plan of one step: which rows decode, which prompts advance, and what the host knows of them.

A plan is made by the scheduler from host state alone, executed by the backend's runner, and settled by the
engine when its results are on the host. Under overlap the next plan is made before the last one is settled.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from octavo.engine.request import Request


@dataclass(frozen=True)
class DecodeRow:
    """One request whose newest token is verified, together with whatever is drafted behind it."""

    request: Request
    row: int
    generation: int
    draft_limit: int  # drafted tokens that can still matter (max_tokens, context)


@dataclass(frozen=True)
class PrefillChunk:
    """Tokens [start, end) of a request's known tokens; the final chunk also samples."""

    request: Request
    row: int
    generation: int
    start: int
    end: int
    final: bool

    @property
    def num_tokens(self) -> int:
        return self.end - self.start


@dataclass(frozen=True)
class StepPlan:
    """Everything one launch needs. `max_kv_tokens` bounds every slot the step reads or writes, plus one."""

    decodes: tuple[DecodeRow, ...]
    prefills: tuple[PrefillChunk, ...]
    draft_tokens: int
    max_kv_tokens: int

    @property
    def items(self) -> tuple[DecodeRow | PrefillChunk, ...]:
        """Everything the step computes, decode rows first."""
        return (*self.decodes, *self.prefills)

    @property
    def rows(self) -> np.ndarray:
        """int64 ledger rows of `items`."""
        return np.array([item.row for item in self.items], dtype=np.int64)

    @property
    def generations(self) -> np.ndarray:
        """int64 generations of `items`."""
        return np.array([item.generation for item in self.items], dtype=np.int64)

    def __len__(self) -> int:
        return len(self.decodes) + len(self.prefills)
