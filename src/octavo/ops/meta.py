"""What one forward pass is told about its tokens: shapes the host knows, values only the device knows.

A forward is *ragged*: `n` tokens of `b` sequences, sequence s owning tokens `q_indptr[s]:q_indptr[s+1]`.
A prefill chunk, a plain decode, a chain, a tree and a block draft are all described by the same fields:

    KV slots of a row   0 … kv_start-1            kv_start … (this step's slots)
                        committed, always visible  slot kv_start+j is visible to token t iff bit j of mask[t]
                                                   (mask None: causal, every slot <= write_slots[t])

`positions` is where RoPE and the window see a token (kv_start + depth); `write_slots` is where its K/V goes.
They differ only inside trees. A window W lets a query at position q read keys at positions q-W+1 … q.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class StepMeta:
    """Description of one ragged forward. Integer tensors are int64 on the model's device.

    token_ids    [n]  input tokens
    positions    [n]  RoPE / window position of each token
    write_slots  [n]  KV slot (token index inside the row) each token's K/V is written to
    q_seq        [n]  sequence index (0 … b-1) of each token
    rows         [b]  ledger row of each sequence: the page-table row
    kv_start     [b]  first slot this step's mask bits speak about; all slots below are visible
    mask         [n]  64-bit ancestor masks over slots kv_start+j, or None for causal order
    q_indptr     b+1 host integers
    max_kv_tokens     host upper bound of any slot read, plus one (shapes of gathers)
    """

    token_ids: torch.Tensor
    positions: torch.Tensor
    write_slots: torch.Tensor
    q_seq: torch.Tensor
    rows: torch.Tensor
    kv_start: torch.Tensor
    mask: torch.Tensor | None
    q_indptr: tuple[int, ...]
    max_kv_tokens: int

    @property
    def num_tokens(self) -> int:
        return self.q_indptr[-1]

    @property
    def num_seqs(self) -> int:
        return len(self.q_indptr) - 1


@dataclass(frozen=True)
class KVView:
    """Device side of the page pools: tensors the ledger's decisions are projected onto.

    full / swa   [pages, layers_of_pool, 2 (k, v), kv_heads, page_size, head_dim]; None where the model has
                 no such layers. A page is one contiguous block over all layers of its pool.
    full_table / swa_table   int32 [max_rows, width_pages]; -1 means "no page". Written, never read back.
    """

    full: torch.Tensor | None
    swa: torch.Tensor | None
    full_table: torch.Tensor
    swa_table: torch.Tensor | None
    page_size: int

    def pool(self, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(kv tensor, page table) of pool "full" or "swa"."""
        kv, table = (self.full, self.full_table) if kind == "full" else (self.swa, self.swa_table)
        if kv is None or table is None:
            raise ValueError(f"this model has no {kind} pool")
        return kv, table


@dataclass(frozen=True)
class KVLayer:
    """Where one attention layer keeps its KV: pool kind and index inside a page of that pool."""

    pool: str  # "full" | "swa"
    index: int
    window_tokens: int | None = None  # None: full attention
