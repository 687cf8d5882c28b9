"""A parameter with its optimizer state, wherever they are: fetched, updated, stored."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import torch

from ...base.errors import PlanError
from ..target.accelerator import Ticket
from ..target.host_resident import working_device
from ..trace.record import View
from .arena import Place, StateArena, give_memory
from .optimizer import moves, updated
from .stepping import UsedUp


class Brought(NamedTuple):
    """What an update works on, on the device."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, Any]


class Owned:
    """One parameter of a planned model.

    Parameters
    ----------
    name
        Its path.
    parameter
        The model's.
    place
        `device`, `state` or `host`; see `graph/hosted.py`.
    arena
        Where what moves rests.
    optimizer, group
        Who updates it, and with which settings; None for a parameter that is not trained.
    by
        Where that is done, if something of it lies on the host: `device` or `in place`.
    """

    def __init__(
        self,
        name: str,
        parameter: torch.nn.Parameter,
        place: str,
        arena: StateArena,
        optimizer: torch.optim.Optimizer | None,
        group: dict[str, Any] | None,
        by: str = "device",
    ) -> None:
        self.name, self.parameter, self.place, self.by = name, parameter, place, by
        self.arena, self.optimizer, self.group = arena, optimizer, group
        self.device = working_device(parameter)
        self.lanes = arena.lanes()
        self.is_updated = False
        # While a step is tried nothing is updated or written.
        self.is_dry = False
        self._small: dict[str, Any] = {}
        self._gradient: torch.Tensor | None = None
        if place == "host":
            arena.take(parameter)
        elif (found := arena.place(parameter)) is not None:
            # It was made on the host, and there is room for it.
            own = found.block.clone().view(parameter.dtype)
            here = own.as_strided(parameter.size(), parameter.stride()).to(self.device)
            give_memory(parameter, here)
        if place != "device":
            self.adopt()

    def adopt(self) -> None:
        """Move what the optimizer keeps for it, and does not rest yet, to the host."""
        assert self.optimizer is not None or self.group is None
        if self.optimizer is None or self.parameter not in self.optimizer.state:
            return
        state = self.optimizer.state[self.parameter]
        for name, value in state.items():
            if moves(value) and self.arena.place(value) is None:
                state[name] = resting = self.arena.resting(value)
                with torch.no_grad():
                    resting.copy_(value)

    def resting(self) -> Place:
        """Return where the parameter rests; raises PlanError if it was given other memory."""
        found = self.arena.place(self.parameter)
        if found is None:
            raise PlanError(
                f"the parameter {self.name!r} lay on the host and has other memory by now, as "
                "after `model.to` or `parameter.data = ...`. Plan the model as it is now; to load "
                "values, use load_state_dict or copy_."
            )
        return found

    def fetch(self, form: View) -> tuple[torch.Tensor, Callable[[], None]]:
        """Start to bring the parameter; return it as it will be, and what waits for it."""
        here, ticket = self._bring(self.resting(), form.dtype, form.size, form.stride)
        return here, lambda: self.lanes.wait(ticket)

    def fetch_state(self) -> tuple[dict[str, Any], Callable[[], None]]:
        """Start to bring the state; counts of steps are copied: a step that fails changes none."""
        self.adopt()
        found: dict[str, Any] = {}
        tickets: list[Ticket] = []
        for name, value in self._state().items():
            place = self.arena.place(value) if moves(value) else None
            if place is None:
                found[name] = value.clone() if isinstance(value, torch.Tensor) else value
                continue
            found[name], ticket = self._bring(place, value.dtype, value.size(), value.stride())
            tickets.append(ticket)

        def wait() -> None:
            for ticket in tickets:
                self.lanes.wait(ticket)

        return found, wait

    def update(
        self, here: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Make the optimizer's step, in place; return the state after it."""
        assert self.optimizer is not None
        assert self.group is not None
        if gradient.stride() != here.stride():
            # As autograd lays a gradient out that becomes `.grad`.
            gradient = torch.empty_like(here).copy_(gradient)
        return updated(self.optimizer, self.group, here, gradient, state)

    def update_here(self, gradient: torch.Tensor) -> None:
        """Make the step where parameter and state are: on the device, or at rest."""
        assert self.optimizer is not None
        self.optimizer.state[self.parameter] = self.update(self.parameter, gradient, self._state())
        if self.place != "device":
            self.adopt()

    def update_at_rest(self) -> None:
        """Make the step with a gradient that rests."""
        gradient = self.parameter.grad
        assert gradient is not None
        place = self.arena.place(gradient)
        if place is not None and place.written is not None:
            self.lanes.finish(place.written)
        self.update_here(gradient)

    def used_up(self) -> None:
        """Note that it was updated in the backward pass."""
        self.is_updated = True
        self.parameter.grad = UsedUp(self.parameter)

    def store(self, here: torch.Tensor | None, state: dict[str, Any]) -> Callable[[], None]:
        """Start to write the parameter, where it was moved, and its state; return what waits."""
        assert self.optimizer is not None
        tickets = [] if here is None else [self._put(here, self.resting())]
        kept = dict[str, Any]()
        before = self._state()
        for name, value in state.items():
            if not moves(value):
                kept[name] = value
                continue
            rests = before.get(name)
            if rests is None or self.arena.place(rests) is None or rests.size() != value.size():
                rests = self.arena.resting(value)
            place = self.arena.place(rests)
            assert place is not None
            tickets.append(self._put(value, place))
            kept[name] = rests
        self.optimizer.state[self.parameter] = kept

        def wait() -> None:
            for ticket in tickets:
                self.lanes.wait(ticket)

        return wait

    def keep_gradient(self, gradient: torch.Tensor) -> Callable[[], None]:
        """Make a gradient `.grad`, or add it to that, on the host; return what waits for it.

        On the host `.grad` is a tensor like any other: it can be clipped, scaled and added to.
        """
        there = self.parameter.grad
        if there is not None:
            found = self.arena.place(there)
            if found is not None and found.written is not None:
                self.lanes.finish(found.written)
            with torch.no_grad():
                there.add_(gradient.to(there.device))
            return _nothing
        if self._gradient is None:
            self._gradient = self.arena.resting(self.parameter)
        place = self.arena.place(self._gradient)
        assert place is not None
        if gradient.stride() != self.parameter.stride() or not _is_all(gradient):
            gradient = torch.empty_like(self.parameter, device=gradient.device).copy_(gradient)
        ticket = self._put(gradient, place)
        self.parameter.grad = self._gradient
        return lambda: self.lanes.wait(ticket)

    def bring_all(self) -> Callable[[], Brought]:
        """Start to bring parameter, gradient and state for an update; return what waits."""
        state, state_here = self.fetch_state()
        here, ticket = self.parameter, None
        if self.place == "host":
            here, ticket = self._bring_like(self.resting(), self.parameter)
        gradient, other = self.parameter.grad, None
        assert gradient is not None
        place = self.arena.place(gradient)
        if place is not None:
            gradient, other = self._bring_like(place, gradient)
        elif gradient.device != self.device:
            gradient = gradient.to(self.device)

        def arrived() -> Brought:
            state_here()
            for copy in (ticket, other):
                if copy is not None:
                    self.lanes.wait(copy)
            return Brought(here, gradient, state)

        return arrived

    def put_back(self, brought: Brought) -> Callable[[], None]:
        """Update what was brought, and start to write it; return what waits for that."""
        after = self.update(brought.parameter, brought.gradient, brought.state)
        wait = self.store(brought.parameter if self.place == "host" else None, after)
        being_written = (brought, after)

        def written() -> None:
            nonlocal being_written
            wait()
            # Until now nobody else holds them.
            del being_written

        return written

    def _state(self) -> dict[str, Any]:
        assert self.optimizer is not None
        found: dict[str, Any] = self.optimizer.state.get(self.parameter, {})
        return found

    def _bring_like(self, place: Place, like: torch.Tensor) -> tuple[torch.Tensor, Ticket]:
        return self._bring(place, like.dtype, like.size(), like.stride())

    def _bring(
        self, place: Place, dtype: torch.dtype, size: Any, stride: Any
    ) -> tuple[torch.Tensor, Ticket]:
        here = torch.empty(place.block.numel(), dtype=torch.uint8, device=self.device)
        ticket = self.lanes.arrive(place.block, here, place.written)
        empty = torch.empty(0, dtype=dtype, device=self.device)
        return empty.set_(here.untyped_storage(), 0, size, stride), ticket

    def _put(self, tensor: torch.Tensor, place: Place) -> Ticket:
        memory = tensor.untyped_storage()
        here = torch.empty(0, dtype=torch.uint8, device=tensor.device).set_(memory)
        place.written = self.lanes.leave(here, place.block)
        return place.written


def _nothing() -> None:
    pass


def _is_all(tensor: torch.Tensor) -> bool:
    """Whether a tensor is all of its storage."""
    return tensor.numel() * tensor.element_size() == tensor.untyped_storage().nbytes()
