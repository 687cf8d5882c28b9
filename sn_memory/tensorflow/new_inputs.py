"""A training call of a kind that nobody planned for: what runs, found when it is traced.

The plain step is no choice: a plan exists for runs that do not fit. The call is traced beside the
function that is being built, and of the plans there are the fastest that keeps the budget on it is
carried over; ops have the same names at any size. Where none does, a short search plans it. Where
that fails too, or a size is left open, layers run again, chosen by steps measured on made-up
values.
"""

from __future__ import annotations

import logging
import time
import warnings
from collections.abc import Hashable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record as tape

from ..base.errors import PlanError, PlanWarning
from ..base.sizes import show_bytes
from ..plan.plan import BudgetError
from ..run.at_once import PLANNED, plan_at_once
from ..run.measured_choice import summary
from .eager.program import Program
from .eager.trial import left_alone
from .errors import TraceError, as_it_is, first_line
from .model.arguments import Call, describe, is_open
from .model.outside import run_outside
from .model.settings import changed, settings_of, steady
from .modules.backend import LayerStep
from .planned import Planned, kind_of, plain_model, planned_kind
from .planning import Planning, put_together
from .trace.model import as_specs, model_step
from .trace.trace import OPTIMIZER, Trace, main_device, trace_like, uncounted

log = logging.getLogger(__name__)

_LINE = "model = sn_memory.tensorflow.plan(model, [sample, another], budget)"
AGAIN = "layers run again"


def step_for(model: Any, record: Planned, call: Call) -> Program | LayerStep | None:
    """Return what runs a call that is being traced; None while `plan` is not done.

    Warns where what runs is slower than a plan of ops, or above the budget.

    Parameters
    ----------
    model, record
        The planned model and what it carries; what runs is kept there.

    Raises
    ------
    PlanError
        With `strict`, if there can be no plan of its ops.
    BudgetError
        With `strict`, if no plan keeps the budget.
    TraceError
        If layers cannot run again either.
    """
    if call.why:
        kind: Hashable = call.why
    else:
        kind = kind_of(call.key, model.trainable_variables)
    wants_input = tape.should_record_backprop([it for it in call.tensors if it.dtype.is_floating])
    program = record.programs.get(kind)
    stale = program is not None and changed(program.settings, settings_of(model)) is not None
    if program is not None and not stale and not wants_input:
        if kind in record.at_sight:
            record.at_sight[kind] = record.count
        return program
    if record.backend == "layers" or record.planning is None:
        return record.layers
    if wants_input:
        kind = (kind, "a gradient of its input")
    if kind in record.again:
        return record.again[kind]
    return _FirstSight(model, record, record.planning, call, kind, wants_input=wants_input).step()


class _FirstSight:
    """A call that came for the first time, and the way to what runs it.

    Parameters
    ----------
    model, record, planning, call
        The planned model and what it carries, and the call.
    kind
        Under which what runs is kept.
    wants_input
        Whether a gradient of its input is wanted, which a plan of ops does not make.
    """

    def __init__(
        self,
        model: Any,
        record: Planned,
        planning: Planning,
        call: Call,
        kind: Hashable,
        *,
        wants_input: bool,
    ) -> None:
        self.model, self.record, self.planning, self.call = model, record, planning, call
        self.kind, self.wants_input = kind, wants_input
        self.plain = plain_model(model)
        self.budget_bytes = record.budget_bytes
        self.began = time.perf_counter()
        self.how = ""
        # Where no plan of ops keeps the budget: the error, which says the smallest peak.
        self.over: BudgetError | None = None

    def step(self) -> Program | LayerStep:
        """Return what runs, and keep it."""
        try:
            return self.found()
        finally:
            self.record.time.took(time.perf_counter() - self.began)

    def found(self) -> Program | LayerStep:
        why, program = self.refusal(), None
        hurried = not why and not self.planning.strict and not self.record.time.left()
        if hurried:
            why = str(self.record.time)
        if not why:
            try:
                program = run_outside(self.by_ops)
            except Exception as error:  # noqa: BLE001 - whatever it is, the safe step runs
                self.record.forget(self.kind)
                why = f"it cannot be traced: {first_line(error)}"
        if program is not None and self.over is None:
            log.info("%s met %s: %s, %s", self.name, self.call, self.how, summary(program.plan))
            return program
        if self.over is not None:
            why = f"no plan of its ops was found that keeps {show_bytes(self.budget_bytes)}"
        if self.planning.strict:
            self.refuse(why)
        return self.by_layers(why, program, keep=not hurried)

    @property
    def name(self) -> str:
        return type(self.model).__name__

    def refusal(self) -> str:
        """Return why there can be no plan of ops, or nothing."""
        if self.call.why:
            return self.call.why
        if is_open(self.call.key):
            return (
                "a size is open (None) where its function is traced, and bytes depend on it: leave "
                "reduce_retracing and the input_signature out, or say drop_remainder=True"
            )
        if self.wants_input:
            return (
                "a gradient of its input is wanted, as where it is part of another model, and a "
                "plan of its ops makes none"
            )
        return ""

    def by_ops(self) -> Program:
        """Return a program: carried over, or searched for shortly."""
        record, before = self.record, self.record.traced
        assert before is not None
        args, kwargs = self.arguments()
        with left_alone(self.plain):
            then = settings_of(self.plain)
            traced = trace_like(self.plain, args, kwargs, before)
            held = steady(then, settings_of(self.plain))
            if traced.structure["key"] != self.call.key:
                raise TraceError(f"its trace is of {describe(traced.structure['key'])}")
            unknown = uncounted(traced.named)
            if unknown:
                raise TraceError(unknown)
            program = put_together(traced, self.plan_of(traced), held)
            if self.over is not None:
                return program
            took = time.perf_counter() - self.began
            told = planned_kind(self.call.key, self.how, program.plan, self.budget_bytes, took)
            record.keep_at_sight(self.kind, program, told)
            # In a graph of its own: what fails there would fail in the one that is being built.
            model_step(self.model).get_concrete_function(*args, **kwargs)
        return program

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments with tf.TensorSpec in the place of tensors."""
        kwargs = {key: it for key, it in self.call.kwargs.items() if key != "training"}
        return as_specs(self.call.args), as_specs(kwargs)

    def plan_of(self, traced: Trace) -> Any:
        record = self.record
        plans = [
            (record.told[kind].inputs, program.plan)
            for kind, program in record.programs.items()
            if record.told[kind].how.startswith(PLANNED)
        ]
        search = self.planning.search(self.budget_bytes)
        allocator = self.planning.allocator
        found = plan_at_once(traced.graph, search, self.budget_bytes, plans, allocator)
        self.how, self.over = found.how, found.over
        return found.plan

    def by_layers(self, why: str, program: Program | None, *, keep: bool) -> Program | LayerStep:
        """Return the safe step: layers run again, measured on made-up values."""
        step: Program | LayerStep
        try:
            step, how = self.layers(), AGAIN
        except TraceError as error:
            if program is None:
                raise
            log.info("%s: %s", self.name, error)
            step, how = program, self.how
        if program is not None and program.plan.peak_bytes < step.plan.peak_bytes:
            step, how = program, self.how
        self.how = how
        over = step.plan.peak_bytes - self.budget_bytes
        if over > 0:
            self.warn(
                f"{self.call}: no choice was found that keeps {show_bytes(self.budget_bytes)}, and "
                f"{why}. The smallest runs ({self.how}), {over} bytes above the budget "
                f"({summary(step.plan)}). Raise the budget or make the input smaller"
            )
        else:
            self.warn(
                f"{self.call}: {self.how} ({self.measured_on()}: {summary(step.plan)}), which may "
                f"be slower than a plan of its ops, because {why}. Plan it as well: {_LINE}"
            )
        if keep:
            took = time.perf_counter() - self.began
            told = planned_kind(self.call.key or (), self.how, step.plan, self.budget_bytes, took)
            self.record.keep_at_sight(self.kind, step, told)
        return step

    def measured_on(self) -> str:
        return "on " + ", ".join(str(list(it)) for it in self.shapes())

    def sample(self) -> tuple[Any, ...]:
        """Return arguments of full shape: the call's, or those that the model was planned for."""
        args, kwargs = self.arguments()
        known = not self.call.why and not is_open(self.call.key)
        plain = all(it is None for it in tf.nest.flatten(kwargs))
        return args if known and plain else self.planning.sample

    def shapes(self) -> list[tuple[int, ...]]:
        leaves = tf.nest.flatten(self.sample())
        return [tuple(it.shape) for it in leaves if hasattr(it, "shape")]

    def layers(self) -> LayerStep:
        """Return a choice of layers that was measured on an input as large, or measure one."""
        if self.record.layers is not None:
            return self.record.layers
        shapes = self.shapes()
        for measured, step in self.record.measured:
            if _covers(measured, shapes):
                return step
        before = self.record.traced
        held = 0
        if before is not None:
            held = sum(it.bytes for it in before.graph.storages if it.name == OPTIMIZER)
        step = run_outside(
            lambda: LayerStep(
                self.plain,
                self.sample(),
                self.budget_bytes,
                device=main_device(),
                resident_bytes=held,
                safely=True,
            )
        )
        rest = [it for it in self.record.measured if not _covers(shapes, it[0])]
        self.record.measured = [*rest, (shapes, step)]
        return step

    def refuse(self, why: str) -> None:
        """Raise what `strict` asks for."""
        said = f"strict: {self.name} met {self.call}, and {why}. "
        if self.over is not None:
            error = BudgetError(
                f"{said}The smallest peak found is {show_bytes(self.over.peak_bytes)}. Raise the "
                "budget or make the input smaller.",
                peak_bytes=self.over.peak_bytes,
                budget_bytes=self.budget_bytes,
                op=self.over.op,
                plan=self.over.plan,
            )
            raise as_it_is(error)
        raise as_it_is(PlanError(f"{said}Plan it ahead: {_LINE}, or leave strict out."))

    def warn(self, what: str) -> None:
        warnings.warn(f"{self.name} met {what}.", PlanWarning, stacklevel=8)


def _covers(large: list[tuple[int, ...]], small: list[tuple[int, ...]]) -> bool:
    """Whether no size of one list of shapes is above its fellow in the other."""
    return len(large) == len(small) and all(
        len(one) == len(other) and all(a >= b for a, b in zip(one, other, strict=True))
        for one, other in zip(large, small, strict=True)
    )
