"""Autograd nodes of a whole model, whose forward and backward run a plan's instructions.

There is a chain of nodes, one for each section of the backward pass, which ends where gradients are
ready. The inputs of a node are the parameters whose gradients it computes, and a token that links
it to the next section. So gradients are accumulated one at a time, as soon as they are computed, as
in torch; hooks on parameters (DistributedDataParallel, Horovod) fire meanwhile, and
`torch.autograd.grad` sees the parameters. A single node would hold all new gradients in addition to
those of earlier steps.
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
    """Return, per gradient, a bit mask of the output gradients it is computed from.

    If a loss uses only some of the outputs, autograd leaves the parameters of the others without a
    gradient, and the optimizer skips them. Zeros would not be the same: moments are updated and
    weights decay.
    """
    sources: dict[int, int] = {}
    for number, view in enumerate(captured.output_gradients):
        sources[view.storage] = sources.get(view.storage, 0) | 1 << number
    for call in captured.recording.calls[captured.boundary :]:
        bits = 0
        for storage in call.reads:
            bits |= sources.get(storage, 0)
        for storage in call.makes:
            # A new value replaces the earlier sources; a write adds to them.
            sources[storage] = bits
        for storage in call.writes:
            sources[storage] = sources.get(storage, 0) | bits
    return tuple(
        0 if view is None else sources.get(view.storage, 0) for _, view in captured.gradients
    )


def left_out(reached: Sequence[int], arrived: Sequence[object]) -> frozenset[int]:
    """Return the indices of gradients that depend only on outputs without a gradient."""
    if all(grad is not None for grad in arrived):
        return frozenset()
    present = sum(1 << number for number, grad in enumerate(arrived) if grad is not None)
    return frozenset(place for place, bits in enumerate(reached) if bits and not bits & present)


def overwritten(captured: Captured) -> list[str]:
    """Return the names of parameters and buffers that a forward pass both reads and overwrites.

    Run once more, it would compute something else. Running statistics of a training batch norm, and
    counters, are excluded: they are read only to update themselves.
    """
    calls = captured.recording.calls[: captured.boundary]
    written = {storage for call in calls for storage in call.writes}
    named = (*captured.parameters, *captured.buffers)
    # Per storage, the names of overwritten tensors that it was computed from.
    sources = {view.storage: {name} for name, view in named if view.storage in written}
    for call in calls:
        own = statistics(call)
        reads = [arg for place, arg in enumerate(call.flat) if place not in own]
        read = {read.storage for read in reads if isinstance(read, View)}
        names = set[str]().union(*(sources.get(storage, ()) for storage in read))
        for storage in (*call.makes, *call.writes):
            sources[storage] = sources.get(storage, set()) | names
    return sorted(set[str]().union(*(sources.get(storage, ()) for storage in captured.returned)))


Gradients = list[torch.Tensor | None]
_NUMBERS = count(1)


class Replay(Step):
    """Runs the program of a traced step and its plan on the tensors of a model; see Program."""

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
        # Constants, which only the trace holds.
        self.known = list(captured.recording.constants.values())
        # The optimizer's state.
        self.resident_bytes = trace.resident_bytes
        self.counts_gradients = bool(captured.earlier)
        self.reads, self.looked = captured.reads, captured.looked
        # The peak of a backward pass that accumulates gradients into earlier ones.
        self.adding_peak_bytes = self.program.adding_peak_bytes
        # Per output that is a tensor, whether it may receive a gradient.
        pairs = zip(captured.differentiable, captured.outputs, strict=True)
        self.differentiable = [takes for takes, out in pairs if isinstance(out, View)]
        self.reached = reached(captured)
        # Per input that takes a gradient, how many are returned; see `separate_sums`.
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
        # `_alike` cannot tell whether tensors that shared a storage still do.
        self._each_its_own_storage = len({view.storage for view in forms}) == len(forms)
        # Whether gradients of parameters are used inside the step.
        self.inside = update_ops is not None and bool(update_ops.used_gradients)
        used = update_ops.used_gradients if update_ops is not None else ()
        self.used_places = [
            place for place, (name, _) in enumerate(captured.gradients[:leaves]) if name in used
        ]
        self.update_ops = update_ops
        # Unique in this process.
        self.number = next(_NUMBERS)
        # Tells whether a step's inputs have the forms of the previous step's.
        self._inputs_as_planned: Callable[[Sequence[torch.Tensor]], bool] | None = None

    @property
    def ignored(self) -> list[torch.Tensor]:
        return [buffer.block for buffer in self.program.free_buffers]

    def in_pool(self, *, begins: bool = False) -> AbstractContextManager[Any]:
        """Return a context in which this thread allocates from the memory pool of the plan.

        begins : whether a step begins, whose later parts run in the backward pass
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
        """Devices on which the forward pass draws random numbers."""
        place = self.captured.recording.device
        calls = [call for call in self.captured.recording.calls if call.random]
        return [*{place[make]: None for call in calls for make in (*call.makes, *call.writes)}]

    @cached_property
    def overwritten(self) -> list[str]:
        return overwritten(self.captured)

    def release(self) -> None:
        # So host memory holds the blocks of only one kind of input, however many there are.
        self.program.free_buffers.clear()

    def is_outdated(self, ends: Sequence[bool]) -> bool:
        """Whether kernels use other layouts, or requested gradients are not planned."""
        own = self.captured.ends
        return bool(self.layouts) or (len(ends) == len(own) and any(map(gt, ends, own)))

    def run(self, model: torch.nn.Module, args: Any, kwargs: Any, call: Call | None = None) -> Any:
        """Run the forward pass of a model, and return its result."""
        if call is None:
            call = Call(list(model.parameters()), list(model.buffers()), None)
        parameters, buffers = call.parameters, call.buffers
        plain = None if call.plain is None else call.plain(self)
        inputs = tensors((args, kwargs))
        # As in `Captured.gradients`: parameters first, then inputs; each tensor once.
        wanted: list[torch.Tensor] = [param for param in parameters if param.requires_grad]
        # What the last section of the backward pass has gradients for, in addition to parameters.
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
            # Autograd only runs nodes that lead to a requested gradient; these show which do.
            memory.used = [
                torch.empty(0, device=self.device, requires_grad=True),
                *(wanted[place] for place in self.used_places),
            ]
            follow += memory.used
        sections = self.program.backward
        # The last section first: each node takes the token of the section that runs after it.
        for at in range(len(sections) - 1, 0, -1):
            ready = [wanted[place] for place in sections[at].ready]
            follow = [_Section.apply(self, memory, at, *ready, *follow)]
        ready = [wanted[place] for place in sections[0].ready]
        results = iter(_Planned.apply(self, memory, *ready, *follow))
        # Outputs that are not tensors are the same in each step: those of the trace.
        flat = [next(results) if isinstance(out, View) else out for out in self.captured.outputs]
        # Only a joint graph of torch.compile has no form, and it is not replayed.
        assert self.captured.output_form is not None
        return self.captured.output_form.filled(flat)

    def section(
        self, memory: Memory | Gradients, at: int, token: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        """Run a section of the backward pass; return its gradients.

        The last section also returns those of inputs. In any other, the last item is the gradient
        of the token: the token received, or a new one.
        """
        section, is_last = self.program.backward[at], at == len(self.program.backward) - 1
        if isinstance(memory, Memory):
            gradients = self._run(memory, section, is_last)
        else:
            # The model's own step has computed all gradients.
            gradients = [memory[place] for place in section.ready]
            gradients += memory[self.program.leaves :] if is_last else []
        if not is_last:
            gradients.append(torch.empty(0, device=self.device) if token is None else token)
        elif self.inside:
            gradients += [None] * (1 + len(self.used_places))
        return gradients

    def unused(self, memory: Memory) -> frozenset[int]:
        """Return the indices of gradients that this backward pass must not use inside the step.

        All of them if it computes gradients of inputs only, e.g. `torch.autograd.grad(loss, x)`.
        Raises ReplayError if it computes gradients of some parameters only.
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
                # With no other reference, autograd makes them `.grad` without a copy.
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
        """Return the memory of a backward pass, or its gradients if a plan cannot compute them.

        If the graph is kept, e.g. by `retain_graph=True`, storages stay for another pass.
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
            # Later sections of this pass find it by the id of autograd's graph task.
            task = torch._C._current_graph_task_id()
            memory.passes[task] = used
            # Some of its sections may never run.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(memory.passes.pop, task))
        return used

    def unplanned(self, arrived: Sequence[torch.Tensor | None]) -> bool:
        """Whether an output has a gradient for which no backward pass was planned."""
        ends = self.captured.ends
        return any(grad is not None and not end for grad, end in zip(arrived, ends, strict=True))

    def start(self, inputs: Sequence[torch.Tensor]) -> Memory:
        """Return memory that holds the parameters, buffers and inputs of a step."""
        if self.update_ops is not None:
            self.update_ops.begin()
        memory = self.program.memory()
        memory.layouts = self.layouts
        if self._inputs_as_planned is None or not self._inputs_as_planned(inputs):
            self._check(inputs)
            if self._each_its_own_storage:
                # Takes a few microseconds in later steps; `_check` compares every tensor.
                self._inputs_as_planned = _alike(inputs)
        held = memory.held
        for storage, at in self._held_inputs:
            held[storage] = inputs[at]
        for storage, tensor in self.captured.recording.constants.items():
            held[storage] = tensor
        return memory

    def _check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise if an input has another form than planned.

        Storages and offsets may differ, e.g. of parameters that became views of one flat vector.
        Tensors that shared a storage must still do so.
        """
        fetched = () if self.update_ops is None else self.update_ops.fetched
        first: dict[int, tuple[View, torch.Tensor]] = {}
        for view, tensor in zip(self._views, inputs, strict=True):
            if view.storage in fetched:
                continue  # on the host: checked when it is fetched
            place = self.captured.recording.device[view.storage]
            got = tensor.size(), tensor.stride(), tensor.dtype, tensor.device
            if (*view.form, place) != got:
                if tensor.is_meta:
                    raise ReplayError(
                        f"a parameter, buffer or input of size {tuple(tensor.size())} is on the "
                        "meta device, so its plan can be read but not run. Give the model "
                        "memory (model.to_empty(device=...), then its weights), and plan it then."
                    )
                move = "" if tensor.device == place else f"Move it to {place}, or plan"
                raise ReplayError(
                    f"a parameter, buffer or input has size {tuple(tensor.size())}, stride "
                    f"{tensor.stride()}, type {tensor.dtype} and device {tensor.device}; the plan "
                    f"expects {view.size}, {view.stride}, {view.dtype} and {place}. "
                    f"{move or 'Plan'} the model as it is now."
                )
            other, other_tensor = first.setdefault(view.storage, (view, tensor))
            distance = view.offset * view.dtype.itemsize - other.offset * other.dtype.itemsize
            if tensor is not other_tensor and (
                tensor.untyped_storage()._cdata != other_tensor.untyped_storage()._cdata
                or tensor.data_ptr() - other_tensor.data_ptr() != distance
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
                # Detached, as the memory must hold no tensors that refer to this node.
                results = tuple(load(memory.held).detach() for load in replay.program.results)
                for storage in replay.program.handed_over:
                    memory.held[storage] = None
        except BaseException:
            # Freed now: the exception, and with it this frame, may be kept alive for long.
            memory.clear()
            raise
        ctx.mark_non_differentiable(*compress(results, map(not_, replay.differentiable)))
        # No plan counts the zeros that autograd would make for outputs without a gradient.
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
    """A later section of the backward pass; its forward only makes a token for the one before."""

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
    """Whether the current backward pass computes the gradient of a leaf."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # it was requested by torch.autograd.grad
        return True


def _versions(program: Program, memory: Memory) -> list[tuple[int, int]]:
    """Versions and addresses of tensors that the backward pass reads."""
    held = [memory.held[storage] for storage in program.read_later]
    return [memory_version(tensor) for tensor in held if tensor is not None]


def _as_planned(
    view: View, output_gradient: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Return a gradient in the traced layout; that of `sum` is an expanded scalar, for example.

    For an output that the loss does not use: zeros.
    """
    if output_gradient is not None and view.shows(output_gradient):
        return output_gradient
    gradient = torch.empty_strided(view.size, view.stride, dtype=view.dtype, device=device)
    return gradient.zero_() if output_gradient is None else gradient.copy_(output_gradient)


def _as_recorded(device: torch.device) -> AbstractContextManager[Any]:
    """Disable autocast: its casts are among the recorded calls, and must not be repeated."""
    if torch.is_autocast_enabled(device.type):
        return torch.autocast(device.type, enabled=False)
    return _NOTHING


def _alike(inputs: Sequence[torch.Tensor]) -> Callable[[Sequence[torch.Tensor]], bool]:
    """Return a function that tells whether other tensors have the same forms and offsets."""
    forms, offsets = alike(inputs), [tensor.storage_offset() for tensor in inputs]
    return lambda others: forms(others) and [t.storage_offset() for t in others] == offsets


def _waiting_bytes(named: GraphBinding, plan: Plan) -> tuple[int, int]:
    """Bytes held from a forward to its backward pass: in all, and of its inputs and outputs.

    Offloaded storages count as well: copies that the peak of one pass has room for are skipped.
    """
    graph = named.graph
    size = dict(
        zip((storage.name for storage in graph.storages), graph.arrays.bytes.tolist(), strict=True)
    )
    inputs = {storage.name for storage in graph.storages if storage.role == "input"}
    held = inputs | ({STATE} & size.keys())
    # The caller may hold these for longer than the plan.
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
