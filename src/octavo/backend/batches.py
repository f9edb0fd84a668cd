"""How the decode rows of a forward are laid out: ragged (`Flat`), or equally many tokens for every row (`Batch`)."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from octavo.ops.meta import StepMeta
from octavo.spec.drafter import Draft


@dataclass(frozen=True)
class Flat:
    """Decode part of a forward: `padded` [D, 1+m] matrices cut to the real tokens.

    `index` [nd] picks real tokens out of the flattened matrices (None: all are real); `lengths` are drafted
    columns per row, on the host.
    """

    width: int
    lengths: tuple[int, ...]
    index: torch.Tensor | None

    def cut(self, padded: torch.Tensor) -> torch.Tensor:
        flat = padded.reshape(-1, *padded.shape[2:])
        return flat if self.index is None else flat.index_select(0, self.index)

    def pad(self, flat: torch.Tensor) -> torch.Tensor:
        """[nd, …] back to [D, 1+m, …]; padded places hold zeros and are never looked at."""
        rows = len(self.lengths)
        if self.index is None:
            return flat.reshape(rows, self.width, *flat.shape[1:])
        out = flat.new_zeros(rows * self.width, *flat.shape[1:])
        out.index_copy_(0, self.index, flat)
        return out.reshape(rows, self.width, *flat.shape[1:])


@dataclass(frozen=True)
class Batch:
    """`width` tokens for each of b rows: ledger row of each sequence [b] and token [b·width], sequence of each token,
    columns 0 … width - 1, ones [b]; indptr on the host."""

    rows: torch.Tensor
    node_rows: torch.Tensor
    q_seq: torch.Tensor
    columns: torch.Tensor
    ones: torch.Tensor
    q_indptr: tuple[int, ...]

    def meta(
        self, token_ids: torch.Tensor, positions: torch.Tensor, start: torch.Tensor, max_kv_tokens: int
    ) -> StepMeta:
        """The target's forward of tokens [b·width] at `positions`, behind `start` [b] committed ones of each row."""
        return StepMeta(
            token_ids=token_ids,
            positions=positions,
            write_slots=positions,
            q_seq=self.q_seq,
            rows=self.rows,
            kv_start=start,
            mask=None,
            q_indptr=self.q_indptr,
            max_kv_tokens=max_kv_tokens,
            num_decodes=len(self.q_indptr) - 1,
        )


def uniform(draft: Draft) -> bool:
    """Whether every row drafted the same number of columns."""
    return min(draft.lengths) == max(draft.lengths)
