"""Handing the state of sparse rows to the compiled module: checked and bound once per view."""

from __future__ import annotations

import ctypes

import torch

from octavo.ops import native_lib as nl
from octavo.ops.meta import SparseView


class SparseBinding:
    """The `octavo_sparse` of the view seen last; the structure stays where it is while that view is used."""

    def __init__(self) -> None:
        self._view: SparseView | None = None
        self._struct = nl.Sparse()
        self._host_layers = nl.int64_array([0])

    def bind(self, view: SparseView, decodes: int, shape: tuple[int, int], layers: int) -> int:
        """Address of the structure for a step with `decodes` decoding sequences.

        shape: (kv_heads, head_dim) of the program's sparse layers; layers: how many it has. Raises ValueError where
        the view does not fit them or is of a kind that compiled code cannot read.
        """
        if view is not self._view:
            check_view(view, shape, layers)
            self._fill(view)
            self._view = view
        self._struct.decodes = decodes
        return ctypes.addressof(self._struct)

    def _fill(self, view: SparseView) -> None:
        self._host_layers = nl.int64_array(list(view.host_layers))
        tensors = {name: getattr(view, name).data_ptr() for name in _TENSORS}
        self._struct = nl.Sparse(
            **tensors,
            host_layer=ctypes.addressof(self._host_layers),
            counts=view.counts.data_ptr(),
            slot_count=view.slots.shape[0] - 1,
            host_pages=view.host.shape[0] - 1,
            layers=view.num_layers,
            host_page_layers=view.host.shape[1],
            rows=view.slot_map.shape[1],
            width=view.slot_map.shape[2],
            device_pages=view.device_pages,
            topk_pages=view.topk_pages,
            recent_tokens=view.recent_tokens,
            dense_limit_tokens=view.dense_limit_tokens,
        )


_TENSORS = ("slots", "host", "bounds", "row_slots", "host_table", "backed", "slot_map", "column_of", "order")


def check_view(view: SparseView, shape: tuple[int, int], layers: int) -> None:
    """Shapes, types and memory layout of a view, against a program's sparse layers."""
    want = (2, shape[0], view.page_size, shape[1])
    for name in ("slots", "host"):
        pages = getattr(view, name)
        if tuple(pages.shape[2:]) != want:
            raise ValueError(f"{name} of shape {tuple(pages.shape)}: sparse layers need [*, *, {want}]")
        if pages.dtype not in (torch.float32, torch.bfloat16) or pages.dtype != view.slots.dtype:
            raise ValueError(f"{name} of type {pages.dtype}: slots and host tier must both be float32 or bfloat16")
    if view.num_layers < layers or len(view.host_layers) != view.num_layers:
        raise ValueError(f"{view.num_layers} sparse layers in the slots, the program has {layers}")
    if view.selector is not None:
        raise ValueError("the compiled operations know page bounds only: a selector of one's own runs in torch")
    for name in _TENSORS:
        if not getattr(view, name).is_contiguous():
            raise ValueError(f"{name} must be contiguous")
    for name in _TENSORS[3:]:
        if getattr(view, name).dtype != torch.int32:
            raise ValueError(f"{name} must be int32")
    if view.bounds.dtype != torch.float32 or view.bounds.shape[:2] != (view.num_layers, view.host.shape[0]):
        raise ValueError(f"bounds must be float32 [{view.num_layers}, {view.host.shape[0]}, …]")
