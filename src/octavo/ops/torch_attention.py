"""Paged attention in torch: a gather a layer, blocks of positions reduced in a fixed order.

Numerics. A query's keys are cut into blocks of `BLOCK` slots at absolute multiples of BLOCK. Every block gives
its own partial sums; they are added in position order. The maximum is taken over all keys (exact in any order).
A block that the mask hides altogether adds exact zeros, so company, page size, chunking, tiles and the length of
the gather do not change a single bit (tests/unit/test_ops_attention.py compares bits).
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from octavo.ops.meta import KVLayer, KVView, StepMeta
from octavo.ops.rows import batched_rows, prepare_batched

BLOCK = 64
MASK_BITS = 64
_TILE_TOKENS = 128
_SCORE_BUDGET = 1 << 23  # elements of one tile's score matrix: 32 MiB


def prepare_attention(head_dim: int) -> None:
    """Find out before the first step which row counts of the two products give the same bits."""
    prepare_batched(head_dim, BLOCK, "nt")
    prepare_batched(BLOCK, head_dim, "nn")


@dataclass(frozen=True)
class _Tile:
    """Queries tokens[start:stop] of b sequences, seen against `slots` gathered keys each.

    pages, offsets [b, S]; valid [b, S] (slot has a page); visible [b, tokens, S].
    """

    start: int
    stop: int
    sequences: int
    pages: torch.Tensor
    offsets: torch.Tensor
    valid: torch.Tensor
    visible: torch.Tensor


@dataclass
class AttentionStep:
    """What all layers of one step share: which slots each tile of queries gathers and sees."""

    meta: StepMeta
    kv: KVView
    _tiles: dict[tuple[str, int | None, int], list[_Tile]] = field(default_factory=dict)
    _write: dict[str, tuple[torch.Tensor, torch.Tensor]] = field(default_factory=dict)

    def write(self, layer: KVLayer, k: torch.Tensor, v: torch.Tensor, kv_heads: int, head_dim: int) -> None:
        """Put k, v [n, kv_heads·head_dim] where the page table says. Page -1 is the pool's last, spare page."""
        pool, table = self.kv.pool(layer.pool)
        if layer.pool not in self._write:
            slots = self.meta.write_slots
            column = (slots // self.kv.page_size).clamp(0, table.shape[1] - 1)
            pages = table[self.meta.rows[self.meta.q_seq], column].long()
            self._write[layer.pool] = (pages, slots % self.kv.page_size)
        pages, offsets = self._write[layer.pool]
        n = self.meta.num_tokens
        for half, x in enumerate((k, v)):
            target = pool[:, layer.index, half]
            target[pages, :, offsets] = x.reshape(n, kv_heads, head_dim).to(pool.dtype)

    def attend(
        self, q: torch.Tensor, layer: KVLayer, scale: float, heads: int, kv_heads: int, head_dim: int
    ) -> torch.Tensor:
        """Rotated q [n, heads·head_dim] -> [n, heads·head_dim] in q's dtype; the arithmetic is float32."""
        pool, _ = self.kv.pool(layer.pool)
        key = (layer.pool, layer.window_tokens, heads)
        if key not in self._tiles:
            self._tiles[key] = list(self._plan(layer, heads))
        results = []
        wide = q.float() * scale
        for tile in self._tiles[key]:
            k = _gather(pool[:, layer.index, 0], tile)
            v = _gather(pool[:, layer.index, 1], tile)
            v.masked_fill_(~tile.valid[:, None, :, None], 0.0)  # stale numbers may be anything, 0 · NaN too
            part = self._tile_tokens(wide, tile)
            results.append(_attend(part, k, v, tile.visible, heads // kv_heads).to(q.dtype))
        return torch.cat(results)

    def _tile_tokens(self, q: torch.Tensor, tile: _Tile) -> torch.Tensor:
        """[b, tokens, heads·head_dim] of one tile: its sequences stand side by side, equally long."""
        return q[tile.start : tile.stop].view(tile.sequences, -1, q.shape[-1])

    def _plan(self, layer: KVLayer, heads: int) -> list[_Tile]:
        tiles: list[_Tile] = []
        indptr = self.meta.q_indptr
        first = 0
        while first < self.meta.num_seqs:
            tokens = indptr[first + 1] - indptr[first]
            last = first + 1
            if tokens == 0:
                first = last
                continue
            size = self._tile_size(tokens, heads)
            # Short rows of one length (decode, verify) share a tile; a long chunk is cut into several.
            limit = max(1, _SCORE_BUDGET // max(1, heads * size * self.meta.max_kv_tokens))
            while (
                size == tokens
                and last < self.meta.num_seqs
                and indptr[last + 1] - indptr[last] == tokens
                and last - first < limit
            ):
                last += 1
            for at in range(0, tokens, size):
                tiles.append(self._tile(layer, first, last, at, min(at + size, tokens)))
            first = last
        return tiles

    def _tile_size(self, tokens: int, heads: int) -> int:
        fitting = _SCORE_BUDGET // max(1, heads * self.meta.max_kv_tokens)
        return min(tokens, max(8, min(_TILE_TOKENS, fitting)))

    def _tile(self, layer: KVLayer, first: int, last: int, at: int, stop: int) -> _Tile:
        """Tokens at:stop of each of the sequences first:last (one sequence unless the tile is whole)."""
        meta, page_size = self.meta, self.kv.page_size
        base = meta.q_indptr[first]
        tokens = meta.q_indptr[first + 1] - base
        lo, hi = base + at, base + (last - first - 1) * tokens + stop
        shape = (last - first, stop - at)
        positions = meta.positions[lo:hi].view(shape)
        write_slots = meta.write_slots[lo:hi].view(shape)
        kv_start = meta.kv_start[first:last, None]
        _, table = self.kv.pool(layer.pool)
        # In causal order no token of the tile can see past its own slot: the host knows how far that is at most.
        reach = meta.max_kv_tokens if meta.mask is not None else meta.max_kv_tokens - (tokens - stop)
        blocks = -(-max(reach, 1) // BLOCK)
        begin = torch.zeros_like(kv_start)
        if layer.window_tokens is not None:
            own = MASK_BITS if meta.mask is not None else stop - at
            span_blocks = (layer.window_tokens + own - 2) // BLOCK + 2
            if span_blocks < blocks:
                blocks = span_blocks
                earliest = kv_start if meta.mask is not None else positions[:, :1]
                begin = (earliest - layer.window_tokens + 1).clamp(min=0) // BLOCK * BLOCK
        slots = begin + torch.arange(blocks * BLOCK, device=begin.device)  # [b, S]
        column = slots // page_size
        found = table[meta.rows[first:last, None], column.clamp(max=table.shape[1] - 1)].long()
        seen = self._visible(layer.window_tokens, first, last, slots, positions, write_slots, kv_start, (lo, hi))
        reachable = (found >= 0) & (column < table.shape[1])
        seen = seen & reachable[:, None, :]
        valid = seen.any(dim=1)
        return _Tile(lo, hi, last - first, found.clamp(min=0), slots % page_size, valid, seen)

    def _visible(
        self,
        window: int | None,
        first: int,
        last: int,
        slots: torch.Tensor,
        positions: torch.Tensor,
        write_slots: torch.Tensor,
        kv_start: torch.Tensor,
        span: tuple[int, int],
    ) -> torch.Tensor:
        """[b, tokens, S] bool."""
        keys = slots[:, None, :]
        if self.meta.mask is None:
            seen = keys <= write_slots[:, :, None]
            key_positions = slots
        else:
            bit = slots - kv_start
            inside = (bit >= 0) & (bit < MASK_BITS)
            mask = self.meta.mask[span[0] : span[1]].view(positions.shape)[:, :, None]
            allowed = (mask >> bit.clamp(0, MASK_BITS - 1)[:, None, :]) & 1 > 0
            seen = (bit < 0)[:, None, :] | (inside[:, None, :] & allowed)
            key_positions = self._tree_positions(first, last, slots, kv_start)
        if window is not None:
            seen = seen & (key_positions[:, None, :] > positions[:, :, None] - window)
        return seen

    def _tree_positions(self, first: int, last: int, slots: torch.Tensor, kv_start: torch.Tensor) -> torch.Tensor:
        """[b, S] position of the token in each slot: the slot itself, but for this step's own (tree) tokens."""
        meta = self.meta
        lo, hi = meta.q_indptr[first], meta.q_indptr[last]
        shape = (last - first, (hi - lo) // (last - first))
        own = kv_start + torch.arange(MASK_BITS + 1, device=slots.device)
        column = (meta.write_slots[lo:hi].view(shape) - kv_start).clamp(0, MASK_BITS)
        own = own.scatter(1, column, meta.positions[lo:hi].view(shape))
        bit = slots - kv_start
        return torch.where((bit >= 0) & (bit < MASK_BITS), own.gather(1, bit.clamp(0, MASK_BITS)), slots)


def _gather(pool: torch.Tensor, tile: _Tile) -> torch.Tensor:
    """pool [pages, kv_heads, page_size, head_dim] -> float32 [b, kv_heads, S, head_dim], a fresh tensor."""
    return pool[tile.pages, :, tile.offsets].transpose(1, 2).float().contiguous()


def _attend(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, group: int) -> torch.Tensor:
    """q [b, t, H·D] float32, scaled; k, v [b, KVH, S, D]; visible [b, t, S] -> [b·t, H·D]."""
    b, kv_heads, slots, dim = k.shape
    tokens, blocks = q.shape[1], slots // BLOCK
    rows = tokens * group
    grouped = q.view(b, tokens, kv_heads, group, dim).transpose(1, 2).reshape(b, kv_heads, 1, rows, dim)
    each = grouped.expand(b, kv_heads, blocks, rows, dim).reshape(-1, rows, dim)
    scores = batched_rows(each, k.view(-1, BLOCK, dim).transpose(1, 2), "nt")
    scores = scores.reshape(b, kv_heads, blocks, tokens, group, BLOCK)
    hidden = ~visible.view(b, 1, tokens, blocks, 1, BLOCK).transpose(2, 3)
    scores = scores.masked_fill(hidden, -torch.inf)
    # Finite also for a row that sees nothing: its weights are then all zero, not NaN.
    peak = scores.amax(dim=(2, 5), keepdim=True).clamp(min=-1e30)
    weights = torch.exp(scores - peak)
    norm = _sum_in_order(weights.sum(dim=-1), 2)  # [b, KVH, t, G]
    partial = batched_rows(weights.view(-1, rows, BLOCK), v.view(-1, BLOCK, dim), "nn")
    total = _sum_in_order(partial.view(b, kv_heads, blocks, tokens, group, dim), 2)
    out = total / norm.clamp(min=1e-30)[..., None]
    return out.transpose(1, 2).reshape(b * tokens, -1)


def _sum_in_order(x: torch.Tensor, dim: int) -> torch.Tensor:
    """x[0] + x[1] + … along dim, left to right: trailing zero blocks change nothing."""
    parts = x.unbind(dim)
    total = parts[0].clone()
    for part in parts[1:]:
        total += part
    return total
