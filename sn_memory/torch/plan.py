"""plan: a model that keeps a budget. It is the model: same class, parameters, state dict, modes.

What changes is its forward (planned_forward.py). The model passed in stays as it is; both share
parameters, buffers and modules. How it is planned for an input is in planning.py.
"""

from __future__ import annotations

import logging
import os
import warnings
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ..base.errors import PlanWarning
from ..base.host import return_freed
from ..base.native import core
from ..base.progress import ProgressOption, progress_output
from ..base.sizes import is_part, parse_bytes
from ..cost.devices import speeds
from ..graph.hosted import UPDATES
from ..graph.records import Device
from ..plan.api import plan_graph
from ..plan.plan import Plan, check_techniques
from ..run.measured_choice import summary
from ..run.planned import PlannedKind
from ..run.process import LIMIT
from .accumulation import planned_for_both
from .errors import TraceError
from .host.buffers import StateBuffers
from .model.guards import GuardCache, signature_of
from .model.sharded import first_fsdp_refused, of_first_fsdp, register_fsdp_alias
from .model.signature import Arguments, InputSignature
from .model.step import device_of
from .model.wrapping import (
    RECORD,
    as_written,
    check_model,
    check_optimizer,
    explained,
    is_compiled,
    plain_model,
    planned_class,
    uninitialized,
)
from .modules.backend import ModuleStep
from .planned import Planned, Sampled
from .planned_forward import PlannedForward
from .planning import PlanningResult, PlanOptions, guarded
from .state.model_state import ModelState, host_buffers_for
from .target.capacity import limit_budget
from .target.gpu import gpu_of
from .trace.op_seconds import Measure
from .trace.trace import call_arguments

log = logging.getLogger(__name__)

BACKENDS = ("auto", "graph", "compile", "modules")
# Keywords that were removed, and what to write instead.
_REMOVED = {
    "loss_chunks": "Let the model's forward return torch.nn.functional.linear_cross_entropy(hidden,"
    " head.weight, labels, options=torch.nn.LinearCrossEntropyOptions(batch_chunk_size=256))",
}
_WRAPPERS = ("DistributedDataParallel", "DataParallel")


def plan(
    model: torch.nn.Module,
    sample: Any,
    budget: float | str = LIMIT,
    *,
    planner: str | Plan = "auto",
    techniques: Sequence[str] = ("keep", "recompute"),
    backend: str = "auto",
    profile: bool = True,
    device: Device | str | None = None,
    optimizer: Any = None,
    time_limit_s: float = 60.0,
    overlap: bool = False,
    workspaces: bool | Measure = False,
    trial: bool = True,
    accumulate: bool = False,
    state: str | os.PathLike[str] | StateBuffers | None = None,
    update: str = "step",
    strict: bool = False,
    deterministic: bool = False,
    progress: ProgressOption = None,
    **removed: Any,
) -> torch.nn.Module:
    """Return the model as one that trains within a budget of bytes, with the same gradients.

    Parameters
    ----------
    model
        In the modes it is to be trained in. It stays as it is. One that is planned already keeps
        its plans for other inputs.
    sample
        An input like those of training: a tensor, a tuple of positional arguments, or a mapping of
        keyword arguments. Or a list of such inputs, each planned for: the smallest and the largest,
        say. An input of another kind (shapes, types, modes, autocast) gets a plan when it comes: of
        the plans there are the fastest that keeps the budget, or a new one, or modules that run
        again.
    budget
        The most live bytes: a number, "6GiB", or "60%" of the unplanned peak, of several samples
        that of the largest. Parameters, buffers, gradients and the input count. "limit", as where
        it is left out: what is free where the model is, for all that one process may have of it;
        see `limit_budget`. With the name of a GPU as `device`, what torch can reserve there.
    time_limit_s
        Seconds on the wall, kept to a tenth, that timing ops and searching share, for each sample;
        timing has half of them at most. Recording and the trial come on top. Steps that `modules`
        measures take what they take.
    planner, techniques
        As in `sn_memory.plan_graph`. In place of a planner's name, a plan of
        `trace` with the same settings: made by the command line, or what BudgetError carries as
        the smallest that was found. The technique `offload` moves storages to the host.
    backend
        `graph` runs the recorded calls one by one as planned. `compile` runs the model under
        torch.compile (Inductor), with the fastest of torch's own memory budgets that keeps this
        one. `modules` runs chosen modules again in the backward pass; it takes any model. Both
        measure, on a real sample. `auto` is `graph`, and `modules` with a warning for a model that
        cannot be traced; a model that was compiled (`torch.compile(model)`, `model.compile()`)
        stays compiled, or is planned as any other with a warning that says why.
    profile, device
        As in `trace`. With the name of a GPU, and a model that is not on one, the plan is on paper:
        it can be read and reported, and a training step raises ReplayError.
    optimizer
        An optimizer or its class; its state counts as well.
    overlap
        With `graph`: make no gradient of a parameter later than torch does, so that DDP or Horovod
        exchanges each as early. Otherwise those larger than what they are made of come last, which
        holds least. Each is handed over as soon as it is made either way.
    workspaces
        With `graph`: let the plan choose how each convolution runs, by the workspace it has room
        for, as in `trace`. Other algorithms round otherwise, so bits may differ.
    trial
        Run the planned step once on the sample, and the model's own if memory allows, and compare.
        The model is left as it was. For a sample that is no real input (token numbers beyond the
        vocabulary), say False; one without memory is never tried, nor is `compile`.
    accumulate
        Plan for gradients of parameters that are there when a step begins, as in all micro-batches
        but the first, or with `zero_grad(set_to_none=False)`. They count, a percentage is of the
        unplanned peak with them, and steps that find none keep the same bytes. Otherwise that is
        planned at the first step that finds some, if the budget has no room for them; a warning
        says so if no plan keeps it.
    state
        Let parameters and the state of `optimizer`, an instance then, lie on the host, as far as
        the budget asks for it, in one plan with the activations: "host" or, of a model on
        the CPU, the path of a folder for a file. `HostState`, and `PinnedState` beside a GPU, have
        docstrings of their own, for a model that is made there. With `graph`, `keep` and
        `recompute` only.
    update
        When parameters are updated. `step`: by `optimizer.step()`, as ever; with `state` each
        gradient is written to the host as soon as it is complete, one parameter is updated after
        the other, and clipping, loss scalers and accumulation work on `.grad`. `backward`, with
        `state`: each parameter in the backward pass, which moves less; what would use `.grad`
        raises PlanError. `hooks`, without `state` and with `graph`: by hooks of the caller's own
        (`register_post_accumulate_grad_hook`) that update a parameter when its gradient is complete
        and let the gradient go; none is then held to the end of the step, and none is made last.
    strict
        Raise PlanError or BudgetError, when an input of another kind comes, where a warning would
        say that what runs is slower than a plan of its ops, or above the budget.
    deterministic
        Count work in place of seconds, as `plan_graph` does: the same plan on a slow and on a fast
        machine, whatever its load. With `profile=False` and not with `modules`, whose seconds are
        measured; `auto` does not fall back to them.
    progress
        None writes to standard error how far planning is, where that is a terminal: a bar if tqdm
        is installed, else lines. True writes in any case, False never. A function takes a
        `sn_memory.Progress` each time.

    Returns
    -------
    A module of the same class that shares parameters, buffers and modules with `model`. Its
    `sn_memory` tells back end, trace and plan, the `kinds` of input by now, and writes the report.
    Copies and pickles of it are plain models.

    Raises
    ------
    TraceError
        For a model that cannot be traced, with another back end than `auto` and `modules`; the
        message says where.
    BudgetError
        If no plan keeps the budget; carries the smallest peak found and its op.
    PlanError
        Without a budget, where nothing says what is free; names what was read.
    MissingExtra
        Without the compiled extension; says how to build it.

    Notes
    -----
    Loss and gradients are bit-equal to the unplanned run, dropout and batch norm included, where
    kernels are deterministic; under inductor, to what inductor computes.

    Examples
    --------
    >>> import torch
    >>> import sn_memory.torch
    >>> layers = [torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU()) for _ in range(8)]
    >>> sample = torch.zeros(512, 64)
    >>> model = sn_memory.torch.plan(torch.nn.Sequential(*layers), sample, "80%", profile=False)
    >>> model(torch.randn(512, 64)).sum().backward()
    >>> model.sn_memory.plan.peak_bytes <= 0.8 * model.sn_memory.plan.baseline_peak_bytes
    True
    """
    for name in removed:
        instead = f", which was removed. {_REMOVED[name]}" if name in _REMOVED else ""
        raise TypeError(f"plan() got an unexpected keyword argument {name!r}{instead}.")
    if backend not in BACKENDS:
        raise ValueError(f"got backend {backend!r}, expected one of {', '.join(BACKENDS)}.")
    if deterministic and (profile or backend == "modules"):
        got = "profile=True" if profile else "backend='modules'"
        raise ValueError(
            f"got deterministic=True with {got}, which measures seconds: they differ from run to "
            "run. Pass profile=False, a device whose speeds are to count, and another back end."
        )
    check_techniques(techniques)
    core()  # without it there is no plan: said before anything is traced
    check_model(model)
    check_optimizer(optimizer)
    speeds(device)  # a name that is none is said before anything is done
    return_freed()
    _check_update(update, state=state is not None, accumulate=accumulate, backend=backend)
    planning = PlanOptions(
        budget=budget,
        planner=planner,
        techniques=tuple(techniques),
        backend=backend,
        profile=profile,
        device=device,
        optimizer=optimizer,
        time_limit_s=time_limit_s,
        overlap=overlap,
        workspaces=workspaces,
        trial=trial,
        plan_graph=plan_graph,
        accumulate=accumulate,
        update=update,
        deterministic=deterministic,
        share=budget if is_part(budget) else "",
    )
    if backend == "compile" and "offload" in techniques:
        raise ValueError(
            "got technique offload with backend='compile', where no copy to the host is safe: "
            "Inductor (torch 2.13) gives the memory of a tensor that is being copied to its next "
            "buffer, and moves the wait for a copy past readers of it. Plan with 'graph', which "
            "offloads, or compile with techniques=('keep', 'recompute')."
        )
    if backend == "compile" and planner != "auto":
        raise ValueError(
            f"got a planner ({planner!r:.60}) with backend='compile', which measures torch's own "
            "partitions and searches no graph of ops. Leave planner out, or plan with 'graph'."
        )
    if state is not None:
        _check_state(planning)
    model, was_compiled = as_written(model, keep=backend in ("auto", "compile"))
    if was_compiled and backend == "auto":
        unlike = "offload" if "offload" in techniques else "planner" if planner != "auto" else ""
        planning = replace(planning, was_compiled=not unlike)
        if unlike:
            warnings.warn(
                f"{type(model).__name__} was compiled and is planned without torch.compile, "
                f"because only a plan of its ops has {unlike}. Leave that out to keep it compiled.",
                PlanWarning,
                stacklevel=2,
            )
    _check_model(model)
    _check_device(device, model, backend)
    before = model.__dict__.get(RECORD)
    if budget == LIMIT:
        budget = limit_budget(plain_model(model), sample, optimizer=optimizer, device=device)
        planning = replace(planning, share="")
    plain = plain_model(model)
    planning = replace(planning, budget=budget)
    if state is not None:
        buffers = host_buffers_for(plain_model(model), state)
        held = ModelState(plain_model(model), optimizer, buffers, update)
        planning = replace(planning, state=held)
    # The largest first: of several samples the budget is of it.
    samples = sorted(_kinds(plain, sample), key=lambda it: -it[0].nbytes)
    found: list[tuple[InputSignature, Arguments, PlanningResult]] = []
    for kind, given in samples:
        with progress_output(progress), explained(given):
            made = planned_for_both(planning, plain, given)
        found.append((kind, given, made))
        planning = replace(planning, after_first=made.after_first or planning.after_first)
        planning = replace(planning, budget=_budget_bytes(planning, made))
        if made.trial.different:
            warnings.warn(
                f"with its plan {type(plain).__name__} computes the same but for rounding: "
                f"{made.trial.remark}.",
                PlanWarning,
                stacklevel=2,
            )
        what = f"{type(plain).__name__} planned by {made.backend}"
        log.info("%s: %s", what, summary(made.step.plan))
    twin = uninitialized(planned_class(type(plain), PlannedForward))
    twin.__dict__.update(plain.__dict__)
    register_fsdp_alias(twin, model)
    twin.__dict__[RECORD] = record = _record(plain, planning, found, before, strict=strict)
    record.sampled = Sampled.of(twin, found[0][1])
    return twin


def _check_device(device: Device | str | None, model: torch.nn.Module, backend: str) -> None:
    """Refuse to compile or to measure for a GPU that is not here."""
    if backend in ("compile", "modules") and gpu_of(device, device_of(model)) is not None:
        raise ValueError(
            f"got device {device!r} with backend={backend!r}, which compiles or measures on the "
            "machine that is here. Use 'graph', whose plan is made on paper, or plan there."
        )


def _kinds(model: torch.nn.Module, sample: Any) -> list[tuple[InputSignature, Arguments]]:
    """Return the samples, each with its kind; what its step reads is not known yet."""
    found = []
    for each in sample if isinstance(sample, list) else [sample]:
        given = call_arguments(each)
        kind = signature_of(model, given, ())
        if kind is None:
            raise TraceError(
                "an argument of the sample is neither a tensor nor hashable, so it cannot be told "
                "whether later inputs are like it. Pass tensors, numbers, strings or tuples."
            )
        found.append((kind, given))
    if not found:
        raise ValueError("got an empty list of samples, expected at least one.")
    return found


def _budget_bytes(planning: PlanOptions, made: PlanningResult) -> int:
    """Return the budget in bytes: percent are of the first sample's own step."""
    return parse_bytes(planning.budget, whole=made.step.plan.baseline_peak_bytes)


def _record(
    plain: torch.nn.Module,
    planning: PlanOptions,
    found: list[tuple[InputSignature, Arguments, PlanningResult]],
    before: Planned | None,
    *,
    strict: bool,
) -> Planned:
    """Return what the planned model carries: what was planned now, and for other inputs before."""
    first = found[0][2]
    record = Planned(first.backend, {}, first.step, {}, first.trial, planning, strict)
    if before is not None:
        # Those that came while training are planned again at sight: the budget may be another.
        asked = [it for it in before.steps if it not in before.planned_online]
        record.steps |= {it: before.steps[it] for it in asked}
        asked_steps = set(record.steps.values())
        record.written |= {it: before.written[it] for it in asked}
        record.told |= {it: before.told[it] for it in asked}
        record.later |= {it: made for it, made in before.later.items() if it in asked_steps}
        record.laid_out_otherwise = before.laid_out_otherwise
        record.guards = GuardCache(before.guards)
    for sampled, given, made in found:
        plan = made.step.plan
        kind = guarded(record.guards, sampled, plain, given, made.step)
        if isinstance(made.step, ModuleStep):
            record.free |= made.step.sets
            kind = kind.without(record.free)
        record.steps[kind] = step = made.first or made.step
        if planning.accumulate:
            record.later[step] = made.step
        record.written[kind] = (len(given[0]), tuple(given[1]))
        record.told[kind] = PlannedKind(
            kind.shapes(), "planned", plan.peak_bytes, record.budget_bytes
        )
        record.laid_out_otherwise |= made.laid_out_otherwise
        if isinstance(made.step, ModuleStep):
            record.safe.append((kind, made.step))
    return record


def _check_update(update: str, *, state: bool, accumulate: bool, backend: str) -> None:
    """Raise ValueError for a time of updates that does not go with other settings."""
    known = (*UPDATES, "hooks")
    if update not in known:
        raise ValueError(f"got update {update!r}, expected one of {', '.join(known)}.")
    if update == "backward" and not state:
        raise ValueError(
            "got update='backward' without state: who updates parameters in the backward pass has "
            "them on the host. Say state='host' as well, or update='hooks' for hooks of your own."
        )
    given = {
        "state": state,
        "accumulate=True": accumulate,
        f"backend={backend!r}": backend in ("compile", "modules"),
    }
    for what in (it for it, is_given in given.items() if is_given and update == "hooks"):
        raise ValueError(
            f"got update='hooks' with {what}: gradients that hooks let go one by one are planned "
            "by 'graph' alone, and none is there when the next step begins. Leave one of them out."
        )


def _check_state(planning: PlanOptions) -> None:
    """Raise ValueError for settings that do not go with state on the host."""
    techniques = set(planning.techniques) - {"keep", "recompute"}
    refused = {
        f"backend={planning.backend!r}": planning.backend not in ("auto", "graph"),
        f"technique {', '.join(sorted(techniques))}": bool(techniques),
        "accumulate=True": planning.accumulate,
        "a plan as planner": isinstance(planning.planner, Plan),
        "optimizer=None": planning.optimizer is None,
    }
    for what, is_given in refused.items():
        if is_given:
            raise ValueError(
                f"got state with {what}. State on the host needs an instance of an optimizer, "
                "backend 'graph' or 'auto', and the techniques keep and recompute; gradients of "
                "several micro-batches are added on the host with update='step' as it is."
            )


def _check_model(model: torch.nn.Module) -> None:
    kind = type(model)
    if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
        raise TraceError(
            f"the model is a {kind.__name__}. Plan the module inside it first, then wrap what plan "
            "returns."
        )
    if of_first_fsdp(model):
        raise first_fsdp_refused()
    if is_compiled(model):
        raise TraceError(
            "the model was given to torch.compile, which would run it without the plan. Plan it "
            "with backend='compile' or 'auto', which compile it as planned."
        )
    if "forward" in model.__dict__:
        raise TraceError(
            "the model's forward was replaced on the instance, so that of its class would not be "
            "the whole of it. Put the change into a subclass."
        )
    if len({it.device for it in model.parameters()}) > 1:
        raise TraceError("the parameters lie on several devices; a plan is for the memory of one.")
