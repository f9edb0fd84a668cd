"""Forwards outside an engine: pages of their own and the descriptions of simple steps.

For perplexity and `octavo doctor`. Nothing here meets the ledger: every row owns a fixed run of pages.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch

from octavo.kv.sizing import PoolSizes
from octavo.model.registry import make_kv
from octavo.ops.meta import KVView, StepMeta


def scratch_pages(network: Any, rows: int, tokens: int, page_size: int) -> KVView:
    """Empty pages for `rows` rows of `tokens` tokens; row r has pages r·w … r·w + w − 1 of each pool."""
    width = -(-tokens // page_size)
    pages = rows * width
    sizes = PoolSizes(pages if network.full_layers else 0, pages if network.swa_layers else 0)
    kv: KVView = make_kv(network, sizes, max_rows=rows, width_pages=width, device=torch.device("cpu"))
    table = torch.arange(pages, dtype=torch.int32).reshape(rows, width)
    for mine in (kv.full_table, kv.swa_table):
        if mine is not None and mine.numel():
            mine[:rows, :width].copy_(table)
    return kv


def chunk_step(ids: Sequence[int], *, row: int = 0, start: int = 0) -> StepMeta:
    """`ids` as one chunk of one row, the first at position `start`."""
    count = len(ids)
    positions = torch.arange(start, start + count)
    return StepMeta(
        token_ids=torch.tensor(list(ids)),
        positions=positions,
        write_slots=positions,
        q_seq=torch.zeros(count, dtype=torch.int64),
        rows=torch.tensor([row]),
        kv_start=torch.tensor([start]),
        mask=None,
        q_indptr=(0, count),
        max_kv_tokens=start + count,
    )


def decode_step(ids: Sequence[int], *, position: int = 0) -> StepMeta:
    """One token each for rows 0 … n−1, all at the same position."""
    count = len(ids)
    rows = torch.arange(count)
    positions = torch.full((count,), position)
    return StepMeta(
        token_ids=torch.tensor(list(ids)),
        positions=positions,
        write_slots=positions,
        q_seq=rows,
        rows=rows,
        kv_start=positions,
        mask=None,
        q_indptr=tuple(range(count + 1)),
        max_kv_tokens=position + 1,
    )
