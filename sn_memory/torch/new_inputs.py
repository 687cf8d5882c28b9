"""A training input of a kind without a plan, in torch: see `run/unseen.py`.

Ops have the same names at any size, so plans can be carried over. This is torch's part: values that
change from step to step, state on the host and sharded parameters. No collective is issued, except
in the first step after parameters were sharded: other ranks may see other inputs.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..plan.plan import BudgetError, Plan
from ..run.measured_choice import summary
from ..run.planned import KeptStep, PlannedKind
from ..run.unseen import AT_ONCE, CARRIED_OVER, NOTHING_AGAIN, UnseenInput
from .eager.trial import is_real
from .errors import TraceError, first_line
from .model.modes import warn
from .model.sharded import first_fsdp_refused, of_first_fsdp
from .model.signature import (
    OF_CALL,
    Arguments,
    InputSignature,
    Name,
    call_layout,
    cut_out,
    detached,
    tensors,
)
from .model.step import restore_rng_state
from .model.wrapping import inner_model
from .planned import PlanRecord
from .planning import PlanOptions, guarded
from .step import Step
from .target.capacity import planned_settings
from .trace.op_seconds import while_training
from .trace.trace import Trace

# How many choices of modules are kept.
_SAFE = 16
# How many values of one attribute or argument are planned for, including the sample's. Otherwise a
# value that changes in each step, as by a schedule, would be planned for in each.
_VALUES = 3
AGAIN, REGIONS = "modules run again", "planned by regions"
# Back ends that measure a choice of parts, which then runs any input that is no larger.
_BY_PARTS = ("modules", "regions")


def step_for(
    model: torch.nn.Module, record: PlanRecord, kind: InputSignature | None, arguments: Arguments
) -> Step | None:
    """Return the step for an input that occurs for the first time.

    None if the model's own forward needs no plan: nothing requires a gradient, or tensors have no
    memory. Warns if the step is slower than a plan of ops, or exceeds the budget.

    model, record : the planned model and its record, which keeps the step
    kind, arguments : the input; kind is None if an argument cannot be compared
    """
    if of_first_fsdp(model):
        raise first_fsdp_refused()
    if not record.latest.runs_here:
        return record.latest
    plain = inner_model(model)
    like = kind or record.guards.signature_of(plain, arguments, loosely=True)
    assert like is not None
    held = (*tensors(arguments), *plain.parameters())
    if not like.wants_gradients or not is_real(held):
        return None
    return _UnseenArguments(plain, record, kind, like, arguments).step()


class _UnseenArguments(UnseenInput[Step]):
    """Arguments of a kind that occurs for the first time.

    plain, record, kind, arguments : as for `step_for`, but the plain model
    like : its kind, with only the types of arguments that cannot be compared
    """

    log = logging.getLogger(__name__)
    line = "model = sn_memory.torch.plan(model, [sample, another], budget)"
    first_line = staticmethod(first_line)

    def __init__(
        self,
        plain: torch.nn.Module,
        record: PlanRecord,
        kind: InputSignature | None,
        like: InputSignature,
        arguments: Arguments,
    ) -> None:
        on_host = record.state is not None
        # With state on the host only a plan of ops can run. A model planned by regions or modules
        # runs by them even under `strict`.
        strict = on_host or (record.strict and record.backend not in _BY_PARTS)
        super().__init__(
            type(plain).__name__, record.budget_bytes, strict=strict, clock=record.inputs.time
        )
        self.plain, self.record, self.kind, self.like = plain, record, kind, like
        self.inputs = record.inputs
        self.arguments = cut_out(arguments)
        if not record.strict:
            self.demand = "state on the host"
        # Whether a warning has already said that modules are recomputed, and why.
        self.warned = False

    def add_reads(self, step: Step) -> None:
        """Make the kind depend on what the step read from modules and from the input."""
        self.like = guarded(self.record.guards, self.like, self.plain, self.arguments, step)
        self.kind = self.kind and self.like

    def refusal(self) -> str:
        if self.record.backend in _BY_PARTS:
            return self.changing() or f"the model is planned by {self.record.backend}"
        if self.kind is None:
            return "an argument is neither a tensor nor hashable"
        if self.kind.free:
            return f"{self.names(self.kind.free)} changes from step to step"
        if self.kind.sharded:
            return (
                "parameters of modules inside it were sharded after planning, and a plan of ops "
                "computes with unsharded ones"
            )
        return self.changing()

    def changing(self) -> str:
        """Count what changed since the nearest kind; if it changed too often, say so."""
        inputs = self.inputs
        if self.kind is None or self.kind.free or not inputs.kept:
            return ""
        changed = min((self.kind.changed_since(kind) for kind in inputs.kept), key=len)
        inputs.changes.update(changed)
        often = {part for part in changed if inputs.changes[part] >= _VALUES}
        if not often:
            return ""
        names, on_host = self.names(often), self.record.state is not None
        # Warn once for each: with state on the host, further values are planned for and get here.
        if not self.record.strict and (
            not on_host or any(inputs.changes[part] == _VALUES for part in often)
        ):
            follows = "each is planned anew" if on_host else "modules run again in such steps"
            self.warned = True
            warn(
                f"{self.name} got another value of {names} in {_VALUES} steps, and a plan is for "
                f"one value. From now on {follows}. To plan once, for all values, pass it as a "
                "tensor, or keep it in a buffer that is changed in place; a few values can be "
                f"planned ahead: {self.line}."
            )
        if on_host:
            return ""
        inputs.free |= often
        self.kind = self.like = self.kind.without(inputs.free)
        return f"{names} changes from step to step"

    def names(self, changed: Iterable[Name]) -> str:
        paths = [path for path, _ in self.plain.named_modules()]
        names = [
            f"the argument {name}" if place == OF_CALL else f"{paths[place]}.{name}".lstrip(".")
            for place, name in sorted(changed)
        ]
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        return ", ".join(names[:3]) + more

    def by_ops(self) -> Step:
        with _disable_current_modes(), restore_rng_state(), while_training():
            step = self._by_ops()
            self.add_reads(step)
        return step

    def _by_ops(self) -> Step:
        record = self.record
        traced = record.latest_trace
        speeds = traced.graph.device if traced else None
        planning = record.planning().at_once(self.budget_bytes, speeds)
        if record.backend == "compile":
            return self.compiled(planning)
        # If the kind is planned again, the layouts its kernels were seen to use still hold.
        before = self.inputs.kept.get(self.kind) if self.kind else None
        seen = dict(before.step.layouts or {}) if before else {}
        # Once a step had other layouts than traced, each new step is tried before it runs.
        if seen:
            self.inputs.laid_out_otherwise = True
        if self.inputs.laid_out_otherwise:
            seen = planning.layouts_seen(seen, self.plain, detached(self.arguments))
        planning = replace(planning, layouts=seen, plan_of_trace=self.plan_of_trace)
        step = planning.by_graph(self.plain, self.arguments)
        # No trial: a result with another layout is copied and noted here, and the step is traced
        # again next time.
        step.layouts = {}
        return step

    def compiled(self, planning: PlanOptions) -> Step:
        """Return a compiled step; with the setting of another input if that keeps the budget."""
        settings = (kept.step.setting for kept in self.inputs.kept.values())
        known = dict.fromkeys(setting for setting in settings if setting is not None)
        try:
            step = planning.by_compiler(self.plain, self.arguments, tuple(known))
        except BudgetError as error:
            self.how, self.over = AT_ONCE, error
            smallest = replace(planning, budget=error.peak_bytes)
            return smallest.by_compiler(self.plain, self.arguments)
        self.how = NOTHING_AGAIN
        if setting := step.setting:
            self.how = f"{CARRIED_OVER} another input" if setting in known else AT_ONCE
        return step

    def plan_of_trace(self, traced: Trace) -> Plan:
        # Constants of steps for other kinds take memory while this one runs.
        own = traced.captured.recording.constants.values()
        budget_bytes = self.budget_bytes - self.inputs.constants_bytes(excluding=own)
        graph, kept = traced.graph, self.inputs.kept.values()
        search = self.record.planning().at_once(budget_bytes, None).planned
        allocator = planned_settings() if graph.allocator == "torch" else None
        return self.planned(graph, search, budget_bytes, kept, allocator)

    def covering(self) -> Step | None:
        """Return a choice of modules that was measured on an input at least as large.

        For a sharded model, any choice that exists: measuring issues collectives, and an input that
        is new to one rank may not be new to the others. The first input after sharding is new to
        all.
        """
        if self.like.sharded:
            return next((step for kind, step in self.inputs.measured if kind.sharded), None)
        free = self.inputs.free
        like = self.like.without(free)
        return next(
            (step for kind, step in self.inputs.measured if kind.without(free).covers(like)), None
        )

    def by_parts(self, why: str, by_ops: Step | None, *, keep: bool) -> Step:
        known = self.covering()
        if known is not None:
            self.how = REGIONS if known.backend == "regions" else AGAIN
            return self.kept(known) if keep else known
        step: Step = self.parts()
        self.how = REGIONS if step.backend == "regions" else AGAIN
        # If both exceed the budget, the plan of ops runs if it exceeds it by less.
        if by_ops is not None and by_ops.plan.peak_bytes < step.plan.peak_bytes > self.budget_bytes:
            step, self.how = by_ops, AT_ONCE
        peak = step.plan.peak_bytes
        if peak > self.budget_bytes and self.record.strict:
            self.over = self.over or BudgetError(
                "",
                peak_bytes=peak,
                budget_bytes=self.budget_bytes,
                op=getattr(step.plan, "peak_op", ""),
            )
            raise self.error(why)
        if step is not by_ops:
            self.add_reads(step)
            # Attributes that the forward pass sets may change each time; that makes no other kind.
            if self.kind is not None and not step.sets <= self.inputs.free:
                self.inputs.free |= step.sets
                self.kind = self.like = self.kind.without(self.inputs.free)
            self.remember(step)
        by_parts = self.record.backend in _BY_PARTS
        if peak > self.budget_bytes or not (by_parts or self.warned or self.like.sharded):
            warn(self.warning(step, why))
        elif self.like.sharded and not by_parts:
            warn(
                f"{self.name} got {self.like.shapes()} and is planned by modules from now on, "
                f"because {why}. Within the same budget, measured on this step: "
                f"{summary(step.plan)}. To keep the plan, shard the planned model alone, "
                "fully_shard(model)."
            )
        else:
            event = self.name, self.described(), self.how, summary(step.plan)
            self.log.info("%s met %s: %s, %s", *event)
        if self.like.sharded:
            self.inputs.latest = step
        return self.kept(step) if keep else step

    def parts(self) -> Step:
        """Return a choice of regions or modules that was measured on this input."""
        if self.record.backend == "regions":
            planning = self.record.planning().at_once(self.budget_bytes, None)
            arguments = detached(self.arguments)
            try:
                # The caller's modes would see, and might change, what is traced.
                with _disable_current_modes(), restore_rng_state(), while_training():
                    return planning.by_regions(self.plain, arguments, "", safely=True)
            except TraceError as error:
                self.log.info("%s has no plan by regions: %s", self.name, self.first_line(error))
        return self.record.planning().by_modules(
            self.plain, self.arguments, safely=True, held_bytes=self.inputs.constants_bytes()
        )

    def remember(self, step: Step) -> None:
        """Keep a choice of modules for inputs that are no larger."""
        # The new choice replaces those measured on inputs that it covers.
        rest = [measured for measured in self.inputs.measured if not self.like.covers(measured[0])]
        if not any(kept is step for _, kept in rest):
            self.inputs.measured = [*rest, (self.like, step)][-_SAFE:]

    def kept(self, step: Step) -> Step:
        inputs, kind = self.inputs, self.kind
        if kind is not None:
            planned_kind = PlannedKind(
                self.like.shapes(),
                self.how,
                step.plan.peak_bytes,
                self.budget_bytes,
                self.unlike(),
                self.seconds,
            )
            if kind in inputs.kept:
                # Drop the step for earlier gradients together with the one it belongs to.
                inputs.later.pop(inputs.kept[kind].step, None)
            call = call_layout(self.arguments)
            inputs.kept[kind] = KeptStep(step, planned_kind, call, inputs.count)
            inputs.make_room(kind, self.budget_bytes)
        return step

    def described(self) -> str:
        """Return the input's shapes, and how it differs from the nearest known kind."""
        unlike = self.unlike()
        return f"{self.like.shapes()} ({unlike})" if unlike else self.like.shapes()

    def unlike(self) -> str:
        return self.inputs.unlike(self.like, self.plain)
