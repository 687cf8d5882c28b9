"""A device with memory of its own, through `torch.cuda`, `torch.xpu` and their like; its streams.

These modules have the same names for the same things, so no caller asks which one it is; what only
CUDA has (its caching allocator's rounding, cuDNN) is asked for by name where it is used.

A copy on the stream of the ops delays them; a synchronisation stops the program. On a GPU each
direction has a stream of its own: a copy waits, on the device, for what was queued before it, and
ops wait, on the device, for the copy they need. On the CPU a copy is done when it is asked for.

A parameter whose state is planned may lie in pinned memory: a tensor of the CPU, whose ops run on a
device. Who traces a model asks `working_device` on which.
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

# Those whose memory is the host's, or nowhere.
_ON_HOST = ("cpu", "meta", "mkldnn", "mps")

# Who counts the memory of a type of device in the place of torch's module; see allocator.py.
COUNTED: dict[str, Any] = {}


def is_apart(device: torch.device) -> bool:
    """Whether a device has memory beside the host's."""
    return device.type not in _ON_HOST and hasattr(torch, device.type)


def module_of(device: torch.device) -> Any:
    """Return torch's module of a device that is apart."""
    return getattr(torch, device.type)


def memory_of(device: torch.device) -> Any:
    """Return who counts the memory of a device that is apart, with the functions of its module."""
    return COUNTED.get(device.type) or module_of(device)


def has_streams(device: torch.device) -> bool:
    """Whether copies may run on streams of their own beside the ops of a device."""
    return is_apart(device) and hasattr(module_of(device), "Stream")


def synchronize(device: torch.device) -> None:
    """Wait until a device has done what it was asked for."""
    if is_apart(device):
        module_of(device).synchronize(device)


def now(device: torch.device) -> float:
    """Return the seconds of a clock, once all before is done."""
    synchronize(device)
    return time.perf_counter()


def rng_state(device: torch.device) -> torch.Tensor:
    """Return the state of a device's random number generator."""
    if is_apart(device):
        state: torch.Tensor = module_of(device).get_rng_state(device)
        return state
    # By an op, which is seen where storages are counted.
    return torch.get_rng_state().detach()


def set_rng_state(device: torch.device, state: torch.Tensor) -> None:
    """Set the state of a device's random number generator."""
    if is_apart(device):
        module_of(device).set_rng_state(state, device)
    else:
        torch.set_rng_state(state)


def free_bytes(device: torch.device) -> int | None:
    """Return what tensors may still take on a device that is apart; None if it does not say."""
    module = module_of(device)
    if not hasattr(module, "mem_get_info"):
        return None
    memory = memory_of(device)
    # What the allocator keeps for later is free for tensors, and in use to the driver.
    kept = memory.memory_reserved(device) - memory.memory_allocated(device)
    return int(module.mem_get_info(device)[0] + kept)


def device_types() -> tuple[str, ...]:
    """Return the types of devices that may be apart; cheap, as it is asked in each step."""
    return "cuda", "xpu", torch._C._get_privateuse1_backend_name()


def in_use() -> list[str]:
    """Return those of them that this process has begun to use."""
    # Asked of each module, as a call of most others would begin to use the device.
    has_begun = {
        kind: getattr(getattr(torch, kind, None), "is_initialized", None) for kind in device_types()
    }
    return [kind for kind, test in has_begun.items() if test is not None and test()]


# What a copy gives back to wait for.
Ticket = Any


class Lanes:
    """Two lanes between a device and the host; these copy at once, for the CPU, where both are one.

    A copy may run at any time between what it is said to come after and the `wait` for its ticket.
    Neither lane needs to keep an order of its own.
    """

    def leave(self, here: torch.Tensor, host: torch.Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Copy from the device to the host, after all ops so far and the copies of `after`."""
        host.copy_(here)

    def arrive(self, host: torch.Tensor, here: torch.Tensor, after: Ticket) -> Ticket:
        """Copy back into new memory, after the copy that `after` stands for; None: after none."""
        here.copy_(host)

    def wait(self, ticket: Ticket) -> None:
        """Let ops from now on wait for a copy; the program does not."""

    def finish(self, ticket: Ticket) -> None:
        """Let the program wait for a copy."""


class StreamLanes(Lanes):
    """A stream for each direction, of a device that has streams."""

    def __init__(self, device: torch.device) -> None:
        self.device, self.of = device, module_of(device)
        self.out, self.back = self.of.Stream(device), self.of.Stream(device)

    def leave(self, here: torch.Tensor, host: torch.Tensor, after: Sequence[Ticket] = ()) -> Ticket:
        """Queue the copy behind the ops so far, and behind those that read its place before."""
        self.out.wait_event(self.of.current_stream(self.device).record_event())
        # The host's memory may still be read by a copy of what lay there before.
        for ticket in after:
            self.out.wait_event(ticket)
        with self.of.stream(self.out):
            host.copy_(here, non_blocking=True)
        return self.out.record_event()

    def arrive(self, host: torch.Tensor, here: torch.Tensor, after: Ticket) -> Ticket:
        """Queue the copy behind its way out, and behind ops that used this memory before."""
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
    """Return streams where a device has them, copies that are done when asked for elsewhere."""
    return StreamLanes(device) if has_streams(device) else Lanes()


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
        # A property: of the tensor, and so of where it lies, but for the device it works on.
        if getattr(func, "__name__", "") == "__get__":
            owner = getattr(func, "__self__", None)
            if owner is torch.Tensor.device and self.buffers.buffer_of(args[0]) is not None:
                return self.device
            return func(*args, **(kwargs or {}))
        args, kwargs = tree_map_only(torch.Tensor, self._to_device, (args, kwargs or {}))
        return func(*args, **kwargs)

    def _to_device(self, tensor: torch.Tensor) -> torch.Tensor:
        if tensor.device.type == "cpu" and self.buffers.buffer_of(tensor) is not None:
            # Ops on the same stream come after the copy; the program need not wait.
            return tensor.to(self.device, non_blocking=True)
        return tensor
