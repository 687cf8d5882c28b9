"""A training call of a kind that nobody planned for: what runs, found when it is traced.

The call is traced beside the function that is being built; ops have the same names at any size, so
that plans can be carried over. Where no plan of ops is found, or a size is left open, layers run
again, chosen by steps measured on synthetic values. See run/unseen.py.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Hashable
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import record as tape

from ..base.errors import PlanWarning
from ..run.at_once import PLANNED, plan_at_once
from ..run.unseen import UnseenInput
from .eager import Program
from .errors import TraceError, as_it_is, first_line
from .guards import Call, changed, describe, is_open, settings_of, signature_of, steady
from .model import as_specs, model_step, restore_model, run_outside
from .modules.backend import LayerStep
from .planned import Planned, PlanOptions, plain_model
from .target import bfc_settings
from .trace.trace import OPTIMIZER, Trace, trace_like

AGAIN = "layers run again"
Step = Program | LayerStep
Shapes = list[tuple[int, ...]]


def step_for(model: Any, record: Planned, call: Call) -> Step | None:
    """Return what runs a call that is being traced, and keep it; None while `plan` is not done.

    Warns where what runs is slower than a plan of ops, or above the budget.

    Raises
    ------
    PlanError
        With `strict`, if there can be no plan of its ops.
    BudgetError
        With `strict`, if no plan keeps the budget.
    TraceError
        If layers cannot run again either.
    """
    kind: Hashable = call.why or signature_of(call.key, model.trainable_variables)
    wants_input = tape.should_record_backprop([it for it in call.tensors if it.dtype.is_floating])
    if wants_input:
        kind = (kind, "a gradient of its input")
    step = record.steps.get(kind)
    if isinstance(step, Program) and changed(step.settings, settings_of(model)):
        step = None
    if step is not None:
        if kind in record.planned_online:
            record.planned_online[kind] = record.count
        return step
    if record.backend == "layers" or record.options is None:
        return record.layers
    return _UnseenCall(model, record, record.options, call, kind, wants_input=wants_input).step()


class _UnseenCall(UnseenInput[Step]):
    """A call that came for the first time; what runs is kept under its `kind`."""

    log = logging.getLogger(__name__)
    line = "model = sn_memory.tensorflow.plan(model, [sample, another], budget)"
    first_line = staticmethod(first_line)

    def __init__(
        self,
        model: Any,
        record: Planned,
        options: PlanOptions,
        call: Call,
        kind: Hashable,
        *,
        wants_input: bool,
    ) -> None:
        super().__init__(
            type(model).__name__, record.budget_bytes, strict=options.strict, clock=record.time
        )
        self.model, self.record, self.options, self.call = model, record, options, call
        self.kind, self.wants_input = kind, wants_input
        self.plain = plain_model(model)

    def told(self) -> str:
        return str(self.call)

    def refusal(self) -> str:
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
        try:
            return run_outside(self._by_ops)
        except Exception:
            self.record.forget(self.kind)
            raise

    def _by_ops(self) -> Program:
        before = self.record.traced
        assert before is not None
        args, kwargs = self.arguments()
        with restore_model(self.plain):
            then = settings_of(self.plain)
            traced = trace_like(self.plain, args, kwargs, before)
            settings = steady(then, settings_of(self.plain))
            if traced.structure["key"] != self.call.key:
                raise TraceError(f"its trace is of {describe(traced.structure['key'])}")
            if traced.uncounted:
                raise TraceError(traced.uncounted)
            program = Program(traced, self.plan_of(traced), settings)
            if self.over is None:
                self.kept(program)
                # In a graph of its own: what fails there would fail in the one that is being built.
                model_step(self.model).get_concrete_function(*args, **kwargs)
        return program

    def plan_of(self, traced: Trace) -> Any:
        told = self.record.told
        plans = [
            (told[kind].inputs, step.plan)
            for kind, step in self.record.steps.items()
            if isinstance(step, Program) and told[kind].how.startswith(PLANNED)
        ]
        search = self.options.search(self.budget_bytes)
        allocator = bfc_settings(self.options.device)
        return self.noted(plan_at_once(traced.graph, search, self.budget_bytes, plans, allocator))

    def arguments(self) -> tuple[tuple[Any, ...], dict[str, Any]]:
        """Return the call's arguments with tf.TensorSpec in the place of tensors."""
        kwargs = {key: value for key, value in self.call.kwargs.items() if key != "training"}
        return as_specs(self.call.args), as_specs(kwargs)

    def by_parts(self, why: str, by_ops: Step | None, *, keep: bool) -> Step:
        step: Step | None = None
        try:
            step = self.layers()
        except TraceError as error:
            if by_ops is None:
                raise
            self.log.info("%s: %s", self.name, error)
        if by_ops is not None and (step is None or by_ops.plan.peak_bytes < step.plan.peak_bytes):
            step = by_ops
        else:
            self.how = AGAIN
        assert step is not None
        shapes = ", ".join(str(list(shape)) for shape in self.shapes())
        text = self.warning(step, why, f"on {shapes}: ")
        warnings.warn(text, PlanWarning, stacklevel=7)
        return self.kept(step) if keep else step

    def kept(self, step: Step) -> Step:
        self.record.keep(self.kind, self.call.key or (), step, self.how, self.seconds)
        return step

    def error(self, why: str) -> Exception:
        return as_it_is(super().error(why))

    def sample(self) -> tuple[Any, ...]:
        """Return arguments of full shape: the call's, or those that the model was planned for."""
        args, kwargs = self.arguments()
        known = not self.call.why and not is_open(self.call.key)
        plain = all(leaf is None for leaf in tf.nest.flatten(kwargs))
        return args if known and plain else self.record.sample

    def shapes(self) -> Shapes:
        leaves = tf.nest.flatten(self.sample())
        return [tuple(leaf.shape) for leaf in leaves if hasattr(leaf, "shape")]

    def layers(self) -> LayerStep:
        """Return a choice of layers that was measured on an input as large, or measure one."""
        if self.record.layers is not None:
            return self.record.layers
        shapes, traced = self.shapes(), self.record.traced
        for measured, step in self.record.measured:
            if _covers(measured, shapes):
                return step
        storages = traced.graph.storages if traced is not None else ()
        resident = sum(it.bytes for it in storages if it.name == OPTIMIZER)
        step = run_outside(
            lambda: LayerStep(
                self.plain, self.sample(), self.budget_bytes, resident_bytes=resident, safely=True
            )
        )
        rest = [it for it in self.record.measured if not _covers(shapes, it[0])]
        self.record.measured = [*rest, (shapes, step)]
        return step


def _covers(large: Shapes, small: Shapes) -> bool:
    """Whether no size of one list of shapes is below its fellow in the other."""
    return len(large) == len(small) and all(
        len(one) == len(other) and all(a >= b for a, b in zip(one, other, strict=True))
        for one, other in zip(large, small, strict=True)
    )
