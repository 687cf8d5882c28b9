"""The whole state of a planned model: its placement, its planning, and the ops that move it."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ...base.errors import PlanError
from ...base.sizes import parse_bytes, show_bytes
from ...graph.graph import Graph
from ...graph.liveness import unplanned_bytes
from ...plan.plan import Plan
from ...plan.state import StatePlan, plan_state, planned_with, step_bytes
from ..eager.replay import Replay
from ..eager.trial import is_real, until_laid_out
from ..errors import ReplayError, TraceError, first_line
from ..host.buffers import HostState, PinnedState, StateBuffers
from ..host.copies import Wait
from ..model.results import ends_of, tensors_of
from ..model.signature import Arguments, detached, tensors
from ..model.step import device_of, restore_rng_state
from ..target.accelerator import OnDeviceMode, has_streams, is_apart
from ..trace.record import Layouts
from ..trace.to_graph import GraphBinding
from ..trace.trace import Trace
from .optimizer import StateUnits, UsedGradient, replace_step, step_without
from .parameter import Fetched, ParameterState, StateOps


def host_buffers_for(
    model: torch.nn.Module, state: str | os.PathLike[str] | StateBuffers
) -> StateBuffers:
    """Return the host memory that the argument `state` of `plan` selects.

    Raises PlanError if it does not fit the device of the model.
    """
    device = device_of(model)
    if state == "host":
        return PinnedState(device) if is_apart(device) else HostState()
    if not isinstance(state, StateBuffers):
        if is_apart(device):
            raise PlanError(
                f"state: got the folder {os.fspath(state)!r} for a model on {device}, whose state "
                "lies in pinned memory. Say state='host'."
            )
        return HostState(state)
    wanted = device if is_apart(device) else torch.device("cpu")
    if state.device != wanted:
        raise PlanError(
            f"state: got a {type(state).__name__} for a model on {state.device}, and the model is "
            f"on {device}. Pass one for {device}, or say state='host'."
        )
    return state


def check_model(model: torch.nn.Module) -> None:
    """Raise PlanError for a model whose parameters cannot be updated one by one inside a step."""
    named, seen = list(model.named_parameters()), dict[int, str]()
    for name, parameter in named:
        if parameter.device.type not in ("cpu", "meta") and not has_streams(parameter.device):
            raise PlanError(
                f"state: got the parameter {name!r} on {parameter.device}. State on the host is "
                "for models on the CPU, or on a device whose streams copy while ops run. Leave "
                "state out."
            )
    for name, parameter in named:
        if parameter.is_meta or not parameter.numel():
            continue
        # By storage, as parameters that share memory may be different Python objects.
        other = seen.setdefault(parameter.untyped_storage()._cdata, name)
        if other != name:
            raise PlanError(
                f"state: the parameters {other!r} and {name!r} are two that share memory, so an "
                "update of one would change the other. Make them one (assign the same parameter to "
                "both modules), or give each its own."
            )
    ranks = torch.distributed.is_available() and torch.distributed.is_initialized()
    if ranks and torch.distributed.get_world_size() > 1:
        raise PlanError(
            "state: got a process group of several ranks, whose gradients are exchanged as "
            "autograd hands them over; those of parameters on the host are not. Train on one rank, "
            "or shard the state (FSDP2, ZeRO) in place of state=."
        )
    for name, parameter in named:
        if parameter._backward_hooks or getattr(parameter, "_post_accumulate_grad_hooks", None):
            raise PlanError(
                f"state: the parameter {name!r} has a hook on its gradient, which would not run "
                "where the gradient is used inside the step. Remove it before planning."
            )


class ModelState:
    """Parameters and optimizer state of a model, and their placement.

    model : the plain model
    optimizer : updates the model
    buffers : the host memory for what moves

    parameters : those of the model, by path, once the first plan has placed them
    latest : the latest plan
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        buffers: StateBuffers,
    ) -> None:
        self.optimizer, self.buffers, self.update = optimizer, buffers, buffers.update
        self.units = StateUnits(optimizer)
        self.parameters: dict[str, ParameterState] = {}
        self.latest: StatePlan | None = None
        check_model(model)

    def __repr__(self) -> str:
        if self.latest is None:
            return "state on the host: nothing planned yet"
        many, lanes = Counter(self.places.values()), self.latest.lanes
        later = self.latest.step_peak_bytes
        step = f"; optimizer.step() takes {show_bytes(later)} at least" if later else ""
        return (
            f"of {len(self.parameters)} parameters {many['host']} lie on the host with their "
            f"state, {many['state']} have their state there ({show_bytes(self.buffers.nbytes)} in "
            f"{self.buffers.where}), {many['device']} stay{step}; a step takes {lanes.seconds:.3g} "
            f"s, {100 * lanes.hidden:.0f} % of {lanes.copies_s:.3g} s of copies beside ops"
        )

    @property
    def places(self) -> dict[str, str]:
        """The place of each parameter: `device`, `state` or `host`."""
        return {name: param.place for name, param in self.parameters.items()}

    def replay(
        self,
        model: torch.nn.Module,
        traced: Trace,
        budget: float | str,
        planner: Callable[[Graph, int], Plan],
        *,
        measured: bool,
    ) -> Replay:
        """Return the replay of a traced step, including updates.

        model : the plain model
        traced : its step, without an optimizer
        budget : the most live bytes, or a share of the step's peak if everything stays on the
            device
        planner : plans a graph within a number of bytes
        measured : whether to measure transfer speeds instead of using those of the trace
        """
        graph = traced.graph
        if measured:
            to_host, back = self.buffers.speeds()
            device = replace(graph.device, to_host_bytes_per_s=to_host, to_device_bytes_per_s=back)
            graph = replace(graph, device=device)
        units = self.units.of(model, traced)
        sizes = {storage.name: storage.bytes for storage in graph.storages}
        # Twice the parameter, as its gradient counts too.
        by = self.buffers.updater(
            sum(2 * sizes[unit.parameter] + unit.state_bytes for unit in units)
        )
        state_bytes = sum(unit.state_bytes + unit.counts_bytes for unit in units)
        baseline = unplanned_bytes(graph) + state_bytes
        budget_bytes = parse_bytes(budget, whole=baseline)
        # If planned before, for another input, the placement is kept.
        if self.parameters:
            planned = planned_with(
                graph, units, self.places, budget_bytes, planner, update=self.update,
                updaters={name: param.by for name, param in self.parameters.items()},
            )  # fmt: skip
        else:
            # With `step` gradients wait on the host, and torch requires `.grad` to be on the
            # parameter's device: if the device has its own memory, parameters go to the host, too.
            is_host_only = is_apart(self.buffers.device) and self.update == "step"
            planned = plan_state(
                graph, units, budget_bytes, planner, update=self.update, by=by,
                places=("host",) if is_host_only else ("state", "host"),
            )  # fmt: skip
        plan = replace(planned.plan, baseline_peak_bytes=baseline, budget_bytes=budget_bytes)
        self.latest = planned = replace(planned, plan=plan)
        # Nothing is moved before this point: an infeasible budget leaves model and optimizer alone.
        self._place(model, planned)
        if by != "in place":
            # The move used the file's mapping; steps read the file directly instead.
            self.buffers.let_go()
        self._step_bytes = {
            name: step_bytes(unit, planned.places[name], sizes[name], self.parameters[name].by)
            for unit in units
            for name in (unit.parameter,)
        }
        # Bytes on the device during `optimizer.step()`, whichever parameter is updated.
        self._stays_bytes = planned.step_peak_bytes - max(
            (sum(self._step_bytes[unit.parameter]) for unit in units if unit.gradient), default=0
        )
        replace_step(self.optimizer, self)
        # A replay refers to storages by number; fetches and updates come after all recorded ones.
        numbers = dict(traced.named.storage_of)
        for storage in planned.graph.storages:
            numbers.setdefault(storage.name, len(traced.captured.recording.nbytes) + len(numbers))
        named = GraphBinding(
            planned.graph, traced.named.call_of, numbers, traced.named.random_states
        )
        ops = StateOps(self.parameters, named, traced, begin=self.begin, end=self.end)
        return Replay(replace(traced, named=named), plan, ops)

    def step(self) -> None:
        """Finish the optimizer's step: update all that the backward pass did not update."""
        inside = self._updated_inside()
        if self.update == "step":
            # Gradients are in `.grad` on the host. None is skipped, as in torch.
            row = [state for state in inside.values() if state.parameter.grad is not None]
            assert self.latest is not None
            assert self.latest.plan.budget_bytes is not None
            room = self.latest.plan.budget_bytes - self._stays_bytes
            sequential_update(
                [state for state in row if state.by == "device"], self._step_bytes, room
            )
            for state in row:
                if state.by != "device":
                    state.update_in_place()
        else:
            for state in inside.values():
                gradient = state.parameter.grad
                if gradient is not None and not isinstance(gradient, UsedGradient):
                    raise PlanError(
                        f"the parameter {state.name!r} has a gradient that no planned step made: a "
                        "backward pass of another model, or one whose forward pass ran without the "
                        "plan. Its update is made in the planned step. Drop it, or run the planned "
                        "model."
                    )
        step_without(self.optimizer, inside)
        if self.update == "backward":
            for state in inside.values():
                # Remove the placeholder: the next step must not find a gradient.
                state.is_updated, state.parameter.grad = False, None
        self.buffers.finish()

    def _updated_inside(self) -> dict[int, ParameterState]:
        """Return the parameters that the optimizer's own step does not update, by id."""
        trained = (param for param in self.parameters.values() if param.optimizer is not None)
        return {
            id(state.parameter): state
            for state in trained
            if self.update == "backward" or state.place != "device"
        }

    def begin(self) -> None:
        """Raise PlanError before a forward pass that would see partially updated parameters."""
        if self.update == "step":
            return
        late = next((param for param in self.parameters.values() if param.is_updated), None)
        if late is not None:
            raise PlanError(
                f"a second forward pass comes before optimizer.step(): {late.name!r} was updated "
                "in the backward pass of the first, so this one would compute with new parameters. "
                "Call optimizer.step() after each backward pass; to add gradients of several "
                "micro-batches, plan with a state object of update='step'."
            )

    def brought(self) -> AbstractContextManager[Any]:
        """Let ops inside get copies on the device of tensors that are on the host."""
        device = self.buffers.device
        # If the device is the CPU, they are ordinary tensors.
        return OnDeviceMode(self.buffers, device) if is_apart(device) else nullcontext()

    def with_inputs(self, arguments: Arguments) -> Arguments:
        """Return the arguments with CPU tensors moved to the device that the model runs on.

        A host-resident parameter reports the CPU as its device, and some callers (`generate` of
        transformers) put inputs on the device of the first parameter.
        """
        device = self.buffers.device
        if not is_apart(device):
            return arguments
        return tree_map_only(  # type: ignore[no-any-return]
            torch.Tensor,
            # 0-dimensional CPU tensors can be combined with tensors on any device.
            lambda tensor: (
                tensor.to(device) if tensor.device.type == "cpu" and tensor.dim() else tensor
            ),
            arguments,
        )

    def end(self) -> None:
        """Wait for gradients being copied to the host, as the caller reads `.grad` next."""
        if self.update == "step":
            self.buffers.finish()

    @contextmanager
    def without_updates(self) -> Iterator[None]:
        """Keep steps inside from changing parameters, gradients and state."""
        # The caller's gradients are set aside, as the dry run must not add to them.
        gradients = [(state, state.parameter.grad) for state in self.parameters.values()]
        for state, _ in gradients:
            state.is_dry, state.parameter.grad = True, None
        try:
            yield
        finally:
            for state, gradient in gradients:
                state.is_dry, state.parameter.grad = False, gradient

    def move_state(self) -> None:
        """Move loaded optimizer state to the host."""
        for state in self.parameters.values():
            if state.place != "device":
                state.move_state()

    def dry_run(
        self,
        replay: Replay,
        model: torch.nn.Module,
        arguments: Arguments,
        planned_with: Callable[[Layouts], Replay],
    ) -> Replay:
        """Run a step on a sample without updates; return it, replanned if layouts differ.

        The trial of `plan` also runs the model's own step, with all parameters on the device, which
        is impossible for a model that does not fit there. Here only the planned step runs, without
        updates, to check that it runs at all, and whether kernels give results other layouts than
        traced.

        replay : the step
        model, arguments : the plain model, and the sample; if it has no memory, nothing is run
        planned_with : traces and plans the step with given layouts

        Raises TraceError if the step does not run on the sample.
        """
        if not is_real((*tensors(arguments), *model.buffers())):
            return replay

        def run(step: Replay) -> None:
            try:
                self._dry_run(step, model, arguments)
            except (ReplayError, torch.OutOfMemoryError):
                raise
            except Exception as error:
                raise TraceError(
                    f"a step with the plan, tried on the sample, failed: {type(error).__name__}: "
                    f"{first_line(error)}"
                ) from error

        return until_laid_out(
            {}, lambda layouts: planned_with(layouts) if layouts else replay, run
        )[0]

    def _dry_run(self, step: Replay, model: torch.nn.Module, arguments: Arguments) -> None:
        args, kwargs = detached(arguments)
        # A forward pass writes statistics and counters even without updates.
        buffers = [(buffer, buffer.detach().clone()) for buffer in model.buffers()]
        try:
            with restore_rng_state(), self.without_updates(), torch.enable_grad():
                returned = step.run(model, args, kwargs)
                ends = ends_of(returned, tensors_of(returned, model))
                if ends:
                    torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
        finally:
            with torch.no_grad():
                for buffer, before in buffers:
                    buffer.copy_(before)
                for leaf in tensors((args, kwargs)):
                    leaf.grad = None

    def _place(self, model: torch.nn.Module, plan: StatePlan) -> None:
        for name, parameter in model.named_parameters():
            if name not in self.parameters:
                group = self.units.groups.get(id(parameter))
                self.parameters[name] = ParameterState(
                    name,
                    parameter,
                    plan.places.get(name, "device"),
                    self.buffers,
                    None if group is None else self.optimizer,
                    group,
                    plan.updaters.get(name, "device"),
                )


def sequential_update(
    states: Sequence[ParameterState], needs: Mapping[str, tuple[int, int]], room_bytes: int
) -> None:
    """Update parameters whose gradients are on the host, one after the other.

    If there is room, the next is fetched and earlier ones are written during an update.

    states : parameters with gradients
    needs : per path, bytes that an update fetches, and bytes of its scratch
    room_bytes : the budget minus what always stays on the device
    """
    # Writes to the host in progress, oldest first, and the parameter that was prefetched.
    storing: list[tuple[int, Wait]] = []
    fetched: Fetched | None = None
    try:
        for at, state in enumerate(states):
            nbytes, scratch = needs[state.name]
            room = room_bytes - nbytes - scratch
            # There was no room to prefetch it, so all pending writes have to finish first.
            if fetched is None:
                while storing:
                    storing.pop(0)[1]()
                fetched = state.fetch_all()
            current, fetched = fetched, None
            # After the last one nothing is prefetched, as if it needed more than there is room for.
            following = needs[states[at + 1].name][0] if at + 1 < len(states) else room + 1
            ahead = following if following <= room else 0
            # Wait for as many writes as the next fetch needs room for.
            while storing and sum(state for state, _ in storing) + ahead > room:
                storing.pop(0)[1]()
            if following <= room:
                fetched = states[at + 1].fetch_all()
            storing.append((nbytes, state.update_fetched(current)))
            # From here only `storing` keeps it alive, until it is written.
            del current
    finally:
        # Also after an error: no copy may still be using memory that is freed.
        if fetched is not None:
            fetched.wait()
        for _, wait in storing:
            wait()
