"""A training input of a kind that nobody planned for: what runs, found when it comes.

The plain step is no choice: a plan exists for runs that do not fit. The input is traced, and of the
plans there are the fastest that keeps the budget on it is carried over; where none does, a short
search plans it (`at_once.py`). Where that fails too, parts of the model run again, chosen by
measured steps. A rim says how it traces, and which parts there are.
"""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from typing import Any, ClassVar, Generic, Protocol, TypeVar

from ..base.errors import PlanError
from ..base.sizes import show_bytes
from ..plan.plan import BudgetError
from .at_once import PlanAtOnce, TimeToPlan
from .measured_choice import summary


class Step(Protocol):
    """What runs a step as planned."""

    @property
    def plan(self) -> Any: ...


S = TypeVar("S", bound=Step)


class UnseenInput(ABC, Generic[S]):
    """A kind of input that came for the first time, and the way to what runs it.

    Parameters
    ----------
    name
        Of the model, for messages.
    strict
        Raise where a warning would say that what runs is no plan of its ops.
    clock
        What planning at first sight took, and may take.
    """

    log: ClassVar[logging.Logger]
    line: ClassVar[str]  # of a program that plans several inputs ahead

    def __init__(self, name: str, budget_bytes: int, *, strict: bool, clock: TimeToPlan) -> None:
        self.name, self.budget_bytes, self.strict, self.clock = name, budget_bytes, strict, clock
        # How it was planned, as `PlannedKind` has it.
        self.how = ""
        # Where no plan of ops keeps the budget: the error, which says the smallest peak.
        self.over: BudgetError | None = None
        self.began = time.perf_counter()

    @staticmethod
    @abstractmethod
    def first_line(error: Exception) -> str:
        """Return the line of an error that says something."""

    @abstractmethod
    def told(self) -> str:
        """Say what it is."""

    @abstractmethod
    def refusal(self) -> str:
        """Return why there can be no plan of ops, or nothing."""

    @abstractmethod
    def by_ops(self) -> S:
        """Return a step whose ops are planned, its plan one that went through `noted`."""

    @abstractmethod
    def by_parts(self, why: str, by_ops: S | None, *, keep: bool) -> S:
        """Return a step in which parts run again; by_ops : a plan that does not keep the budget."""

    @abstractmethod
    def kept(self, step: S) -> S:
        """Keep a step for its kind of input."""

    def step(self) -> S:
        """Return what runs, and keep it."""
        try:
            return self._step()
        finally:
            self.clock.took(self.seconds)

    def _step(self) -> S:
        why, by_ops = self.refusal(), None
        hurried = not why and not self.strict and not self.clock.left()
        if hurried:
            why = str(self.clock)
        if not why:
            try:
                by_ops = self.by_ops()
            except Exception as error:  # noqa: BLE001 - whatever it is, the safe step runs
                why = f"it cannot be traced: {self.first_line(error)}"
        if self.over is not None:
            why = f"no plan of its ops was found that keeps {show_bytes(self.budget_bytes)}"
        elif by_ops is not None:
            told = self.name, self.told(), self.how, summary(by_ops.plan)
            self.log.info("%s met %s: %s, %s", *told)
            return self.kept(by_ops)
        if self.strict:
            raise self.error(why)
        return self.by_parts(why, by_ops, keep=not hurried)

    @property
    def seconds(self) -> float:
        """What it took so far."""
        return time.perf_counter() - self.began

    def noted(self, found: PlanAtOnce) -> Any:
        """Note how a plan was found, and return it."""
        self.how, self.over = found.how, found.over
        return found.plan

    def error(self, why: str) -> Exception:
        """Return what `strict` asks for."""
        said = f"strict: {self.name} met {self.told()}, and {why}. "
        if self.over is None:
            return PlanError(f"{said}Plan it ahead: {self.line}, or leave strict out.")
        return BudgetError(
            f"{said}The smallest peak found is {show_bytes(self.over.peak_bytes)}. Raise the "
            "budget or make the input smaller.",
            peak_bytes=self.over.peak_bytes,
            budget_bytes=self.budget_bytes,
            op=self.over.op,
            plan=self.over.plan,
        )

    def warning(self, step: S, why: str, measured_on: str = "") -> str:
        """Say what runs in the place of a plan of ops, and why."""
        over = step.plan.peak_bytes - self.budget_bytes
        if over > 0:
            return (
                f"{self.name} met {self.told()}: no choice was found that keeps "
                f"{show_bytes(self.budget_bytes)}, and {why}. The smallest runs ({self.how}), "
                f"{over} bytes above the budget ({summary(step.plan)}). Raise the budget or make "
                "the input smaller."
            )
        return (
            f"{self.name} met {self.told()}: {self.how} ({measured_on}{summary(step.plan)}), which "
            f"may be slower than a plan of its ops, because {why}. Plan it as well: {self.line}."
        )
