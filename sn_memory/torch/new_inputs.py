"""A training input of a kind that nobody planned for: what runs, found when it comes.

The plain step is no choice: a plan exists for runs that do not fit. The kind is traced, and of the
plans there are the fastest that keeps the budget on it is carried over; ops have the same names at
any size. Where none does, a short search plans it. Where that fails too, modules run again, chosen
by steps measured on this very input. No collective is issued, but in the
first step after parameters were sharded: other ranks may see other inputs.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Iterable
from dataclasses import replace

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import _disable_current_modes

from ..base.errors import PlanError, PlanWarning
from ..base.sizes import show_bytes
from ..graph.graph import Graph
from ..plan.plan import BudgetError, Plan
from ..run.at_once import AT_ONCE, CARRIED_OVER, NOTHING_AGAIN, PLANNED, plan_at_once
from ..run.measured_choice import summary
from ..run.planned import PlannedKind
from .compile.backend import CompiledStep
from .eager.replay import Replay
from .eager.trial import layouts_seen
from .errors import first_line
from .model.sharded import first_fsdp_refused, of_first_fsdp
from .model.signature import OF_CALL, Arguments, InputSignature, Name
from .model.step import apart, restore_rng_state, tensors
from .model.wrapping import inner_model
from .modules.backend import ModuleStep
from .on_paper import EstimateOnlyStep
from .planned import Planned
from .planning import PlanOptions, Step, guarded, smallest_of_trace
from .target.capacity import planned_settings
from .trace.op_seconds import while_training
from .trace.trace import Trace, resident_storages

log = logging.getLogger(__name__)

# So many choices of modules are remembered.
_SAFE = 16
# So many values of one attribute or argument are planned for, the sample's among them.
_VALUES = 3
_LINE = "model = sn_memory.torch.plan(model, [sample, another], budget)"


def step_for(
    model: torch.nn.Module, record: Planned, kind: InputSignature | None, given: Arguments
) -> Step | None:
    """Return what runs for an input that came for the first time.

    None where the model's own forward needs no plan: nothing wants a gradient, or nothing has
    memory. Warns where what runs is slower than a plan of ops, or above the budget.

    Parameters
    ----------
    model, record
        The planned model and what it carries; the step is kept there.
    kind, given
        The input; no kind where an argument cannot be compared.

    Raises
    ------
    PlanError
        With `strict`, if there can be no plan of its ops.
    BudgetError
        With `strict`, if no plan keeps the budget.
    TraceError
        For a model that the first FSDP wraps.
    ReplayError
        For one that was planned for a device that is not here.
    """
    if of_first_fsdp(model):
        raise first_fsdp_refused()
    if isinstance(record.latest, EstimateOnlyStep):
        raise record.latest.refusal()
    plain = inner_model(model)
    like = kind or record.guards.signature_of(plain, given, loosely=True)
    assert like is not None
    held = (*tensors(given), *plain.parameters())
    if not like.wants_gradients or any(it.is_meta or isinstance(it, FakeTensor) for it in held):
        return None
    return _FirstSight(plain, record, kind, like, given).step()


def without_free_arenas(step: Step | None) -> None:
    """Give back the blocks on the host that no pass of a step uses; it makes new ones if it runs.

    So the host holds those of one kind of input, however many there are.
    """
    if isinstance(step, Replay):
        step.program.free_buffers.clear()


class _FirstSight:
    """An input that came for the first time, and the way to a step for it.

    Parameters
    ----------
    plain, record, kind, given
        As for `step_for`, but the plain model.
    like
        Its kind, with types in the place of arguments that cannot be compared.
    """

    def __init__(
        self,
        plain: torch.nn.Module,
        record: Planned,
        kind: InputSignature | None,
        like: InputSignature,
        given: Arguments,
    ) -> None:
        self.plain, self.record, self.kind, self.like = plain, record, kind, like
        self.given = given
        self.name = type(plain).__name__
        self.budget_bytes = record.budget_bytes
        self.how = ""
        # Where no plan of ops keeps the budget: the error, which says the smallest peak.
        self.over: BudgetError | None = None
        # Whether a warning said already that modules run again, and why.
        self.warned = False

    def step(self) -> Step:
        """Return what runs, and keep it."""
        began = time.perf_counter()
        try:
            return self.found(began)
        finally:
            self.record.time.took(time.perf_counter() - began)

    def found(self, began: float) -> Step:
        why, by_ops = self.refusal(), None
        if not why or self.record.backend == "modules":
            why = self.changing() or why
        hurried = not why and not self.record.strict and not self.record.time.left()
        if hurried:
            why = str(self.record.time)
        if not why:
            try:
                with _disable_current_modes(), restore_rng_state(), while_training():
                    by_ops = self.by_ops()
                    self.is_for(by_ops)
            except Exception as error:  # noqa: BLE001 - whatever it is, the safe step runs
                why = f"it cannot be traced: {first_line(error)}"
        if self.record.planning.state is not None and (by_ops is None or self.over is not None):
            self.refuse(why or f"no plan of its ops keeps {show_bytes(self.budget_bytes)}")
        if by_ops is not None and self.over is None:
            log.info("%s met %s: %s, %s", self.name, self.told(), self.how, summary(by_ops.plan))
            return self.kept(by_ops, began)
        if self.over is not None:
            why = f"no plan of its ops was found that keeps {show_bytes(self.budget_bytes)}"
        if self.record.strict and self.record.backend != "modules":
            self.refuse(why)
        known = self.covering()
        if known is not None:
            return known if hurried else self.kept(known, began, "modules run again")
        return self.by_modules(why, by_ops, began, keep=not hurried)

    def is_for(self, step: Step) -> None:
        """Note what a step takes from modules and from what the input holds: its kind then."""
        self.like = guarded(self.record.guards, self.like, self.plain, self.given, step)
        self.kind = self.kind and self.like

    def refusal(self) -> str:
        """Return why there can be no plan of ops, or nothing."""
        if self.record.backend == "modules":
            return "the model is planned by modules"
        if self.kind is None:
            return "an argument is neither a tensor nor hashable"
        if self.kind.free:
            return f"{self.names(self.kind.free)} changes from step to step"
        if self.kind.sharded:
            return (
                "parameters of modules inside it were sharded after planning, and a plan of ops "
                "computes with whole ones"
            )
        return ""

    def changing(self) -> str:
        """Count what changed since the nearest kind; return why no more is planned for it."""
        record = self.record
        if self.kind is None or self.kind.free or not record.told:
            return ""
        changed = min((self.kind.changed_since(it) for it in record.told), key=len)
        record.changes.update(changed)
        often = {it for it in changed if record.changes[it] >= _VALUES}
        if not often:
            return ""
        names, on_host = self.names(often), record.planning.state is not None
        if not record.strict and (
            not on_host or any(record.changes[it] == _VALUES for it in often)
        ):
            follows = "each is planned anew" if on_host else "modules run again in such steps"
            self.warned = True
            self.warn(
                f"another value of {names} in {_VALUES} steps, and a plan is for one value. From "
                f"now on {follows}. To plan once, for all values, pass it as a tensor, or keep it "
                f"in a buffer that is changed in place; a few values can be planned ahead: {_LINE}"
            )
        if on_host:
            return ""
        record.free |= often
        self.kind = self.like = self.kind.without(record.free)
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
        """Return a step whose ops are planned: carried over, or searched for shortly."""
        record = self.record
        traced = record.latest_trace
        speeds = traced.graph.device if traced else None
        planning = record.planning.at_once(self.budget_bytes, speeds)
        if record.backend == "compile":
            return self.compiled(planning)
        before = record.steps.get(self.kind) if self.kind else None
        seen = dict(before.layouts or {}) if isinstance(before, Replay) else {}
        if seen:
            record.laid_out_otherwise = True
        if record.laid_out_otherwise:
            seen = layouts_seen(
                seen,
                self.plain,
                apart(self.given),
                lambda known: planning.replay(
                    self.plain, self.given, known, smallest_of_trace, False
                ),
            )
        step = planning.by_graph(self.plain, self.given, seen, self.plan_of_trace)
        # Where a kernel lays out otherwise than traced, it is put right and noted; see `step_for`.
        if isinstance(step, Replay):
            step.layouts = {}
        return step

    def compiled(self, planning: PlanOptions) -> Step:
        """Return a compiled step, with what keeps the budget for other inputs if it does here."""
        known = {
            step.plan.setting: None
            for step in self.record.steps.values()
            if isinstance(step, CompiledStep) and step.plan.setting is not None
        }
        try:
            step = planning.by_compiler(self.plain, self.given, tuple(known))
        except BudgetError as error:
            self.how, self.over = AT_ONCE, error
            smallest = replace(planning, budget=error.peak_bytes)
            return smallest.by_compiler(self.plain, self.given)
        self.how = NOTHING_AGAIN
        if setting := step.plan.setting:
            self.how = f"{CARRIED_OVER} another input" if setting in known else AT_ONCE
        return step

    def plan_of_trace(self, traced: Trace) -> Plan:
        own = traced.captured.recording.constants.values()
        others = self.record.constants_bytes(beside=own)
        return self.plan_of(traced.graph, self.budget_bytes - others)

    def plan_of(self, graph: Graph, budget_bytes: int) -> Plan:
        record = self.record
        plans = [
            (kind.shapes(), plan)
            for kind, step in record.steps.items()
            if isinstance(plan := self.alike(step).plan, Plan)
            and record.told[kind].how.startswith(PLANNED)
        ]
        search = record.planning.at_once(budget_bytes, None).planned
        allocator = planned_settings() if graph.allocator == "torch" else None
        found = plan_at_once(graph, search, budget_bytes, plans, allocator)
        self.how, self.over = found.how, found.over
        return found.plan

    def alike(self, step: Step) -> Step:
        """Return the step that was planned with gradients in place, if a new one is."""
        return self.record.later.get(step, step) if self.record.planning.accumulate else step

    def covering(self) -> ModuleStep | None:
        """Return a choice of modules that kept the budget on an input as large or larger.

        Of a sharded model any, once there is one: to measure is collectives, and what is new to
        one rank may not be to the others. The first time after it was sharded it is, to all.
        """
        if self.like.sharded:
            return next((step for kind, step in self.record.safe if kind.sharded), None)
        free = self.record.free
        like = self.like.without(free)
        return next(
            (step for kind, step in self.record.safe if kind.without(free).covers(like)), None
        )

    def by_modules(self, why: str, by_ops: Step | None, began: float, *, keep: bool) -> Step:
        """Return the safe step: modules run again, measured on this input."""
        held = sum(it.bytes for it in resident_storages(self.plain, self.record.planning.optimizer))
        held += self.record.constants_bytes()
        # As leaves: where they come from is no part of the step that is measured.
        args, kwargs = apart(self.given)
        step: Step = ModuleStep(
            self.plain,
            args,
            kwargs,
            self.budget_bytes,
            resident_bytes=held,
            accumulate=self.record.planning.accumulate,
            safely=True,
        )
        self.how = "modules run again"
        peak = step.plan.peak_bytes
        if by_ops is not None and by_ops.plan.peak_bytes < peak > self.budget_bytes:
            step, peak, self.how = by_ops, by_ops.plan.peak_bytes, AT_ONCE
        over = peak - self.budget_bytes
        if over > 0 and self.record.strict:
            self.over = self.over or BudgetError(
                "",
                peak_bytes=peak,
                budget_bytes=self.budget_bytes,
                op=getattr(step.plan, "peak_op", ""),
            )
            self.refuse(why)
        if isinstance(step, ModuleStep):
            self.is_for(step)
            if self.kind is not None and not step.sets <= self.record.free:
                self.record.free |= step.sets
                self.kind = self.like = self.kind.without(self.record.free)
            self.remember(step)
        if over > 0:
            self.warn(
                f"{self.told()}: no choice was found that keeps {show_bytes(self.budget_bytes)}, "
                f"and {why}. The smallest runs ({self.how}), {over} bytes above the budget "
                f"({summary(step.plan)}). Raise the budget or make the input smaller"
            )
        elif self.like.sharded and self.record.backend != "modules":
            self.warn(
                f"{self.like.shapes()} and is planned by modules from now on, because {why}. "
                f"Within the budget it had, measured on this step: {summary(step.plan)}. To keep "
                "the plan, shard the planned model alone, fully_shard(model)"
            )
        elif self.record.backend != "modules" and not self.warned:
            self.warn(
                f"{self.told()}: modules run again ({summary(step.plan)}), which may be slower "
                f"than a plan of its ops, because {why}. Plan it as well: {_LINE}"
            )
        else:
            log.info("%s met %s: %s, %s", self.name, self.told(), self.how, summary(step.plan))
        if self.like.sharded:
            self.record.backend, self.record.latest = "modules", step
        return self.kept(step, began) if keep else step

    def remember(self, step: ModuleStep) -> None:
        """Keep a choice of modules for inputs that are no larger."""
        rest = [it for it in self.record.safe if not self.like.covers(it[0])]
        if not any(it is step for _, it in rest):
            self.record.safe = [*rest, (self.like, step)][-_SAFE:]

    def kept(self, step: Step, began: float, how: str = "") -> Step:
        """Keep a step for its kind, as long as there is room."""
        record, kind = self.record, self.kind
        if kind is not None:
            took = time.perf_counter() - began
            record.told[kind] = PlannedKind(
                self.like.shapes(),
                how or self.how,
                step.plan.peak_bytes,
                self.budget_bytes,
                self.unlike(),
                took,
            )
            record.later.pop(record.steps.get(kind), None)  # type: ignore[arg-type]
            record.steps[kind] = step
            record.written[kind] = (len(self.given[0]), tuple(self.given[1]))
            record.planned_online[kind] = record.count
            record.make_room(kind)
        return step

    def told(self) -> str:
        """Say what it is, and what is otherwise than in the nearest kind that is known."""
        unlike = self.unlike()
        return f"{self.like.shapes()} ({unlike})" if unlike else self.like.shapes()

    def unlike(self) -> str:
        paths = [path for path, _ in self.plain.named_modules()]
        others = [self.like.unlike(it, paths) for it in self.record.told if it != self.kind]
        nearest: list[str] = min(others, key=len) if others else []
        return "; ".join(nearest)

    def refuse(self, why: str) -> None:
        """Raise what `strict` asks for."""
        asked = "strict" if self.record.strict else "state on the host"
        said = f"{asked}: {self.name} met {self.told()}, and {why}. "
        if self.over is not None:
            raise BudgetError(
                f"{said}The smallest peak found is {show_bytes(self.over.peak_bytes)}. Raise the "
                "budget or make the input smaller.",
                peak_bytes=self.over.peak_bytes,
                budget_bytes=self.budget_bytes,
                op=self.over.op,
                plan=self.over.plan,
            )
        raise PlanError(f"{said}Plan it ahead: {_LINE}, or leave strict out.")

    def warn(self, what: str) -> None:
        warnings.warn(f"{self.name} met {what}.", PlanWarning, stacklevel=11)
