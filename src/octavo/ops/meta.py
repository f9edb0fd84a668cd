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
from typing import Protocol

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
    num_decodes       leading sequences that decode: they select pages in sparse layers; the others are prompt
                      chunks, which see all their pages there too
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
    num_decodes: int = 0

    @property
    def num_tokens(self) -> int:
        return self.q_indptr[-1]

    @property
    def num_seqs(self) -> int:
        return len(self.q_indptr) - 1


class PageSelector(Protocol):
    """Which pages of a long context matter to a query (`--page-selector module:Class`; made without arguments).

    A page is summed up once, when it is complete, by two vectors a KV head; the sums live beside the page in the
    host tier's books, so a shared prefix shares them. A query's scores must not depend on other queries or pages
    of the call (text would depend on company then), and nothing here may read a device value on the host.
    """

    def summarise(self, layer: int, keys: torch.Tensor) -> torch.Tensor:
        """Rotated keys [m, kv_heads, page_size, head_dim] of sparse layer `layer` -> float32 [m, 2, kv_heads,
        head_dim]."""

    def score(self, layer: int, queries: torch.Tensor, summaries: torch.Tensor) -> torch.Tensor:
        """Rotated, unscaled float32 queries [n, kv_heads, group, head_dim], summaries [n, pages, 2, kv_heads,
        head_dim] -> float32 [n, pages]: the larger, the sooner a page counts. Scores of incomplete pages are void.
        """


@dataclass(frozen=True)
class SparseView:
    """Device side of HiSparse: KV of sparse layers lives in a row's slots and, whole, in the host tier.

    slots       [slots + 1, sparse_layers, 2, kv_heads, page_size, head_dim]; the last one is spare
    host        [host_pages + 1, all layers, 2, kv_heads, page_size, head_dim]; the last one is spare. Indexed like a
                device tensor: on CUDA a device-addressable view of pinned memory, on a CPU memory or a mapped file
    bounds      float32 [sparse_layers, host_pages + 1, 2, kv_heads, head_dim]: a selector's sums of complete pages,
                layer by layer because a step reads one layer's of all pages of a row
    row_slots   int32 [max_rows, device_pages] slots of a row, -1 none
    host_table  int32 [max_rows, width_pages] host page of a column (page of a row), -1 none
    slot_map    int32 [sparse_layers, max_rows, width_pages] place (0 … device_pages - 1) of a column, -1 none
    column_of   int32 [sparse_layers, max_rows, device_pages] column in a place, -1 empty: the inverse of slot_map
    order       int32 [sparse_layers, max_rows, device_pages] places of a row, least recently used first
    backed      int32 [max_rows] columns below it are in the host tier, drained; written by the host before a launch
    counts      int64 [3] summed over layers and steps, for metrics: needed pages that had a place (hits), pages loaded
                from the host tier (swaps), places given to pages that are new

    host_layers        layer inside a host page of each sparse layer
    dense_host_layers  layer inside a host page of each layer of the device's full pool (dense and draft layers)
    topk_pages         candidates a query counts beside page 0 and the recent ones
    recent_tokens      positions up to the query's own that always count (at least footprint_tokens)
    footprint_tokens   most slots one step of a row may write
    dense_limit_tokens a query at position q counts everything iff q + 1 <= dense_limit_tokens

    The tensors' contents on the device belong to `ops/torch_sparse.py` and `native/sparse.cpp`.
    """

    slots: torch.Tensor
    host: torch.Tensor
    bounds: torch.Tensor
    row_slots: torch.Tensor
    host_table: torch.Tensor
    slot_map: torch.Tensor
    column_of: torch.Tensor
    order: torch.Tensor
    backed: torch.Tensor
    counts: torch.Tensor
    host_layers: tuple[int, ...]
    dense_host_layers: tuple[int, ...]
    page_size: int
    topk_pages: int
    recent_tokens: int
    footprint_tokens: int
    dense_limit_tokens: int
    selector: PageSelector | None = None  # None: page bounds

    @property
    def device_pages(self) -> int:
        """Slots of one row, pages."""
        return self.row_slots.shape[1]

    @property
    def num_layers(self) -> int:
        return self.slots.shape[1]


@dataclass(frozen=True)
class KVView:
    """Device side of the page pools: tensors the ledger's decisions are projected onto.

    full / swa   [pages, layers_of_pool, 2 (k, v), kv_heads, page_size, head_dim]; None where the model has
                 no such layers. A page is one contiguous block over all layers of its pool.
    sparse       the layers of pool "sparse" (HiSparse), None without
    full_table / swa_table   int32 [max_rows, width_pages]; -1 means "no page". Written, never read back.
    """

    full: torch.Tensor | None
    swa: torch.Tensor | None
    full_table: torch.Tensor
    swa_table: torch.Tensor | None
    page_size: int
    sparse: SparseView | None = None

    def pool(self, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
        """(kv tensor, page table) of pool "full" or "swa"."""
        kv, table = (self.full, self.full_table) if kind == "full" else (self.swa, self.swa_table)
        if kv is None or table is None:
            raise ValueError(f"this model has no {kind} pool")
        return kv, table


@dataclass(frozen=True)
class KVLayer:
    """Where one attention layer keeps its KV: pool kind and index inside a page of that pool."""

    pool: str  # "full" | "swa" | "sparse" (index among the sparse layers)
    index: int
    window_tokens: int | None = None  # None: full attention
