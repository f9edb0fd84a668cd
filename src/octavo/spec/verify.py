"""One acceptance rule for chains, trees, blocks and n-grams, and what goes with it.

    at every drafted node the target samples its own token y ~ p
    a child is accepted iff its token equals y, and the walk goes on from there
    the y where the walk ends is the bonus token

A drafted token is deterministic (q is one-hot), so this is exact speculative sampling: P(output) = p.
Source: C. Chen et al., "Accelerating LLM decoding with speculative sampling" (2023), with a one-hot q; the bonus
row is a sample of p like any other, so everything that shapes p (penalties, bias, grammar) shapes it too.

Nodes are numbered 0 = root (the newest committed token), j + 1 = drafted column j; m columns, m + 1 nodes.
Nothing here reads a device value on the host; loops run over depths and columns, which the host knows.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.backend.relay import upload
from octavo.ops.meta import KVView, SparseView
from octavo.ops.torch_slots import locate

MAX_NODES = 64  # bits of an ancestor mask


def _columns_real(lengths: torch.Tensor | Sequence[int], m: int, device: torch.device) -> torch.Tensor:
    """[b, m] bool: columns that were really drafted."""
    if isinstance(lengths, torch.Tensor) and lengths.dtype == torch.bool:
        return lengths
    real = lengths if isinstance(lengths, torch.Tensor) else upload(list(lengths), device)
    return torch.arange(m, device=device) < real[:, None]


def accept(
    draft_tokens: torch.Tensor,
    parents: torch.Tensor | None,
    lengths: torch.Tensor | Sequence[int] | None,
    sampled: torch.Tensor,
    max_depth: int | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Which drafted nodes are kept.

    draft_tokens [b, m]; parents [b, m] node numbers or None for a chain; lengths: real columns per row (host
    numbers or a tensor [b]), or which are real (bool [b, m]), None: all m; sampled [b, m + 1] the target's token at
    every node; max_depth: longest path (default m).

    Returns (accept_nodes, counts, out_tokens), w = max_depth + 1:
      accept_nodes [b, w]  node numbers of the accepted path, root first; columns after `counts` repeat the last
                           accepted node, so they are safe to gather and harmless to copy
      counts       [b]     accepted drafted tokens (0 … max_depth)
      out_tokens   [b, w]  the accepted tokens, then the bonus token at index `counts`, repeated after it
    """
    b, m = draft_tokens.shape
    device = draft_tokens.device
    depth = m if max_depth is None else min(max_depth, m)
    width = (m if max_depth is None else max_depth) + 1
    steps = torch.arange(width, device=device)
    real = None if lengths is None else _columns_real(lengths, m, device)
    if parents is None:
        hit = draft_tokens == sampled[:, :m]
        hit = hit if real is None else hit & real
        counts = hit[:, :depth].cumprod(dim=1).sum(dim=1)
        nodes = torch.minimum(steps.expand(b, width), counts[:, None])
        return nodes, counts, sampled.gather(1, nodes)
    node = torch.zeros(b, dtype=torch.int64, device=device)
    alive = torch.ones(b, dtype=torch.bool, device=device)
    counts = torch.zeros(b, dtype=torch.int64, device=device)
    path = [node]
    for _ in range(depth):
        y = sampled.gather(1, node[:, None])
        child = (parents == node[:, None]) & (draft_tokens == y)
        child = child if real is None else child & real
        alive = alive & child.any(dim=1)
        node = torch.where(alive, child.to(torch.int8).argmax(dim=1) + 1, node)
        counts = counts + alive.to(torch.int64)
        path.append(node)
    path.extend([node] * (width - len(path)))
    nodes = torch.stack(path, dim=1)
    return nodes, counts, sampled.gather(1, nodes)


def chain_parents(b: int, m: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[b, m] parents of a chain, for code that wants a tree."""
    return torch.arange(m, device=device).expand(b, m)


def ancestor_mask(parents: torch.Tensor) -> torch.Tensor:
    """[b, m + 1] int64 bit masks: bit i of node j is set iff i is j or an ancestor of j (bit 0 = root).

    `parents` [b, m] with parents before children. At most 64 nodes, so that a mask fits one word.
    """
    b, m = parents.shape
    if m + 1 > MAX_NODES:
        raise ValueError(f"{m + 1} nodes: an ancestor mask has {MAX_NODES} bits")
    masks = torch.ones(b, m + 1, dtype=torch.int64, device=parents.device)
    for j in range(1, m + 1):
        own = -(1 << 63) if j == 63 else 1 << j
        masks[:, j] = masks.gather(1, parents[:, j - 1 : j])[:, 0] | own
    return masks


def chain_mask(m: int, device: torch.device | str = "cpu") -> torch.Tensor:
    """[m + 1] int64 masks of a chain: node j sees bits 0 … j."""
    bits = [(1 << (j + 1)) - 1 for j in range(m + 1)]
    return upload([b - (1 << 64) if b >= 1 << 63 else b for b in bits], torch.device(device))


def path_tokens(
    draft_tokens: torch.Tensor,
    parents: torch.Tensor | None = None,
    depths: torch.Tensor | None = None,
    max_depth: int | None = None,
) -> torch.Tensor:
    """Drafted tokens on the way from the root to each node, the node's own included: what a penalty must count.

    Returns [b, m + 1, max_depth] int64, in order of depth, padded with -1 (the root's line is all -1).
    """
    b, m = draft_tokens.shape
    device = draft_tokens.device
    depth = m if max_depth is None else max_depth
    if parents is None:
        columns = torch.arange(depth, device=device)
        line = torch.nn.functional.pad(draft_tokens[:, :depth], (0, max(0, depth - m)), value=-1)
        seen = columns < torch.arange(m + 1, device=device)[:, None]
        return torch.where(seen, line[:, None, :], -1)
    zero = torch.zeros(b, 1, dtype=torch.int64, device=device)
    token_of = torch.cat([zero - 1, draft_tokens], dim=1)
    parent_of = torch.cat([zero, parents], dim=1)
    depth_of = torch.cat([zero, _depths(parents, depth) if depths is None else depths], dim=1)
    node = torch.arange(m + 1, device=device).expand(b, m + 1)
    paths = torch.full((b, m + 1, depth + 1), -1, dtype=torch.int64, device=device)  # last column: bin for the root
    for _ in range(depth):
        at = depth_of.gather(1, node)
        index = torch.where(at > 0, (at - 1).clamp(max=depth), depth)
        paths.scatter_(2, index[:, :, None], token_of.gather(1, node)[:, :, None])
        node = parent_of.gather(1, node)
    return paths[:, :, :depth]


def _depths(parents: torch.Tensor, max_depth: int) -> torch.Tensor:
    """[b, m] depth of every column (1 = child of the root)."""
    depth = torch.ones_like(parents)
    parent_of = torch.cat([torch.zeros_like(parents[:, :1]), parents], dim=1)
    node = parents
    for _ in range(max_depth - 1):
        depth = depth + (node > 0)
        node = parent_of.gather(1, node)
    return depth


def compact_kv(
    kv: KVView, rows: torch.Tensor, kv_start: torch.Tensor, accept_nodes: torch.Tensor, pools: Sequence[str]
) -> None:
    """Move the KV of an accepted tree path to the front: slot kv_start + accept_nodes[:, j] -> kv_start + j.

    rows [b], kv_start [b], accept_nodes [b, w] as `accept` returns them; pools: "full" and/or "swa" (sparse layers
    always go along). In place, all layers of a page at once. Columns after the accepted run copy the last accepted
    slot into reject space.
    """
    if accept_nodes.shape[1] < 2:
        return
    source = kv_start[:, None] + accept_nodes[:, 1:]
    steps = torch.arange(1, accept_nodes.shape[1], device=accept_nodes.device)
    target = kv_start[:, None] + steps
    for name in pools:
        tensor, table = kv.pool(name)
        lines = table[rows].to(torch.int64)
        source_page, source_off = _locate(lines, source, kv.page_size)
        target_page, target_off = _locate(lines, target, kv.page_size)
        moved = tensor[source_page, :, :, :, source_off]
        tensor[target_page, :, :, :, target_off] = moved
    if kv.sparse is not None:
        _compact_slots(kv.sparse, rows, source, target)


def _compact_slots(view: SparseView, rows: torch.Tensor, source: torch.Tensor, target: torch.Tensor) -> None:
    """The same inside the slots of sparse layers, where every layer has places of its own: tokens [b, w]."""
    last, p = view.slot_map.shape[2] - 1, view.page_size
    for layer in range(view.num_layers):
        from_slot, _ = locate(view, layer, rows[:, None], (source // p).clamp(max=last))
        to_slot, _ = locate(view, layer, rows[:, None], (target // p).clamp(max=last))
        slots = view.slots[:, layer]
        slots[to_slot, :, :, target % p] = slots[from_slot, :, :, source % p]


def _locate(lines: torch.Tensor, slots: torch.Tensor, page_size: int) -> tuple[torch.Tensor, torch.Tensor]:
    """(page id, offset) of slots [b, w] in table lines [b, width]."""
    column = (slots // page_size).clamp(max=lines.shape[1] - 1)
    return lines.gather(1, column), slots % page_size
