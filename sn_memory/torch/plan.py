"""plan: return a model that trains within a budget; class, parameters and state dict stay the same.

Only its forward changes (planned_forward.py). The model passed in stays as it is; both share
parameters, buffers and modules. planning.py plans the step of one input.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from .. import settings
from ..base.errors import core
from ..base.host import return_freed
from ..base.progress import progress_output, sharing
from ..base.sizes import is_part, parse_bytes
from ..cost.devices import speeds
from ..graph.records import Device
from ..plan.api import plan_graph
from ..plan.plan import Plan, check_techniques
from ..run.measured_choice import summary
from ..run.planned import KeptStep, PlannedKind
from ..run.reserved import LIMIT
from .errors import TraceError
from .model.guards import GuardCache, signature_of
from .model.modes import warn
from .model.sharded import first_fsdp_refused, of_first_fsdp, register_fsdp_alias
from .model.signature import Arguments, InputSignature, call_layout
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
from .planned import PlanRecord, StepCache
from .planned_forward import PlannedForward
from .planning import PlanningResult, PlanOptions, guarded
from .target.capacity import limit_budget
from .target.gpu import gpu_of
from .trace.op_seconds import op_times
from .trace.trace import call_arguments

if TYPE_CHECKING:
    from .host.buffers import StateBuffers

log = logging.getLogger(__name__)

BACKENDS = ("auto", "graph", "regions", "compile", "modules")
# State that stays on the device and is updated by the caller's hooks.
HOOKS = "hooks"
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
    state: str | os.PathLike[str] | StateBuffers | None = None,
    time_limit_s: float = 60.0,
    strict: bool = False,
) -> torch.nn.Module:
    """Return a model that trains within a memory budget, with the same gradients.

    Parameters
    ----------
    model
        In the modes it is to be trained in. It stays as it is. A model that is already planned
        keeps its plans for other inputs.
    sample
        An input like those of training: a tensor, a tuple of positional arguments, or a mapping of
        keyword arguments. Or a list of such inputs, each planned for: the smallest and the
        largest, say, or several of one shape where values decide what runs. An input of another
        kind (shapes, types, modes, autocast) gets a plan when it first occurs: the fastest existing
        plan that keeps the budget, a new plan, or modules that are recomputed.
    budget
        The most live bytes: a number, "6GiB", or "60%" of the unplanned peak (of the largest
        sample, if there are several). Parameters, buffers, gradients and the input count. "limit",
        the default: what this process may still allocate on the model's device; see
        `limit_budget`. With the name of a GPU as `device`, what torch can reserve there.
    time_limit_s
        Wall-clock seconds, kept to within a tenth, that timing ops and searching share, per sample;
        timing gets at most half of them. Recording and the trial come on top, and so do the steps
        that `modules` measures.
    planner, techniques
        As in `sn_memory.plan_graph`. Instead of a planner's name, a plan for the graph that `trace`
        returns with the same settings: from the command line, or the smallest plan found, which
        BudgetError carries. The technique `offload` moves storages to the host.
    backend
        `graph` runs the recorded calls one by one as planned. `compile` runs the model under
        torch.compile (Inductor), with the fastest of torch's own memory budgets that keeps this
        one. `regions` plans those parts of a model that can be traced completely, each by its ops
        and all within the budget, and runs the code between them unchanged. `modules` recomputes
        chosen modules in the backward pass; it takes any model. The last three measure, on a real
        sample. `auto` is `graph`; for a model that cannot be traced it is `regions`, with a
        warning, and `modules` if no part can be traced or no plan of the parts keeps the budget.
        With `auto`, a compiled model (`torch.compile(model)`, `model.compile()`) stays compiled, or
        is planned like any other with a warning that says why.
    profile, device
        As in `trace`. With the name of a GPU, and a model that is not on one, the plan is for
        reading and reports only: a training step raises ReplayError.
    optimizer
        An optimizer or its class; its state counts as well.
    state
        Keep parameters and the state of `optimizer` (an instance then) on the host, as far as the
        budget requires, in one plan with the activations: "host" or, for a model on the CPU, the
        path of a folder for a file. `HostState`, or `PinnedState` for a GPU: their docstrings say
        when parameters are updated; pass one for a model whose parameters are created in it. Only
        with `graph`, `keep` and `recompute`.
        "hooks", with `graph`: everything stays on the device, and the caller's own hooks
        (`register_post_accumulate_grad_hook`) update a parameter when its gradient is complete and
        free the gradient; no gradient is then held to the end of the step or computed last.
    strict
        For an input of another kind, raise PlanError or BudgetError where a warning would otherwise
        say that what runs is slower than a plan of its ops, or exceeds the budget.

    Returns
    -------
    A module of the same class that shares parameters, buffers and modules with `model`. Its
    `sn_memory` has the back end, trace and plan, the `kinds` of input seen so far, and writes the
    report. Copies and pickles of it are plain models.

    Raises
    ------
    TraceError
        With `graph` or `compile`, for a model that cannot be traced; with `regions`, for a model of
        which no part can be traced. The message says where.
    BudgetError
        If no plan keeps the budget; carries the smallest peak found and its op.
    PlanError
        Without a budget, if no source says how much memory is free; names the sources read.
    MissingExtra
        Without the compiled extension; says how to build it.

    Notes
    -----
    The planned step runs once on the sample and, if memory allows, so does the model's own; their
    results are compared, and the model is left as it was. A model without memory (on the meta
    device) is not tried, nor is `compile`.

    Plans follow the training loop. The first step that finds gradients of parameters (an earlier
    micro-batch, `zero_grad(set_to_none=False)`) is planned again if the budget has no room for
    them; a warning says so if no plan keeps it. Where torch.distributed or Horovod runs several
    ranks, gradients of parameters are computed no later than in torch if the budget allows, so that
    they are exchanged as early; on one rank, gradients larger than what they are computed from come
    last, which holds least. For settings of all plans of a process see `sn_memory.settings`.

    Loss and gradients are bit-equal to the unplanned run, dropout and batch norm included, where
    kernels are deterministic; under Inductor, to what Inductor computes.

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
    # Refuse before anything is traced.
    hooks, host = state == HOOKS, None if state == HOOKS else state
    _check_settings(backend, techniques, planner, profile=profile, hooks=hooks)
    if host is not None:
        _check_state(backend, techniques, planner, optimizer)
    core()
    check_model(model)
    check_optimizer(optimizer)
    speeds(device)
    return_freed()
    planning = PlanOptions(
        budget=budget,
        planner=planner,
        techniques=tuple(techniques),
        backend=backend,
        profile=profile,
        device=device,
        optimizer=optimizer,
        time_limit_s=time_limit_s,
        plan_graph=plan_graph,
        overlap=state is None and exchanges_gradients(),
        update=HOOKS if hooks else "step",
        share=budget if is_part(budget) else "",
    )
    # From here on `model` is the one before torch.compile; it may already be planned.
    model, was_compiled = as_written(model, keep=backend in ("auto", "compile"))
    if was_compiled and backend == "auto":
        planning = replace(planning, was_compiled=_may_be_compiled(model, techniques, planner))
    _check_model(model, backend, device)
    plain = plain_model(model)
    if budget == LIMIT:
        free = limit_budget(plain, sample, optimizer=optimizer, device=device)
        # Not a share of the plain step's peak: a step with gradients is not planned again for one.
        planning = replace(planning, budget=free, share="")
    if host is not None:
        from .state.model_state import ModelState, host_buffers_for

        held = ModelState(plain, optimizer, host_buffers_for(plain, host))
        planning = replace(planning, state=held)
    results, planning = _planned_samples(plain, sample, planning)
    # The planned model differs from the plain one only in its class and its record: both have the
    # same parameters, buffers and modules.
    twin = uninitialized(planned_class(plain, PlannedForward))
    twin.__dict__.update(plain.__dict__)
    register_fsdp_alias(twin, model)
    before: PlanRecord | None = model.__dict__.get(RECORD)
    guards = GuardCache(before.guards if before else None)
    earlier = before.inputs if before else None
    twin.__dict__[RECORD] = PlanRecord(
        inputs=_kept_inputs(plain, guards, results, earlier, int(planning.budget)),
        options=planning,
        strict=strict,
        trial=results[0].result.trial,
        guards=guards,
    )
    return twin


class _Planned(NamedTuple):
    """A sample, its kind (which later inputs are compared with), and the step planned for it."""

    kind: InputSignature
    arguments: Arguments
    result: PlanningResult


def _planned_samples(
    plain: torch.nn.Module, sample: Any, planning: PlanOptions
) -> tuple[list[_Planned], PlanOptions]:
    """Plan a step for each sample; return the steps, and the options for later inputs."""
    # The largest first: a budget in percent refers to its plain step's peak.
    samples = sorted(_kinds(plain, sample), key=lambda kind: -kind[0].nbytes)
    planned: list[_Planned] = []
    by_parts: set[InputSignature] = set()
    for kind, arguments in samples:
        if kind in by_parts:
            continue
        # A plan of ops holds for any values; regions and modules may need more for some of them.
        alike = tuple(other for its, other in samples if its == kind and other is not arguments)
        output, shared = progress_output(settings.progress), sharing(planning.time_limit_s)
        with output, explained(arguments), shared, op_times(device_of(plain)):
            result = replace(planning, alike=alike).planned_step(plain, arguments)
        if result.step.covers_smaller:
            by_parts.add(kind)
        planned.append(_Planned(kind, arguments, result))
        # If one sample needs a first forward pass, because that sets attributes, the others are
        # traced after one, too. From the first sample on the budget is in bytes.
        baseline = result.step.plan.baseline_peak_bytes
        planning = replace(
            planning,
            after_first=result.after_first or planning.after_first,
            budget=parse_bytes(planning.budget, whole=baseline),
        )
        if result.trial.different:
            warn(
                f"with its plan {type(plain).__name__} computes the same except for rounding: "
                f"{result.trial.remark}.",
            )
        name, backend = type(plain).__name__, result.step.backend
        log.info("%s planned by %s: %s", name, backend, summary(result.step.plan))
    return planned, planning


def exchanges_gradients() -> bool:
    """Whether several ranks train together, under torch.distributed or Horovod."""
    distributed = torch.distributed
    if distributed.is_available() and distributed.is_initialized():
        return distributed.get_world_size() > 1
    # A program that trains with Horovod has imported it.
    horovod = sys.modules.get("horovod.torch")
    return horovod is not None and bool(horovod.is_initialized() and horovod.size() > 1)


def _kinds(model: torch.nn.Module, sample: Any) -> list[tuple[InputSignature, Arguments]]:
    """Return the samples with their kinds, as far as these are known before tracing."""
    kinds = []
    for example in sample if isinstance(sample, list) else [sample]:
        arguments = call_arguments(example)
        kind = signature_of(model, arguments, ())
        if kind is None:
            raise TraceError(
                "an argument of the sample is neither a tensor nor hashable, so later inputs "
                "cannot be compared with it. Pass tensors, numbers, strings or tuples."
            )
        kinds.append((kind, arguments))
    if not kinds:
        raise ValueError("got an empty list of samples, expected at least one.")
    return kinds


def _kept_inputs(
    plain: torch.nn.Module,
    guards: GuardCache,
    results: list[_Planned],
    before: StepCache | None,
    budget_bytes: int,
) -> StepCache:
    """Return the steps that the planned model keeps: the new ones, and those of an earlier plan."""
    cache = StepCache(results[0].result.step)
    if before is not None:
        # Kinds planned while training are planned again when they occur: the budget may differ.
        cache.kept |= {kind: kept for kind, kept in before.kept.items() if kept.used is None}
        kept_steps = {kept.step for kept in cache.kept.values()}
        cache.later |= {step: later for step, later in before.later.items() if step in kept_steps}
        cache.laid_out_otherwise = before.laid_out_otherwise
    for sampled, arguments, result in results:
        step = result.step
        kind = guarded(guards, sampled, plain, arguments, step)
        if step.covers_smaller:
            # Values that the forward pass sets itself change each time; that makes no other kind.
            cache.free |= step.sets
            kind = kind.without(cache.free)
            cache.measured.append((kind, step))
        planned_kind = PlannedKind(kind.shapes(), "planned", step.plan.peak_bytes, budget_bytes)
        cache.kept[kind] = KeptStep(step, planned_kind, call_layout(arguments))
        cache.laid_out_otherwise |= result.laid_out_otherwise
    return cache


def _check_settings(
    backend: str, techniques: Sequence[str], planner: str | Plan, *, profile: bool, hooks: bool
) -> None:
    """Raise ValueError for settings that are invalid or exclude each other."""
    if backend not in BACKENDS:
        raise ValueError(f"got backend {backend!r}, expected one of {', '.join(BACKENDS)}.")
    settings.check_profile(profile=profile, backend=backend, measuring="modules")
    check_techniques(techniques)
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
    if hooks and backend in ("compile", "modules", "regions"):
        raise ValueError(
            f"got state='hooks' with backend={backend!r}: gradients freed one by one by hooks are "
            "planned only by 'graph'. Leave one of them out."
        )


def _check_state(
    backend: str, techniques: Sequence[str], planner: str | Plan, optimizer: Any
) -> None:
    """Raise ValueError for settings that cannot be combined with state on the host."""
    others = sorted(set(techniques) - {"keep", "recompute"})
    refused = {
        f"backend={backend!r}": backend not in ("auto", "graph"),
        f"technique {', '.join(others)}": bool(others),
        "a plan as planner": isinstance(planner, Plan),
        "optimizer=None": optimizer is None,
    }
    for what, is_refused in refused.items():
        if is_refused:
            raise ValueError(
                f"got state with {what}. State on the host needs an instance of an optimizer, "
                "backend 'graph' or 'auto', and the techniques keep and recompute."
            )


def _may_be_compiled(
    model: torch.nn.Module, techniques: Sequence[str], planner: str | Plan
) -> bool:
    """Whether a compiled model stays compiled; if not, warn which setting needs a plan of ops."""
    missing = "offload" if "offload" in techniques else "planner" if planner != "auto" else ""
    if missing:
        warn(
            f"{type(model).__name__} was compiled and is planned without torch.compile, "
            f"because only a plan of its ops has {missing}. Leave that out to keep it compiled.",
        )
    return not missing


def _check_model(model: torch.nn.Module, backend: str, device: Device | str | None) -> None:
    """Raise if the model cannot be planned, or not with this back end for this device."""
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
            "the model's forward was replaced on the instance, and a plan runs the one of its "
            "class. Put the change into a subclass."
        )
    if len({param.device for param in model.parameters()}) > 1:
        raise TraceError("the parameters lie on several devices; a plan is for the memory of one.")
    measures = backend in ("compile", "modules", "regions")
    if measures and gpu_of(device, device_of(model)) is not None:
        raise ValueError(
            f"got device {device!r} with backend={backend!r}, which compiles or measures on this "
            "machine. Use 'graph', which plans without the device, or plan on that machine."
        )
