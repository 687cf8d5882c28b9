"""`model.sn_memory` of a planned model: its steps, and what is known about them."""

from __future__ import annotations

import threading
from collections import Counter
from collections.abc import Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from operator import or_
from typing import TYPE_CHECKING, Any

import torch

from ..base.sizes import parse_bytes
from ..run.planned import KeptStep, PlannedRecord
from ..run.unseen import TimeToPlan
from .eager.trial import Trial
from .model.guards import GuardCache
from .model.signature import InputSignature, Name, storage_sizes
from .planning import PlanOptions
from .step import Step
from .target.allocator import StepPool
from .trace.trace import Trace

if TYPE_CHECKING:
    from .state.model_state import ModelState

# How many kinds that were planned while training are kept.
KINDS = 64


@dataclass
class StepCache:
    """The steps of a planned model, and what training has shown so far.

    latest : the step of the latest `plan`; that of the largest sample, if there are several
    ends : which outputs the backward pass begins at, as in `trace`, once steps have shown it
    laid_out_otherwise : whether kernels were seen to use other memory layouts than traced
    kept : per kind of input
    later : per step, the one that replaces it if parameters already have gradients
    measured : steps that were measured on an input, with its kind
    changes : per attribute and argument, how many values were planned for while training
    free : attributes and arguments that change from step to step, whose values are ignored; see
        `InputSignature.without`.
    time : seconds that planning while training took, and may take
    count, running : steps so far, and the one that ran last
    warned : keys of the warnings already given; each is given once
    """

    latest: Step
    ends: tuple[bool, ...] = ()
    laid_out_otherwise: bool = False
    kept: dict[InputSignature, KeptStep[Step]] = field(default_factory=dict)
    later: dict[Step, Step] = field(default_factory=dict)
    measured: list[tuple[InputSignature, Step]] = field(default_factory=list)
    changes: Counter[Name] = field(default_factory=Counter)
    free: set[Name] = field(default_factory=set)
    time: TimeToPlan = field(default_factory=TimeToPlan)
    count: int = 0
    running: Step | None = None
    warned: set[str] = field(default_factory=set)

    def known(self, kind: InputSignature | None) -> InputSignature | None:
        """Return the kind of a kept step that accepts `kind`; else `kind` without free values."""
        if kind is None or kind in self.kept:
            return kind
        # A step for exactly these values takes precedence over one that ignores them.
        free = kind.without(self.free)
        accepts = (step for like in (kind, free) for step in self.kept if step.accepts(like))
        return next(accepts, free)

    def step(self, kind: InputSignature | None) -> Step | None:
        """Return the step of a kind; None if it has to be planned, or planned again."""
        kept = None if kind is None else self.kept.get(kind)
        return None if kept is None or kept.step.is_outdated(self.ends) else kept.step

    def unlike(self, kind: InputSignature, model: torch.nn.Module) -> str:
        """Describe how a kind differs from the most similar other; `model` names the modules."""
        paths = [path for path, _ in model.named_modules()]
        others = (kind.unlike(kept, paths) for kept in self.kept if kept != kind)
        nearest: list[str] = min(others, key=len, default=[])
        return "; ".join(nearest)

    def begins_at(self, ends: Sequence[bool]) -> None:
        """From now on plan for gradients of these outputs as well as of the earlier ones."""
        if len(self.ends) == len(ends):
            ends = [*map(or_, self.ends, ends)]
        self.ends = tuple(ends)

    @property
    def all_steps(self) -> list[Step]:
        """All steps, with those in `later`."""
        # Each once: a step by regions or modules serves all kinds that it covers.
        return [*dict.fromkeys((*(kept.step for kept in self.kept.values()), *self.later.values()))]

    def constants_bytes(self, *, excluding: Iterable[torch.Tensor] = ()) -> int:
        """Bytes that steps hold besides the model's tensors; each storage counts once."""
        held = storage_sizes(tensor for step in self.all_steps for tensor in step.known)
        excluded = storage_sizes(excluding)
        return sum(nbytes for key, nbytes in held.items() if key not in excluded)

    def make_room(self, newest: InputSignature, budget_bytes: int) -> None:
        """Drop the least recently used kinds if there are too many, or they hold too much."""
        # Kinds of the samples of `plan` have no `used`, and stay; the newest is about to run.
        online = {kind: kept.used for kind, kept in self.kept.items() if kept.used is not None}
        online.pop(newest, None)
        for kind in sorted(online, key=online.__getitem__):
            # Does what other kinds hold take a step above the budget that keeps it by itself?
            too_much = any(
                step.plan.peak_bytes <= budget_bytes
                and step.plan.peak_bytes + self.constants_bytes(excluding=step.known) > budget_bytes
                for step in (kept.step for kept in self.kept.values())
            )
            if len(online) < KINDS and not too_much:
                return
            del online[kind]
            self.later.pop(self.kept.pop(kind).step, None)


@dataclass(repr=False, frozen=True, eq=False)
class PlanRecord(PlannedRecord[Trace, Step]):
    """What a planned model carries as `model.sn_memory`; created once, when it is planned.

    Parameters
    ----------
    inputs
        Its steps, per kind of input.
    options
        How the model was planned last, with the budget in bytes.
    strict
        Whether to raise where no plan of ops keeps the budget.
    trial
        The result of the trial of the latest plan.
    guards
        What the steps depend on besides tensors; the kinds of the latest inputs.
    pool
        Where the steps allocate, on a device that has such pools (CUDA).
    lock
        Held during a forward pass, and during planning: it serializes threads that share the model,
        because both temporarily replace attributes of its modules.
    """

    inputs: StepCache
    options: PlanOptions
    strict: bool
    trial: Trial
    guards: GuardCache
    pool: StepPool = field(default_factory=StepPool)
    lock: Any = field(default_factory=threading.RLock)

    def release(self) -> None:
        """Return what the steps have reserved to the device; the next step reserves it again.

        On CUDA the steps have a pool of their own. Gradients are in it: free them before
        (`zero_grad`), as blocks in use stay. Without such a pool nothing is done.
        """
        self.pool.release()

    @property
    def backend(self) -> str:  # type: ignore[override]
        """The back end of the latest plan: `graph`, `regions`, `compile` or `modules`."""
        return self.inputs.latest.backend

    @property
    def latest(self) -> Step:
        """The step of the latest plan."""
        return self.inputs.latest

    @property
    def kept(self) -> dict[InputSignature, KeptStep[Step]]:  # type: ignore[override]
        """The kept steps, per kind of input."""
        return self.inputs.kept

    def planning(self) -> PlanOptions:
        """Return the options for planning later inputs, with what training has shown."""
        return replace(self.options, ends=self.inputs.ends)

    @property
    def state(self) -> ModelState | None:
        """Where parameters and optimizer state are kept, and its cost; None if not planned."""
        return self.options.state

    def all_brought(self) -> AbstractContextManager[Any]:
        """A context for the model's own forward: state on the host is copied in for each op."""
        return nullcontext() if self.state is None else self.state.brought()

    @property
    def plan(self) -> Any:
        """The latest plan: a Plan; a RegionsPlan by `regions`, a MeasuredPlan by `modules`."""
        return self.latest.plan

    @property
    def latest_trace(self) -> Trace | None:
        return self.latest.trace

    @property
    def budget_bytes(self) -> int:
        """The budget, for every kind of input."""
        return parse_bytes(self.options.budget, whole=self.latest.plan.baseline_peak_bytes)
