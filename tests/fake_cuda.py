"""Run code on a CUDA device that is not there: shapes, devices and host reads are checked, nothing is computed.

`FakeTensorMode` alone stops at Python's indexing sugar and at `.to` on a build of torch without CUDA, because both
ask for a device guard first. Here the same calls go to the operations behind the sugar. A host read
(`.item()`, `nonzero`, a boolean index) raises, and so do mixed devices.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode

aten = torch.ops.aten
_CASTS = {
    torch.Tensor.long: torch.int64,
    torch.Tensor.int: torch.int32,
    torch.Tensor.bool: torch.bool,
    torch.Tensor.float: torch.float32,
    torch.Tensor.double: torch.float64,
    torch.Tensor.half: torch.float16,
    torch.Tensor.bfloat16: torch.bfloat16,
}


def _select(x: torch.Tensor, index: Any) -> tuple[torch.Tensor, list[torch.Tensor | None]]:
    """Apply the parts of an index that are views; return the rest as tensors per dimension."""
    parts = list(index) if isinstance(index, tuple) else [index]
    if Ellipsis in [p for p in parts if not isinstance(p, torch.Tensor)]:
        at = next(i for i, p in enumerate(parts) if p is Ellipsis)
        used = sum(1 for p in parts if p is not None and p is not Ellipsis)
        parts[at : at + 1] = [slice(None)] * (x.dim() - used)
    tensors: list[torch.Tensor | None] = []
    dim = 0
    for part in parts:
        if isinstance(part, torch.Tensor):
            tensors.append(part)
            dim += 1
        elif part is None:
            x = x.unsqueeze(dim)
            tensors.append(None)
            dim += 1
        elif isinstance(part, slice):
            x = aten.slice.Tensor(x, dim, part.start, part.stop, part.step or 1)
            tensors.append(None)
            dim += 1
        else:
            x = x.select(dim, part)
    return x, tensors


class _WithoutDeviceGuard(TorchFunctionMode):
    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func is torch.Tensor.__getitem__:
            x, tensors = _select(args[0], args[1])
            return aten.index.Tensor(x, tensors) if any(t is not None for t in tensors) else x
        if func is torch.Tensor.__setitem__:
            x, tensors = _select(args[0], args[1])
            value = args[2]
            if any(t is not None for t in tensors):
                return aten.index_put_(x, tensors, value)
            if isinstance(value, torch.Tensor):
                return aten.copy_(x, value.expand(x.shape))
            return aten.fill_(x, value)
        if func is torch.Tensor.to:
            device = kwargs.get("device")
            dtype = kwargs.get("dtype")
            for arg in args[1:]:
                if isinstance(arg, torch.dtype):
                    dtype = arg
                elif isinstance(arg, (str, torch.device)):
                    device = torch.device(arg)
            return aten._to_copy(
                args[0],
                device=device or args[0].device,
                dtype=dtype or args[0].dtype,
                memory_format=kwargs.get("memory_format"),
            )
        if func is torch.Tensor.index_put_:
            return aten.index_put_(args[0], list(args[1]), args[2])
        if func is torch.Tensor.__invert__:
            return aten.bitwise_not(args[0])
        if func is torch.Tensor.contiguous:
            return aten.clone(args[0], memory_format=torch.contiguous_format)
        if func is torch.Tensor.copy_:
            return aten.copy_(args[0], args[1])
        if func in _CASTS:
            return aten._to_copy(args[0], dtype=_CASTS[func])
        return func(*args, **kwargs)


@contextmanager
def fake_cuda() -> Iterator[torch.device]:
    """Inside, tensors made on the yielded device have shapes and a device, and no values."""
    with FakeTensorMode(allow_non_fake_inputs=True), _WithoutDeviceGuard():
        yield torch.device("cuda")
