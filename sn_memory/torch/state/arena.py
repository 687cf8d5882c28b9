"""Where parameters and optimizer state lie when they are not on the device."""

from __future__ import annotations

from abc import ABC, abstractmethod
from dataclasses import dataclass

import torch

from ...base.errors import PlanError
from ..target.accelerator import Lanes, Ticket


@dataclass(eq=False)
class Place:
    """Where one tensor rests.

    Parameters
    ----------
    block
        [bytes] uint8, its bytes on the host.
    written
        The copy that changes them, as long as somebody has to wait for it.
    """

    block: torch.Tensor
    written: Ticket = None


class StateArena(ABC):
    """The host memory of parameters and optimizer state."""

    def __init__(self) -> None:
        self._places: dict[int, Place] = {}

    @property
    @abstractmethod
    def nbytes(self) -> int:
        """What is reserved."""

    @property
    @abstractmethod
    def where(self) -> str:
        """What it is, in words."""

    @property
    @abstractmethod
    def device(self) -> torch.device:
        """Where ops run on what rests here."""

    @abstractmethod
    def lanes(self) -> Lanes:
        """Return what copies between here and the device."""

    @abstractmethod
    def updater(self, nbytes: int) -> str:
        """Return who updates so many bytes of parameters, gradients and state; see `with_state`."""

    @abstractmethod
    def speeds(self) -> tuple[float, float]:
        """Return bytes per second (to the host, back), measured once."""

    @abstractmethod
    def reserved(self, size: int) -> torch.Tensor:
        """Return a block of bytes, a storage of its own."""

    @property
    def blocks(self) -> list[torch.Tensor]:
        """All that rests, as bytes."""
        return [place.block for place in self._places.values()]

    def resting(self, like: torch.Tensor) -> torch.Tensor:
        """Return a tensor at rest in the form of a dense one, which is not read."""
        block = self.reserved(like.numel() * like.element_size())
        self._places[block.data_ptr()] = Place(block)
        return torch.empty(0, dtype=like.dtype).set_(
            block.untyped_storage(), 0, like.size(), like.stride()
        )

    def place(self, tensor: torch.Tensor) -> Place | None:
        """Return where a tensor rests; None if it is none of this arena's."""
        try:
            return self._places.get(tensor.data_ptr())
        except RuntimeError:  # no memory, as on the meta device
            return None

    def finish(self) -> None:
        """Wait until all that was written has arrived: from now on the program may read it."""
        for place in self._places.values():
            if place.written is not None:
                self.lanes().finish(place.written)
                place.written = None

    @abstractmethod
    def let_go(self) -> None:
        """Take no memory of the process for what rests, if that can be, until somebody looks."""

    def hold(self, model: torch.nn.Module) -> torch.nn.Module:
        """Move the parameters of a model to the host; of one on the meta device, make them there.

        Those of a meta model are zeros: initialise or load them afterwards, module by module. So a
        model is made that fits nowhere else. Its buffers become zeros on the device.

        Raises
        ------
        PlanError
            For a buffer on the meta device that no state dict has: nothing would load it.
        """
        make_buffers(model, self.device)
        for parameter in dict.fromkeys(model.parameters()):
            self.take(parameter)
        return model

    def take(self, parameter: torch.nn.Parameter) -> Place:
        """Move one parameter to the host, if it is not there; return its place."""
        found = self.place(parameter)
        if found is not None:
            return found
        made = self.resting(parameter)
        if not parameter.is_meta:
            with torch.no_grad():
                made.copy_(parameter)
        give_memory(parameter, made)
        found = self.place(parameter)
        assert found is not None
        return found


def make_buffers(model: torch.nn.Module, device: torch.device) -> None:
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
    made: dict[int, torch.Tensor] = {}
    for _, module, name, buffer in missing:
        module._buffers[name] = made.setdefault(id(buffer), torch.zeros_like(buffer, device=device))


def give_memory(parameter: torch.nn.Parameter, made: torch.Tensor) -> None:
    """Let a parameter, the same object, be what another tensor is; its gradient goes with it."""
    gradient, parameter.grad = parameter.grad, None
    if torch._has_compatible_shallow_copy_type(parameter, made):
        parameter.data = made
    else:
        # Between devices that torch does not know as its own, and from the meta device.
        torch.utils.swap_tensors(parameter, torch.nn.Parameter(made, parameter.requires_grad))
    if gradient is not None:
        parameter.grad = gradient.to(made.device)
