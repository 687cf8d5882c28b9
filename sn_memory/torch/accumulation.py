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

import warnings
from collections.abc import Mapping, Sequence
from dataclasses import replace

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..base.clock import sharing
from ..base.errors import PlanWarning
from ..base.sizes import parse_bytes, show_bytes
from ..plan.plan import BudgetError, Plan
from .compile.backend import CompiledStep
from .eager.replay import Replay
from .model.signature import Arguments
from .model.step import device_of, gradient_bytes, wanted_bytes
from .model.wrapping import RECORD, inner_model, plain_class
from .modules.backend import ModuleStep
from .planned import Planned
from .planning import EARLIER, PlanningResult, PlanOptions, Step
from .trace.op_seconds import op_times, while_training


def planned_for_both(
    planning: PlanOptions, model: torch.nn.Module, given: Arguments
) -> PlanningResult:
    """Plan for gradients that are there; and within the same bytes for none, which is faster.

    The step for none is `made.first`; it is None where only the other is to be had.
    """
    with sharing(planning.time_limit_s), op_times(device_of(inner_model(model))):
        return _for_both(planning, model, given)


def _for_both(planning: PlanOptions, model: torch.nn.Module, given: Arguments) -> PlanningResult:
    made = planning.made(model, given)
    if not planning.accumulate or isinstance(planning.planner, Plan):
        return made
    budget_bytes = parse_bytes(planning.budget, whole=made.step.plan.baseline_peak_bytes)
    alone = replace(planning, accumulate=False, budget=budget_bytes, after_first=made.after_first)
    try:
        return replace(made, first=alone.like(made.step, model, given))
    except BudgetError:
        # A search may miss it; the plan for gradients that are there holds no more without them.
        return made


def fitting(
    model: torch.nn.Module,
    step: Step,
    given: Arguments,
    parameters: Sequence[torch.nn.Parameter],
) -> Step:
    """Return the step to run in place of one that was planned: another where gradients are there.

    Parameters
    ----------
    model
        The planned model; what is planned now is kept in its record.
    step
        The step planned for its input.
    given
        The input, as the sample was written.
    parameters
        The model's.
    """
    record: Planned = model.__dict__[RECORD]
    # Where all of the state is planned, gradients that are there lie on the host, or are counted.
    # Those of functional_call need be no leaves, and then have none.
    if record.planning.state is None and any(
        it.is_leaf and it.grad is not None for it in parameters
    ):
        step = _with_gradients(model, record, step, given)
    if not record.told_of_several:
        every = {*record.steps.values(), *record.later.values()}
        waiting = {it: it.waiting for it in every if isinstance(it, Replay) and it.waiting}
        if waiting:
            record.told_of_several = _several(model, record.budget_bytes, step, waiting)
    return step


def peak_of_several(model: torch.nn.Module, step: Step, waiting: Mapping[Replay, int]) -> int:
    """Return the most that a step takes while forward passes wait for their backward passes.

    waiting : of each plan, how many

    The first backward pass runs beside all that wait. Each later one runs beside one less, and
    beside the gradients of those before, as autograd hands a gradient over when it has come from
    all; it may add two of them into a third.
    """
    held = sum(count * it.waiting_bytes[0] for it, count in waiting.items())
    # The caller may hold inputs and outputs longer.
    less = min(every - callers for every, callers in (it.waiting_bytes for it in waiting))
    adding = max(it.adding_peak_bytes for it in waiting)
    largest = max((it.nbytes for it in model.parameters() if it.requires_grad), default=0)
    later = adding + held - less + wanted_bytes(model) + largest
    return max(step.plan.peak_bytes + held, later)


def _several(
    model: torch.nn.Module, budget_bytes: int, step: Step, waiting: Mapping[Replay, int]
) -> bool:
    """Warn if forward passes that wait break the budget; whether they do."""
    need = peak_of_several(model, step, waiting)
    if need <= budget_bytes:
        return False
    room = budget_bytes - (need - step.plan.peak_bytes)
    _warn(
        f"{sum(waiting.values()) + 1} forward passes of {plain_class(type(model)).__name__} "
        f"come before their backward passes: together they take up to {show_bytes(need)}, and the "
        f"budget is {show_bytes(budget_bytes)}. Call backward after each forward pass, or plan for "
        f"so much less, if that can be had: sn_memory.torch.plan(model, sample, {max(room, 0)}).",
        depth=2,
    )
    return True


def _with_gradients(model: torch.nn.Module, record: Planned, step: Step, given: Arguments) -> Step:
    """Return the step for gradients that are there; plan it if the budget has no room for them."""
    if step in record.later:
        return record.later[step]
    held, budget_bytes = gradient_bytes(model), record.budget_bytes
    if _counts_them(step) or step.plan.peak_bytes + held <= budget_bytes:
        return step
    planning, made = record.planning, step
    least: BudgetError | None = None
    if isinstance(step, ModuleStep):
        need, line = step.plan.peak_bytes + held, "budget"
    else:
        if any(record.steps[it] is step for it in record.planned_online):
            # As it was planned itself: nothing is timed, and the search is short.
            speeds = None if step.trace is None else step.trace.graph.device
            planning = planning.at_once(budget_bytes, speeds)
        with _disable_current_modes(), sharing(planning.time_limit_s), while_training():
            made, least = _planned_with(planning, budget_bytes, step, inner_model(model), given)
        need = made.plan.peak_bytes
        line = repr(planning.share) if planning.share else str(least and least.peak_bytes)
    if need > budget_bytes:
        smallest = f" The smallest peak found is {show_bytes(least.peak_bytes)}." if least else ""
        text = (
            f"a training step of {plain_class(type(model)).__name__} finds gradients of "
            f"{show_bytes(held)}, of an earlier micro-batch, or of the step before where they are "
            "dropped after the forward pass, as by Lightning: with them it takes "
            f"{show_bytes(need)}, and the budget is {show_bytes(budget_bytes)}.{smallest} Plan for "
            f"them: sn_memory.torch.plan(model, sample, {line}, accumulate=True)."
        )
        if record.strict:
            peak_bytes, op = (least.peak_bytes, least.op) if least else (need, "")
            raise BudgetError(
                f"strict: {text}", peak_bytes=peak_bytes, budget_bytes=budget_bytes, op=op
            )
        _warn(text, depth=2)
    record.later[step] = made
    return made


def _counts_them(step: Step) -> bool:
    """Whether a step was planned with gradients in place."""
    if isinstance(step, Replay):
        return bool(step.captured.earlier)
    if isinstance(step, ModuleStep | CompiledStep):
        return step.accumulate
    return step.trace is not None and EARLIER in step.trace.graph.storage_index


def _planned_with(
    planning: PlanOptions,
    budget_bytes: int,
    step: Step,
    plain: torch.nn.Module,
    given: Arguments,
) -> tuple[Step, BudgetError | None]:
    """Return a step with gradients in place, and the error where the budget cannot be kept.

    Then it is planned for the same percentage, where one was asked for, of its own unplanned peak;
    else at the smallest peak that is found.
    """
    name = "auto" if isinstance(planning.planner, Plan) else planning.planner
    anew = replace(planning, accumulate=True, planner=name)
    least: BudgetError | None = None
    for budget in (budget_bytes, planning.share):
        if budget == "":
            continue
        try:
            return replace(anew, budget=budget).like(step, plain, given), least
        except BudgetError as error:
            least = least or error
    assert least is not None
    if least.plan is None:
        return step, least
    smallest = replace(anew, planner=least.plan, budget=least.peak_bytes)
    return smallest.like(step, plain, given), least


def _warn(text: str, *, depth: int) -> None:
    """Warn where the model was called; `depth` is how many functions of this file are between."""
    warnings.warn(text, PlanWarning, stacklevel=depth + 7)
