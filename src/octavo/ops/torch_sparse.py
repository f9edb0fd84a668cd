"""Sparse layers in torch: selection, swap-in and attention over the counted pages.

What a query counts depends on its position and on committed keys alone (design 03): page 0, the pages that overlap the
last `recent_tokens` positions and everything behind, and the `topk_pages` best of the complete pages between. A query
that is still below `dense_limit_tokens`, or has no more candidates than `topk_pages`, counts everything.

Numerics. The counted pages stand side by side in ascending order: key i of a query is offset i % p of its page number
i // p, cut into the blocks of `torch_attention`. With everything counted that is the order of dense attention, so the
bits are the same. Every query is a sequence of its own here, so neither company nor drafts change them.

Prompt chunks see everything: pages in slots where mapped, in the host tier elsewhere.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from octavo.ops.meta import KVLayer, KVView, SparseView, StepMeta
from octavo.ops.page_selector import selector_of
from octavo.ops.torch_attention import BLOCK, MASK_BITS, SCORE_BUDGET, TILE_TOKENS, attend_blocks
from octavo.ops.torch_slots import locate, map_columns


@dataclass(frozen=True)
class _Pages:
    """What all sparse layers of a step share; b sequences, t decoding tokens, W columns.

    rows [b]; host_pages [b, W], -1 none; written, filled [b, W] bool: columns this step writes, columns with older
    tokens; always, candidates [t, W] bool: what a decoding token counts in any case, and what it may choose from.
    """

    width: int
    rows: torch.Tensor
    host_pages: torch.Tensor
    written: torch.Tensor
    filled: torch.Tensor
    always: torch.Tensor
    candidates: torch.Tensor


@dataclass
class SparseStep:
    """One forward over a view with sparse layers: `write` (which selects and swaps in), then `attend`, by layer."""

    meta: StepMeta
    view: SparseView
    _pages: _Pages | None = None
    _counted: dict[int, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    @classmethod
    def of(cls, meta: StepMeta, kv: KVView) -> SparseStep:
        if kv.sparse is None:
            raise ValueError("this view has no sparse layers")
        return cls(meta, kv.sparse)

    @property
    def decode_tokens(self) -> int:
        return self.meta.q_indptr[self.meta.num_decodes]

    def write(
        self, layer: KVLayer, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, kv_heads: int, head_dim: int
    ) -> None:
        """Select for rotated q [n, heads·head_dim], map and swap in, then put k, v [n, kv_heads·head_dim] in slots."""
        meta, view, pages = self.meta, self.view, self._plan()
        needed = pages.written
        if self.decode_tokens:
            counted = self._select(layer.index, q[: self.decode_tokens].float(), kv_heads, head_dim)
            self._counted[layer.index] = counted_list(counted, self._list_width())
            union = torch.zeros(pages.written.shape, dtype=torch.int32, device=counted.device)
            union.index_add_(0, meta.q_seq[: self.decode_tokens], counted.to(torch.int32))
            needed = needed | (union > 0)
        map_columns(view, layer.index, pages.rows, needed, pages.written, pages.filled, pages.host_pages)
        column = (meta.write_slots // view.page_size).clamp(0, view.slot_map.shape[2] - 1)
        slot, _ = locate(view, layer.index, meta.rows[meta.q_seq], column)
        offset = meta.write_slots % view.page_size
        for half, x in enumerate((k, v)):
            target = view.slots[:, layer.index, half]
            target[slot, :, offset] = x.reshape(-1, kv_heads, head_dim).to(target.dtype)

    def attend(
        self, q: torch.Tensor, layer: KVLayer, scale: float, heads: int, kv_heads: int, head_dim: int
    ) -> torch.Tensor:
        """Rotated q [n, heads·head_dim] -> [n, heads·head_dim] in q's dtype; the arithmetic is float32."""
        wide = q.float() * scale
        results = []
        if self.decode_tokens:
            results += self._attend_counted(wide[: self.decode_tokens], layer.index, heads // kv_heads)
        for sequence in range(self.meta.num_decodes, self.meta.num_seqs):
            results += self._attend_all(wide, layer.index, sequence, heads // kv_heads)
        return torch.cat(results).to(q.dtype) if results else q

    # -- what is counted ------------------------------------------------------------------------------------------

    def _plan(self) -> _Pages:
        if self._pages is None:
            meta, view, p = self.meta, self.view, self.view.page_size
            width = max(1, min(-(-meta.max_kv_tokens // p), view.host_table.shape[1]))
            columns = torch.arange(width, device=meta.rows.device)
            last_slot = torch.zeros_like(meta.kv_start).scatter_reduce(0, meta.q_seq, meta.write_slots, "amax")
            first, last = (x[:, None] // p for x in (meta.kv_start, last_slot))
            self._pages = _Pages(
                width,
                meta.rows,
                view.host_table.index_select(0, meta.rows)[:, :width].long(),
                written=(columns >= first) & (columns <= last),
                filled=columns * p < meta.kv_start[:, None],
                **self._rules(columns),
            )
        return self._pages

    def _rules(self, columns: torch.Tensor) -> dict[str, torch.Tensor]:
        """always, candidates of the decoding tokens, from their positions."""
        view, t = self.view, self.decode_tokens
        at = self.meta.positions[:t, None]
        recent = (at - view.recent_tokens + 1).clamp(min=0) // view.page_size
        seen = columns <= self._reach()[:, None] // view.page_size
        whole = at + 1 <= view.dense_limit_tokens
        always = seen & (whole | (columns == 0) | (columns >= recent))
        return {"always": always, "candidates": seen & ~always}

    def _reach(self) -> torch.Tensor:
        """[t] last key a decoding token sees, counted as plain decode would: kv_start + rank in its mask."""
        meta, t = self.meta, self.decode_tokens
        if meta.mask is None:
            return meta.write_slots[:t]
        return meta.kv_start[meta.q_seq[:t]] + self._bits().sum(dim=1) - 1

    def _bits(self) -> torch.Tensor:
        """[t, 64] the mask of every decoding token, bit by bit."""
        mask = self.meta.mask
        if mask is None:
            raise ValueError("causal steps have no masks")
        return (mask[: self.decode_tokens, None] >> torch.arange(MASK_BITS, device=mask.device)) & 1

    def _list_width(self) -> int:
        """Host bound of the pages one query counts."""
        view = self.view
        chosen = view.topk_pages + 2 + -(-view.recent_tokens // view.page_size)
        return min(self._plan().width, max(chosen, -(-view.dense_limit_tokens // view.page_size)))

    def _select(self, layer: int, q: torch.Tensor, kv_heads: int, head_dim: int) -> torch.Tensor:
        """[t, W] bool: the pages each decoding token counts."""
        pages, view = self._plan(), self.view
        if pages.width - 1 <= view.topk_pages or self.meta.max_kv_tokens <= view.dense_limit_tokens:
            return pages.always | pages.candidates
        sequence = self.meta.q_seq[: self.decode_tokens]
        source = pages.host_pages.clamp(min=0)
        queries = q.view(q.shape[0], kv_heads, -1, head_dim)
        selector = selector_of(view)
        size = max(1, SCORE_BUDGET // (4 * pages.width * kv_heads * head_dim))
        scores = []
        for lo in range(0, q.shape[0], size):
            summaries = view.bounds[layer][source[sequence[lo : lo + size]]]
            scores.append(selector.score(layer, queries[lo : lo + size], summaries))
        return pages.always | best(torch.cat(scores), pages.candidates, view.topk_pages)

    # -- attention ------------------------------------------------------------------------------------------------

    def _attend_counted(self, q: torch.Tensor, layer: int, group: int) -> list[torch.Tensor]:
        """Decoding tokens: q [t, H·D], scaled."""
        pages = self._counted[layer][0].shape[1]
        slots = -(-pages * self.view.page_size // BLOCK) * BLOCK
        size = max(1, SCORE_BUDGET // (slots * q.shape[1]))
        results = []
        for lo in range(0, q.shape[0], size):
            part = q[lo : lo + size]
            slot, seen = self._seen_slots(layer, lo, lo + len(part), slots)
            column = (slot // self.view.page_size).clamp(0, self._plan().width - 1)
            sequence = self.meta.q_seq[lo : lo + len(part)]
            seen = seen & (self._plan().host_pages[sequence[:, None], column] >= 0)
            k, v = self._gather(layer, sequence, column, slot % self.view.page_size, self._may_overflow())
            v.masked_fill_(~seen[:, None, :, None], 0.0)  # stale numbers may be anything, 0 · NaN too
            results.append(attend_blocks(part[:, None], k, v, seen[:, None], group))
        return results

    def _seen_slots(self, layer: int, lo: int, hi: int, slots: int) -> tuple[torch.Tensor, torch.Tensor]:
        """KV slots [hi - lo, slots] of tokens lo:hi in the order of their counted pages, and whether each is seen."""
        meta, p = self.meta, self.view.page_size
        columns, count = (x[lo:hi] for x in self._counted[layer])
        key = torch.arange(slots, device=columns.device)
        number = (key // p).clamp(max=columns.shape[1] - 1)
        at = columns[:, number] * p + key % p
        listed = (key // p)[None] < count[:, None]
        if meta.mask is None:
            return at, listed & (at <= meta.write_slots[lo:hi, None])
        start = meta.kv_start[meta.q_seq[lo:hi]][:, None]
        bits = self._bits()[lo:hi]
        own = torch.sort(1 - bits, dim=1, stable=True).indices  # set bits first, ascending
        rank = at - start
        slot = torch.where(rank < 0, at, start + own.gather(1, rank.clamp(0, MASK_BITS - 1)))
        return slot, listed & (rank < bits.sum(dim=1, keepdim=True))

    def _may_overflow(self) -> bool:
        """Whether a needed page may be without a place: host bounds only."""
        meta, view, p = self.meta, self.view, self.view.page_size
        indptr = meta.q_indptr[: meta.num_decodes + 1]
        tokens = max(b - a for a, b in zip(indptr, indptr[1:], strict=False))
        reserve = -(-(view.footprint_tokens + view.recent_tokens) // p) + 4
        most = min(self._plan().width, max(tokens * view.topk_pages, -(-view.dense_limit_tokens // p)))
        return most + reserve > view.device_pages

    def _attend_all(self, q: torch.Tensor, layer: int, sequence: int, group: int) -> list[torch.Tensor]:
        """One prompt chunk: every page below its end, in tiles of queries."""
        meta, view, pages = self.meta, self.view, self._plan()
        lo, hi = meta.q_indptr[sequence], meta.q_indptr[sequence + 1]
        if lo == hi:
            return []
        slots = -(-pages.width * view.page_size // BLOCK) * BLOCK
        at = torch.arange(slots, device=q.device)
        column = (at // view.page_size).clamp(max=pages.width - 1)[None]
        one = meta.q_seq[lo : lo + 1]
        k, v = self._gather(layer, one, column, at[None] % view.page_size, True)
        home = pages.host_pages[sequence]
        there = (home[column[0]] >= 0) & (at // view.page_size < pages.width)
        v.masked_fill_(~(there & (at <= meta.write_slots[hi - 1]))[None, None, :, None], 0.0)
        size = max(8, min(TILE_TOKENS, SCORE_BUDGET // (slots * group * k.shape[1])))
        results = []
        for first in range(lo, hi, size):
            last = min(hi, first + size)
            seen = there & (at <= meta.write_slots[first:last, None])
            results.append(attend_blocks(q[None, first:last], k, v, seen[None], group))
        return results

    def _gather(
        self, layer: int, sequence: torch.Tensor, column: torch.Tensor, offset: torch.Tensor, from_host: bool
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """float32 k, v [m, kv_heads, S, head_dim] at columns and offsets [m, S] of sequences [m], fresh tensors.

        from_host: read columns without a place in the host tier.
        """
        view = self.view
        slot, there = locate(view, layer, self.meta.rows[sequence][:, None], column)
        home = torch.where(there, view.host.shape[0] - 1, self._plan().host_pages[sequence[:, None], column])
        result = []
        for half in range(2):
            x = view.slots[:, layer, half][slot, :, offset]
            if from_host:
                stored = view.host[:, view.host_layers[layer], half][home, :, offset]
                x = torch.where(there[:, :, None, None], x, stored)
            result.append(x.transpose(1, 2).float().contiguous())
        return result[0], result[1]


def best(scores: torch.Tensor, candidates: torch.Tensor, count: int) -> torch.Tensor:
    """[t, W] bool: the `count` candidates with the largest scores [t, W], of equal ones the lowest page."""
    order = torch.sort(scores.masked_fill(~candidates, -torch.inf), dim=1, descending=True, stable=True).indices
    rank = torch.empty_like(order).scatter_(
        1, order, torch.arange(order.shape[1], device=order.device).expand_as(order)
    )
    return candidates & (rank < count)


def counted_list(counted: torch.Tensor, width: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(columns [t, width] ascending, how many of them count [t]) of counted [t, W] bool; what follows is void."""
    columns = torch.sort((~counted).to(torch.int8), dim=1, stable=True).indices
    return columns[:, :width], counted.sum(dim=1)
