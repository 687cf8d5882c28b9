"""Where parameters and optimizer state lie when they are not on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from functools import cached_property

import torch

from ...base.errors import PlanError
from ..target.accelerator import Lanes, has_streams, lanes_for
from ..target.host_resident import resident_for
from ..trace.op_seconds import transfer_speeds
from .copies import CopyEngine, HostBuffer

# torch rounds pinned memory up to a power of two, so it is asked for in such pieces.
_SLAB = 1 << 26
# As the device's own allocator aligns.
_ALIGNMENT = 512
# Elements that are copied to measure the link, as many as the trace of a step takes.
_PROBE = 1 << 24


class StateBuffers(ABC):
    """The host memory of parameters and optimizer state: a buffer for each tensor.

    Attributes
    ----------
    device
        Where ops run on what lies here.
    where
        What it is, in words.
    """

    device: torch.device
    where: str

    def __init__(self) -> None:
        self._buffers: dict[int, HostBuffer] = {}
        self._speeds: tuple[float, float] | None = None

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """What is reserved."""

    @abstractmethod
    def lanes(self) -> Lanes:
        """Return what copies between here and the device."""

    @cached_property
    def engine(self) -> CopyEngine:
        """What starts these copies."""
        return CopyEngine(self.device, self.lanes())

    def updater(self, nbytes: int) -> str:
        """Return who updates so many bytes of parameters, gradients and state; see `with_state`."""
        return "device"

    def speeds(self) -> tuple[float, float]:
        """Return bytes per second (to the host, back), measured once."""
        if self._speeds is None:
            self._speeds = self._measure()
        return self._speeds

    @abstractmethod
    def _measure(self) -> tuple[float, float]: ...

    @abstractmethod
    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a block of bytes, a storage of its own."""

    @abstractmethod
    def let_go(self) -> None:
        """Take no memory of the process for what lies here, if that can be, until it is read."""

    @property
    def blocks(self) -> list[torch.Tensor]:
        """All that lies here, as bytes."""
        return [it.block for it in self._buffers.values()]

    def empty_like(self, tensor: torch.Tensor) -> torch.Tensor:
        """Return a tensor here in the form of a dense one, which is not read."""
        block = self.allocate(tensor.numel() * tensor.element_size())
        self._buffers[block.data_ptr()] = HostBuffer(block)
        return torch.empty(0, dtype=tensor.dtype).set_(
            block.untyped_storage(), 0, tensor.size(), tensor.stride()
        )

    def buffer_of(self, tensor: torch.Tensor) -> HostBuffer | None:
        """Return where a tensor lies; None if it is not here."""
        try:
            return self._buffers.get(tensor.data_ptr())
        except RuntimeError:  # no memory, as on the meta device
            return None

    def finish(self) -> None:
        """Wait until all that was written has arrived: from now on the program may read it."""
        for buffer in self._buffers.values():
            self.engine.finish(buffer)

    def hold(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move the parameters of a model to the host; of one on the meta device, make them there.

        Those of a meta model are zeros: initialise or load them afterwards, module by module. So a
        model is made that fits nowhere else. Its buffers become zeros on the device.

        Raises
        ------
        PlanError
            For a buffer on the meta device that no state dict has: nothing would load it.
        """
        _materialize_buffers(model, self.device)
        for parameter in dict.fromkeys(model.parameters()):
            self.move_here(parameter)
        return model

    def move_here(self, parameter: torch.nn.Parameter) -> None:
        """Move one parameter to the host, if it is not there."""
        if self.buffer_of(parameter) is not None:
            return
        moved = self.empty_like(parameter)
        if not parameter.is_meta:
            with torch.no_grad():
                moved.copy_(parameter)
        set_memory(parameter, moved)


def _materialize_buffers(model: torch.nn.Module, device: torch.device) -> None:
    """Make the buffers of a model that are on the meta device: zeros, the same where they were."""
    missing = [
        (f"{path}.{name}" if path else name, module, name, buffer)
        for path, module in model.named_modules()
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False)
        if buffer.is_meta
    ]
    for path, module, name, _ in missing:
        if name in module._non_persistent_buffers_set:
            raise PlanError(
                f"the buffer {path!r} is on the meta device and in no state dict, so that nothing "
                "would load it. Give its module a real one before (register_buffer again), as the "
                "module computes it when it is made."
            )
    real: dict[int, torch.Tensor] = {}
    for _, module, name, buffer in missing:
        module._buffers[name] = real.setdefault(id(buffer), torch.zeros_like(buffer, device=device))


def set_memory(parameter: torch.nn.Parameter, tensor: torch.Tensor) -> None:
    """Let a parameter, the same object, be what another tensor is; its gradient goes with it."""
    gradient, parameter.grad = parameter.grad, None
    if torch._has_compatible_shallow_copy_type(parameter, tensor):
        parameter.data = tensor
    else:
        # Between devices that torch does not know as its own, and from the meta device.
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(tensor, parameter.requires_grad))
    if gradient is not None:
        parameter.grad = gradient.to(tensor.device)


class PinnedState(StateBuffers):
    """State in pinned memory of the host, for a model on a device with memory of its own.

    What an op needs is copied to the device and back on streams beside the ops. A tensor here is
    one of the CPU: who reads it after the backward pass or the optimizer's step sees its values.

    Parameters
    ----------
    device
        Where the model's ops run, as `"cuda"`.
    """

    def __init__(self, device: torch.device | str) -> None:
        super().__init__()
        # With its number, as tensors say it.
        self.device = torch.empty(0, device=torch.device(device)).device
        if not has_streams(self.device):
            raise ValueError(
                f"got device {str(device)!r}, expected one with memory and streams of its own, as "
                "'cuda'. On the CPU state lies in a file: HostState."
            )
        self.where = f"pinned memory for {self.device}"
        self._slabs: list[tuple[torch.Tensor, int]] = []
        resident_for(self, self.device)

    @property
    def nbytes(self) -> int:
        """What is reserved."""
        return sum(slab.nbytes for slab, _ in self._slabs)

    def lanes(self) -> Lanes:
        """Return the streams of copies."""
        return lanes_for(self.device)

    def _measure(self) -> tuple[float, float]:
        return transfer_speeds(torch.ones(_PROBE, device=self.device))

    def let_go(self) -> None:
        """Nothing: pinned memory is taken for good."""

    def allocate(self, nbytes: int) -> torch.Tensor:
        """Return a block of pinned memory, of zeros."""
        wanted = -(-max(nbytes, 1) // _ALIGNMENT) * _ALIGNMENT
        fits = (at for at, (slab, end) in enumerate(self._slabs) if slab.nbytes - end >= wanted)
        at = next(fits, len(self._slabs))
        if at == len(self._slabs):
            size = max(_SLAB, 1 << (wanted - 1).bit_length())
            self._slabs.append((torch.zeros(size, dtype=torch.uint8, pin_memory=True), 0))
        slab, begin = self._slabs[at]
        self._slabs[at] = (slab, begin + wanted)
        memory = memoryview(slab.numpy())
        # A storage of its own, which holds the slab.
        return torch.frombuffer(memory, dtype=torch.uint8, count=max(nbytes, 1), offset=begin)[
            :nbytes
        ]
