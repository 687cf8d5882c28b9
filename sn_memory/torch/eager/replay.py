"""The planned model as autograd nodes, whose forward and backward run a plan's instructions.

It is a chain of nodes, one for each section of the backward pass, which ends where gradients are
ready. The inputs of a node are the parameters whose gradients it computes, and a token that links
to the next section. So gradients are accumulated one at a time as they are computed, as in torch,
hooks on parameters (DistributedDataParallel, Horovod) fire in between, and `torch.autograd.grad`
sees the parameters. A single node would hold all gradients in addition to those of earlier steps.
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
    """Return, per gradient, the output gradients it is computed from: their positions, as bits.

    If a loss uses only some of the outputs, autograd leaves the other parameters without a
    gradient, and an optimizer skips them. Zeros are different: moments are updated, weights decay.
    """
    of: dict[int, int] = {}
    for number, view in enumerate(captured.output_gradients):
        of[view.storage] = of.get(view.storage, 0) | 1 << number
    for call in captured.recording.calls[captured.boundary :]:
        bits = 0
        for storage in call.reads:
            bits |= of.get(storage, 0)
        for storage in call.makes:
            # A new storage replaces earlier origins; a write adds to them.
            of[storage] = bits
        for storage in call.writes:
            of[storage] = of.get(storage, 0) | bits
    return tuple(0 if view is None else of.get(view.storage, 0) for _, view in captured.gradients)


def left_out(reached: Sequence[int], arrived: Sequence[object]) -> frozenset[int]:
    """Return the positions of gradients that only depend on outputs without a gradient."""
    if all(grad is not None for grad in arrived):
        return frozenset()
    here = sum(1 << number for number, grad in enumerate(arrived) if grad is not None)
    return frozenset(place for place, bits in enumerate(reached) if bits and not bits & here)


def overwritten(captured: Captured) -> list[str]:
    """Return the names of parameters and buffers that a forward pass reads, and overwrites.

    A rerun would compute something else. Statistics of a batch norm in training, and counts, are
    only read to update themselves.
    """
    calls = captured.recording.calls[: captured.boundary]
    written = {storage for call in calls for storage in call.writes}
    named = (*captured.parameters, *captured.buffers)
    # Per storage, the overwritten parameters and buffers that it was computed from.
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
        # Constants, which the trace holds.
        self.known = list(captured.recording.constants.values())
        # The optimizer's state.
        self.resident_bytes = trace.resident_bytes
        self.counts_gradients = bool(captured.earlier)
        self.reads, self.looked = captured.reads, captured.looked
        # The peak of a backward pass that adds its gradients to those of another.
        self.adding_peak_bytes = self.program.adding_peak_bytes
        # Per output that is a tensor, whether it may get a gradient.
        pairs = zip(captured.differentiable, captured.outputs, strict=True)
        self.differentiable = [takes for takes, out in pairs if isinstance(out, View)]
        self.reached = reached(captured)
        # Per input that requires a gradient, how many are returned; see `separate_sums`.
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
        # `_alike` does not check whether tensors that share a storage still do.
        self._each_its_own_storage = len({view.storage for view in forms}) == len(forms)
        # Whether gradients of parameters are used inside the step.
        self.inside = update_ops is not None and bool(update_ops.used_gradients)
        used = update_ops.used_gradients if update_ops is not None else ()
        self.used_places = [
            place for place, (name, _) in enumerate(captured.gradients[:leaves]) if name in used
        ]
        self.update_ops = update_ops
        # Unique among the steps of this process.
        self.number = next(_NUMBERS)
        # Whether a step gets tensors like those of the previous one.
        self._inputs_as_planned: Callable[[Sequence[torch.Tensor]], bool] | None = None

    @property
    def ignored(self) -> list[torch.Tensor]:
        return [buffer.block for buffer in self.program.free_buffers]

    def in_pool(self, *, begins: bool = False) -> AbstractContextManager[Any]:
        """Return the context in which this thread allocates what the plan counts.

        begins : whether a step begins; its later parts run in the backward pass
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
        """Devices whose generators the forward pass draws from."""
        place = self.captured.recording.device
        calls = [call for call in self.captured.recording.calls if call.random]
        return [*{place[make]: None for call in calls for make in (*call.makes, *call.writes)}]

    @cached_property
    def overwritten(self) -> list[str]:
        return overwritten(self.captured)

    def release(self) -> None:
        # So the host holds only the blocks of one kind of input.
        self.program.free_buffers.clear()

    def is_outdated(self, ends: Sequence[bool]) -> bool:
        """Whether kernels use other layouts, or it lacks requested gradients."""
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
        # Tensors other than parameters for which the last section has gradients.
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
            # Autograd visits nodes whose gradients are requested; these leaves show which.
            memory.used = [
                torch.empty(0, device=self.device, requires_grad=True),
                *(wanted[place] for place in self.used_places),
            ]
            follow += memory.used
        sections = self.program.backward
        # The last section first: each node takes the token of the next one in the backward pass.
        for at in range(len(sections) - 1, 0, -1):
            ready = [wanted[place] for place in sections[at].ready]
            follow = [_Section.apply(self, memory, at, *ready, *follow)]
        ready = [wanted[place] for place in sections[0].ready]
        results = iter(_Planned.apply(self, memory, *ready, *follow))
        # Outputs that are not tensors are the same in each step: the trace's.
        flat = [next(results) if isinstance(out, View) else out for out in self.captured.outputs]
        # Only the joint graph of torch.compile has no form, and it is not replayed.
        assert self.captured.output_form is not None
        return self.captured.output_form.filled(flat)

    def section(
        self, memory: Memory | Gradients, at: int, token: torch.Tensor | None
    ) -> list[torch.Tensor | None]:
        """Run a section of the backward pass; return its gradients; the last also those of inputs.

        For any other section, the last item is the token's: the token that came, or a new one.
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
        """Return the positions of gradients that must not be used inside of this backward pass.

        All of them if it only computes gradients of inputs, e.g. `torch.autograd.grad(loss, x)`.
        Raises ReplayError if it is for only some of the parameters.
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
                # Nothing else holds them, so autograd takes them as `.grad` without a copy.
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
        """Return the memory of a backward pass, or its gradients if no plan can compute them.

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
            # Later sections of this pass find it by the number of autograd's graph task.
            task = torch._C._current_graph_task_id()
            memory.passes[task] = used
            # Some of its sections may never run.
            engine = torch.autograd.Variable._execution_engine
            engine.queue_callback(partial(memory.passes.pop, task))
        return used

    def unplanned(self, arrived: Sequence[torch.Tensor | None]) -> bool:
        """Whether an output got a gradient at which no planned backward pass begins."""
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
                # From the next step on this takes a few microseconds, unlike `_check`.
                self._inputs_as_planned = _alike(inputs)
        held = memory.held
        for storage, at in self._held_inputs:
            held[storage] = inputs[at]
        for storage, tensor in self.captured.recording.constants.items():
            held[storage] = tensor
        return memory

    def _check(self, inputs: Sequence[torch.Tensor]) -> None:
        """Raise if an input has another form than planned.

        The storage may be another one, with another offset, e.g. if parameters became views of one
        vector. Tensors that shared one storage must still do so.
        """
        fetched = () if self.update_ops is None else self.update_ops.fetched
        first: dict[int, tuple[View, torch.Tensor]] = {}
        for view, tensor in zip(self._views, inputs, strict=True):
            if view.storage in fetched:
                continue  # it is on the host, and checked when it is fetched
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
                # Another tensor on the same storage: held tensors must not hold this node.
                results = tuple(load(memory.held).detach() for load in replay.program.results)
                for storage in replay.program.handed_over:
                    memory.held[storage] = None
        except BaseException:
            # Immediately, as the exception, and this frame with it, may be held for long.
            memory.clear()
            raise
        ctx.mark_non_differentiable(*compress(results, map(not_, replay.differentiable)))
        # Zeros that autograd makes for outputs without a gradient would not be in the plan.
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
    """A later section of the backward pass; its forward only returns the previous one's token."""

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
    """Whether the running backward pass computes the gradient of a leaf, among others."""
    try:
        return torch._C._will_engine_execute_node(get_gradient_edge(leaf).node)
    except RuntimeError:  # torch.autograd.grad was called for it
        return True


def _versions(program: Program, memory: Memory) -> list[tuple[int, int]]:
    """Versions and addresses of what a later pass reads."""
    held = [memory.held[storage] for storage in program.read_later]
    return [memory_version(tensor) for tensor in held if tensor is not None]


def _as_planned(
    view: View, output_gradient: torch.Tensor | None, device: torch.device
) -> torch.Tensor:
    """Return a gradient in the traced layout; `sum` passes a single number, expanded.

    Zeros for an output that the loss does not use.
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
    """Return a predicate: whether other tensors have the same forms and addresses."""
    forms, offsets = alike(inputs), [tensor.storage_offset() for tensor in inputs]
    return lambda others: forms(others) and [one.storage_offset() for one in others] == offsets


def _waiting_bytes(named: GraphBinding, plan: Plan) -> tuple[int, int]:
    """Bytes that a forward pass holds until its backward pass: all, and those of in- and outputs.

    Storages on the host count as well: copies that fit below the peak of one pass are not made.
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
