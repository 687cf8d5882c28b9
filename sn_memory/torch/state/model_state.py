"""All of the state of a planned model: what moves, how it is planned, who carries it out."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import replace
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ...base.errors import PlanError
from ...base.sizes import parse_bytes, show_bytes
from ...graph.graph import Graph
from ...graph.hosted import UPDATES
from ...graph.liveness import unplanned_bytes
from ...graph.unit import Unit
from ...plan.plan import Plan
from ...plan.state import StatePlan, plan_state, planned_with, step_bytes
from ..device.accelerator import is_apart
from ..device.resting import Brought
from ..eager.replay import Replay
from ..model.signature import Arguments
from ..trace.record import Layouts
from ..trace.to_graph import Named
from ..trace.trace import Trace
from .added_ops import AddedOps
from .arena import StateArena
from .checks import check_model
from .in_turn import update_in_turn
from .owned import Owned
from .rehearsal import rehearsed
from .stepping import UsedUp, step_in_memory, take_over
from .units import StateUnits


class ModelState:
    """Parameters and optimizer state of a model, and where they lie.

    Parameters
    ----------
    model
        The plain model.
    optimizer
        Who updates it.
    arena
        Where what moves rests.
    update
        `step`: gradients wait on the host for `optimizer.step()`. `backward`: each parameter is
        updated as soon as its gradient is complete.

    Attributes
    ----------
    owned
        Per parameter of the model, by path, once the first plan has said where it lies.
    latest
        The plan made last.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        optimizer: torch.optim.Optimizer,
        arena: StateArena,
        update: str = "step",
    ) -> None:
        if update not in UPDATES:
            raise ValueError(f"got update {update!r}, expected one of {', '.join(UPDATES)}.")
        self.optimizer, self.arena, self.update = optimizer, arena, update
        self.units = StateUnits(optimizer)
        self.owned: dict[str, Owned] = {}
        self.latest: StatePlan | None = None
        check_model(model)

    def __repr__(self) -> str:
        if self.latest is None:
            return "state on the host: nothing planned yet"
        many, lanes = Counter(self.places.values()), self.latest.lanes
        later = self.latest.step_peak_bytes
        step = f"; optimizer.step() takes {show_bytes(later)} at least" if later else ""
        return (
            f"of {len(self.owned)} parameters {many['host']} lie on the host with their state, "
            f"{many['state']} have their state there ({show_bytes(self.arena.nbytes)} in "
            f"{self.arena.where}), {many['device']} stay{step}; a step takes {lanes.seconds:.3g} "
            f"s, {100 * lanes.hidden:.0f} % of {lanes.copies_s:.3g} s of copies beside ops"
        )

    @property
    def places(self) -> dict[str, str]:
        """Per parameter, where it lies: `device`, `state` or `host`."""
        return {name: it.place for name, it in self.owned.items()}

    @property
    def blocks(self) -> list[torch.Tensor]:
        """What lies on the host."""
        return self.arena.blocks

    def replay(
        self,
        model: torch.nn.Module,
        traced: Trace,
        budget: float | str,
        planner: Callable[[Graph, int], Plan],
        *,
        measured: bool,
    ) -> Replay:
        """Return what carries a traced step out, its updates included.

        Parameters
        ----------
        model
            The plain model.
        traced
            Its step, without an optimizer.
        budget
            The most live bytes, or a share of what the step takes where all stays on the device.
        planner
            Plans a graph within so many bytes.
        measured
            Whether to measure the speeds of the way, in place of those of the trace.
        """
        graph = self._with_speeds(traced.graph) if measured else traced.graph
        units = self.units.of(model, traced)
        by = self._updater(graph, units)
        whole = unplanned_bytes(graph) + sum(it.state_bytes + it.counts_bytes for it in units)
        budget_bytes = parse_bytes(budget, whole=whole)
        if self.owned:
            found = planned_with(
                graph, units, self.places, budget_bytes, planner, update=self.update,
                updaters={name: it.by for name, it in self.owned.items()},
            )  # fmt: skip
        else:
            found = plan_state(
                graph,
                units,
                budget_bytes,
                planner,
                update=self.update,
                updaters=(by,),
                places=self._places(),
            )
        plan = replace(found.plan, baseline_peak_bytes=whole, budget_bytes=budget_bytes)
        self.latest = found = replace(found, plan=plan)
        self._own(model, found)
        if by != "in place":
            self.arena.let_go()
        sizes = {it.name: it.bytes for it in graph.storages}
        self._step_bytes = {
            it.parameter: step_bytes(
                it, found.places[it.parameter], sizes[it.parameter], self.owned[it.parameter].by
            )
            for it in units
        }
        self._stays_bytes = found.step_peak_bytes - max(
            (sum(self._step_bytes[it.parameter]) for it in units if it.gradient), default=0
        )
        take_over(self.optimizer, self)
        numbers = dict(traced.named.storage_of)
        for storage in found.graph.storages:
            numbers.setdefault(storage.name, len(traced.captured.recording.nbytes) + len(numbers))
        named = Named(found.graph, traced.named.call_of, numbers, traced.named.random_states)
        return Replay(replace(traced, named=named), plan, AddedOps(self.owned, named, traced, self))

    def step(self) -> None:
        """Finish the step of the optimizer: all that was not updated in the backward pass."""
        inside = self._inside()
        if self.update == "step":
            row = [it for it in inside.values() if it.parameter.grad is not None]
            assert self.latest is not None
            assert self.latest.plan.budget_bytes is not None
            room = self.latest.plan.budget_bytes - self._stays_bytes
            update_in_turn([it for it in row if it.by == "device"], self._step_bytes, room)
            for owned in row:
                if owned.by != "device":
                    owned.update_at_rest()
            step_in_memory(self.optimizer, lambda it: id(it) in inside)
            self.arena.finish()
            return
        for owned in inside.values():
            gradient = owned.parameter.grad
            if gradient is not None and not isinstance(gradient, UsedUp):
                raise PlanError(
                    f"the parameter {owned.name!r} has a gradient that no planned step made: a "
                    "backward pass of another model, or one whose forward pass ran without the "
                    "plan. Its update is made in the planned step. Drop it, or run the planned "
                    "model."
                )
        step_in_memory(self.optimizer, lambda it: id(it) in inside)
        for owned in inside.values():
            owned.is_updated, owned.parameter.grad = False, None
        self.arena.finish()

    def _inside(self) -> dict[int, Owned]:
        """Return the parameters that are not updated by the optimizer's own step."""
        trained = (it for it in self.owned.values() if it.optimizer is not None)
        return {
            id(it.parameter): it
            for it in trained
            if self.update == "backward" or it.place != "device"
        }

    def begin(self) -> None:
        """Raise PlanError where a forward pass comes that would see half of an update."""
        if self.update == "step":
            return
        late = next((it for it in self.owned.values() if it.is_updated), None)
        if late is not None:
            raise PlanError(
                f"a second forward pass comes before optimizer.step(): {late.name!r} was updated "
                "in the backward pass of the first, so this one would compute with new parameters. "
                "Call optimizer.step() after each backward pass; to add gradients of several "
                "micro-batches, plan with update='step'."
            )

    def brought(self) -> AbstractContextManager[Any]:
        """Let ops inside find on the device what rests on the host."""
        device = self.arena.device
        # On the CPU what rests is a tensor like any other.
        return Brought(self.arena, device) if is_apart(device) else nullcontext()

    def with_inputs(self, given: Arguments) -> Arguments:
        """Return arguments with their tensors of the host on the device that the model works on.

        A parameter at rest says that it is of the host, and callers put inputs where the first
        parameter is (`generate` of transformers does).
        """
        device = self.arena.device
        if not is_apart(device):
            return given
        return tree_map_only(  # type: ignore[no-any-return]
            torch.Tensor,
            # A number in a tensor goes with tensors of any device.
            lambda it: it.to(device) if it.device.type == "cpu" and it.dim() else it,
            given,
        )

    def end(self) -> None:
        """Wait for gradients that are on their way to the host: the caller reads `.grad` next."""
        if self.update == "step":
            self.arena.finish()

    @contextmanager
    def without_updates(self) -> Iterator[None]:
        """Let steps inside change no parameter, no gradient and no state."""
        gradients = [(it.parameter, it.parameter.grad) for it in self.owned.values()]
        for owned in self.owned.values():
            owned.is_dry, owned.parameter.grad = True, None
        try:
            yield
        finally:
            for owned in self.owned.values():
                owned.is_dry = False
            for parameter, gradient in gradients:
                parameter.grad = gradient

    def adopt(self) -> None:
        """Move what a loaded state holds to the host."""
        for owned in self.owned.values():
            if owned.place != "device":
                owned.adopt()

    def rehearsed(
        self,
        replay: Replay,
        model: torch.nn.Module,
        given: Arguments,
        planned_with: Callable[[Layouts], Replay],
    ) -> Replay:
        """Return a step that runs on a sample as traced; see rehearsal.py."""
        return rehearsed(replay, model, given, planned_with)

    def _places(self) -> tuple[str, ...]:
        """Return where what moves may lie.

        With `step` a gradient waits on the host, and torch wants `.grad` where the parameter is; so
        beside a device with memory of its own the parameter is there as well.
        """
        apart = is_apart(self.arena.device)
        return ("host",) if apart and self.update == "step" else ("state", "host")

    def _updater(self, graph: Graph, units: Sequence[Unit]) -> str:
        """Return who updates what lies on the host, if all of it does."""
        sizes = {it.name: it.bytes for it in graph.storages}
        # A parameter, and its gradient.
        return self.arena.updater(sum(2 * sizes[it.parameter] + it.state_bytes for it in units))

    def _own(self, model: torch.nn.Module, found: StatePlan) -> None:
        for name, parameter in model.named_parameters():
            if name not in self.owned:
                group = self.units.groups.get(id(parameter))
                self.owned[name] = Owned(
                    name,
                    parameter,
                    found.places.get(name, "device"),
                    self.arena,
                    None if group is None else self.optimizer,
                    group,
                    found.updaters.get(name, "device"),
                )

    def _with_speeds(self, graph: Graph) -> Graph:
        to_host, back = self.arena.speeds()
        device = replace(graph.device, to_host_bytes_per_s=to_host, to_device_bytes_per_s=back)
        return Graph(
            graph.storages, graph.ops, name=graph.name, device=device, allocator=graph.allocator,
            aliases=graph.aliases, unplanned_peak_bytes=graph.unplanned_peak_bytes,
        )  # fmt: skip
