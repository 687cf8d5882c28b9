"""plan_step: a training step that keeps a budget: the tape, the loss and the update in one plan."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from typing import Any

from ..base.clock import sharing
from ..base.errors import PlanWarning
from ..base.native import core
from ..base.progress import Wanted, say, speaking
from ..check.replay import check_plan
from ..graph.records import Device
from ..plan.api import plan_graph
from .card import plan_on_card
from .errors import TraceError, first_line
from .planned import check_deterministic, check_techniques
from .planned_step import PlannedStep
from .trace.trace import trace, uncounted


def plan_step(
    step: Any,
    sample: Any,
    budget: float | str,
    *,
    planner: str = "auto",
    techniques: Sequence[str] = ("keep", "recompute"),
    profile: bool = True,
    device: Device | str | None = None,
    time_limit_s: float = 60.0,
    deterministic: bool = False,
    progress: Wanted = None,
) -> PlannedStep:
    """Return a training step that keeps a budget of bytes and does the same.

    Parameters
    ----------
    step
        A function with or without tf.function that holds the gradient tape, and the update where
        that is to be planned too.
    sample
        Its arguments: a tuple of tensors, arrays or tf.TensorSpec, or a single one.
    budget, planner, techniques, profile, device, time_limit_s, deterministic, progress
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
    check_techniques(techniques)
    check_deterministic(deterministic, profile=profile, backend="graph")
    core()  # without it there is no plan: said before anything is traced
    if getattr(step, "_jit_compile", None):
        raise TraceError(
            "the step is compiled by XLA (jit_compile=True), which schedules by itself. Plan it "
            "without jit_compile."
        )
    if isinstance(step, PlannedStep):
        step = step.plain
    with speaking(progress), sharing(time_limit_s):
        say("trace", 0, 1)
        traced = trace(step, sample, profile=profile, device=device)
        made = plan_on_card(
            plan_graph,
            traced.graph,
            budget,
            device=device,
            planner=planner,
            techniques=techniques,
            time_limit_s=time_limit_s,
            deterministic=deterministic,
        )
    unknown = uncounted(traced.named)
    if unknown:
        warnings.warn(f"The peak may be higher: {unknown}.", PlanWarning, stacklevel=2)
    check_plan(traced.graph, made)
    planned = PlannedStep(step, traced, made)
    try:
        planned.put_together()
    except Exception as error:
        said = f"the planned step cannot be put together: {first_line(error)}"
        raise TraceError(said) from error
    return planned
