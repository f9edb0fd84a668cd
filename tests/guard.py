"""Fails a test when code inside `no_device_sync()` would make the host wait for the device.

Works on a CPU-only machine: a dispatch mode sees the operations that read values, and patched `Tensor` methods see
those that dispatch never shows on a CPU (`tolist`, `numpy`, `data_ptr`, `.to` another device, truth values).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest.mock import patch

import torch
from torch.utils._python_dispatch import TorchDispatchMode

BANNED_OPS = (
    "_local_scalar_dense",
    "nonzero",
    "nonzero_static",
    "unique_consecutive",
    "unique_dim",
    "_unique",
    "_unique2",
    "masked_select",
    "is_nonzero",
    "equal",
    "bincount",
)
BANNED_METHODS = ("item", "tolist", "numpy", "cpu", "data_ptr", "__array__", "__dlpack__", "__bool__", "__int__",
                  "__float__", "__index__", "nonzero", "unique")  # fmt: skip


class DeviceSync(AssertionError):
    """The launch path waited for the device."""


class _Dispatch(TorchDispatchMode):
    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func.overloadpacket.__name__
        if name in BANNED_OPS:
            raise DeviceSync(f"{name} reads device values")
        if name in ("index", "index_put", "index_put_") and any(
            isinstance(i, torch.Tensor) and i.dtype in (torch.bool, torch.uint8) for i in args[1] or ()
        ):
            raise DeviceSync(f"{name} with a boolean index")
        if name == "repeat_interleave" and (kwargs or {}).get("output_size") is None:
            raise DeviceSync("repeat_interleave without output_size")
        return func(*args, **(kwargs or {}))


def _banned(name: str) -> Callable[..., Any]:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        raise DeviceSync(f"Tensor.{name} on the launch path")

    return method


def _to(real: Callable[..., Any]) -> Callable[..., Any]:
    def method(self: torch.Tensor, *args: Any, **kwargs: Any) -> Any:
        target = [a for a in (*args, kwargs.get("device")) if isinstance(a, (str, torch.device))]
        if target and not kwargs.get("non_blocking"):
            raise DeviceSync(f"Tensor.to({target[0]}) blocks")
        return real(self, *args, **kwargs)

    return method


@contextmanager
def no_device_sync() -> Iterator[None]:
    """Raises DeviceSync when the code inside would synchronise with the device."""
    with ExitStack() as stack:
        for name in BANNED_METHODS:
            stack.enter_context(patch.object(torch.Tensor, name, _banned(name)))
        stack.enter_context(patch.object(torch.Tensor, "to", _to(torch.Tensor.to)))
        stack.enter_context(_Dispatch())
        yield
