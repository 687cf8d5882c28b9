"""Gradients that are there when a step begins: of earlier micro-batches, or zeros nobody dropped.

A step is planned as torch's first: it finds no gradient. With those of an earlier micro-batch it
takes at most their bytes more than planned. Where the budget has no room for that, the step is
planned once more, with these bytes resident and each new gradient added to its own as soon as it
is made; from then on there are two plans, one for each case.

Several forward passes before one backward pass are counted: what those hold that wait, and the
gradients of one pass, which wait for those of the next. No plan is made for that; where it is more
than the budget a warning says by how much.
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
from .model.signature import Arguments
from .model.step import cut_out, gradient_bytes, wanted_bytes
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
    """Return the step to run in place of one that was planned: another where gradients are there.

    model : the planned model; what is planned now is kept in its record
    step : the step planned for its input
    arguments : the input, as the sample was written
    parameters : the model's
    """
    record: PlanRecord = model.__dict__[RECORD]
    # Where all of the state is planned, gradients that are there lie on the host, or are counted.
    # Those of functional_call need be no leaves, and then have none.
    if record.state is None and any(
        param.is_leaf and param.grad is not None for param in parameters
    ):
        step = _with_gradients(model, record, step, arguments)
    inputs = record.inputs
    if "several" not in inputs.warned:
        waiting = {step: step.waiting for step in inputs.every if step.waiting}
        if waiting and _several(model, record.budget_bytes, step, waiting):
            inputs.warned.add("several")
    return step


def peak_of_several(model: torch.nn.Module, step: Step, waiting: Mapping[Any, int]) -> int:
    """Return the most that a step takes while forward passes wait for their backward passes.

    waiting : of each plan, how many

    The first backward pass runs beside all that wait. Each later one runs beside one less, and
    beside the gradients of those before, as autograd hands a gradient over when it has come from
    all; it may add two of them into a third.
    """
    held = sum(count * step.waiting_bytes[0] for step, count in waiting.items())
    # The caller may hold inputs and outputs longer.
    less = min(every - callers for every, callers in (step.waiting_bytes for step in waiting))
    adding = max(step.adding_peak_bytes for step in waiting)
    largest = max((param.nbytes for param in model.parameters() if param.requires_grad), default=0)
    later = adding + held - less + wanted_bytes(model) + largest
    return max(step.plan.peak_bytes + held, later)


def _several(
    model: torch.nn.Module, budget_bytes: int, step: Step, waiting: Mapping[Any, int]
) -> bool:
    """Warn if forward passes that wait break the budget; whether they do."""
    need = peak_of_several(model, step, waiting)
    if need <= budget_bytes:
        return False
    room = budget_bytes - (need - step.plan.peak_bytes)
    warn(
        f"{sum(waiting.values()) + 1} forward passes of {plain_class(type(model)).__name__} come "
        f"before their backward passes: together they take up to {show_bytes(need)}, and the "
        f"budget is {show_bytes(budget_bytes)}. Call backward after each forward pass, or plan "
        "with a budget smaller by that, if it can be kept: sn_memory.torch.plan(model, sample, "
        f"{max(room, 0)})."
    )
    return True


def _with_gradients(
    model: torch.nn.Module, record: PlanRecord, step: Step, arguments: Arguments
) -> Step:
    """Return the step for gradients that are there; plan it if the budget has no room for them."""
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
                replanned = step.for_gradients_of(held)
            else:
                replanned = step
                # To measure anew is collectives, and other ranks may have no reason for it.
                if not is_sharded(model):
                    # Gradients are there while it is measured, so they are not made a second time:
                    # what is measured is a step that finds none, which holds each new gradient
                    # beside its own to the end, and thus no less.
                    replanned = planning.by_modules(
                        plain, arguments, safely=True, earlier_bytes=held
                    )
        else:
            kept = inputs.kept.values()
            if any(one.step is step and one.used is not None for one in kept):
                # As it was planned itself: nothing is timed, and the search is short.
                speeds = None if step.trace is None else step.trace.graph.device
                planning = planning.at_once(budget_bytes, speeds)
            # Modes that the caller has on would see, and might change, what is traced.
            with _disable_current_modes(), sharing(planning.time_limit_s), while_training():
                replanned, least = _planned_with(planning, budget_bytes, step, plain, arguments)
    except Exception as error:  # noqa: BLE001 - whatever it is, the plan there is runs
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
    """Return a step with gradients in place, and the error where the budget cannot be kept.

    Then it is planned for the same percentage, where one was asked for, of its own unplanned peak;
    else at the smallest peak that is found.
    """
    # A plan that was passed in is of a step that finds no gradients.
    name = "auto" if isinstance(planning.planner, Plan) else planning.planner
    anew = replace(planning, accumulate=True, planner=name)
    least: BudgetError | None = None
    for budget in (budget_bytes, planning.share):
        if budget == "":
            continue
        try:
            return step.replan(replace(anew, budget=budget), plain, arguments), least
        except BudgetError as error:
            # That of the bytes asked for; the second attempt is at the percentage.
            least = least or error
    assert least is not None
    if least.plan is None:
        return step, least
    smallest = replace(anew, planner=least.plan, budget=least.peak_bytes)
    return step.replan(smallest, plain, arguments), least
