"""What a planned Keras model carries as `model.sn_memory`: programs, and what is told of them."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

from ..plan import plan as plans
from ..run.at_once import TimeToPlan
from ..run.planned import PlannedKind, PlannedRecord
from .eager.program import Program
from .model.arguments import describe
from .modules.backend import LayerStep
from .planning import Planning
from .trace.trace import Trace

RECORD = "sn_memory"
# Of the kinds that come while training so many are kept.
KINDS = 32


@dataclass(repr=False)
class Planned(PlannedRecord[Trace]):
    """What a planned model or step carries as `sn_memory`.

    Parameters
    ----------
    backend
        What carries the plan out: `graph` or `layers`.
    traced, made
        What `plan` planned last, and how, of several samples the largest; with `layers`, there is
        no trace.
    programs
        The planned steps, per kind of input.
    layers
        What runs layers again, for any input, if `plan` chose these.
    refused
        Why calls were run plainly; each is warned about once.
    planning
        How the model was planned last; None of a step, and before `plan` is done.
    told
        Per kind of input, how it was planned; see `kinds`.
    at_sight
        Of the kinds, those that came while training, with the number of the last trace of each.
    again
        Choices of layers for kinds of input that no program is for.
    measured
        Choices of layers, each with the shapes it was measured on.
    time
        What planning at first sight took, and may take.
    count
        How often the model was put into a function.
    running
        What was put into a function last.
    """

    backend: str
    traced: Trace | None
    made: Any
    programs: dict[Hashable, Program] = field(default_factory=dict)
    layers: LayerStep | None = None
    refused: set[Hashable] = field(default_factory=set)
    planning: Planning | None = None
    told: dict[Hashable, PlannedKind] = field(default_factory=dict)
    at_sight: dict[Hashable, int] = field(default_factory=dict)
    again: dict[Hashable, LayerStep] = field(default_factory=dict)
    measured: list[tuple[Any, LayerStep]] = field(default_factory=list)
    time: TimeToPlan = field(default_factory=TimeToPlan)
    count: int = 0
    running: Program | LayerStep | None = None

    @property
    def plan(self) -> Any:
        return self.made

    @property
    def planned_inputs(self) -> list[str]:
        if self.layers is not None:
            return ["any"]
        # Of a step function nothing is told: it takes arguments like its sample's alone.
        return super().planned_inputs or ["as its sample"]

    @property
    def latest_trace(self) -> Trace | None:
        return self.traced

    @property
    def budget_bytes(self) -> int:
        """The budget, for every kind of input."""
        return int(self.made.budget_bytes)

    def take_over(self, before: Planned | None) -> None:
        """Keep what was planned for other inputs when it was asked for; the rest is made again."""
        if before is not None:
            asked = [it for it in before.programs if it not in before.at_sight]
            self.programs |= {it: before.programs[it] for it in asked}
            self.told |= {it: before.told[it] for it in asked}
            self.layers = before.layers

    def keep(self, kind: Hashable, step: Program | LayerStep, told: PlannedKind) -> None:
        """Keep what runs for a kind of input."""
        self.forget(kind)
        if isinstance(step, Program):
            self.programs[kind] = step
        else:
            self.again[kind] = step
        self.told[kind] = told

    def keep_at_sight(self, kind: Hashable, step: Program | LayerStep, told: PlannedKind) -> None:
        """Keep it as long as there is room: those that were not used for longest go."""
        self.keep(kind, step, told)
        self.at_sight[kind] = self.count
        while len(self.at_sight) > KINDS:
            self.forget(min(self.at_sight, key=lambda it: self.at_sight[it]))

    def forget(self, kind: Hashable) -> None:
        """Let a kind of input go."""
        for held in (self.programs, self.again, self.told, self.at_sight):
            held.pop(kind, None)  # type: ignore[attr-defined]


def planned_kind(
    call: Hashable, how: str, plan: Any, budget_bytes: int, seconds: float = 0.0
) -> PlannedKind:
    """Return what is told of a kind of input: the key of its call, and its plan."""
    return PlannedKind(describe(call), how, plan.peak_bytes, budget_bytes, seconds=seconds)


def kind_of(call: Hashable, variables: Sequence[Any]) -> Hashable:
    """What a plan of a model depends on: the arguments of its `call`, and what trains."""
    return call, tuple(id(it) for it in variables)


def plain_model(model: Any) -> Any:
    """Return a planned model as it was before; any other as it is."""
    if RECORD not in model.__dict__:
        return model
    plain: Any = object.__new__(type(model).__mro__[2])
    plain.__dict__.update({key: it for key, it in model.__dict__.items() if key != RECORD})
    return plain


def check_techniques(techniques: Sequence[str]) -> None:
    """Raise PlanError for techniques there are not, ValueError for those not carried out here."""
    plans.check_techniques(techniques)
    if "offload" in techniques:
        raise ValueError(
            'got the technique "offload", expected "keep" and "recompute": under TensorFlow '
            "nothing is moved to the host."
        )


def check_deterministic(deterministic: bool, *, profile: bool, backend: str) -> None:
    """Raise ValueError for what measures seconds, where the plan is to be the same anywhere."""
    if deterministic and (profile or backend == "layers"):
        got = "profile=True" if profile else "backend='layers'"
        raise ValueError(
            f"got deterministic=True with {got}, which measures seconds: they differ from run to "
            "run. Pass profile=False, a device whose speeds are to count, and another back end."
        )
