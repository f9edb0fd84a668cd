"""Device-side memory between steps, indexed by ledger row: what step N+1 needs of step N before the host has it."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch

from octavo.kv.tiers import Tiers
from octavo.ops.meta import SparseView
from octavo.ops.sparse_state import open_rows


def upload(values: np.ndarray | list[int], device: torch.device, dtype: torch.dtype = torch.int64) -> torch.Tensor:
    """Host numbers to the device without waiting for it (pinned staging on CUDA)."""
    host = torch.as_tensor(values, dtype=dtype)
    if device.type == "cpu":
        return host
    if device.type == "cuda" and torch.cuda.is_available():
        host = host.pin_memory()
    return host.to(device, non_blocking=True)


@dataclass(frozen=True)
class Relay:
    """seq_lens [rows] KV slots committed as the device knows it; last_tokens [rows] newest token, without KV."""

    seq_lens: torch.Tensor
    last_tokens: torch.Tensor

    @classmethod
    def create(cls, max_rows: int, device: torch.device) -> Relay:
        zeros = torch.zeros(max_rows, dtype=torch.int64, device=device)
        return cls(zeros, zeros.clone())

    def store(self, rows: torch.Tensor, seq_lens: torch.Tensor, last_tokens: torch.Tensor | None) -> None:
        """After a forward: new lengths, and the newest tokens where the step sampled any."""
        self.seq_lens.index_copy_(0, rows, seq_lens)
        if last_tokens is not None:
            self.last_tokens.index_copy_(0, rows, last_tokens)

    def keep(
        self, rows: torch.Tensor, start: torch.Tensor, counts: torch.Tensor, run: torch.Tensor, context_tokens: int
    ) -> torch.Tensor:
        """Accepted runs [b, w] behind `start` [b], `counts` [b] drafted tokens of each: [b, 1 + w], the counts that
        `context_tokens` holds, then the runs. Lengths and newest tokens are known here then."""
        counts = torch.minimum(counts, (context_tokens - 1 - start).clamp(min=0))
        self.store(rows, (start + counts + 1).clamp(max=context_tokens), run.gather(1, counts[:, None])[:, 0])
        return torch.cat([counts[:, None], run], dim=1)


class TableProjection:
    """The device copies of the ledger's page tables. Written from the ledger's updates, never read back."""

    def __init__(self, tables: dict[str, torch.Tensor]) -> None:
        self.tables = tables

    def apply(self, pool: str, rows: np.ndarray, cols: np.ndarray, pages: np.ndarray) -> None:
        if len(rows) == 0:
            return
        table = self.tables[pool]
        device = table.device
        table.index_put_(
            (upload(rows, device), upload(cols, device)), upload(pages, device, torch.int32), accumulate=False
        )


class TierProjection:
    """The device copies of what the books say about tiers: host pages of columns, slots of rows, backup frontiers."""

    def __init__(self, view: SparseView, tiers: Tiers) -> None:
        self._view, self._tiers = view, tiers

    def apply(self, rows: np.ndarray, cols: np.ndarray, pages: np.ndarray) -> None:
        """Cells of the full table have changed: so may their host pages have."""
        if len(rows) == 0:
            return
        table = self._view.host_table
        device = table.device
        host = upload(self._tiers.pool.host_pages_of(pages), device, torch.int32)
        table.index_put_((upload(rows, device), upload(cols, device)), host, accumulate=False)

    def apply_rows(self) -> None:
        """Rows that opened or closed start anew; slots and frontiers of rows that changed."""
        renewed, dirty = self._tiers.take_row_updates()
        device = self._view.host_table.device
        if len(renewed):
            open_rows(self._view, upload(renewed, device))
        if len(dirty):
            at = upload(dirty, device)
            self._view.row_slots.index_copy_(0, at, upload(self._tiers.row_slots[dirty], device, torch.int32))
            self._view.backed.index_copy_(0, at, upload(self._tiers.backed[dirty], device, torch.int32))
