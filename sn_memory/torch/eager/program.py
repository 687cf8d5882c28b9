"""A plan as a program: the recorded calls in planned order, with storages freed as planned.

Checkpointing wrappers and graph partitioners decide what is saved and leave order and lifetimes to
autograd. Here each action of the plan is one instruction: run a call (again), free a storage, copy
one to the host or back. Nothing else holds a tensor, so the live tensors are those of the plan.
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace
from weakref import WeakSet

import numpy as np

from ...graph.records import LOSS
from ...plan.buffers import live_bytes
from ...plan.plan import Plan
from ..errors import ReplayError
from ..host.copies import CopyEngine, HostCopy, OffloadBuffers, unneeded
from ..trace.rearrange import values_read
from ..trace.record import Call, Captured, View, form_of
from ..trace.to_graph import GraphBinding, main_device
from ..trace.trace import Trace
from .instructions import (
    FreeStorage,
    Instruction,
    Memory,
    Names,
    Row,
    RunCall,
    UpdateOps,
    ViewLoad,
    free_rng_state,
    offload,
    prefetch,
    wait_for_copy,
)

# A section costs as much as tens of small calls. So it ends once its gradients have this many
# bytes or, in a small net, this part of all. DistributedDataParallel sends a mebibyte at least.
GROUP_BYTES = 1 << 18
GROUPS = 8
# Indices of gradients and their views; None for those that are not planned.
Ready = list[tuple[int, View | None]]


@dataclass(frozen=True, slots=True)
class Section:
    """A part of the backward pass that ends where gradients of parameters are ready.

    ready, loads, storages : indices of those gradients, their loaders (None for a gradient that is
        not planned), and the storages that are released with them.
    """

    row: Row
    ready: list[int]
    loads: list[ViewLoad | None]
    storages: list[int]


class Program:
    """The instructions of a plan, before and after the loss.

    Those after it form sections. A gradient of a parameter is ready when no later action reads or
    changes it or the parameter: the caller, who receives it, may change both.

    plan : for the graph of the traced step; accepted by `check_plan`
    update_ops : implementation of those ops of the graph that are not calls
    part : whether the step is part of a larger one: its outputs then belong to another part, and
        are held here only as long as the plan says

    Raises ReplayError for a plan that would move tensors that the caller holds.
    """

    def __init__(
        self, trace: Trace, plan: Plan, update_ops: UpdateOps | None = None, *, part: bool = False
    ) -> None:
        builder, captured = _Builder(trace, plan, update_ops, part), trace.captured
        self.storages = len(captured.recording.nbytes)
        if update_ops is not None:
            self.storages = update_ops.storages
        before, self.backward = builder.instructions()
        self.forward = Row(before, builder.names)
        # Storages that the backward pass reads and the caller could change in between.
        self.read_later = sorted(builder.read_later - builder.fetched)
        # Storages that the forward pass made and the backward pass overwrites.
        self.overwritten = sorted(builder.overwritten)
        # Storages released once the forward pass has returned its outputs; only in parts.
        self.handed_over = builder.handed_over()
        self.forms = builder.forms
        self.results = [
            builder.load(output) for output in captured.outputs if isinstance(output, View)
        ]
        self.gradients = [
            None if gradient is None else builder.load(gradient)
            for _, gradient in captured.gradients
        ]
        # The peak of a backward pass that accumulates gradients into earlier ones, uncounted.
        self.adding_peak_bytes = builder.adding_peak_bytes
        # How many of the gradients are those of parameters.
        self.leaves = builder.leaves
        # All host copies of the plan, and by index those that are made.
        self.host_copies = builder.host_copies
        self.made_copies = {i: builder.host_copies[i] for i in sorted(builder.copies_made)}
        self._engine = CopyEngine(main_device(captured)) if self.made_copies else None
        self._pinned_bytes = trace.graph.device.pinned_bytes
        # Buffers not in use: one set, unless several forward passes waited for their backward.
        self.free_buffers = [self._new_buffers()] if self.made_copies else []
        self._memories: WeakSet[Memory] = WeakSet()

    def memory(self) -> Memory:
        """Return empty memory for a step."""
        buffers = None
        if self.made_copies:
            buffers = self.free_buffers.pop() if self.free_buffers else self._new_buffers()
        memory = Memory(self.storages, buffers, self.free_buffers)
        self._memories.add(memory)
        return memory

    @property
    def waiting(self) -> int:
        """The number of forward passes that still wait for their backward pass."""
        return sum(bool(memory.held) and not memory.consumed for memory in self._memories)

    def _new_buffers(self) -> OffloadBuffers:
        assert self._engine is not None
        return OffloadBuffers(self.made_copies, self._engine, pinned_bytes=self._pinned_bytes)


class _Builder:
    """Builds the instructions of a plan while tracking which storages are held at each action."""

    def __init__(self, trace: Trace, plan: Plan, update_ops: UpdateOps | None, part: bool) -> None:
        self.named, self.captured = named, captured = trace.named, trace.captured
        self.plan, self.update_ops, self.part = plan, update_ops, part
        # Outputs that the plan frees as soon as they are returned.
        self.freed_outputs: list[int] = []
        self.fetched = frozenset[int]() if update_ops is None else update_ops.fetched
        self.names = Names()
        self.calls = captured.recording.calls
        runs = Counter(action.target for action in plan.actions if action.kind == "run")
        self.rerun_names = {name for name, count in runs.items() if count > 1}
        self.drawn_again = {named.call_of[key] for key in self.rerun_names & named.call_of.keys()}
        self.ran: set[str] = set()
        self.held: set[int] = set(captured.recording.roles) - self.fetched
        self.forms: dict[int, View] = {}
        self.read_later: set[int] = set()
        self.overwritten: set[int] = set()
        self.host_copies, self.copy_at = _host_copies(named, captured, plan)
        self.loss = plan.actions.index(("run", LOSS, 0))
        # If all host copies are made.
        self.live = np.array(live_bytes(named.graph, plan.actions), dtype=np.int64)
        self.copies_made = set(range(len(self.host_copies)))
        self.copies_made -= unneeded(self.host_copies, self.live, plan.peak_bytes)
        # Gradients of parameters come first, under the same names; the rest belong to inputs.
        names = {name for name, _ in captured.gradients}
        self.trained = {name: view.storage for name, view in captured.parameters if name in names}
        self.leaves = len(self.trained)
        # Calls that autograd performs: they accumulate a gradient into an earlier one.
        self.sums = set(captured.summed.values())
        self.ready_at = self.gradients_ready()
        # Storages on the host, and those being copied for which no instruction waits yet.
        self.away: set[int] = set()
        self.pending: set[int] = set()
        for view in (
            *(view for _, view in (*captured.parameters, *captured.buffers)),
            *(view for view in captured.inputs if view is not None),
            *captured.output_gradients,
        ):
            self.forms.setdefault(view.storage, view)
        for number, tensor in captured.recording.constants.items():
            self.forms[number] = form_of(tensor, number)

    def instructions(self) -> tuple[list[Instruction], list[Section]]:
        before: list[Instruction] = []
        current = before
        sections: list[Section] = []
        # What the caller holds as well: it must not be moved, and may be changed meanwhile.
        outside = {view.storage for view in self.captured.output_gradients}
        outside |= self.captured.returned
        changeable = outside | set(self.captured.recording.roles)
        # Gradients about to be summed: they are released with their section, not before.
        summed: set[int] = set()
        waiting: set[int] = set()
        # Whether storages were only freed since the loss: in a part, those that it returns.
        at_end = False
        for at, (kind, target, _) in enumerate(self.plan.actions):
            at_end &= kind == "free"
            if kind == "run" and target == LOSS:
                # From here on instructions belong to the backward pass, and go into its sections.
                current = []
                at_end = True
                waiting = self.held - set(self.captured.recording.roles)
                self.held |= {view.storage for view in self.captured.output_gradients}
                continue
            copied = self.copied(target) if kind == "run" else None
            if target in self.named.random_states:
                drawn = self.named.random_states[target]
                # The op that draws stores its RNG state itself; one that never reruns stores none.
                if kind == "free" and drawn in self.drawn_again:
                    current.append(free_rng_state(drawn))
            elif copied is not None:
                current += self.update_op(target, copied)
            elif kind == "run" and self.named.call_of[target] in self.sums:
                summed |= set(self.calls[self.named.call_of[target]].reads)
            # Autograd frees it after accumulating it.
            elif kind == "free" and self.named.storage_of[target] in summed:
                pass
            elif kind == "run":
                call = self.calls[self.named.call_of[target]]
                if current is not before:
                    self.read_later |= {*call.reads, *call.writes} & changeable
                    self.overwritten |= waiting & set(call.writes)
                current += self.waits({*call.reads, *call.writes})
                current.append(self.run(target, call))
            else:
                storage = self.named.storage_of[target]
                if at_end and self.part and storage in outside:
                    self.held.discard(storage)
                    self.freed_outputs.append(storage)
                    continue
                if storage in outside and not (self.part and kind == "free"):
                    raise ReplayError(
                        f"the plan would {kind} {target!r}, which this back end cannot do: "
                        "outputs and their gradients belong to the caller. Plan with the "
                        "techniques keep and recompute."
                    )
                current += self.move(at, kind, storage)
            if current is not before and self.ready_at.get(at):
                sections.append(self.section(current, self.ready_at[at]))
                current = []
        current += self.waits(set(self.pending))
        # Gradients that no action of the backward pass touches (views of output gradients), or
        # that are not planned.
        rest = self.ready_at.get(-1, [])
        if rest or not sections:
            sections.append(self.section(current, rest))
        else:
            sections[-1].row.instructions.extend(current)
        return before, sections

    def handed_over(self) -> list[int]:
        """Return the storages a part releases after its forward: freed outputs, unread inputs."""
        if not self.part:
            return []
        own = {view.storage for _, view in (*self.captured.parameters, *self.captured.buffers)}
        inputs = {view.storage for view in self.captured.inputs if view is not None} - own
        loaded = {view.storage for _, view in self.captured.gradients if view is not None}
        return [*self.freed_outputs, *sorted(inputs - self.read_later - loaded)]

    def load(self, view: View) -> ViewLoad:
        """Return the loader of a view."""
        return ViewLoad(view, self.forms[view.storage])

    def copied(self, op: str) -> tuple[int, ...] | None:
        """Return the storages that an op other than a call starts to copy; None for a call."""
        return None if self.update_ops is None else self.update_ops.copied(op)

    def reads(self, op: str) -> set[int]:
        """Return the storages that an op of the graph reads."""
        record = self.named.graph.ops[self.named.graph.op_index[op]]
        return {self.named.storage_of[value] for value in (*record.inputs, *record.writes)}

    def update_op(self, op: str, copied: tuple[int, ...]) -> list[Instruction]:
        """Return the instructions of an op other than a call."""
        assert self.update_ops is not None
        row = [*self.waits(self.reads(op)), self.update_ops.instruction(op, self.load)]
        record = self.named.graph.ops[self.named.graph.op_index[op]]
        self.held |= {self.named.storage_of[output] for output in record.outputs}
        self.pending |= {*copied}
        return row

    def section(self, current: list[Instruction], ready: Ready) -> Section:
        """Return the section that ends with these gradients."""
        storages = [view.storage for _, view in ready if view is not None]
        current += self.waits(set(storages))
        loads = [None if view is None else self.load(view) for _, view in ready]
        return Section(Row(current, self.names), [place for place, _ in ready], loads, storages)

    def gradients_ready(self) -> dict[int, Ready]:
        """Per action, the parameter gradients that no later one needs; -1: no action at all."""
        # Per storage, the last action of the backward pass that needs it, and the last that reads
        # its values: for parameters only the second counts.
        last: dict[int, int] = {}
        read: dict[int, int] = {}
        for at, (kind, target, _) in enumerate(self.plan.actions):
            if at <= self.loss or target in self.named.random_states:
                continue
            if kind == "run" and self.copied(target) is not None:
                last |= dict.fromkeys(self.reads(target), at)
                read |= dict.fromkeys(self.reads(target), at)
            elif kind == "run":
                call = self.calls[self.named.call_of[target]]
                last |= dict.fromkeys((*call.reads, *call.makes, *call.writes), at)
                read |= dict.fromkeys(values_read(call), at)
            else:
                last[self.named.storage_of[target]] = at
        ready: dict[int, Ready] = {}
        # Those that are not planned are reported with the last section.
        for place in self.captured.of_others:
            if place < self.leaves:
                ready.setdefault(-1, []).append((place, None))
        used = frozenset[str]() if self.update_ops is None else self.update_ops.used_gradients
        for place, (name, view) in enumerate(self.captured.gradients):
            if view is not None and name in self.trained and name not in used:
                at = max(last.get(view.storage, -1), read.get(self.trained[name], -1))
                ready.setdefault(at, []).append((place, view))
        return self.in_groups(ready)

    def in_groups(self, ready: dict[int, Ready]) -> dict[int, Ready]:
        """Group small gradients with those that are ready next, so that they end one section.

        Only as far as they fit below the peak of a pass that accumulates into earlier gradients.
        """
        nbytes = self.captured.recording.nbytes
        ready_at = {
            view.storage: at for at in sorted(ready) if at >= 0 for _, view in ready[at] if view
        }
        gone = self.gone(ready_at)
        # Live bytes if autograd accumulates each gradient into an earlier one, and frees it: the
        # plan counts it to the end, unless the sum is an op of the plan.
        curve = self.live.copy()
        if not self.sums:
            for storage, at in gone.items():
                curve[at + 1 :] -= nbytes[storage]
        peak = self.adding_peak_bytes = int(curve[self.loss :].max())
        if self.host_copies:
            # Copies that the peak has room for are skipped, and their storages stay on the device.
            self.adding_peak_bytes = self.plan.peak_bytes
            return ready
        # A section for each small gradient would cost more than its ops.
        enough = min(sum(map(nbytes.__getitem__, ready_at)) // GROUPS, GROUP_BYTES)
        grouped = {-1: ready[-1]} if -1 in ready else {}
        waiting: Ready = []
        ends = sorted(ready.keys() - {-1})
        for at, following in zip(ends, [*ends[1:], 0], strict=False):
            waiting += ready[at]
            held = {view.storage for _, view in waiting if view}
            # Extra bytes held at each action until the next gradients are ready.
            wait = np.zeros(max(following - at, 0), dtype=np.int64)
            for storage in held:
                wait[max(gone[storage] - at, 0) :] += nbytes[storage]
            many = sum(nbytes[storage] for storage in held) >= enough
            if at == ends[-1] or many or (curve[at + 1 : following + 1] + wait > peak).any():
                grouped[at], waiting = waiting, []
        return grouped

    def gone(self, ready_at: dict[int, int]) -> dict[int, int]:
        """Return the action after which the storage of each gradient is free.

        That is when it is returned (`ready_at`) or, if the plan sums it, when the plan frees it.
        """
        if not self.sums:
            return ready_at
        freed = {
            self.named.storage_of[target]: at
            for at, (kind, target, _) in enumerate(self.plan.actions)
            if kind == "free" and target not in self.named.random_states
        }
        return {storage: freed.get(storage, len(self.plan.actions)) for storage in ready_at}

    def waits(self, storages: set[int]) -> list[Instruction]:
        """Return the instructions that wait for those of these storages that are being copied."""
        pending = sorted(storages & self.pending)
        self.pending.difference_update(pending)
        return [wait_for_copy(storage) for storage in pending]

    def run(self, name: str, call: Call) -> Instruction:
        is_rerun = name in self.ran
        self.ran.add(name)
        results = []
        for place, view in enumerate(call.outputs):
            if view is None:
                continue
            # A result that is already on the device or the host is dropped after the call.
            fresh = view.storage in call.makes and view.storage not in self.held | self.away
            if fresh:
                self.held.add(view.storage)
                self.forms[view.storage] = view
            results.append((place, view, fresh))
        # Calls for their effects alone make, write and draw nothing.
        touched = (*call.makes, *call.writes, 0)[0]
        return RunCall(
            call,
            self.forms,
            results,
            number=self.named.call_of[name],
            reruns=is_rerun,
            replayed=call.random and name in self.rerun_names,
            device=self.captured.recording.device[touched],
        )

    def move(self, at: int, kind: str, storage: int) -> list[Instruction]:
        host_copy = self.copy_at.get(at)
        is_made = host_copy in self.copies_made
        if kind == "free":
            # The copy is skipped, as there is room: the storage stays on the device.
            if host_copy is not None and not is_made:
                return []
            self.held.discard(storage)
            if host_copy is not None:
                self.away.add(storage)
                return [wait_for_copy(storage, free=True)]
            return [*self.waits({storage}), FreeStorage(storage)]
        if host_copy is None or not is_made:
            return []
        if kind == "offload":
            return [*self.waits({storage}), offload(storage, host_copy)]
        self.held.add(storage)
        self.away.discard(storage)
        self.pending.add(storage)
        return [prefetch(storage, host_copy, self.forms[storage])]


def _host_copies(
    named: GraphBinding, captured: Captured, plan: Plan
) -> tuple[list[HostCopy], dict[int, int]]:
    """Return the host copies of a plan, and the index of the copy per action that is part of it."""
    copies: list[HostCopy] = []
    at: dict[int, int] = {}
    away: dict[int, int] = {}
    for place, (kind, target, _) in enumerate(plan.actions):
        if kind not in ("offload", "free", "prefetch") or target in named.random_states:
            continue
        storage = named.storage_of[target]
        if kind == "offload":
            away[storage] = at[place] = len(copies)
            nbytes = captured.recording.nbytes[storage]
            # Later actions say when it is freed and copied back; it may never come back.
            copies.append(HostCopy(storage, place, place, len(plan.actions), nbytes))
        elif kind == "free" and storage in away:
            at[place] = number = away[storage]
            copies[number] = replace(copies[number], freed=place)
        elif kind == "prefetch":
            at[place] = number = away.pop(storage)
            copies[number] = replace(copies[number], end=place)
    return copies, at
