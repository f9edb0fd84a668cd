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
TILE_TOKENS = 128
SCORE_BUDGET = 1 << 23  # elements of one tile's score matrix: 32 MiB


def prepare_attention(head_dim: int) -> None:
    """Find out before the first step which row counts of the two products give the same bits."""
    prepare_batched(head_dim, BLOCK, "nt")
    prepare_batched(BLOCK, head_dim, "nn")


@dataclass(frozen=True)
class _Tile:
    """Queries [start:stop] of the step as `sequences` × equally many, seen against S gathered keys a sequence.

    Column c of the keys is the c-th thing a plain decode would see, so its place in a block does not depend on how
    a tree was laid out. pages, offsets, valid (some query sees it) [b, S]; visible [b, tokens, S].
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
            plan = self._causal_plan if self.meta.mask is None else self._masked_plan
            self._tiles[key] = plan(layer, heads)
        results = []
        wide = q.float() * scale
        for tile in self._tiles[key]:
            k = _gather(pool[:, layer.index, 0], tile)
            v = _gather(pool[:, layer.index, 1], tile)
            v.masked_fill_(~tile.valid[:, None, :, None], 0.0)  # stale numbers may be anything, 0 · NaN too
            part = wide[tile.start : tile.stop].view(tile.sequences, -1, q.shape[-1])
            results.append(attend_blocks(part, k, v, tile.visible, heads // kv_heads).to(q.dtype))
        return torch.cat(results) if results else q

    def _causal_plan(self, layer: KVLayer, heads: int) -> list[_Tile]:
        """Neighbouring sequences of equally few tokens (decode, verify) share a tile; a chunk is cut into several."""
        tiles: list[_Tile] = []
        indptr, first = self.meta.q_indptr, 0
        fitting = SCORE_BUDGET // max(1, heads * self.meta.max_kv_tokens)
        while first < self.meta.num_seqs:
            tokens = indptr[first + 1] - indptr[first]
            size = min(tokens, max(8, min(TILE_TOKENS, fitting)))
            last = first + 1
            while (
                0 < size == tokens
                and last < self.meta.num_seqs
                and indptr[last + 1] - indptr[last] == tokens
                and (last - first + 1) * tokens <= fitting
            ):
                last += 1
            for at in range(0, tokens, max(1, size)):
                tiles.append(self._causal_tile(layer, first, last, at, min(at + size, tokens)))
            first = last
        return tiles

    def _causal_tile(self, layer: KVLayer, first: int, last: int, at: int, stop: int) -> _Tile:
        """Tokens at:stop of each of the sequences first:last (one sequence unless the tile takes all its tokens)."""
        meta = self.meta
        base = meta.q_indptr[first]
        tokens = meta.q_indptr[first + 1] - base
        lo, hi = base + at, base + (last - first - 1) * tokens + stop
        write_slots = meta.write_slots[lo:hi].view(last - first, stop - at)
        # No token sees past its own slot, and the last token's slot is below the host's bound.
        reach = meta.max_kv_tokens - (tokens - stop)
        columns = self._columns(write_slots[:, :1], layer.window_tokens, stop - at, reach)
        seen = columns[:, None, :] <= write_slots[:, :, None]
        if layer.window_tokens is not None:
            seen = seen & (columns[:, None, :] > write_slots[:, :, None] - layer.window_tokens)
        return self._tile(layer, lo, hi, meta.rows[first:last], columns, seen)

    def _masked_plan(self, layer: KVLayer, heads: int) -> list[_Tile]:
        """Every token is a sequence of its own: what it sees of this step's slots is its mask's business alone."""
        size = max(1, SCORE_BUDGET // max(1, 2 * heads * BLOCK * self.meta.max_kv_tokens))
        n = self.meta.num_tokens
        return [self._masked_tile(layer, lo, min(lo + size, n)) for lo in range(0, n, size)]

    def _masked_tile(self, layer: KVLayer, lo: int, hi: int) -> _Tile:
        """Column kv_start + r is the r-th set bit of the token's mask: for a tree, its ancestor at depth r."""
        meta, mask = self.meta, self.meta.mask
        if mask is None:
            raise ValueError("a masked tile needs a mask")
        sequence, window = meta.q_seq[lo:hi], layer.window_tokens
        start = meta.kv_start[sequence][:, None]
        bit = torch.arange(MASK_BITS, device=mask.device)
        bits = (mask[lo:hi, None] >> bit) & 1
        order = torch.sort(1 - bits, dim=1, stable=True).indices  # set bits first, ascending
        columns = self._columns(start, window, MASK_BITS, meta.max_kv_tokens)
        rank = columns - start
        own = order.gather(1, rank.clamp(0, MASK_BITS - 1))
        slots = torch.where(rank < 0, columns, start + own)
        seen = rank < bits.sum(dim=1, keepdim=True)
        if window is not None:
            place = self._own_positions()[sequence].gather(1, own)
            place = torch.where(rank < 0, columns, place)
            seen = seen & (place > meta.positions[lo:hi, None] - window)
        return self._tile(layer, lo, hi, meta.rows[sequence], slots, seen[:, None, :])

    def _own_positions(self) -> torch.Tensor:
        """[b, 64] position of the token in slot kv_start + j, where this step writes one; else the slot itself."""
        meta = self.meta
        bit = torch.arange(MASK_BITS + 1, device=meta.positions.device)
        table = meta.kv_start[:, None] + bit
        column = (meta.write_slots - meta.kv_start[meta.q_seq]).clamp(0, MASK_BITS)
        table[meta.q_seq, column] = meta.positions
        return table[:, :MASK_BITS]

    def _columns(self, earliest: torch.Tensor, window: int | None, own: int, reach: int) -> torch.Tensor:
        """[b, S] whole blocks of columns, from 0 or from the block where the window of `earliest` [b, 1] begins."""
        blocks = -(-max(reach, 1) // BLOCK)
        begin = torch.zeros_like(earliest)
        if window is not None and (window + own - 2) // BLOCK + 2 < blocks:
            blocks = (window + own - 2) // BLOCK + 2
            begin = (earliest - window + 1).clamp(min=0) // BLOCK * BLOCK
        return begin + torch.arange(blocks * BLOCK, device=begin.device)

    def _tile(
        self, layer: KVLayer, lo: int, hi: int, rows: torch.Tensor, slots: torch.Tensor, seen: torch.Tensor
    ) -> _Tile:
        _, table = self.kv.pool(layer.pool)
        page = slots // self.kv.page_size
        found = table[rows[:, None], page.clamp(0, table.shape[1] - 1)].long()
        seen = seen & ((found >= 0) & (page < table.shape[1]))[:, None, :]
        return _Tile(lo, hi, len(rows), found.clamp(min=0), slots % self.kv.page_size, seen.any(dim=1), seen)


def _gather(pool: torch.Tensor, tile: _Tile) -> torch.Tensor:
    """pool [pages, kv_heads, page_size, head_dim] -> float32 [b, kv_heads, S, head_dim], a fresh tensor."""
    return pool[tile.pages, :, tile.offsets].transpose(1, 2).float().contiguous()


def attend_blocks(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, visible: torch.Tensor, group: int) -> torch.Tensor:
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
