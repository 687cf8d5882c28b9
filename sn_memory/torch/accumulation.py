"""Gradients that exist when a step begins: from earlier micro-batches, or zeros that were kept.

A step is planned as the first one: without existing gradients. Those of an earlier micro-batch add
at most their bytes to the planned peak. If the budget has no room for them, the step is planned
again, with these bytes resident and each new gradient added to the old one as soon as it is
computed; from then on there are two plans, one for each case.

Several forward passes before one backward pass are counted as well: what the waiting passes hold,
and the gradients of one pass, which wait for those of the next. They get no plan of their own; if
they exceed the budget, a warning says by how much.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..base.progress import sharing
from ..base.sizes import show_bytes
from ..plan.plan import BudgetError, Plan
from .errors import first_line
from .model.modes import warn
from .model.sharded import is_sharded
from .model.signature import Arguments, cut_out
from .model.step import gradient_bytes, wanted_bytes
from .model.wrapping import RECORD, inner_model, plain_class
from .planned import PlanRecord
from .planning import PlanOptions
from .step import Step
from .trace.op_seconds import while_training


def fitting(
    model: torch.nn.Module,
    step: Step,
    arguments: Arguments,
    parameters: Sequence[torch.nn.Parameter],
) -> Step:
    """Return the step to run: the planned one, or one with room for existing gradients.

    A new plan is kept in the model's record; arguments are in the form of the sample.
    """
    record: PlanRecord = model.__dict__[RECORD]
    # With state on the host, earlier gradients are on the host or are counted. Parameters that
    # functional_call swaps in may be non-leaves, and then have no gradients.
    has_gradients = any(param.is_leaf and param.grad is not None for param in parameters)
    if record.state is None and step.runs_here and has_gradients:
        step = _with_gradients(model, record, step, arguments)
    inputs = record.inputs
    if "several" not in inputs.warned:
        waiting = {step: step.waiting for step in inputs.all_steps if step.waiting}
        if waiting and _several(model, record.budget_bytes, step, waiting):
            inputs.warned.add("several")
    return step


def peak_of_several(model: torch.nn.Module, step: Step, waiting: Mapping[Any, int]) -> int:
    """Return the peak of a step while forward passes wait for their backward passes.

    waiting : per step, how many passes

    During the first backward pass all of them are held. During each later one, one less is held,
    plus the gradients of the earlier ones: autograd accumulates a gradient once all passes have
    contributed to it, and may add two of them into a third.
    """
    held = sum(count * step.waiting_bytes[0] for step, count in waiting.items())
    # The caller may hold inputs and outputs longer than the pass.
    less = min(every - callers for every, callers in (step.waiting_bytes for step in waiting))
    adding = max(step.adding_peak_bytes for step in waiting)
    largest = max((param.nbytes for param in model.parameters() if param.requires_grad), default=0)
    later = adding + held - less + wanted_bytes(model) + largest
    return max(step.plan.peak_bytes + held, later)


def _several(
    model: torch.nn.Module, budget_bytes: int, step: Step, waiting: Mapping[Any, int]
) -> bool:
    """Warn if waiting forward passes break the budget; return whether they do."""
    need = peak_of_several(model, step, waiting)
    if need <= budget_bytes:
        return False
    room = budget_bytes - (need - step.plan.peak_bytes)
    more = max(other.waiting_bytes[0] for other in waiting)
    warn(
        f"{sum(waiting.values()) + 1} forward passes of {plain_class(type(model)).__name__} come "
        f"before their backward passes: together they take up to {show_bytes(need)}, one more up "
        f"to {show_bytes(more)} beyond that, and the budget is "
        f"{show_bytes(budget_bytes)}. Call backward after each forward pass, or plan "
        "with a budget that leaves room for them, if it can be kept: "
        f"sn_memory.torch.plan(model, sample, {max(room, 0)})."
    )
    return True


def _with_gradients(
    model: torch.nn.Module, record: PlanRecord, step: Step, arguments: Arguments
) -> Step:
    """Return a step with room for earlier gradients; plan it if `step` has no room."""
    inputs = record.inputs
    if step in inputs.later:
        return inputs.later[step]
    held, budget_bytes = gradient_bytes(model), record.budget_bytes
    if step.counts_gradients or step.plan.peak_bytes + held <= budget_bytes:
        return step
    planning, plain = record.planning(), inner_model(model)
    arguments = cut_out(arguments)
    replanned: Step
    least: BudgetError | None = None
    why = ""
    try:
        if step.covers_smaller:
            from .regions.step import RegionStep

            if isinstance(step, RegionStep):
                replanned = step.with_gradients(held)
            else:
                replanned = step
                # Measuring issues collectives, and other ranks may not measure now.
                if not is_sharded(model):
                    # The user's gradients exist during measuring, so no others are allocated: the
                    # measured step begins without gradients, and holds each new one besides the
                    # user's to the end, which takes no less.
                    replanned = planning.by_modules(
                        plain, arguments, safely=True, earlier_bytes=held
                    )
        else:
            if any(kept.step is step and kept.used is not None for kept in inputs.kept.values()):
                # Like the step itself, which was planned while training: no timing, a short
                # search.
                speeds = None if step.trace is None else step.trace.graph.device
                planning = planning.at_once(budget_bytes, speeds)
            # The caller's modes would see, and might change, what is traced.
            with _disable_current_modes(), sharing(planning.time_limit_s), while_training():
                replanned, least = _planned_with(planning, budget_bytes, step, plain, arguments)
    except Exception as error:  # noqa: BLE001 - on any error the existing plan runs
        replanned, why = step, f" It has no other plan, as that failed: {first_line(error)}"
    need = replanned.plan.peak_bytes + (held if replanned is step else 0)
    if need > budget_bytes:
        if least:
            why = f" The smallest peak found is {show_bytes(least.peak_bytes)}."
        text = (
            f"a training step of {plain_class(type(model)).__name__} finds gradients of "
            f"{show_bytes(held)}, of an earlier micro-batch, or of the step before where they are "
            "dropped after the forward pass, as by Lightning: with them it takes "
            f"{show_bytes(need)}, and the budget is {show_bytes(budget_bytes)}.{why} Raise "
            f"the budget: sn_memory.torch.plan(model, sample, {need})."
        )
        if record.strict:
            peak_bytes, op = (least.peak_bytes, least.op) if least else (need, "")
            raise BudgetError(
                f"strict: {text}", peak_bytes=peak_bytes, budget_bytes=budget_bytes, op=op
            )
        warn(text)
    inputs.later[step] = replanned
    return replanned


def _planned_with(
    planning: PlanOptions,
    budget_bytes: int,
    step: Step,
    plain: torch.nn.Module,
    arguments: Arguments,
) -> tuple[Step, BudgetError | None]:
    """Return a step planned for existing gradients, and the error if it cannot keep the budget.

    In that case it is planned for the same percentage (if the budget was one) of its own unplanned
    peak, else for the smallest peak found.
    """
    # A plan that was passed in is for a step without earlier gradients.
    name = "auto" if isinstance(planning.planner, Plan) else planning.planner
    # Layouts seen in a trial of this step are the kernels' own, whatever the plan.
    seen = None if step.trace is None else step.trace.layouts
    anew = replace(planning, accumulate=True, planner=name, layouts=seen)
    least: BudgetError | None = None
    for budget in (budget_bytes, planning.share):
        if budget == "":
            continue
        try:
            options = replace(anew, budget=budget)
            return options.by_backend(step.backend, plain, arguments), least
        except BudgetError as error:
            # Keep the error of the first attempt, for the bytes; the second is for the percentage.
            least = least or error
    assert least is not None
    if least.plan is None:
        return step, least
    smallest = replace(anew, planner=least.plan, budget=least.peak_bytes)
    return smallest.by_backend(step.backend, plain, arguments), least
