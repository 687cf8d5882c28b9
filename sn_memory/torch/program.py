"""A plan as a program: the recorded calls in the planned order, storages given back where it says.

Checkpointing wrappers and graph partitioners decide what is saved and leave order and lifetimes to
autograd. Here each step of the plan is one instruction: run a call (again), give a storage back,
move one to the host or back. Nothing else holds a tensor, so what is live is what the plan says.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch

from ..plan import Plan
from .capture import Captured
from .errors import ReplayError
from .instructions import (
    Instruction,
    Memory,
    free_storage,
    offload_storage,
    prefetch_storage,
    run_call,
    take,
)
from .neutral import LOSS, Named, main_device
from .offload import HostArena, Trip
from .recorder import Call, View, form_of


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
        return take(view, self.forms[view.storage])

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
        return run_call(
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
            return free_storage(storage)
        if action == "offload":
            self.leaving[storage] = (at, len(self.trips))
            nbytes = self.captured.recording.nbytes[storage]
            # Its end is known when it comes back; one that never does stays to the end.
            self.trips.append(Trip(at, len(self.plan.steps), nbytes))
            return offload_storage(storage, len(self.trips) - 1)
        start, trip = self.leaving.pop(storage)
        self.trips[trip] = replace(self.trips[trip], start=start, end=at + 1)
        self.held.add(storage)
        return prefetch_storage(storage, trip, self.forms[storage])
