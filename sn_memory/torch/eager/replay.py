"""The whole model to autograd: its forward and its backward are a plan's instructions.

Or rather a chain of nodes, one for each section of the backward pass, that ends where gradients are
ready. The inputs of a node are the parameters whose gradients it makes, and a token, by which the
next section follows. So gradients are accumulated as they are made, one at a time, as torch does
it, hooks on parameters (DistributedDataParallel, Horovod) fire meanwhile, and `torch.autograd.grad`
sees the parameters. One node for all would hold all gradients beside those of earlier steps.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from functools import cached_property, partial
from itertools import compress, count
from operator import gt, not_
from typing import Any

import torch
from torch.autograd.graph import get_gradient_edge

from ...graph.records import LOSS
from ...plan.plan import Plan
from ..errors import ReplayError
from ..model.modes import casting, is_batched, transformed
from ..model.signature import alike, tensors
from ..model.snapshot import memory_version
from ..step import Call, Step
from ..trace.record import Captured, View
from ..trace.to_graph import STATE, GraphBinding, main_device, statistics
from ..trace.trace import Trace
from .instructions import Memory, UpdateOps
from .program import Program, Section


def reached(captured: Captured) -> tuple[int, ...]:
    """Return, per gradient, the output gradients it is computed from: their places, as bits.

    Where a loss takes some of the outputs only, autograd leaves the parameters of the rest without
    a gradient, and an optimizer passes them over. Zeros are not the same: moments go on, weights
    decay.
    """
    of: dict[int, int] = {}
    for number, view in enumerate(captured.output_gradients):
        of[view.storage] = of.get(view.storage, 0) | 1 << number
    for call in captured.recording.calls[captured.boundary :]:
        bits = 0
        for storage in call.reads:
            bits |= of.get(storage, 0)
        for storage in call.makes:
            # Made anew: what it came from before does not count; a write adds to what is there.
            of[storage] = bits
        for storage in call.writes:
            of[storage] = of.get(storage, 0) | bits
    return tuple(0 if view is None else of.get(view.storage, 0) for _, view in captured.gradients)


def left_out(reached: Sequence[int], arrived: Sequence[object]) -> frozenset[int]:
    """Return the places of gradients that come from outputs alone whose own have not arrived."""
    if all(grad is not None for grad in arrived):
        return frozenset()
    here = sum(1 << number for number, grad in enumerate(arrived) if grad is not None)
    return frozenset(place for place, bits in enumerate(reached) if bits and not bits & here)


def overwritten(captured: Captured) -> list[str]:
    """Return the names of parameters and buffers that a forward pass reads, and writes over.

    Run once more, it would compute something else. Statistics of a batch norm that trains, and
    counts, are read for themselves alone.
    """
    calls = captured.recording.calls[: captured.boundary]
    written = {storage for call in calls for storage in call.writes}
    named = (*captured.parameters, *captured.buffers)
    # Per storage, what is written over of what it was computed from.
    of = {view.storage: {name} for name, view in named if view.storage in written}
    for call in calls:
        own = statistics(call)
        reads = [arg for place, arg in enumerate(call.flat) if place not in own]
        read = {read.storage for read in reads if isinstance(read, View)}
        names = set[str]().union(*(of.get(storage, ()) for storage in read))
        for storage in (*call.makes, *call.writes):
            of[storage] = of.get(storage, set()) | names
    return sorted(set[str]().union(*(of.get(storage, ()) for storage in captured.returned)))


Gradients = list[torch.Tensor | None]
_NUMBERS = count(1)


class Replay(Step):
    """Runs the program of a traced step and a plan on the tensors of a model; see Program."""

    backend = "graph"
    hidden_from_hooks = "do not see what its plan keeps for the backward pass within the budget"
    trace: Trace
    plan: Plan

    def __init__(
        self, trace: Trace, plan: Plan, update_ops: UpdateOps | None = None, *, part: bool = False
    ) -> None:
        self.trace, self.plan = trace, plan
        self.captured = captured = trace.captured
        self.program = Program(trace, plan, update_ops, part=part)
        self.device = main_device(captured)
        # Tensors that belong to nobody, which the trace holds.
        self.known = list(captured.recording.constants.values())
        # The optimizer's state.
        self.resident_bytes = trace.resident_bytes
        self.counts_gradients = bool(captured.earlier)
        self.reads, self.looked = captured.reads, captured.looked
        # The peak of a backward pass whose gradients are added to those of another.
        self.adding_peak_bytes = self.program.adding_peak_bytes
        # Per output that is a tensor, whether a gradient may come back for it.
        pairs = zip(captured.differentiable, captured.outputs, strict=True)
        self.differentiable = [takes for takes, out in pairs if isinstance(out, View)]
        self.reached = reached(captured)
        # Per input that takes a gradient, how many are handed over; see `separate_sums`.
        leaves = self.program.leaves
        self.times = [*Counter(name for name, _ in captured.gradients[leaves:]).values()]
        self._views = [view for _, view in (*captured.parameters, *captured.buffers)]
        self._views += [view for view in captured.inputs if view is not None]
        self._held_inputs = [
            (view.storage, at)
            for at, view in enumerate(self._views)
            if view == self.program.forms[view.storage]
            and (update_ops is None or view.storage not in update_ops.fetched)
        ]
        forms = set(self._views)
        # `_alike` does not see whether tensors that share a storage still do.
        self._each_its_own_storage = len({view.storage for view in forms}) == len(forms)
        # Whether gradients of parameters are used inside the step.
        self.inside = update_ops is not None and bool(update_ops.used_gradients)
        used = update_ops.used_gradients if update_ops is not None else ()
        self.used_places = [
            place for place, (name, _) in enumerate(captured.gradients[:leaves]) if name in used
        ]
        self.update_ops = update_ops
        # No other step of this process has it.
        self.number = next(_NUMBERS)
        # Whether a step is given tensors like those of the one before.
        self._inputs_as_planned: Callable[[Sequence[torch.Tensor]], bool] | None = None

    @property
    def ignored(self) -> list[torch.Tensor]:
        return [buffer.block for buffer in self.program.free_buffers]

    def in_pool(self, *, begins: bool = False) -> AbstractContextManager[Any]:
        """Return the context in which this thread allocates what the plan counts.

        begins : whether a step begins, of which later parts run in the backward pass
        """
        if self.pool is None or self.plan.reserved_peak_bytes is None:
            return _NOTHING
        return self.pool.inside(self.device, self.plan.pool_bytes, step=self.number, begins=begins)

    @property
    def waiting(self) -> int:
        return self.program.waiting

    @cached_property
    def waiting_bytes(self) -> tuple[int, int]:
        return _waiting_bytes(self.trace.named, self.plan)

    @cached_property
    def drawn_on(self) -> list[torch.device]:
        """Devices whose random numbers the forward pass draws."""
        place = self.captured.recording.device
        calls = [call for call in self.captured.recording.calls if call.random]
        return [*{place[make]: None for call in calls for make in (*call.makes, *call.writes)}]

    @cached_property
    def overwritten(self) -> list[str]:
        return overwritten(self.captured)

    def release(self) -> None:
        # So the host holds the blocks of one kind of input, however many there are.
        self.program.free_buffers.clear()

    def is_outdated(self, ends: Sequence[bool]) -> bool:
        """Whether kernels lay out otherwise, or it lacks gradients that were asked for."""
        own = self.captured.ends
        return bool(self.layouts) or (len(ends) == len(own) and any(map(gt, ends, own)))

    def run(self, model: torch.nn.Module, args: Any, kwargs: Any, call: Call | None = None) -> Any:
        """Run the forward pass of a model; returns what it returns."""
        if call is None:
            call = Call(list(model.parameters()), list(model.buffers()), None)
        parameters, buffers = call.parameters, call.buffers
        plain = None if call.plain is None else call.plain(self)
        inputs = tensors((args, kwargs))
        # As in `Captured.gradients`: parameters first, then inputs; each tensor once.
        wanted: list[torch.Tensor] = [param for param in parameters if param.requires_grad]
        # What the last section of the backward pass has gradients for besides parameters.
        follow: list[torch.Tensor] = []
        if any(tensor.requires_grad for tensor in inputs):
            known = set(map(id, wanted))
            others = [leaf for leaf in inputs if leaf.requires_grad and id(leaf) not in known]
            others = [*{id(leaf): leaf for leaf in others}.values()]
            wanted += others
            for other, many in zip(others, self.times, strict=True):
                follow += [other] * many
        memory = self.start([*parameters, *buffers, *inputs])
        memory.plain, memory.wanted = plain, wanted
        if self.inside:
            # Autograd goes back to where a gradient is wanted, and these say where that is.
            memory.used = [
                torch.empty(0, device=self.device, requires_grad=True),
                *(wanted[place] for place in self.used_places),
            ]
            follow += memory.used
        sections = self.program.backward
        # The last section first: each node takes the token of the one that follows it backward.
        for at in range(len(sections) - 1, 0, -1):
            ready = [wanted[place] for place in sections[at].ready]
            follow = [_Section.apply(self, memory, at, *ready, *follow)]
        ready = [wanted[place] for place in sections[0].ready]
        results = iter(_Planned.apply(self, memory, *ready, *follow))
        # What is no tensor is the same in each step: the trace's.
        flat = [next(results) if isinstance(out, View) else out for out in self.captured.outputs]
        # Of the joint graph of torch.compile alone there is no form, and it is not replayed.
        assert self.captured.output_form is not None
        return self.captured.output_form.filled(flat)

    def section(
        self, memory: Memory | Gradients, at: int, token: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        """Run a section of the backward pass; return its gradients, with the last those of inputs.

        With any other, the last item is the token's: the token that came, or a new one.
        """
        section, is_last = self.program.backward[at], at == len(self.program.backward) - 1
        if isinstance(memory, Memory):
            gradients = self._run(memory, section, is_last)
        else:
            # The model's own step has computed all of them.
            gradients = [memory[place] for place in section.ready]
            gradients += memory[self.program.leaves :] if is_last else []
        if not is_last:
            gradients.append(torch.empty(0, device=self.device) if token is None else token)
        elif self.inside:
            gradients += [None] * (1 + len(self.used_places))
        return gradients

    def unused(self, memory: Memory) -> frozenset[int]:
        """Return the places of gradients that are not to be used inside of this backward pass.

        All of them where it is for gradients of inputs alone, as `torch.autograd.grad(loss, x)`.
        Raises ReplayError where it is for some parameters alone.
        """
        everything, *parameters = memory.used
        if _is_wanted(everything):
            return frozenset()
        if any(map(_is_wanted, parameters)):
            raise ReplayError(
                "gradients of some parameters alone are requested (torch.autograd.grad, or "
                "backward with inputs=) of a step that has its state on the host, which uses them "
                "inside. Call backward() without inputs, and read `.grad` where there is one."
            )
        return frozenset(self.used_places)

    def _run(self, memory: Memory, section: Section, is_last: bool) -> Gradients:
        try:
            with _as_recorded(self.device), self.in_pool():
                section.row.run(memory)
                gradients = [
                    memory.gradient(*pair)
                    for pair in zip(section.ready, section.loads, strict=True)
                ]
                # Nobody else holds them, so they become `.grad` and are not copied.
                for storage in section.storages:
                    memory.held[storage] = None
                if not is_last:
                    return gradients
                of_inputs = list(enumerate(self.program.gradients))[self.program.leaves :]
                gradients += [memory.gradient(*value) for value in of_inputs]
        except BaseException:
            memory.clear()
            raise
        memory.clear()
        if self.update_ops is not None:
            self.update_ops.end()
        return gradients

    def for_this_pass(
        self, memory: Memory, arrived: Sequence[torch.Tensor | None]
    ) -> Memory | Gradients:
        """Return what a backward pass runs on, or its gradients where a plan cannot compute them.

        Where the graph is kept, as with `retain_graph=True`, storages stay for another pass.
        """
        keeps = self.update_ops is None and torch._C._autograd._get_current_graph_task_keep_graph()
        used: Memory | Gradients = memory
        several = any(is_batched(grad) for grad in arrived if grad is not None)
        unplanned = self.unplanned(arrived)
        if torch.is_grad_enabled() or several or transformed() or unplanned:
            if memory.plain is None and unplanned:
                raise ReplayError(
                    "got a gradient for an output other than the loss; with state on the host only "
                    "gradients of the loss are planned. Let the model return the whole loss, or "
                    "none: leave out the labels."
                )
            if memory.plain is None:
                raise ReplayError(
                    "gradients of gradients or several at a time (create_graph=True, vmap, "
                    "forward-mode AD) are requested of a step that has its state on the host, "
                    "which computes one gradient. Call the model as it was before planning there."
                )
            used = memory.plain.gradients(memory.wanted, arrived)
            if not keeps:
                memory.clear()
        elif keeps:
            if memory.plain is not None:
                memory.plain.retained()
            used = memory.for_one_pass(self.program.overwritten)
        memory.consumed = not keeps
        if used is not memory:
            # Later sections of this pass find it by the number of autograd's graph task.
            task = torch._C._current_graph_task_id()
            memory.passes[task] = used
            # Some of its sections may never run.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(memory.passes.pop, task))
        return used

    def unplanned(self, arrived: Sequence[torch.Tensor | None]) -> bool:
        """Whether there is a gradient of an output at which no planned backward pass begins."""
        ends = self.captured.ends
        return any(grad is not None and not end for grad, end in zip(arrived, ends, strict=True))

    def start(self, inputs: Sequence[torch.Tensor]) -> Memory:
        """Return memory with the parameters, buffers and inputs of a step in their places."""
        if self.update_ops is not None:
            self.update_ops.begin()
        memory = self.program.memory()
        memory.layouts = self.layouts
        if self._inputs_as_planned is None or not self._inputs_as_planned(inputs):
            self._check(inputs)
            if self._each_its_own_storage:
                # From the next step on a few microseconds, where `_check` walks through all.
                self._inputs_as_planned = _alike(inputs)
        held = memory.held
        for storage, at in self._held_inputs:
            held[storage] = inputs[at]
        for storage, tensor in self.captured.recording.constants.items():
            held[storage] = tensor
        return memory

    def _check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise where an input looks otherwise than planned.

        A storage may be another, and an input may begin at another place of it, as parameters
        do that became views of one vector. Tensors that shared one storage must still do so.
        """
        fetched = () if self.update_ops is None else self.update_ops.fetched
        first: dict[int, tuple[View, torch.Tensor]] = {}
        for view, tensor in zip(self._views, inputs, strict=True):
            if view.storage in fetched:
                continue  # it lies on the host, and who fetches it looks at it
            place = self.captured.recording.device[view.storage]
            got = tensor.size(), tensor.stride(), tensor.dtype, tensor.device
            if (*view.form, place) != got:
                if tensor.is_meta:
                    raise ReplayError(
                        f"a parameter, buffer or input of size {tuple(tensor.size())} is on the "
                        "meta device, so that its plan can be read and not run. Give the model "
                        "memory (model.to_empty(device=...), then its weights), and plan it then."
                    )
                move = "" if tensor.device == place else f"Move it to {place}, or plan"
                raise ReplayError(
                    f"a parameter, buffer or input has size {tuple(tensor.size())}, stride "
                    f"{tensor.stride()}, type {tensor.dtype} and device {tensor.device}; the plan "
                    f"expects {view.size}, {view.stride}, {view.dtype} and {place}. "
                    f"{move or 'Plan'} the model as it is now."
                )
            other, others = first.setdefault(view.storage, (view, tensor))
            distance = view.offset * view.dtype.itemsize - other.offset * other.dtype.itemsize
            if tensor is not others and (
                tensor.untyped_storage()._cdata != others.untyped_storage()._cdata
                or tensor.data_ptr() - others.data_ptr() != distance
            ):
                raise ReplayError(
                    f"a parameter, buffer or input of size {view.size} no longer shares the "
                    f"storage of another of size {other.size}, {distance} bytes before it, as when "
                    "the model was planned. Plan the model as it is now."
                )


_NOTHING = nullcontext()


class _Planned(torch.autograd.Function):
    """The forward pass, and the first section of the backward pass."""

    @staticmethod
    def forward(ctx: Any, replay: Replay, memory: Memory, *wanted: torch.Tensor) -> Any:
        try:
            with _as_recorded(replay.device), replay.in_pool(begins=True):
                replay.program.forward.run(memory)
                # Another tensor on the same storage: what is held here must not hold this node.
                results = tuple(load(memory.held).detach() for load in replay.program.results)
                for storage in replay.program.handed_over:
                    memory.held[storage] = None
        except BaseException:
            # At once: what is raised may be held for long, and this frame with it.
            memory.clear()
            raise
        ctx.mark_non_differentiable(*compress(results, map(not_, replay.differentiable)))
        # Zeros that autograd made for outputs without a gradient would be in no plan.
        ctx.set_materialize_grads(False)
        ctx.replay, ctx.memory = replay, memory
        ctx.versions = _versions(replay.program, memory)
        if memory.plain is not None:
            memory.plain.forward_ended()
        return results

    @staticmethod
    def backward(ctx: Any, *incoming: torch.Tensor | None) -> Any:
        replay, memory = ctx.replay, ctx.memory
        if memory.consumed:
            raise ReplayError(
                "backward runs a second time through a planned model, whose storages are gone. Run "
                "the model again, sum the losses and call backward once, or call it with "
                "retain_graph=True the first time."
            )
        if _versions(replay.program, memory) != ctx.versions:
            raise ReplayError(
                "a parameter, buffer, input or output that the backward pass needs was changed in "
                "place, or given other memory (model.double(), p.data = ...), since the forward "
                "pass. Change it after backward."
            )
        captured = replay.captured
        if captured.only_outside and casting():
            raise ReplayError(
                "backward runs inside torch.autocast, where this model's backward pass computes "
                "with other types than outside; its plan was made for backward outside, as torch "
                "advises. Call backward after the `with torch.autocast` block."
            )
        arrived = [*compress(incoming, replay.differentiable)]
        del incoming
        plain, memory = memory.plain, replay.for_this_pass(memory, arrived)
        if isinstance(memory, Memory):
            arrived = [*compress(arrived, captured.ends)]
            memory.left_out = left_out(replay.reached, arrived)
            if replay.inside:
                memory.left_out |= replay.unused(memory)
            with _as_recorded(replay.device), replay.in_pool():
                for view in captured.output_gradients:
                    gradient = arrived.pop(0)
                    if gradient is not None and gradient.stride() != view.stride and plain:
                        plain.arrived(gradient, view)
                    memory.held[view.storage] = _as_planned(view, gradient, replay.device)
                    del gradient
        del arrived
        return None, None, *replay.section(memory, 0, None)


class _Section(torch.autograd.Function):
    """A later section of the backward pass; forward, only a token for the one before."""

    @staticmethod
    def forward(
        ctx: Any, replay: Replay, memory: Memory, at: int, *wanted: torch.Tensor
    ) -> torch.Tensor:
        ctx.replay, ctx.memory, ctx.at = replay, memory, at
        return torch.empty(0, device=replay.device)

    @staticmethod
    def backward(ctx: Any, token: torch.Tensor) -> Any:
        memory = ctx.memory
        if memory.passes:
            memory = memory.passes.get(torch._C._current_graph_task_id(), memory)
        return None, None, None, *ctx.replay.section(memory, ctx.at, token)


def _is_wanted(leaf: torch.Tensor) -> bool:
    """Whether the backward pass under way is for the gradient of a leaf, among others."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # torch.autograd.grad was asked for it
        return True


def _versions(program: Program, memory: Memory) -> list[tuple[int, int]]:
    """Versions and memories of what a later pass reads."""
    held = [memory.held[storage] for storage in program.read_later]
    return [memory_version(tensor) for tensor in held if tensor is not None]


def _as_planned(
    view: View, output_gradient: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Return a gradient in the layout that was traced; `sum` hands over one number, expanded.

    Of an output that the loss does not use there is none: zeros.
    """
    if output_gradient is not None and view.shows(output_gradient):
        return output_gradient
    gradient = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=device)
    return gradient.zero_() if output_gradient is None else gradient.copy_(output_gradient)


def _as_recorded(device: torch.device) -> AbstractContextManager[Any]:
    """Casts of autocast are among the recorded calls; they must not be cast again."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING


def _alike(inputs: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """Return what tells whether others are alike, and begin at the same places of memory."""
    forms, offsets = alike(inputs), [tensor.storage_offset() for tensor in inputs]
    return lambda others: forms(others) and [one.storage_offset() for one in others] == offsets


def _waiting_bytes(named: GraphBinding, plan: Plan) -> tuple[int, int]:
    """Bytes that a forward pass holds until its backward pass: all, and inputs and outputs of it.

    Those on the host count as well: copies that the peak of one pass has room for are not made.
    """
    graph = named.graph
    size = dict(
        zip((storage.name for storage in graph.storages), graph.arrays.bytes.tolist(), strict=True)
    )
    inputs = {storage.name for storage in graph.storages if storage.role == "input"}
    held = inputs | ({STATE} & size.keys())
    # The caller may hold these longer than the plan does.
    callers = inputs | set(graph.ops[graph.op_index[LOSS]].inputs)
    away: set[str] = set()
    for kind, target, _ in plan.actions:
        if kind == "run" and target == LOSS:
            break
        if kind == "run":
            held |= set(graph.ops[graph.op_index[target]].outputs)
        elif kind == "offload":
            away.add(target)
        elif kind == "free" and target not in away:
            held.discard(target)
        away -= {target} if kind == "prefetch" else set()
    return sum(size[storage] for storage in held), sum(size[caller] for caller in held & callers)
