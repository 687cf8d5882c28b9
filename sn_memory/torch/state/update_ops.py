"""The ops of a plan with state on the host that are no calls of the model, as instructions."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

from ...graph.hosted import FETCH, FETCH_STATE, STATE, STORE, STORE_GRADIENT, UPDATE
from ..eager.instructions import Instruction, Memory, ViewLoad
from ..trace.record import View
from ..trace.to_graph import GraphBinding
from ..trace.trace import Trace
from .parameter import ParameterState

# Longest first: "fetch " begins "fetch state of " as well.
_PREFIXES = (FETCH_STATE, STORE_GRADIENT, FETCH, UPDATE, STORE)


class StateOps:
    """Carries out the ops of `with_state`; see `UpdateOps` of eager/instructions.py.

    Parameters
    ----------
    parameters
        By path.
    named, traced
        The graph with these ops, and the step without them.
    begin, end
        Called before a forward pass, and after a backward pass.
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
        self.storages = max(named.storage_of.values()) + 1
        fetched = {it for op in graph.ops if op.kind == "fetch" for it in op.outputs}
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
        return tuple(self.named.storage_of[it] for it in copied)

    def instruction(self, op: str, load: Callable[[View], ViewLoad]) -> Instruction:
        """Return what carries an op out."""
        prefix = next(it for it in _PREFIXES if op.startswith(it))
        name = op.removeprefix(prefix)
        parameter, number = self.parameters[name], self.named.storage_of
        if prefix == FETCH:
            return _fetch(parameter, number[name], self.forms[name])
        if prefix == FETCH_STATE:
            return _fetch_state(parameter, number[name + STATE])
        # Of an update in place nothing is copied.
        is_copied = parameter.place == "host" and parameter.by == "device"
        storage, state = number[name] if is_copied else None, number.get(name + STATE)
        if prefix == STORE:
            return _store(parameter, storage, state, self.places[name])
        gradient = self.gradients[name]
        assert gradient is not None
        if prefix == STORE_GRADIENT:
            return _store_gradient(parameter, load(gradient), self.places[name])
        return _update(parameter, storage, state, load(gradient), self.places[name])


def _fetch(parameter: ParameterState, storage: int, form: View) -> Instruction:
    def fetch(memory: Memory) -> None:
        memory.held[storage], memory.pending_copies[storage] = parameter.fetch(form)

    return fetch


def _fetch_state(parameter: ParameterState, storage: int) -> Instruction:
    def fetch_state(memory: Memory) -> None:
        held: list[Any] = memory.held
        held[storage], memory.pending_copies[storage] = parameter.fetch_state()

    return fetch_state


def _is_left_out(parameter: ParameterState, place: int, memory: Memory) -> bool:
    """Whether there is no update: a dry run, or a loss of other outputs than it comes from."""
    return parameter.is_dry or place in memory.left_out


def _update(
    parameter: ParameterState, storage: int | None, state: int | None, load: ViewLoad, place: int
) -> Instruction:
    """Update a parameter whose gradient is complete; None: a storage that is not copied.

    place : of the gradient among all
    """

    def update(memory: Memory) -> None:
        held: list[Any] = memory.held
        gradient = load(held)
        if _is_left_out(parameter, place, memory):
            return
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


def _store(
    parameter: ParameterState, storage: int | None, state: int | None, place: int
) -> Instruction:
    def store(memory: Memory) -> None:
        if _is_left_out(parameter, place, memory):
            return
        held: list[Any] = memory.held
        here = None if storage is None else held[storage]
        wait = parameter.store(here, parameter.counts if state is None else held[state])
        for copied in (storage, state):
            if copied is not None:
                memory.pending_copies[copied] = wait

    return store


def _store_gradient(parameter: ParameterState, load: ViewLoad, place: int) -> Instruction:
    def store_gradient(memory: Memory) -> None:
        if not _is_left_out(parameter, place, memory):
            wait = parameter.store_gradient(load(memory.held))
            memory.pending_copies[load.view.storage] = wait

    return store_gradient
