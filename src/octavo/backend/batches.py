"""How the decode rows of a forward are laid out: as chains on their own (`Batch`), or as trees or beside prompts
(`Flat`)."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.backend.relay import upload
from octavo.ops.meta import StepMeta


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
    """One token and `drafted` ones behind it for each of b rows: n tokens in all, `width` at most for a row.

    rows [b] and node_rows [n] are ledger rows; q_seq [n] the sequence of each token, columns [n] its place in it;
    ones [b]; q_indptr b + 1 offsets on the host, indptr [b + 1] the same. Where rows differ (else None): pick [n] takes
    the tokens out of a flattened [b, width], place [b, width] puts them back, repeating a row's last; real
    [b, width - 1] tells drafted from padding.
    """

    rows: torch.Tensor
    node_rows: torch.Tensor
    q_seq: torch.Tensor
    columns: torch.Tensor
    ones: torch.Tensor
    q_indptr: tuple[int, ...]
    indptr: torch.Tensor
    width: int
    pick: torch.Tensor | None
    place: torch.Tensor | None
    real: torch.Tensor | None

    @classmethod
    def of(cls, host_rows: tuple[int, ...], drafted: tuple[int, ...], device: torch.device) -> Batch:
        sizes = 1 + np.asarray(drafted, dtype=np.int64)
        ends = np.cumsum(sizes)
        width, first = int(sizes.max()), ends - sizes
        q_seq = np.repeat(np.arange(len(sizes)), sizes)
        columns = np.arange(ends[-1]) - first[q_seq]
        pick = place = real = None
        if sizes.min() < width:
            pick = upload(q_seq * width + columns, device)
            column = np.arange(width)
            place = upload(first[:, None] + np.minimum(column, sizes[:, None] - 1), device)
            real = upload(column[1:] < sizes[:, None], device, torch.bool)
        rows, seq = upload(list(host_rows), device), upload(q_seq, device)
        return cls(
            rows,
            rows.index_select(0, seq),
            seq,
            upload(columns, device),
            torch.ones_like(rows),
            (0, *ends.tolist()),
            upload(np.concatenate([[0], ends]), device),
            width,
            pick,
            place,
            real,
        )

    def cut(self, padded: torch.Tensor) -> torch.Tensor:
        """[b, width, …] to the n tokens that are real."""
        flat = padded.reshape(-1, *padded.shape[2:])
        return flat if self.pick is None else flat.index_select(0, self.pick)

    def pad(self, flat: torch.Tensor) -> torch.Tensor:
        """[n] to [b, width], a row's last token repeated behind it."""
        return flat.reshape(-1, self.width) if self.place is None else flat[self.place]

    def slots(self, start: torch.Tensor) -> torch.Tensor:
        """KV slot of each token, [n], behind `start` [b] committed ones of each row."""
        return start.index_select(0, self.q_seq) + self.columns

    def meta(
        self, token_ids: torch.Tensor, positions: torch.Tensor, start: torch.Tensor, max_kv_tokens: int
    ) -> StepMeta:
        """The target's forward of tokens [n] at `positions`, behind `start` [b] committed ones of each row."""
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
