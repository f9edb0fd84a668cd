"""Shared by drafters that keep KV: the forward that writes true tokens, and the seeds and limits of rows."""

from __future__ import annotations

import numpy as np
import torch

from octavo.backend.relay import upload
from octavo.ops.meta import StepMeta
from octavo.spec.drafter import DraftRequest, Observation, ProposeBatch, kv_owner


def observe_meta(observation: Observation) -> StepMeta:
    """A forward over every observed slot, at its true position. Padding slots write into reject space."""
    device = observation.rows.device
    if _one_each(observation):  # plain decode with the draft switched off: every step comes here
        q_seq, at = torch.arange(len(observation.host_rows), device=device), observation.start
    else:
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


def _one_each(observation: Observation) -> bool:
    return observation.indptr == tuple(range(len(observation.host_rows) + 1))


def last_slots(observation: Observation) -> torch.Tensor:
    """[b] flat index of every row's newest true slot."""
    first = upload(list(observation.indptr[:-1]), observation.rows.device)
    return first + observation.counts - 1


def bit_table(device: torch.device) -> torch.Tensor:
    """[64] int64 with bit i set in entry i."""
    return upload([1 << i if i < 63 else -(1 << 63) for i in range(64)], device)


def past_draft_limit(drafter: object) -> int:
    """Requests that went past the drafter's own position limit and were no longer drafted."""
    limit = getattr(kv_owner(drafter), "limit", None)
    return limit.beyond if isinstance(limit, PositionLimit) else 0


class PositionLimit:
    """A draft's own position limit: drafts stop there, and `beyond` counts the requests that got so far."""

    def __init__(self, max_tokens: int | None) -> None:
        self.max_tokens = max_tokens
        self.beyond = 0
        self._begun_tokens: dict[int, int] = {}
        self._counted: set[int] = set()

    def begin(self, request: DraftRequest) -> None:
        self._begun_tokens[request.row] = len(request.prompt_token_ids)
        self._counted.discard(request.row)

    def end(self, row: int) -> None:
        self._begun_tokens.pop(row, None)

    def cut(self, batch: ProposeBatch) -> tuple[int, ...]:
        """The batch's limits, shortened to what fits below the draft's own."""
        if self.max_tokens is None:
            return batch.host_limits
        known = batch.host_lens or (0,) * len(batch.host_rows)
        limits = []
        for row, limit, tokens in zip(batch.host_rows, batch.host_limits, known, strict=True):
            room = self.max_tokens - max(tokens, self._begun_tokens.get(row, 0))
            if room <= 0 and row not in self._counted:
                self._counted.add(row)
                self.beyond += 1
            limits.append(max(0, min(limit, room)))
        return tuple(limits)
