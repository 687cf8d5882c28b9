"""plan_step: a training step that keeps a budget: the tape, the loss and the update in one plan."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from ..base.errors import PlanWarning
from ..check.replay import check_plan
from ..graph.records import Device
from ..plan.api import plan_graph
from ..plan.plan import Plan
from .eager.program import Emission, Program
from .errors import TraceError, first_line
from .plan import check_actions
from .planned import Planned
from .trace.trace import Trace, trace, uncounted


def plan_step(
    step: Any,
    sample: Any,
    budget: int | str,
    *,
    planner: str = "auto",
    actions: Sequence[str] = ("keep", "recompute"),
    profile: bool = True,
    device: Device | None = None,
    time_limit_s: float = 60.0,
) -> PlannedStep:
    """Return a training step that keeps a budget of bytes and does the same.

    Parameters
    ----------
    step
        A function with or without tf.function that holds the gradient tape, and the update where
        that is to be planned too.
    sample
        Its arguments: a tuple of tensors, arrays or tf.TensorSpec, or a single one.
    budget, planner, actions, profile, device, time_limit_s
        As in `plan`. The state of optimizers is among the step's variables, so it counts.

    Returns
    -------
    A callable for arguments like the sample's; its `sn_memory` tells trace and plan and writes the
    report. Other shapes or types raise.

    Raises
    ------
    TraceError
        For a step that cannot be traced.
    BudgetError
        If no plan keeps the budget.

    Examples
    --------
    >>> import tensorflow as tf
    >>> import sn_memory.tensorflow
    >>> weights = [tf.Variable(tf.ones((64, 64)) / 64) for _ in range(6)]
    >>> @tf.function
    ... def step(x):
    ...     with tf.GradientTape() as tape:
    ...         h = x
    ...         for weight in weights:
    ...             h = tf.tanh(h @ weight)
    ...         loss = tf.reduce_sum(h)
    ...     for weight, gradient in zip(weights, tape.gradient(loss, weights)):
    ...         weight.assign_sub(1e-4 * gradient)
    ...     return loss
    >>> planned = sn_memory.tensorflow.plan_step(step, tf.ones((512, 64)), "85%", profile=False)
    >>> bool(planned(tf.ones((512, 64))) > 0)
    True
    """
    check_actions(actions)
    if getattr(step, "_jit_compile", None):
        raise TraceError(
            "the step is compiled by XLA (jit_compile=True), which schedules by itself. Plan it "
            "without jit_compile."
        )
    if isinstance(step, PlannedStep):
        step = step.plain
    traced = trace(step, sample, profile=profile, device=device)
    unknown = uncounted(traced.named)
    if unknown:
        warnings.warn(f"The peak may be higher: {unknown}.", PlanWarning, stacklevel=2)
    made = plan_graph(
        traced.graph, budget, planner=planner, actions=actions, time_limit_s=time_limit_s
    )
    check_plan(traced.graph, made)
    planned = PlannedStep(step, traced, made)
    try:
        planned.put_together()
    except Exception as error:
        said = f"the planned step cannot be put together: {first_line(error)}"
        raise TraceError(said) from error
    return planned


class PlannedStep:
    """A training step that runs as planned.

    Parameters
    ----------
    plain
        The step before.
    traced, made
        Its trace and plan.

    Attributes
    ----------
    sn_memory
        Trace, plan and report, as of a planned model.
    """

    def __init__(self, plain: Any, traced: Trace, made: Plan) -> None:
        self.plain = plain
        program = Program(traced.captured, traced.named, made)
        self.sn_memory = Planned("graph", traced, made, {None: program})
        captured = traced.captured
        specs = [
            tf.TensorSpec(captured.tensors[it].shape, captured.tensors[it].dtype)
            for it in captured.arguments
        ]

        def run(*given: Any) -> list[Any]:
            emission = Emission(program, list(given))
            emission.forward()
            return [emission.need(value) for value in captured.outputs]

        self._run = tf.function(run, autograph=False, input_signature=specs)

    def put_together(self) -> None:
        """Put the planned ops into a graph; the first call finds it there."""
        self._run.get_concrete_function()

    def __call__(self, *args: Any) -> Any:
        """Run the step; arguments as of the sample, results as of the plain step."""
        given = [it for it in tf.nest.flatten(args, expand_composites=True) if _is_tensor(it)]
        results = iter(self._run(*given))
        structure = self.sn_memory.trace.structure
        return tf.nest.map_structure(
            lambda it: next(results) if isinstance(it, tf.Tensor) else it,
            structure,
            expand_composites=True,
        )


def _is_tensor(value: Any) -> bool:
    return (
        hasattr(value, "shape") and hasattr(value, "dtype") and not isinstance(value, tf.Variable)
    )
