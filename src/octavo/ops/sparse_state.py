"""Making and moving the device state of sparse rows: what the engine does between steps.

Every function works in place, on whole lists of (row, column) pairs or rows that the host knows, and reads no device
value on the host. Callers keep the books: which pages, when, and that no launched step still uses them (law 14).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from octavo.ops.meta import KVView, PageSelector, SparseView


def new_sparse_view(
    *,
    sparse_layers: int,
    host_layers: Sequence[int],
    dense_host_layers: Sequence[int] = (),
    slots: int,
    host: torch.Tensor,
    max_rows: int,
    width_pages: int,
    device_pages: int,
    topk_pages: int,
    recent_tokens: int,
    footprint_tokens: int,
    dense_limit_tokens: int,
    selector: PageSelector | None = None,
    device: torch.device | str = "cpu",
) -> SparseView:
    """Empty state beside a host tier `host` [host_pages + 1, layers, 2, kv_heads, page_size, head_dim]."""
    if len(host_layers) != sparse_layers:
        raise ValueError(f"host_layers: {len(host_layers)} for {sparse_layers} sparse layers")
    pages, _, _, kv_heads, page_size, head_dim = host.shape

    def state(*shape: int) -> torch.Tensor:
        return torch.full(shape, -1, dtype=torch.int32, device=device)

    order = torch.arange(device_pages, dtype=torch.int32, device=device)
    return SparseView(
        slots=torch.zeros(slots + 1, sparse_layers, 2, kv_heads, page_size, head_dim, dtype=host.dtype, device=device),
        host=host,
        bounds=torch.zeros(sparse_layers, pages, 2, kv_heads, head_dim, dtype=torch.float32, device=device),
        row_slots=state(max_rows, device_pages),
        host_table=state(max_rows, width_pages),
        slot_map=state(sparse_layers, max_rows, width_pages),
        column_of=state(sparse_layers, max_rows, device_pages),
        order=order.expand(sparse_layers, max_rows, device_pages).contiguous(),
        backed=torch.zeros(max_rows, dtype=torch.int32, device=device),
        counts=torch.zeros(3, dtype=torch.int64, device=device),
        host_layers=tuple(host_layers),
        dense_host_layers=tuple(dense_host_layers),
        page_size=page_size,
        topk_pages=topk_pages,
        recent_tokens=recent_tokens,
        footprint_tokens=footprint_tokens,
        dense_limit_tokens=dense_limit_tokens,
        selector=selector,
    )


def open_rows(view: SparseView, rows: torch.Tensor) -> None:
    """Forget what the slots of `rows` int64 [b] hold: no column mapped, order as at the start.

    Called when a row opens and when it closes; `backed`, `row_slots` and `host_table` are the host's to write.
    """
    view.slot_map.index_fill_(1, rows, -1)
    view.column_of.index_fill_(1, rows, -1)
    fresh = torch.arange(view.device_pages, dtype=torch.int32, device=view.order.device)
    view.order[:, rows] = fresh


def back_up(kv: KVView, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Copy pages (rows[i], columns[i]), int64 [m], to their host pages: sparse layers from the row's slots, dense and
    draft layers from the full pool. The pages must be complete, and not backed up before (so every layer has them)."""
    view = _sparse(kv)
    if rows.numel() == 0:
        return
    target = _or_spare(view.host_table[rows, columns], view.host)
    for layer, host_layer in enumerate(view.host_layers):
        view.host[target, host_layer] = view.slots[slots_of(view, layer, rows, columns), layer].to(view.host.device)
    if kv.full is not None and view.dense_host_layers:
        pages = _or_spare(kv.full_table[rows, columns], kv.full)
        for layer, host_layer in enumerate(view.dense_host_layers):
            view.host[target, host_layer] = kv.full[pages, layer]


def load_dense(kv: KVView, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Copy the dense and draft layers of pages (rows[i], columns[i]) from their host pages to the full pool."""
    view = _sparse(kv)
    if kv.full is None or rows.numel() == 0:
        return
    source = _or_spare(view.host_table[rows, columns], view.host)
    pages = _or_spare(kv.full_table[rows, columns], kv.full)
    for layer, host_layer in enumerate(view.dense_host_layers):
        kv.full[pages, layer] = view.host[source, host_layer]


def load_slots(kv: KVView, rows: torch.Tensor, columns: torch.Tensor) -> None:
    """Bring pages (rows[i], columns[i]) from the host tier into slots of every sparse layer.

    For rows just reset: the j-th of a row's columns, in the order given (at most device_pages), takes place j.
    """
    view = _sparse(kv)
    if rows.numel() == 0:
        return
    same = rows[:, None] == rows[None, :]
    place = torch.tril(same, diagonal=-1).sum(dim=1)  # earlier pairs of the same row
    source = _or_spare(view.host_table[rows, columns], view.host)
    target = _or_spare(view.row_slots[rows, place], view.slots)
    for layer, host_layer in enumerate(view.host_layers):
        view.slots[target, layer] = view.host[source, host_layer]
    view.slot_map[:, rows, columns] = place.to(torch.int32)
    view.column_of[:, rows, place] = columns.to(torch.int32)
    used = view.column_of[:, rows] >= 0  # empty places come first, then the loaded ones in their order
    order = torch.sort(used.to(torch.int8), dim=2, stable=True).indices
    view.order[:, rows] = order.to(torch.int32)


def slots_of(view: SparseView, layer: int, rows: torch.Tensor, columns: torch.Tensor) -> torch.Tensor:
    """int64 slot that holds a column of a row in one layer; the spare slot where none does. Shapes broadcast."""
    place = view.slot_map[layer, rows, columns].long()
    slot = view.row_slots[rows, place.clamp(min=0)].long()
    spare = view.slots.shape[0] - 1
    return torch.where((place >= 0) & (slot >= 0), slot, spare)


def summarise_host_pages(view: SparseView, pages: torch.Tensor) -> None:
    """Sums (page bounds) of complete host pages int64 [m] that arrived otherwise than through a forward pass."""
    from octavo.ops.page_selector import selector_of

    selector = selector_of(view)
    for layer, host_layer in enumerate(view.host_layers):
        view.bounds[layer, pages] = selector.summarise(layer, view.host[pages, host_layer, 0])


def _sparse(kv: KVView) -> SparseView:
    if kv.sparse is None:
        raise ValueError("this view has no sparse layers")
    return kv.sparse


def _or_spare(index: torch.Tensor, pool: torch.Tensor) -> torch.Tensor:
    """int64 index with -1 turned into the pool's last, spare entry."""
    return torch.where(index >= 0, index.long(), pool.shape[0] - 1)
