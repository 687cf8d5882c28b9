"""A parameter with its optimizer state, on device or host, and the ops of a plan that move both."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any, NamedTuple

import torch

from ...base.errors import PlanError
from ...graph.hosted import FETCH, FETCH_STATE, STATE, STORE, STORE_GRADIENT, UPDATE
from ..eager.instructions import Instruction, Memory, ViewLoad
from ..host.buffers import StateBuffers, set_memory
from ..host.copies import HostBuffer, Wait, no_wait
from ..target.accelerator import working_device
from ..trace.record import View, form_of
from ..trace.to_graph import GraphBinding
from ..trace.trace import Trace
from .optimizer import UsedGradient, is_movable, updated


class Fetched(NamedTuple):
    """The inputs of an update, on the device; valid once `wait` has been called."""

    parameter: torch.Tensor
    gradient: torch.Tensor
    state: dict[str, Any]
    wait: Wait


class ParameterState:
    """One parameter of a planned model.

    name : its path
    parameter : the model's parameter
    place : `device`, `state` or `host`; see `graph/hosted.py`.
    buffers : the host memory for what moves
    optimizer, group : the optimizer and the group with its settings; None for a parameter that is
        not trained.
    by : where it is updated if some of it is on the host: on the `device` or `in place`.
    """

    def __init__(
        self,
        name: str,
        parameter: torch.nn.Parameter,
        place: str,
        buffers: StateBuffers,
        optimizer: torch.optim.Optimizer | None,
        group: dict[str, Any] | None,
        by: str,
    ) -> None:
        self.name, self.parameter, self.place, self.by = name, parameter, place, by
        self.buffers, self.engine = buffers, buffers.engine
        self.optimizer, self.group = optimizer, group
        self.device = working_device(parameter)
        self.is_updated = False
        # In a dry run nothing is updated or written.
        self.is_dry = False
        # The state after an update if it has no tensors that move: step counts.
        self.counts: dict[str, Any] = {}
        self._gradient: torch.Tensor | None = None
        if place == "host":
            buffers.move_here(parameter)
        elif (buffer := buffers.buffer_of(parameter)) is not None:
            # The parameter was created on the host (`hold`), but the device has room for it.
            own = buffer.block.clone().view(parameter.dtype)
            here = own.as_strided(parameter.size(), parameter.stride()).to(self.device)
            set_memory(parameter, here)
        if place != "device":
            self.move_state()

    @property
    def state(self) -> dict[str, Any]:
        """Its optimizer state; empty before the first step."""
        assert self.optimizer is not None
        state: dict[str, Any] = self.optimizer.state.get(self.parameter, {})
        return state

    def move_state(self) -> None:
        """Move its optimizer state to the host, unless it is already there."""
        if self.optimizer is None or self.parameter not in self.optimizer.state:
            return
        state = self.optimizer.state[self.parameter]
        for name, value in state.items():
            if is_movable(value) and self.buffers.buffer_of(value) is None:
                state[name] = moved = self.buffers.empty_like(value)
                with torch.no_grad():
                    moved.copy_(value)

    def fetch(self, form: View) -> tuple[torch.Tensor, Wait]:
        """Start to copy the parameter to the device; return the copy, and a function that waits."""
        return self.engine.to_device(self._buffer(), form)

    def fetch_state(self) -> tuple[dict[str, Any], Wait]:
        """Start to copy the state; step counts are cloned, so that a failed step changes none."""
        self.move_state()
        state: dict[str, Any] = {}
        waits: list[Wait] = []
        for name, value in self.state.items():
            if is_movable(value):
                state[name], wait = self._to_device(value)
                waits.append(wait)
            else:
                state[name] = value.clone() if isinstance(value, torch.Tensor) else value
        return state, _all(waits)

    def fetch_all(self) -> Fetched:
        """Start to copy parameter, gradient and state for an update."""
        state, wait_state = self.fetch_state()
        parameter: torch.Tensor = self.parameter
        wait_parameter = no_wait
        if self.place == "host":
            parameter, wait_parameter = self.fetch(form_of(parameter, -1))
        assert self.parameter.grad is not None
        gradient, wait = self._to_device(self.parameter.grad)
        return Fetched(parameter, gradient, state, _all((wait_state, wait_parameter, wait)))

    def update(
        self, here: torch.Tensor, gradient: torch.Tensor, state: dict[str, Any]
    ) -> dict[str, Any]:
        """Run the optimizer's step in place; return the state after it."""
        assert self.optimizer is not None
        assert self.group is not None
        if gradient.stride() != here.stride():
            # The layout that autograd gives to `.grad`.
            gradient = torch.empty_like(here).copy_(gradient)
        return updated(self.optimizer, self.group, here, gradient, state)

    def update_in_place(self, gradient: torch.Tensor | None = None) -> None:
        """Run the step where parameter and state are; the gradient defaults to `.grad`."""
        if gradient is None:
            gradient = self.parameter.grad
            assert gradient is not None
            if (buffer := self.buffers.buffer_of(gradient)) is not None:
                self.engine.finish(buffer)
        assert self.optimizer is not None
        self.optimizer.state[self.parameter] = self.update(self.parameter, gradient, self.state)
        if self.place != "device":
            self.move_state()

    def update_fetched(self, fetched: Fetched) -> Wait:
        """Update what was fetched and start to store it; return a function that waits for this."""
        fetched.wait()
        after = self.update(fetched.parameter, fetched.gradient, fetched.state)
        wait = self.store(fetched.parameter if self.place == "host" else None, after)
        in_use = (fetched, after)

        def written() -> None:
            nonlocal in_use
            wait()
            # Until now this function alone keeps them alive.
            del in_use

        return written

    def mark_updated(self) -> None:
        """Note that it was updated in the backward pass."""
        self.is_updated = True
        self.parameter.grad = UsedGradient(self.parameter)

    def store(self, here: torch.Tensor | None, state: dict[str, Any]) -> Wait:
        """Start to write the state, and the parameter if it moves; return a function that waits."""
        assert self.optimizer is not None
        before = self.state
        # Host memory is written while ops run on, so readers have to wait.
        waits = [] if here is None else [self.engine.to_host(here, self._buffer())]
        kept = dict[str, Any]()
        for name, value in state.items():
            kept[name] = value
            if is_movable(value):
                # Into its previous buffer, if any: an optimizer creates state in its first step.
                resident = before.get(name)
                buffer = None
                if resident is not None and resident.size() == value.size():
                    buffer = self.buffers.buffer_of(resident)
                if buffer is None:
                    resident = self.buffers.empty_like(value)
                    buffer = self.buffers.buffer_of(resident)
                    assert buffer is not None
                waits.append(self.engine.to_host(value, buffer))
                kept[name] = resident
        self.optimizer.state[self.parameter] = kept
        return _all(waits)

    def store_gradient(self, gradient: torch.Tensor) -> Wait:
        """Set or add to `.grad` on the host; return a function that waits for the copy.

        On the host `.grad` is an ordinary tensor: it can be clipped, scaled and added to.
        """
        earlier = self.parameter.grad
        # From an earlier micro-batch.
        if earlier is not None:
            if (buffer := self.buffers.buffer_of(earlier)) is not None:
                # Its own copy to the host may still be under way.
                self.engine.finish(buffer)
            with torch.no_grad():
                earlier.add_(gradient.to(earlier.device))
            return no_wait
        # Allocated once: each step writes to the same buffer.
        if self._gradient is None:
            self._gradient = self.buffers.empty_like(self.parameter)
        buffer = self.buffers.buffer_of(self._gradient)
        assert buffer is not None
        # A buffer has the layout of the parameter, and copies are of whole storages.
        contiguous = gradient.nbytes == gradient.untyped_storage().nbytes()
        if gradient.stride() != self.parameter.stride() or not contiguous:
            gradient = torch.empty_like(self.parameter, device=gradient.device).copy_(gradient)
        wait = self.engine.to_host(gradient, buffer)
        self.parameter.grad = self._gradient
        return wait

    def _buffer(self) -> HostBuffer:
        """Return the parameter's host buffer; raises PlanError if its memory was replaced."""
        buffer = self.buffers.buffer_of(self.parameter)
        if buffer is None:
            raise PlanError(
                f"the parameter {self.name!r} was on the host and has other memory now, as after "
                "`model.to` or `parameter.data = ...`. Plan the model as it is now; to load "
                "values, use load_state_dict or copy_."
            )
        return buffer

    def _to_device(self, tensor: torch.Tensor) -> tuple[torch.Tensor, Wait]:
        buffer = self.buffers.buffer_of(tensor)
        if buffer is not None:
            return self.engine.to_device(buffer, form_of(tensor, -1))
        return tensor.to(self.device), no_wait


def _all(waits: Sequence[Wait]) -> Wait:
    def wait() -> None:
        for one in waits:
            one()

    return wait


# Longest first: "fetch state of " also starts with "fetch ".
_PREFIXES = (FETCH_STATE, STORE_GRADIENT, FETCH, UPDATE, STORE)


class StateOps:
    """Executes the ops of `with_state`; see `UpdateOps` in eager/instructions.py.

    parameters : by path
    named, traced : the graph with these ops, and the step without them
    begin, end : called before a forward pass, and after a backward pass
    """

    def __init__(
        self,
        parameters: Mapping[str, ParameterState],
        named: GraphBinding,
        traced: Trace,
        *,
        begin: Callable[[], None],
        end: Callable[[], None],
    ) -> None:
        captured, graph = traced.captured, named.graph
        self.parameters, self.named = parameters, named
        self.forms, self.gradients = dict(captured.parameters), dict(captured.gradients)
        self.places = {name: place for place, (name, _) in enumerate(captured.gradients)}
        # Not their count: the numbers of fetches and updates follow all recorded ones, with gaps.
        self.storages = max(named.storage_of.values()) + 1
        fetched = {output for op in graph.ops if op.kind == "fetch" for output in op.outputs}
        # A fetched parameter is created by an op, so it is not an input of the step.
        self.fetched = frozenset(
            view.storage for name, view in captured.parameters if name in fetched
        )
        self.used_gradients = frozenset(
            op.name.removeprefix(prefix)
            for op in graph.ops
            for prefix in (UPDATE, STORE_GRADIENT)
            if op.kind in ("update", "store") and op.name.startswith(prefix)
        )
        self.begin, self.end = begin, end

    def copied(self, op: str) -> tuple[int, ...] | None:
        """Return the storages that an op starts to copy; None if it is a call."""
        record = self.named.graph.ops[self.named.graph.op_index[op]]
        if record.kind not in ("fetch", "update", "store") or op in self.named.call_of:
            return None
        copied = {"fetch": record.outputs, "store": record.inputs, "update": ()}[record.kind]
        return tuple(self.named.storage_of[name] for name in copied)

    def instruction(self, op: str, load: Callable[[View], ViewLoad]) -> Instruction:
        """Return the instruction that executes an op."""
        prefix = next(prefix for prefix in _PREFIXES if op.startswith(prefix))
        name = op.removeprefix(prefix)
        parameter, number = self.parameters[name], self.named.storage_of
        if prefix == FETCH:
            return _fetch(partial(parameter.fetch, self.forms[name]), number[name])
        if prefix == FETCH_STATE:
            return _fetch(parameter.fetch_state, number[name + STATE])
        # Parameters on the device, or updated in place on the host, are not copied for an update.
        is_copied = parameter.place == "host" and parameter.by == "device"
        storage, state = number[name] if is_copied else None, number.get(name + STATE)
        place, gradient = self.places[name], self.gradients[name]
        if prefix == STORE:
            run = _store(parameter, storage, state)
        elif prefix == STORE_GRADIENT:
            assert gradient is not None
            run = _store_gradient(parameter, load(gradient))
        else:
            assert gradient is not None
            run = _update(parameter, storage, state, load(gradient))

        def unless_left_out(memory: Memory) -> None:
            # Skipped in a dry run, and if the gradient comes from outputs not used by the loss.
            if not (parameter.is_dry or place in memory.left_out):
                run(memory)

        return unless_left_out


def _fetch(start: Callable[[], tuple[Any, Wait]], storage: int) -> Instruction:
    def fetch(memory: Memory) -> None:
        # A tensor for a parameter; for its state a dictionary, which no call reads.
        held: list[Any] = memory.held
        held[storage], memory.pending_copies[storage] = start()

    return fetch


def _update(
    parameter: ParameterState, storage: int | None, state: int | None, load: ViewLoad
) -> Instruction:
    """Update a parameter whose gradient is complete; a storage that is not copied is None."""

    def update(memory: Memory) -> None:
        held: list[Any] = memory.held
        gradient = load(held)
        # Marked first: if the update fails half-way, the next forward pass must raise.
        parameter.mark_updated()
        if state is None and storage is None:
            parameter.update_in_place(gradient)
            return
        here = parameter.parameter if storage is None else held[storage]
        after = parameter.update(here, gradient, {} if state is None else held[state])
        if state is None:
            parameter.counts = after
        else:
            held[state] = after

    return update


def _store(parameter: ParameterState, storage: int | None, state: int | None) -> Instruction:
    def store(memory: Memory) -> None:
        held: list[Any] = memory.held
        here = None if storage is None else held[storage]
        wait = parameter.store(here, parameter.counts if state is None else held[state])
        for copied in (storage, state):
            if copied is not None:
                memory.pending_copies[copied] = wait

    return store


def _store_gradient(parameter: ParameterState, load: ViewLoad) -> Instruction:
    def store_gradient(memory: Memory) -> None:
        wait = parameter.store_gradient(load(memory.held))
        memory.pending_copies[load.view.storage] = wait

    return store_gradient
