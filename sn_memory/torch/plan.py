"""plan: a model that keeps a budget. It is the model: same class, parameters, state dict, modes.

What changes is its forward. Where gradients are wanted and the input is like the sample, the
planned steps run (replay.py); otherwise the model's own forward, as when evaluating. The model
passed in stays as it is; both share parameters, buffers and modules.

Over 300 lines, a hundred of them the docstring of `plan`.
"""

from __future__ import annotations

import logging
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Protocol

import torch

from ..activations import Controller
from ..base.errors import PlanWarning
from ..base.sizes import parse_bytes
from ..check.replay import carry_out, check_plan
from ..graph.graph import Graph
from ..graph.liveness import baseline_seconds, peak
from ..graph.records import Device
from ..plan.api import over_budget, plan_graph
from ..plan.plan import BudgetError, Plan
from ..plan.policies import policy
from ..run.measured_choice import MeasuredPlan, summary
from ..run.planned import PlannedRecord
from .compile.backend import COMPILERS, CompiledStep, Settings
from .eager.compressed import as_planned
from .eager.replay import Replay
from .eager.trial import Trial, layouts_seen, tried
from .errors import TraceError
from .model.kinds import Kind, Written, as_sampled, attributes_of, changeable, kind_of
from .model.step import chance_put_back
from .model.wrapping import RECORD, bare, plain_class, plain_model, planned_class
from .modules.backend import ModuleStep
from .trace.convolutions import Measure
from .trace.record import Layouts
from .trace.trace import Trace, beside, call_arguments, trace

log = logging.getLogger(__name__)

BACKENDS = ("auto", "graph", "compile", "modules")
_WRAPPERS = (
    "DistributedDataParallel",
    "DataParallel",
    "FullyShardedDataParallel",
)


class Step(Protocol):
    """What carries the forward pass of a planned model out, for one kind of input."""

    @property
    def plan(self) -> Plan | MeasuredPlan:
        """What was decided."""

    @property
    def trace(self) -> Trace | None:
        """The graph it was decided on; None where there is none."""

    @property
    def known(self) -> list[torch.Tensor]:
        """Tensors it holds between steps, beside the model's; they count as live."""

    @property
    def ignored(self) -> list[torch.Tensor]:
        """Tensors it holds that lie on the host."""

    @property
    def beside_bytes(self) -> int:
        """What is resident and no part of the step: the optimizer's state."""

    def run(self, model: torch.nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Run the forward pass; the rest of the plan happens in the backward pass."""


@dataclass
class Planned(PlannedRecord[Trace]):
    """What a planned model carries as `model.sn_memory`.

    Parameters
    ----------
    backend
        What carries the plan out: `graph`, `compile` or `modules`.
    steps
        What runs in place of the forward pass, per kind of input.
    latest
        The one planned last.
    noted
        Per module, the attributes it had when it was planned; others make no other kind of input.
    written
        Per kind of input, how the arguments of its sample were written.
    trial
        What the trial of the plan made last found.
    refused
        Why steps were run plainly; each reason is warned about once.
    """

    backend: str
    steps: dict[Kind, Step]
    latest: Step
    noted: tuple[frozenset[str], ...]
    written: dict[Kind, Written]
    trial: Trial
    refused: set[str] = field(default_factory=set)

    @property
    def plan(self) -> Any:
        """The plan made last: a Plan, or with `modules` a MeasuredPlan."""
        return self.latest.plan

    @property
    def latest_trace(self) -> Trace | None:
        return self.latest.trace


def plan(
    model: torch.nn.Module,
    sample: Any,
    budget: int | str,
    *,
    planner: str | Plan = "auto",
    actions: Sequence[str] = ("keep", "recompute"),
    backend: str = "auto",
    profile: bool = True,
    device: Device | None = None,
    optimizer: Any = None,
    time_limit_s: float = 60.0,
    compiler: str = "inductor",
    overlap: bool = False,
    workspaces: bool | Measure = False,
    bits: int | Controller = 8,
    trial: bool = True,
) -> torch.nn.Module:
    """Return the model as one that trains within a budget of bytes, with the same gradients.

    Parameters
    ----------
    model
        In the modes it is to be trained in. It stays as it is. One that is planned already keeps
        its plans for other inputs.
    sample
        An input like those of training: a tensor, a tuple of positional arguments, or a mapping of
        keyword arguments. Other shapes, types or modes run without the plan; a warning says so
        once for each.
    budget
        The most live bytes: a number, "6GiB", or "60%" of the unplanned peak. Parameters, buffers,
        gradients and the input count.
    planner, actions, time_limit_s
        As in `sn_memory.plan_graph`. In place of a planner's name, a plan of
        `trace` with the same settings: made by the command line, or what BudgetError carries as
        the smallest that was found. The action `offload` moves storages to the host; `compress`,
        with `graph` on the CPU, keeps them in few bits, and gradients are then right on average
        only.
    backend
        `graph` runs the recorded calls one by one as planned. `compile` runs the model under
        torch.compile, cut where the plan of its joint graph says. `modules` runs chosen modules
        again in the backward pass; it takes any model, and a real sample, on which it measures.
        `auto` is `graph`, and `modules` with a warning for a model that cannot be traced.
    profile, device
        As in `trace`.
    optimizer
        An optimizer or its class; its state counts as well.
    compiler
        With `compile`: `inductor`, or `eager`, which runs the planned graphs call by call.
    overlap
        With `graph`: make no gradient of a parameter later than torch does, so that DDP or Horovod
        exchanges each as early. Otherwise those larger than what they are made of come last, which
        holds least. Each is handed over as soon as it is made either way.
    workspaces
        With `graph`: let the plan choose how each convolution runs, by the workspace it has room
        for, as in `trace`. Other algorithms round otherwise, so bits may differ.
    bits
        Of what `compress` keeps, as in `trace`: 8, or the controller of `compress_activations`.
    trial
        Run the planned step once on the sample, and the model's own if memory allows, and compare.
        The model is left as it was. For a sample that is no real input (token numbers beyond the
        vocabulary), say False; one without memory is never tried, nor is `compile`.

    Returns
    -------
    A module of the same class that shares parameters, buffers and modules with `model`. Its
    `sn_memory` tells back end, trace and plan and writes the report. Copies and pickles of it are
    plain models.

    Raises
    ------
    TraceError
        For a model that cannot be traced, with another back end than `auto` and `modules`; the
        message says where.
    BudgetError
        If no plan keeps the budget; carries the smallest peak found and its op.

    Notes
    -----
    Loss and gradients are bit-equal to the unplanned run, dropout and batch norm included, where
    kernels are deterministic; under inductor, to what inductor computes. With `compress` the loss
    is; gradients are not, as soon as the plan compresses values.

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
    if backend not in BACKENDS:
        raise ValueError(f"got backend {backend!r}, expected one of {', '.join(BACKENDS)}.")
    if compiler not in COMPILERS:
        raise ValueError(f"got compiler {compiler!r}, expected one of {', '.join(COMPILERS)}.")
    compress = "compress" in actions or (isinstance(planner, Plan) and planner.decided("compress"))
    if compress and backend not in ("auto", "graph"):
        raise ValueError(f"got the action compress with {backend!r}; only 'graph' carries it out.")
    _check_model(model)
    before = model.__dict__.get(RECORD)
    plain = plain_model(model)
    args, kwargs = call_arguments(sample)
    noted = before.noted if before else attributes_of(plain)
    kind = kind_of(plain, args, kwargs, noted)
    if kind is None:
        raise TraceError(
            "an argument of the sample is neither a tensor nor hashable, so it cannot be told "
            "whether later inputs are like it. Pass tensors, numbers, strings or tuples."
        )

    def make(graph: Graph) -> Plan:
        if isinstance(planner, Plan):
            return _within(graph, planner, budget)
        made = plan_graph(
            graph, budget, planner=planner, actions=actions, time_limit_s=time_limit_s
        )
        check_plan(graph, made)
        return made

    def replay(layouts: Layouts, make: Callable[[Graph], Plan], profile: bool) -> Replay:
        traced = trace(
            plain,
            sample,
            profile=profile,
            device=device,
            optimizer=optimizer,
            workspaces=workspaces,
            overlap=overlap,
            bits=bits if compress else None,
            layouts=layouts,
        )
        made = make(traced.graph)
        return Replay(as_planned(traced, made), made)

    def by_graph() -> Step:
        unseen = changeable(args, kwargs)
        if unseen:
            raise TraceError(
                f"an argument is a {', '.join(unseen)}: what it holds could change from step to "
                "step, and a replay would not see it. Pass the tensors and numbers in it."
            )
        return replay({}, make, profile)

    def by_compiler() -> Step:
        settings = Settings(make, profile, device, beside(plain, optimizer), compiler)
        return CompiledStep(plain, args, kwargs, settings)

    def by_modules() -> Step:
        held = sum(it.bytes for it in beside(plain, optimizer))
        return ModuleStep(plain, args, kwargs, budget, resident_bytes=held)

    def in_trial(step: Step) -> tuple[Step, Trial]:
        if not trial or isinstance(step, CompiledStep):
            return step, Trial(False, {}, remark="no trial was asked for, or compiled")

        def found() -> Trial:
            need = step.plan.baseline_peak_bytes
            return tried(step, plain, (args, kwargs), plain_bytes=need, gradients=not compress)

        result = found()
        if result.layouts:
            seen = layouts_seen(
                result.layouts, plain, (args, kwargs), lambda known: replay(known, _smallest, False)
            )
            step = replay(seen, make, profile)
            result = found()
        if result.failure or result.layouts:
            reason = result.failure or f"kernels lay out otherwise {next(iter(result.layouts))}"
            raise TraceError(f"a step with the plan, tried on the sample, failed: {reason}")
        return step, result

    backends = {"graph": by_graph, "compile": by_compiler, "modules": by_modules}
    name = "graph" if backend == "auto" else backend
    try:
        with chance_put_back():
            step, found = in_trial(backends[name]())
    except (BudgetError, ValueError, torch.OutOfMemoryError):
        raise
    except Exception as error:
        if backend != "auto" or compress:
            raise
        kind_of_error = "" if isinstance(error, TraceError) else f"{type(error).__name__}: "
        warnings.warn(
            f"{type(plain).__name__} is planned by modules, which saves less than a plan of its "
            f"ops, because it cannot be traced: {kind_of_error}{error}",
            PlanWarning,
            stacklevel=2,
        )
        name = "modules"
        step, found = in_trial(by_modules())
    if found.different:
        warnings.warn(
            f"with its plan {type(plain).__name__} computes the same but for rounding: "
            f"{found.remark}.",
            PlanWarning,
            stacklevel=2,
        )
    log.info("%s planned by %s: %s", type(plain).__name__, name, summary(step.plan))
    twin = bare(planned_class(type(plain), _PlannedForward))
    twin.__dict__.update(plain.__dict__)
    steps = {**(before.steps if before else {}), kind: step}
    written = {**(before.written if before else {}), kind: (len(args), tuple(kwargs))}
    twin.__dict__[RECORD] = Planned(name, steps, step, noted, written, found)
    return twin


def _smallest(graph: Graph) -> Plan:
    """Return a plan that needs little memory and is found at once."""
    return policy("superneurons_memory")(graph, budget_bytes=None)


def _within(graph: Graph, made: Plan, budget: int | str) -> Plan:
    """Return a plan made before, if it is one of this graph and keeps the budget."""
    found = carry_out(graph, made)
    allowed = parse_bytes(budget, whole=peak(graph).bytes)
    # Op seconds may have been measured anew since; its bound holds for the old ones.
    made = replace(
        made,
        budget_bytes=allowed,
        peak_bytes=found.peak_bytes,
        seconds=found.seconds,
        baseline_seconds=baseline_seconds(graph),
        lower_bound_seconds=0.0,
    )
    if made.peak_bytes > allowed:
        raise over_budget(
            graph, made, allowed, what="the plan passed in", instead="pass a planner's name"
        )
    return made


def _check_model(model: torch.nn.Module) -> None:
    kind = type(model)
    if kind.__name__ in _WRAPPERS and kind.__module__.startswith("torch."):
        raise TraceError(
            f"the model is a {kind.__name__}. Plan the module inside it first, then wrap what plan "
            "returns."
        )
    # Under the second name, model.compile() keeps what stands in for the model's own call.
    if kind.__name__ == "OptimizedModule" or model.__dict__.get("_compiled_call_impl") is not None:
        raise TraceError(
            "the model was given to torch.compile, which would run it without the plan. Plan the "
            "module itself with backend='compile', which compiles it as planned."
        )
    if "forward" in model.__dict__:
        raise TraceError(
            "the model's forward was replaced on the instance, so that of its class would not be "
            "the whole of it. Put the change into a subclass."
        )
    if len({it.device for it in model.parameters()}) > 1:
        raise TraceError("the parameters lie on several devices; a plan is for the memory of one.")


class _PlannedForward:
    """What a planned model does otherwise than its class."""

    def run_planned(
        self, plain: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> Any:
        """Run the forward pass by the plan where there is one, else as the class does."""
        found = self._step(args, kwargs) if torch.is_grad_enabled() else None
        if found is None:
            return plain(self, *args, **kwargs)
        step, sample = found
        if sample is not None:
            args, kwargs = as_sampled(self, sample, (args, kwargs))  # type: ignore[arg-type]
        return step.run(self, args, kwargs)  # type: ignore[arg-type]

    def _step(
        self, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[Step, Written | None] | None:
        record: Planned = self.__dict__[RECORD]
        kind = kind_of(self, args, kwargs, record.noted)  # type: ignore[arg-type]
        if kind is not None and kind in record.steps:
            return record.steps[kind], record.written[kind]
        if record.backend == "modules" and self.training:  # type: ignore[attr-defined]
            # Running modules again is right for any input; the budget was kept on the sample.
            return record.latest, None
        if self.training:  # type: ignore[attr-defined]
            self._warn(record, kind)
        return None

    def _warn(self, record: Planned, kind: Kind | None) -> None:
        """Say once why a step runs without its plan."""
        if kind is not None and kind.sharded:
            why = (
                "parameters of modules inside it were sharded after planning, and its plan "
                "computes with whole ones. Shard the planned model alone, fully_shard(model), or "
                "plan with backend='modules', which takes sharded modules, before fully_shard"
            )
        else:
            paths = [path for path, _ in self.named_modules()]  # type: ignore[attr-defined]
            found = min((kind.unlike(it, paths) for it in record.steps), key=len) if kind else []
            told = "; ".join(found) or "an argument is neither a tensor nor hashable"
            why = (
                f"it is not what was planned: {told}. Plan it for this too: model = "
                "sn_memory.torch.plan(model, sample, budget)"
            )
        if why in record.refused:
            return
        record.refused.add(why)
        warnings.warn(
            f"a training step of {plain_class(type(self)).__name__} runs without its plan, "  # type: ignore[arg-type]
            f"because {why}.",
            PlanWarning,
            stacklevel=7,
        )

    def __reduce_ex__(self, protocol: Any) -> Any:
        plain = plain_model(self)  # type: ignore[arg-type]
        return bare, (type(plain),), dict(plain.__dict__)
