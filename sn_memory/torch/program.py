"""A plan as a program: the recorded calls in the planned order, storages given back where it says.

Checkpointing wrappers and graph partitioners decide what is saved and leave order and lifetimes to
autograd. Here each step of the plan is one instruction: run a call (again), give a storage back,
move one to the host or back. Nothing else holds a tensor, so what is live is what the plan says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ..plan import Plan
from .capture import Captured
from .errors import ReplayError
from .neutral import LOSS, Named, main_device, statistics
from .offload import HostArena, Trip
from .recorder import Call, View, form_of

Instruction = Callable[["Memory"], None]


class Memory:
    """What is held between instructions.

    Attributes
    ----------
    held
        Per storage, a tensor that holds it; None where it is not on the device.
    chance
        State of the random number generator before a call that will run again, per call.
    arena
        Where storages on the host lie; None where the plan moves none.
    """

    def __init__(self, storages: int, arena: HostArena | None) -> None:
        self.held: list[torch.Tensor | None] = [None] * storages
        self.chance: dict[int, torch.Tensor] = {}
        self.arena = arena

    @property
    def spent(self) -> bool:
        """Whether its backward pass has run."""
        return not self.held

    def clear(self) -> None:
        """Let go of everything."""
        self.held, self.chance, self.arena = [], {}, None


class Program:
    """The instructions of a plan, before and after the loss.

    Parameters
    ----------
    named, captured
        The traced step.
    plan
        A plan of its graph that `check_plan` accepts.

    Raises
    ------
    ReplayError
        For a plan that would move or compress what the caller holds.
    """

    def __init__(self, named: Named, captured: Captured, plan: Plan) -> None:
        writer = _Writer(named, captured, plan)
        self.storages = len(captured.recording.nbytes)
        self.forward, self.backward = writer.instructions()
        # Storages that the backward pass reads and somebody else could change in between.
        self.read_later = sorted(writer.read_later)
        self.forms = writer.forms
        self.results = [self.taken(view) for view in captured.outputs if isinstance(view, View)]
        self.gradients = [
            None if view is None else self.taken(view) for _, view in captured.gradients
        ]
        self._trips, self._device = writer.trips, main_device(captured)
        self._arenas: list[HostArena] = []
        if self._trips:
            self._arenas.append(HostArena(self._trips, self._device))

    def taken(self, view: View) -> Callable[[list[Any]], torch.Tensor]:
        """Return the function that takes a view of what is held."""
        return _taken(view, self.forms[view.storage])

    @property
    def arenas(self) -> list[HostArena]:
        """Those not in use: one, unless several forward passes waited for their backward."""
        return self._arenas

    def memory(self) -> Memory:
        """Return empty memory to run in."""
        arena = None
        if self._trips:
            arena = self._arenas.pop() if self._arenas else HostArena(self._trips, self._device)
        return Memory(self.storages, arena)

    def end(self, memory: Memory) -> None:
        """Take memory back when its backward pass has run."""
        if memory.arena is not None:
            self._arenas.append(memory.arena)
        memory.clear()


class _Writer:
    """Writes the instructions of a plan, following what is held at each step."""

    def __init__(self, named: Named, captured: Captured, plan: Plan) -> None:
        self.named, self.captured, self.plan = named, captured, plan
        self.calls = captured.recording.calls
        runs = Counter(step.target for step in plan.steps if step.action == "run")
        self.again = {name for name, count in runs.items() if count > 1}
        self.ran: set[str] = set()
        self.held: set[int] = set(captured.recording.given)
        self.forms: dict[int, View] = {}
        self.read_later: set[int] = set()
        self.trips: list[Trip] = []
        self.leaving: dict[int, tuple[int, int]] = {}
        for view in (
            *(view for _, view in (*captured.parameters, *captured.buffers)),
            *(view for view in captured.inputs if view is not None),
            *captured.tangents,
        ):
            self.forms.setdefault(view.storage, view)
        for number, tensor in captured.recording.constants.items():
            self.forms[number] = form_of(tensor, number)

    def instructions(self) -> tuple[list[Instruction], list[Instruction]]:
        before: list[Instruction] = []
        after: list[Instruction] = []
        outside = {view.storage for view in self.captured.outputs if isinstance(view, View)}
        outside |= {view.storage for view in self.captured.tangents}
        changeable = outside | set(self.captured.recording.given)
        current = before
        for at, (action, target, _) in enumerate(self.plan.steps):
            if action == "run" and target == LOSS:
                current = after
                self.held |= {view.storage for view in self.captured.tangents}
                continue
            if action == "run":
                call = self.calls[self.named.call_of[target]]
                if current is after:
                    self.read_later |= {*call.reads, *call.writes} & changeable
                current.append(self.run(target, call))
                continue
            storage = self.named.storage_of[target]
            if storage in outside or action in ("compress", "decompress"):
                raise ReplayError(
                    f"the plan would {action} {target!r}, which this back end cannot do: outputs "
                    "and their gradients belong to the caller, and nothing is compressed here. "
                    "Plan with the actions keep and recompute."
                )
            current.append(self.move(at, action, storage))
        return before, after

    def run(self, name: str, call: Call) -> Instruction:
        again = name in self.ran
        self.ran.add(name)
        results = []
        for place, view in enumerate(call.outputs):
            if view is None:
                continue
            fresh = view.storage in call.makes and view.storage not in self.held
            if fresh:
                self.held.add(view.storage)
                self.forms[view.storage] = view
            results.append((place, view, fresh))
        touched = (*call.makes, *call.writes)
        return _run(
            call,
            self.forms,
            results,
            number=self.named.call_of[name],
            again=again,
            replayed=call.random and name in self.again,
            # Effects make and write nothing, and draw nothing either.
            device=self.captured.recording.device[touched[0] if touched else 0],
        )

    def move(self, at: int, action: str, storage: int) -> Instruction:
        if action == "free":
            self.held.discard(storage)
            return _free(storage)
        if action == "offload":
            self.leaving[storage] = (at, len(self.trips))
            nbytes = self.captured.recording.nbytes[storage]
            # Its end is known when it comes back; one that never does stays to the end.
            self.trips.append(Trip(at, len(self.plan.steps), nbytes))
            return _offload(storage, len(self.trips) - 1)
        start, trip = self.leaving.pop(storage)
        self.trips[trip] = replace(self.trips[trip], start=start, end=at + 1)
        self.held.add(storage)
        return _prefetch(storage, trip, self.forms[storage])


def _free(storage: int) -> Instruction:
    def free(memory: Memory) -> None:
        memory.held[storage] = None

    return free


def _offload(storage: int, trip: int) -> Instruction:
    def offload(memory: Memory) -> None:
        tensor = memory.held[storage]
        assert memory.arena is not None
        assert tensor is not None
        memory.arena.take(trip, tensor)

    return offload


def _prefetch(storage: int, trip: int, form: View) -> Instruction:
    def prefetch(memory: Memory) -> None:
        assert memory.arena is not None
        memory.held[storage] = memory.arena.give(trip, form)

    return prefetch


def _run(
    call: Call,
    forms: dict[int, View],
    results: Sequence[tuple[int, View, bool]],
    *,
    number: int,
    again: bool,
    replayed: bool,
    device: torch.device,
) -> Instruction:
    """Return the instruction that runs a call.

    results : place among the flat results, View, and whether it is to be held
    replayed : it draws random numbers, and the plan runs it more than once
    """
    target = call.target
    arguments = _arguments(call, forms, without=statistics(call) if again else ())

    def run(memory: Memory) -> None:
        args, kwargs = arguments(memory.held)
        if replayed and again:
            now = _chance(device)
            _set_chance(device, memory.chance[number])
            result = target(*args, **kwargs)
            _set_chance(device, now)
        else:
            if replayed:
                memory.chance[number] = _chance(device)
            result = target(*args, **kwargs)
        if not results:
            return
        flat = (result,) if isinstance(result, torch.Tensor) else tree_flatten(result)[0]
        for place, view, fresh in results:
            tensor = flat[place]
            if not view.shows(tensor):
                raise ReplayError(
                    f"{target} returned a tensor of size {tuple(tensor.size())}, stride "
                    f"{tensor.stride()} and type {tensor.dtype}; traced were {view.size}, "
                    f"{view.stride} and {view.dtype}. Its rule for fake tensors is wrong: report "
                    "it to its owner; this model cannot be planned."
                )
            if fresh:
                memory.held[view.storage] = tensor

    return run


def _arguments(
    call: Call, forms: dict[int, View], *, without: tuple[int, ...]
) -> Callable[[list[Any]], tuple[list[Any], dict[str, Any]]]:
    """Return the function that fills a call's arguments from what is held."""
    flat = [None if place in without else arg for place, arg in enumerate(call.flat)]
    args, kwargs = tree_unflatten(flat, call.spec)
    args = list(args)
    plain = all(isinstance(arg, View) or not _has_view(arg) for arg in (*args, *kwargs.values()))
    if plain:
        places = [
            (place, _taken(arg, forms[arg.storage]))
            for place, arg in enumerate(args)
            if isinstance(arg, View)
        ]
        keys = [
            (key, _taken(arg, forms[arg.storage]))
            for key, arg in kwargs.items()
            if isinstance(arg, View)
        ]

        def fill(held: list[Any]) -> tuple[list[Any], dict[str, Any]]:
            filled = args.copy()
            for place, take in places:
                filled[place] = take(held)
            return filled, {**kwargs, **{key: take(held) for key, take in keys}} if keys else kwargs

        return fill
    takes = [_taken(arg, forms[arg.storage]) if isinstance(arg, View) else None for arg in flat]
    spec = call.spec

    def fill_nested(held: list[Any]) -> tuple[list[Any], dict[str, Any]]:
        values = [
            arg if take is None else take(held) for arg, take in zip(flat, takes, strict=True)
        ]
        made: tuple[list[Any], dict[str, Any]] = tree_unflatten(values, spec)
        return made

    return fill_nested


def _taken(view: View, form: View) -> Callable[[list[Any]], torch.Tensor]:
    """Return the function that takes a view of what is held in a form."""
    storage, size, stride, offset = view.storage, view.size, view.stride, view.offset
    if view == form:
        return lambda held: held[storage]
    if view.dtype == form.dtype:
        return lambda held: held[storage].as_strided(size, stride, offset)

    def other_type(held: list[Any]) -> torch.Tensor:
        base = held[storage]
        empty = torch.empty(0, dtype=view.dtype, device=base.device)
        return empty.set_(base.untyped_storage(), offset, size, stride)

    return other_type


def _has_view(value: Any) -> bool:
    return any(isinstance(leaf, View) for leaf in tree_flatten(value)[0])


def _chance(device: torch.device) -> torch.Tensor:
    if device.type == "cuda":
        return torch.cuda.get_rng_state(device)
    return torch.get_rng_state()


def _set_chance(device: torch.device, state: torch.Tensor) -> None:
    if device.type == "cuda":
        torch.cuda.set_rng_state(state, device)
    else:
        torch.set_rng_state(state)
