"""Host-resident tensors whose ops run on another device: on which, and how they get there.

A parameter whose state is planned may lie in pinned memory: it is a tensor of the CPU, and its ops
run on a device. Who traces a model asks here on which.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only


class Buffers(Protocol):
    """Host memory that knows its tensors."""

    def buffer_of(self, tensor: torch.Tensor) -> Any: ...


_DEVICE = torch.ops.prim.device.default
_devices: WeakKeyDictionary[Buffers, torch.device] = WeakKeyDictionary()


def resident_for(buffers: Buffers, device: torch.device) -> None:
    """Note that ops on the tensors in these buffers run on a device."""
    _devices[buffers] = device


def working_device(tensor: torch.Tensor) -> torch.device:
    """Return where ops on a tensor run: where it is, or where it is copied for them."""
    if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
        return tensor.device
    for buffers, device in _devices.items():
        if buffers.buffer_of(tensor) is not None:
            return device
    return tensor.device


def asked_for_device(func: Any, args: tuple[Any, ...]) -> torch.device | None:
    """Return the answer where a call only asks a fake tensor for its device; None for other calls.

    Autograd asks so six times an op that it runs, and each mode would pass the question on. The
    mode that comes first may answer it, as the one of fake tensors does.
    """
    if func is not _DEVICE or not isinstance(args[0], FakeTensor):
        return None
    kernel = args[0].fake_mode.in_kernel_invocation
    return torch.device("meta") if kernel else args[0].fake_device


class OnDeviceMode(TorchFunctionMode):
    """Copies host-resident tensors to the device for each call, as where a model is evaluated.

    Nothing is kept: a parameter that two calls read is copied twice.
    """

    def __init__(self, buffers: Buffers, device: torch.device) -> None:
        super().__init__()
        self.buffers, self.device = buffers, device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call with copies on the device; what is only asked of a tensor is asked of itself."""
        if getattr(func, "__name__", "") == "__get__":
            owner = getattr(func, "__self__", None)
            if owner is torch.Tensor.device and self.buffers.buffer_of(args[0]) is not None:
                return self.device
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(torch.Tensor, self._to_device, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and self.buffers.buffer_of(tensor) is not None:
            return tensor.to(self.device, non_blocking=True)
        return tensor
