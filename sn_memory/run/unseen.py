"""Training inputs of a kind without a plan: the step is chosen when the kind first occurs.

The plain step is not an option: plans are for models that do not fit without one. The input is
traced; of the plans for other inputs, the fastest that keeps the budget on this one is carried
over; if none does, a short search plans it. If that fails too, parts of the model are recomputed,
chosen by measured steps. A rim defines how to trace, and which parts there are.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable
from dataclasses import replace
from typing import ClassVar, Generic

from ..base.errors import PlanError
from ..base.sizes import parse_bytes, show_bytes
from ..check import carry_out
from ..cost.caching import Settings
from ..graph.graph import Graph
from ..graph.liveness import baseline_seconds, unplanned_bytes
from ..plan.buffers import over_budget
from ..plan.plan import BudgetError, Plan
from ..plan.policies import policy
from ..plan.simulate import decisions_of
from .measured_choice import summary
from .planned import KeptStep, S
from .reserved import keeping_reserved

# Time limit in seconds of a search during training.
SEARCH_S = 1.0
# Planning during training may take this share of the time, plus this many seconds.
SHARE = 0.1
ALLOWED_S = 30.0
# How a kind of input was planned; the last two used a search.
NOTHING_AGAIN = "nothing runs again"
CARRIED_OVER = "carried over from the plan of"
PLANNED = "planned"
AT_ONCE = "planned at once"


def carried_over(graph: Graph, carried: Plan, budget_bytes: int) -> Plan | None:
    """Return another input's plan of the same model as a plan of this graph.

    Ops of one model have the same names at any size. None if their names differ or the plan would
    exceed the budget.
    """
    try:
        plan = within(graph, carried, budget_bytes)
    except (PlanError, BudgetError):
        return None
    return replace(plan, decisions=decisions_of(graph, carried.actions))


def smallest(graph: Graph) -> Plan:
    """Return a plan that needs little memory, without a search."""
    return policy("superneurons_memory")(graph, budget_bytes=None)


def within(graph: Graph, plan: Plan, budget: float | str) -> Plan:
    """Return an earlier plan if it is valid for this graph and keeps the budget."""
    replayed = carry_out(graph, plan)
    allowed = parse_bytes(budget, whole=unplanned_bytes(graph))
    # Op seconds may have been measured again since; the plan's lower bound is for the old ones.
    plan = replace(
        plan,
        budget_bytes=allowed,
        peak_bytes=replayed.peak_bytes,
        seconds=replayed.seconds,
        baseline_seconds=baseline_seconds(graph),
        lower_bound_seconds=0.0,
    )
    if plan.peak_bytes > allowed:
        raise over_budget(
            graph, plan, allowed, what="the plan passed in", instead="pass a planner's name"
        )
    return plan


class TimeToPlan:
    """Seconds spent on planning new inputs since a model was planned, and whether time is left.

    planning_s, longest_s : in total, and maximum for one input
    """

    def __init__(self) -> None:
        self.began = time.perf_counter()
        self.planning_s = self.longest_s = 0.0

    def took(self, seconds: float) -> None:
        """Add the seconds of one more plan."""
        self.planning_s += seconds
        self.longest_s = max(self.longest_s, seconds)

    def left(self) -> bool:
        """Whether there is time to plan one more kind of input."""
        passed = time.perf_counter() - self.began
        # Assume that the next kind takes as long as the longest so far.
        return self.planning_s + self.longest_s <= ALLOWED_S + SHARE * passed

    def __str__(self) -> str:
        return (
            f"planning new kinds of input has taken {self.planning_s:.0f} s, more than a tenth of "
            "the time since planning"
        )


class UnseenInput(ABC, Generic[S]):
    """A kind of input that occurs for the first time; `step` returns the step for it.

    name : of the model, for messages
    strict : raise instead of warning that something other than a plan of its ops runs
    clock : seconds that planning new inputs has taken and may take
    """

    log: ClassVar[logging.Logger]
    line: ClassVar[str]  # of code that plans several inputs ahead
    demand = "strict"  # what requires a plan of ops

    def __init__(self, name: str, budget_bytes: int, *, strict: bool, clock: TimeToPlan) -> None:
        self.name, self.budget_bytes, self.strict, self.clock = name, budget_bytes, strict, clock
        # How it was planned, as in `PlannedKind`.
        self.how = ""
        # If no plan of ops keeps the budget: the error, which states the smallest peak.
        self.over: BudgetError | None = None
        self.began = time.perf_counter()

    @staticmethod
    @abstractmethod
    def first_line(error: Exception) -> str:
        """Return the informative line of an error."""

    @abstractmethod
    def described(self) -> str:
        """Return a description of the input for messages."""

    @abstractmethod
    def refusal(self) -> str:
        """Return why there can be no plan of ops; empty if there can."""

    @abstractmethod
    def by_ops(self) -> S:
        """Return a step whose ops run according to a plan from `planned`."""

    @abstractmethod
    def by_parts(self, why: str, by_ops: S | None, *, keep: bool) -> S:
        """Return a step that recomputes parts; by_ops : a step that exceeds the budget."""

    @abstractmethod
    def kept(self, step: S) -> S:
        """Keep a step for its kind of input."""

    def step(self) -> S:
        """Return the step for the input, and keep it."""
        try:
            return self._step()
        finally:
            self.clock.took(self.seconds)

    def _step(self) -> S:
        why, by_ops = self.refusal(), None
        # With `strict` nothing else may run, however long planning takes.
        hurried = not why and not self.strict and not self.clock.left()
        if hurried:
            why = str(self.clock)
        if not why:
            try:
                by_ops = self.by_ops()
            except BudgetError as error:  # before any plan, e.g. for the optimizer's step alone
                self.over = error
            except Exception as error:  # noqa: BLE001 - whatever it is, the safe step runs
                why = f"it cannot be traced: {self.first_line(error).removesuffix('.')}"
        if self.over is not None:
            why = f"no plan of its ops was found that keeps {show_bytes(self.budget_bytes)}"
        elif by_ops is not None:
            event = self.name, self.described(), self.how, summary(by_ops.plan)
            self.log.info("%s met %s: %s, %s", *event)
            return self.kept(by_ops)
        if self.strict:
            raise self.error(why)
        # Not kept if only time was missing: it is planned once there is time again.
        return self.by_parts(why, by_ops, keep=not hurried)

    @property
    def seconds(self) -> float:
        """Seconds spent on this input so far."""
        return time.perf_counter() - self.began

    def planned(
        self,
        graph: Graph,
        search: Callable[[Graph], Plan],
        budget_bytes: int,
        others: Iterable[KeptStep[S]],
        allocator: Settings | None,
    ) -> Plan:
        """Plan the input's graph, and record how: first without a search, then by a short one.

        If no plan keeps the budget, return the one with the smallest peak, and set `over`.

        graph : a step of the model on the input
        search : plans a graph within `budget_bytes`, in about SEARCH_S
        others : the steps for other inputs
        allocator : a GPU's allocator, whose reserved bytes must stay within the budget as well
        """

        def kept(plan: Plan | None) -> Plan | None:
            if plan is None or plan.peak_bytes > budget_bytes:
                return None
            return keeping_reserved(graph, plan, budget_bytes, allocator)

        # The plain step if it fits, as no plan is faster.
        if whole := kept(policy("liveness")(graph, budget_bytes=None)):
            self.how = NOTHING_AGAIN
            return whole
        keeping = [
            (plan, other.summary.inputs)
            for other in others
            # Only plans from a search: carried-over ones are copies of these.
            if isinstance(other.step.plan, Plan)
            and other.summary.how.startswith(PLANNED)
            and (plan := kept(carried_over(graph, other.step.plan, budget_bytes)))
        ]
        if keeping:
            carried, inputs = min(keeping, key=lambda pair: pair[0].seconds)
            self.how = f"{CARRIED_OVER} {inputs}"
            return carried
        self.how, self.over = AT_ONCE, None
        try:
            return search(graph)
        except BudgetError as error:
            # Above the budget, but the smallest found; the rim decides whether to use it.
            self.over = error
            return error.plan or smallest(graph)

    def error(self, why: str) -> Exception:
        """Return the error to raise under `strict`."""
        message = f"{self.demand}: {self.name} met {self.described()}, and {why}. "
        if self.over is None:
            instead = ", or leave strict out" if self.demand == "strict" else ""
            return PlanError(f"{message}Plan it ahead: {self.line}{instead}.")
        return BudgetError(
            f"{message}The smallest peak found is {show_bytes(self.over.peak_bytes)}. Raise the "
            "budget or make the input smaller.",
            peak_bytes=self.over.peak_bytes,
            budget_bytes=self.budget_bytes,
            op=self.over.op,
            plan=self.over.plan,
        )

    def warning(self, step: S, why: str, measured_on: str = "") -> str:
        """Return a warning that says what runs instead of a plan of ops, and why."""
        over = step.plan.peak_bytes - self.budget_bytes
        if over > 0:
            return (
                f"{self.name} met {self.described()}: no choice was found that keeps "
                f"{show_bytes(self.budget_bytes)}, and {why}. The smallest runs ({self.how}), "
                f"{over} bytes above the budget ({summary(step.plan)}). Raise the budget or make "
                "the input smaller."
            )
        return (
            f"{self.name} met {self.described()}: {self.how} ({measured_on}{summary(step.plan)}), "
            f"which may be slower than a plan of its ops, because {why}. Plan it as well: "
            f"{self.line}."
        )
