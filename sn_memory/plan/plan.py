"""The plan: actions in order, with their predicted cost. Data only; read and written as JSON.

A list of decisions ("recompute h3") does not say when, and each back end would interpret it
differently. So a plan *is* its actions, in order: run, free, offload, prefetch. The decisions
listed with them give the reasons, for people and for back ends that only take hints.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import MISSING, asdict, dataclass, field
from typing import Any, Final, NamedTuple

from ..base.errors import PlanError
from ..base.sizes import (
    Fields,
    decided_line,
    is_count,
    is_text,
    load,
    peak_line,
    seconds_line,
    show,
    show_bytes,
    write_records,
)

FORMAT: Final = "sn_memory.plan.v1"
KINDS: Final = ("run", "free", "offload", "prefetch")
TECHNIQUES: Final = ("keep", "recompute", "offload")
DECISIONS: Final = ("keep", "recompute", "recompute_each", "offload")


def check_techniques(techniques: Sequence[str]) -> None:
    """Raise PlanError for an unknown technique."""
    for technique in techniques:
        if technique not in TECHNIQUES:
            raise PlanError(
                f"got technique {technique!r}, expected some of {', '.join(TECHNIQUES)}."
            )


class Action(NamedTuple):
    """One entry of a plan: `run` an op in one of its ways, or act on a storage.

    run       allocate the outputs that are absent, hold the workspace, compute
    free      free the storage's device memory
    offload   start copying it to the host; its device memory stays until `free`
    prefetch  allocate it on the device again and start copying it back
    """

    kind: str
    target: str
    way: int = 0


@dataclass(frozen=True, slots=True)
class Decision:
    """What happens to one storage between its uses, and why.

    storage : its name
    technique : `keep`, `recompute` (rebuilt once, then held to its last use), `recompute_each`
        (rebuilt for each group of uses) or `offload`
    reason : one sentence for people
    bytes, cost_s : bytes that leave the device, and the seconds that this costs
    """

    storage: str
    technique: str
    reason: str = ""
    bytes: int = 0
    cost_s: float = 0.0


@dataclass(frozen=True, repr=False)
class Plan:
    """Actions that run a graph, with predicted peak and seconds, and a lower bound.

    Parameters
    ----------
    actions
        In order; `check_plan` replays them.
    decisions
        One for each storage that is not resident.
    planner
        The planner that made it.
    peak_bytes, seconds
        Predicted: the most live bytes, and the time when the last op has ended.
    lower_bound_seconds
        No plan with the planner's techniques that keeps the budget is faster than this.
    budget_bytes
        The budget it was planned for; None for planners that take none.
    baseline_peak_bytes, baseline_seconds
        The graph without a plan: everything kept to its last use.
    seconds_sources
        Number of ops by the source of their seconds: measured, roofline or flops.
    solve_s
        Seconds of planning.
    graph_name
        The name of the graph it was made for.
    reserved_peak_bytes
        What the device's allocator reserves for it, by its rules; None if none is modelled.
    pool_bytes
        The initial segment of the step's own memory pool; 0 for none.
    allocator
        The allocator that reserves it, with its settings.
    notes
        Remarks for people.
    """

    actions: tuple[Action, ...]
    decisions: tuple[Decision, ...]
    planner: str
    peak_bytes: int
    seconds: float
    lower_bound_seconds: float
    budget_bytes: int | None = None
    baseline_peak_bytes: int = 0
    baseline_seconds: float = 0.0
    seconds_sources: Mapping[str, int] = field(default_factory=dict)
    solve_s: float = 0.0
    graph_name: str = ""
    reserved_peak_bytes: int | None = None
    pool_bytes: int = 0
    allocator: str = ""
    notes: tuple[str, ...] = ()

    def __repr__(self) -> str:
        gap = f", {100 * self.gap:.1f} % above the bound" if self.lower_bound_seconds else ""
        return "\n".join(
            (
                f"Plan of {self.graph_name or 'a graph'} by {self.planner}, {len(self.actions)} "
                f"actions, found in {self.solve_s:.2g} s",
                peak_line(self.budget_bytes, self.baseline_peak_bytes, self.peak_bytes),
                decided_line(
                    ((decision.technique, decision.bytes) for decision in self.decisions),
                    "storages",
                ),
                f"{seconds_line(self.baseline_seconds, self.seconds)}{gap}",
                *self.notes,
            )
        )

    @property
    def gap(self) -> float:
        """How far above the lower bound the plan is, as a fraction of the bound; 0 is optimal."""
        # A step of 0 seconds meets a bound of 0; any other is infinitely far above it.
        if self.lower_bound_seconds <= 0:
            return 0.0 if self.seconds <= 0 else float("inf")
        return max(0.0, self.seconds / self.lower_bound_seconds - 1)

    @property
    def overhead(self) -> float:
        """Extra seconds over the unplanned graph, as a fraction."""
        return self.seconds / self.baseline_seconds - 1 if self.baseline_seconds else 0.0

    def decided(self, technique: str) -> tuple[str, ...]:
        """Return the names of the storages with this decision.

        Raises PlanError for an unknown technique.
        """
        if technique not in DECISIONS:
            raise PlanError(f"got technique {technique!r}, expected one of {', '.join(DECISIONS)}.")
        return tuple(item.storage for item in self.decisions if item.technique == technique)

    @staticmethod
    def from_json(source: str | os.PathLike[str]) -> Plan:
        """Read a plan from a path, or from JSON text (anything that starts with a brace).

        Raises PlanError with the line (if not JSON) or the key (if invalid).
        """
        return _from_data(load(source, PlanError, "plan"))

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the plan as JSON text, one record per line; also write it to `path` if given."""
        lists = {
            "decisions": map(asdict, self.decisions),
            "actions": (action if action.way else action[:2] for action in self.actions),
        }
        return write_records(_head(self), lists, path)


class BudgetError(RuntimeError):
    """No plan keeps the budget.

    Attributes
    ----------
    peak_bytes
        The smallest peak of any plan found.
    budget_bytes
        The budget that cannot be kept.
    op
        The name of the op at which that smallest peak is reached.
    plan
        The plan of that peak, if known.
    floor_bytes
        No plan has a smaller peak than this; equal to `peak_bytes` if that is proven to be the
        smallest. None if nothing is proven.
    module
        The path of the module that `op` belongs to; empty if unknown.
    percent
        The smallest budget that can be kept, in whole percent of the unplanned peak; None if that
        peak is unknown, or nothing is saved.
    """

    def __init__(
        self,
        message: str,
        *,
        peak_bytes: int,
        budget_bytes: int,
        op: str,
        plan: Plan | None = None,
        floor_bytes: int | None = None,
        module: str = "",
        percent: int | None = None,
    ) -> None:
        super().__init__(message)
        self.peak_bytes = peak_bytes
        self.budget_bytes = budget_bytes
        self.op = op
        self.plan = plan
        self.floor_bytes = floor_bytes
        self.module = module
        self.percent = percent


def percent_kept(peak_bytes: int, whole_bytes: int) -> int | None:
    """Return `peak_bytes` in whole percent of `whole_bytes`; None if it is no smaller."""
    # Rounded up: the plan would exceed the next lower percentage.
    return -(-100 * peak_bytes // whole_bytes) if peak_bytes < whole_bytes else None


# In the order of the file.
_NUMBERS: Final = (
    ("peak_bytes", int),
    ("seconds", float),
    ("lower_bound_seconds", float),
    ("baseline_peak_bytes", int),
    ("baseline_seconds", float),
    ("solve_s", float),
)


def _read_actions(rows: Iterable[Any]) -> Iterable[Action]:
    for at, row in enumerate(rows):
        # The way is written only if it is not the default.
        usual = isinstance(row, list) and len(row) in (2, 3)
        if not (usual and is_text(row[0]) and is_text(row[1])):
            raise PlanError(f'actions[{at}]: got {show(row)}, expected ["kind", "name"].')
        if row[0] not in KINDS:
            raise PlanError(
                f"actions[{at}][0]: got {show(row[0])}, expected one of {', '.join(KINDS)}."
            )
        way = row[2] if len(row) == 3 else 0
        # True is an int in Python, but not the number of a way.
        if isinstance(way, bool) or not isinstance(way, int) or way < 0:
            raise PlanError(
                f"actions[{at}][2]: got {show(way)}, expected a whole number of 0 or more."
            )
        yield Action(row[0], row[1], way)


def _read_decision(data: object, where: str) -> Decision:
    row = Fields(data, where, PlanError)
    technique = row.text("technique")
    if technique not in DECISIONS:
        raise row.fail("technique", technique, f"one of {', '.join(DECISIONS)}")
    decision = Decision(
        row.text("storage"),
        technique,
        row.text("reason", ""),
        row.integer("bytes", 0),
        row.number("cost_s", 0.0),
    )
    row.done()
    return decision


def budget_line(budget_bytes: int, peak_bytes: int) -> str:
    """Return the text for a budget in an error, with a hint if a percentage was meant.

    peak_bytes : the smallest budget that can be kept
    """
    # No step takes 100 bytes; such a budget means percent.
    meant = f', for percent pass "{budget_bytes}%"' if 0 < budget_bytes <= 100 < peak_bytes else ""
    return f"budget is {show_bytes(budget_bytes)}{meant}"


def _amount(row: Fields, key: str, default: object = MISSING, kind: type = int) -> Any:
    value = row.integer(key, default) if kind is int else row.number(key, default)
    if value is not None and value < 0:
        raise row.fail(key, value, "0 or more")
    return value


def _from_data(data: object) -> Plan:
    row = Fields(data, "plan", PlanError)
    if (version := row.text("format")) != FORMAT:
        raise row.fail("format", version, f'"{FORMAT}"')
    numbers = {key: _amount(row, key, kind=kind) for key, kind in _NUMBERS}
    sources = row.mapping("seconds_sources")
    for key, count in sources.items():
        if not is_count(count):
            raise row.fail(f"seconds_sources.{key}", count, "a whole number of 0 or more")
    plan = Plan(
        actions=tuple(_read_actions(row.items("actions"))),
        decisions=tuple(
            _read_decision(item, f"decisions[{at}]")
            for at, item in enumerate(row.items("decisions"))
        ),
        planner=row.text("planner"),
        budget_bytes=row.integer("budget_bytes", None),
        seconds_sources=dict(sources),
        graph_name=row.text("graph_name", ""),
        reserved_peak_bytes=_amount(row, "reserved_peak_bytes", None),
        pool_bytes=_amount(row, "pool_bytes", 0),
        allocator=row.text("allocator", ""),
        notes=row.names("notes"),
        **numbers,
    )
    row.done()
    return plan


def _head(plan: Plan) -> dict[str, Any]:
    """Return the entries of a plan's file before its decisions and actions."""
    head: dict[str, Any] = {
        "format": FORMAT,
        "graph_name": plan.graph_name,
        "planner": plan.planner,
        "budget_bytes": plan.budget_bytes,
        **{key: kind(getattr(plan, key)) for key, kind in _NUMBERS},
        "seconds_sources": dict(plan.seconds_sources),
    }
    if plan.reserved_peak_bytes is not None:
        head |= {
            "reserved_peak_bytes": plan.reserved_peak_bytes,
            "pool_bytes": plan.pool_bytes,
            "allocator": plan.allocator,
            "notes": list(plan.notes),
        }
    return head
