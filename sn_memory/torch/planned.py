"""What a planned model carries as `model.sn_memory`: its steps, and what is known of them."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import torch

from ..base.sizes import parse_bytes
from ..run.at_once import TimeToPlan
from ..run.planned import PlannedKind, PlannedRecord
from .eager.trial import Trial
from .model.kind import Kind
from .model.kinds import Written
from .model.recent import Recent
from .modules.backend import ModuleStep
from .planning import Planning, Step
from .trace.trace import Trace

# Of the kinds that come while training so many steps are kept.
KINDS = 64


@dataclass(repr=False)
class Planned(PlannedRecord[Trace]):
    """What a planned model carries as `model.sn_memory`.

    Parameters
    ----------
    backend
        What carries the plan out: `graph`, `compile` or `modules`.
    steps
        What runs in place of the forward pass, per kind of input.
    latest
        The one that `plan` made last; of several samples, for the largest.
    noted
        Per module, the attributes it had when it was planned; others make no other kind of input.
    written
        Per kind of input, how the arguments of its sample were written.
    trial
        What the trial of the plan made last found.
    planning
        How the model was planned last, with the budget in bytes.
    strict
        Whether to raise where no plan of ops keeps the budget.
    laid_out_otherwise
        Whether kernels were seen to lay results out otherwise than traced.
    told
        Per kind of input, how it was planned; see `kinds`.
    at_sight
        Of the kinds, those that came while training, with the number of the last step of each.
    safe
        Choices of modules that were measured on an input, each with its kind.
    time
        What planning at first sight took, and may take.
    count
        Steps so far.
    running
        The step that ran last.
    later
        Per step, the one that runs in its place where gradients of parameters are there already.
    told_of_several
        Whether a warning said that several forward passes before one backward break the budget.
    recent
        The kinds of the inputs that came last.
    """

    backend: str
    steps: dict[Kind, Step]
    latest: Step
    noted: tuple[frozenset[str], ...]
    written: dict[Kind, Written]
    trial: Trial
    planning: Planning
    strict: bool = False
    laid_out_otherwise: bool = False
    told: dict[Kind, PlannedKind] = field(default_factory=dict)
    at_sight: dict[Kind, int] = field(default_factory=dict)
    safe: list[tuple[Kind, ModuleStep]] = field(default_factory=list)
    time: TimeToPlan = field(default_factory=TimeToPlan)
    count: int = 0
    running: Step | None = None
    later: dict[Step, Step] = field(default_factory=dict)
    told_of_several: bool = False
    recent: Recent = field(default_factory=Recent, repr=False)

    @property
    def plan(self) -> Any:
        """The plan made last: a Plan, or with `modules` a MeasuredPlan."""
        return self.latest.plan

    @property
    def latest_trace(self) -> Trace | None:
        return self.latest.trace

    @property
    def budget_bytes(self) -> int:
        """The budget, for every kind of input."""
        return parse_bytes(self.planning.budget, whole=self.latest.plan.baseline_peak_bytes)

    def constants_bytes(self, *, beside: Iterable[torch.Tensor] = ()) -> int:
        """Bytes of what steps hold beside the model's tensors, each storage once.

        beside : tensors that do not count
        """
        known = {_key(it) for it in beside}
        steps = (*self.steps.values(), *self.later.values())
        held = {_key(it): it for step in steps for it in step.known}
        return sum(it.untyped_storage().nbytes() for key, it in held.items() if key not in known)

    def make_room(self, newest: Kind) -> None:
        """Let kinds go that were not used for longest: too many, or too much is held for them."""
        while len(self.at_sight) > 1 and (len(self.at_sight) > KINDS or self._is_held_too_much()):
            oldest = min(
                (it for it in self.at_sight if it != newest), key=lambda it: self.at_sight[it]
            )
            self.later.pop(self.steps[oldest], None)
            del self.at_sight[oldest], self.told[oldest], self.steps[oldest], self.written[oldest]

    def _is_held_too_much(self) -> bool:
        """Whether what is held for other kinds takes one that keeps the budget above it."""
        return any(
            step.plan.peak_bytes <= self.budget_bytes
            and step.plan.peak_bytes + self.constants_bytes(beside=step.known) > self.budget_bytes
            for step in self.steps.values()
        )


def _key(tensor: torch.Tensor) -> int:
    return int(tensor.untyped_storage()._cdata)
