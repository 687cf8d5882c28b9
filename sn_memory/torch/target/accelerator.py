"""Devices with their own memory, through `torch.cuda`, `torch.xpu` and similar; their streams.

These modules share an API, so callers need not know which one it is; features of CUDA alone (its
caching allocator's rounding, cuDNN) are checked by name where they are used.

A copy on the stream of the ops delays them; a synchronization blocks the program. On a GPU each
direction has its own stream: a copy waits, on the device, for what was queued before it, and ops
wait, on the device, for the copy they need. On the CPU copies are synchronous.

A parameter whose state is planned may be in pinned memory: a CPU tensor whose ops run on a device.
`working_device` returns that device.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any, Protocol
from weakref import WeakKeyDictionary

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_map_only

# Device types that use the host's memory, or none.
_ON_HOST = ("cpu", "meta", "mkldnn", "mps")

# Replacement for torch's module in counting the memory of a type of device; see allocator.py.
COUNTED: dict[str, Any] = {}


def is_apart(device: torch.device) -> bool:
    """Whether a device has its own memory, apart from the host's."""
    return device.type not in _ON_HOST and hasattr(torch, device.type)


def module_of(device: torch.device) -> Any:
    """Return torch's module of a device that is apart."""
    return getattr(torch, device.type)


def memory_of(device: torch.device) -> Any:
    """Return the object with the memory counters of a device that is apart, like its module's."""
    return COUNTED.get(device.type) or module_of(device)


def has_streams(device: torch.device) -> bool:
    """Whether copies may run on separate streams, concurrently with a device's ops."""
    return is_apart(device) and hasattr(module_of(device), "Stream")


def synchronize(device: torch.device) -> None:
    """Wait until a device has finished all queued work."""
    if is_apart(device):
        module_of(device).synchronize(device)


def now(device: torch.device) -> float:
    """Synchronize, then return the time in seconds."""
    synchronize(device)
    return time.perf_counter()


def rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's random number generator."""
    if is_apart(device):
        state: torch.Tensor = module_of(device).get_rng_state(device)
        return state
    # `detach` is an op, so trackers of storages see this tensor.
    return torch.get_rng_state().detach()


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of a device's random number generator."""
    if is_apart(device):
        module_of(device).set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def free_bytes(device: torch.device) -> int | None:
    """Return the bytes still available to tensors on a device that is apart; None if unknown."""
    module = module_of(device)
    if not hasattr(module, "mem_get_info"):
        return None
    memory = memory_of(device)
    # Memory that the allocator caches is free for tensors, but in use for the driver.
    kept = memory.memory_reserved(device) - memory.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + kept)


def device_types() -> tuple[str, ...]:
    """Return the types of devices that may be apart; cheap, as it is called in each step."""
    return "cuda", "xpu", torch._C._get_privateuse1_backend_name()


def in_use() -> list[str]:
    """Return the device types that this process has initialized."""
    # By `is_initialized`, as most other calls would initialize the device.
    has_begun = {
        kind: getattr(getattr(torch, kind, None), "is_initialized", None) for kind in device_types()
    }
    return [kind for kind, test in has_begun.items() if test is not None and test()]


# Returned by a copy, to wait for it.
Ticket = Any


class Lanes:
    """Two lanes between a device and the host; this class copies synchronously, for the CPU.

    A copy may run at any time between its stated dependencies and the `wait` for its ticket.
    Neither lane needs to keep the order of its copies.
    """

    def leave(self, here: torch.Tensor, host: torch.Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Copy from the device to the host, after all ops so far and the copies of `after`."""
        host.copy_(here)

    def arrive(self, host: torch.Tensor, here: torch.Tensor, after: Ticket) -> Ticket:
        """Copy back into new memory, after the copy whose ticket is `after`, if not None."""
        here.copy_(host)

    def wait(self, ticket: Ticket) -> None:
        """Make later ops wait for a copy, without blocking the program."""

    def finish(self, ticket: Ticket) -> None:
        """Block the program until a copy is done."""


class StreamLanes(Lanes):
    """A stream per direction, for a device that has streams."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.of = device, module_of(device)
        self.out, self.back = self.of.Stream(device), self.of.Stream(device)

    def leave(self, here: torch.Tensor, host: torch.Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Queue the copy after all ops so far, and after the copies that read its buffer before."""
        self.out.wait_event(self.of.current_stream(self.device).record_event())
        # A copy of the buffer's previous contents may still be reading it.
        for ticket in after:
            self.out.wait_event(ticket)
        with self.of.stream(self.out):
            host.copy_(here, non_blocking=True)
        return self.out.record_event()

    def arrive(self, host: torch.Tensor, here: torch.Tensor, after: Ticket) -> Ticket:
        """Queue the copy after the copy out, and after ops that used this memory before."""
        if after is not None:
            self.back.wait_event(after)
        self.back.wait_event(self.of.current_stream(self.device).record_event())
        with self.of.stream(self.back):
            here.copy_(host, non_blocking=True)
        return self.back.record_event()

    def wait(self, ticket: Ticket) -> None:
        self.of.current_stream(self.device).wait_event(ticket)

    def finish(self, ticket: Ticket) -> None:
        ticket.synchronize()


def lanes_for(device: torch.device) -> Lanes:
    """Return lanes with streams if a device has them, else synchronous ones."""
    return StreamLanes(device) if has_streams(device) else Lanes()


class Buffers(Protocol):
    """Host memory that can look up its tensors."""

    def buffer_of(self, tensor: torch.Tensor) -> Any: ...


_DEVICE = torch.ops.prim.device.default
_devices: WeakKeyDictionary[Buffers, torch.device] = WeakKeyDictionary()


def resident_for(buffers: Buffers, device: torch.device) -> None:
    """Register the device on which ops on the tensors in these buffers run."""
    _devices[buffers] = device


def working_device(tensor: torch.Tensor) -> torch.device:
    """Return the device on which ops on a tensor run: its own, or the one it is copied to."""
    if tensor.device.type != "cpu" or isinstance(tensor, FakeTensor):
        return tensor.device
    for buffers, device in _devices.items():
        if buffers.buffer_of(tensor) is not None:
            return device
    return tensor.device


def asked_for_device(func: Any, args: tuple[Any, ...]) -> torch.device | None:
    """Return the device if a call only queries that of a fake tensor; None for other calls.

    Autograd makes six such queries per op, which each mode would pass on. The first mode may answer
    them in place of the fake tensor mode.
    """
    if func is not _DEVICE or not isinstance(args[0], FakeTensor):
        return None
    kernel = args[0].fake_mode.in_kernel_invocation
    return torch.device("meta") if kernel else args[0].fake_device


class OnDeviceMode(TorchFunctionMode):
    """Copies host-resident tensors to the device for each call, e.g. when a model is evaluated.

    Nothing is cached: a parameter that two calls read is copied twice.
    """

    def __init__(self, buffers: Buffers, device: torch.device) -> None:
        super().__init__()
        self.buffers, self.device = buffers, device

    def __torch_function__(
        self, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Call with copies on the device; properties are read from the tensor itself."""
        # A property of the host tensor, except `device`: that is the one on which its ops run.
        if getattr(func, "__name__", "") == "__get__":
            owner = getattr(func, "__self__", None)
            if owner is torch.Tensor.device and self.buffers.buffer_of(args[0]) is not None:
                return self.device
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(torch.Tensor, self._to_device, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and self.buffers.buffer_of(tensor) is not None:
            # Ops on the same stream run after the copy; the program need not wait.
            return tensor.to(self.device, non_blocking=True)
        return tensor
