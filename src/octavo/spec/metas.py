"""Shared by drafters that keep KV: the forward that writes true tokens, and the seeds and limits of rows."""

from __future__ import annotations

import numpy as np
import torch

from octavo.backend.relay import upload
from octavo.ops.meta import StepMeta
from octavo.spec.drafter import DraftRequest, Observation


def observe_meta(observation: Observation) -> StepMeta:
    """A forward over every observed slot, at its true position. Padding slots write into reject space."""
    device = observation.rows.device
    indptr = np.asarray(observation.indptr, dtype=np.int64)
    sizes = np.diff(indptr)
    seq = np.repeat(np.arange(len(sizes)), sizes)
    offsets = np.arange(int(indptr[-1])) - indptr[:-1][seq]
    q_seq = upload(seq, device)
    at = observation.start.index_select(0, q_seq) + upload(offsets, device)
    return StepMeta(
        token_ids=observation.next_tokens,
        positions=at,
        write_slots=at,
        q_seq=q_seq,
        rows=observation.rows,
        kv_start=observation.start,
        mask=None,
        q_indptr=observation.indptr,
        max_kv_tokens=observation.max_kv_tokens,
    )


def last_slots(observation: Observation) -> torch.Tensor:
    """[b] flat index of every row's newest true slot."""
    first = upload(list(observation.indptr[:-1]), observation.rows.device)
    return first + observation.counts - 1


def bit_table(device: torch.device) -> torch.Tensor:
    """[64] int64 with bit i set in entry i."""
    return upload([1 << i if i < 63 else -(1 << 63) for i in range(64)], device)


class PositionLimit:
    """A draft's own position limit: rows whose prompt is past it are not drafted, and are counted.

    Rows that grow past it later are cut by the engine through `host_limits` (`max_position_tokens`).
    """

    def __init__(self, max_tokens: int | None) -> None:
        self.max_tokens = max_tokens
        self.beyond = 0
        self._rows: set[int] = set()

    def begin(self, request: DraftRequest) -> None:
        self._rows.discard(request.row)
        if self.max_tokens is not None and len(request.prompt_token_ids) >= self.max_tokens:
            self._rows.add(request.row)
            self.beyond += 1

    def end(self, row: int) -> None:
        self._rows.discard(row)

    def cut(self, rows: tuple[int, ...], limits: tuple[int, ...]) -> tuple[int, ...]:
        if not self._rows:
            return limits
        return tuple(0 if row in self._rows else limit for row, limit in zip(rows, limits, strict=True))
