"""The clock by which searches end: the one on the wall, or work that is counted.

People ask for seconds that they wait, so those are the rule. A search that they end depends on the
machine and on what else runs on it. Where the same answer is wanted everywhere, work is counted
instead: each loop says how much it has done, in steps whose number depends on the problem alone.
Which of the two counts is said once, by `counting`, for all that is called inside it.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Final, TypeVar

# What stands for a second where work is counted. A unit is one op of a graph that the compiled
# search carries out on paper; it does 8 to 30 million of them in a second.
UNITS_PER_S: Final = 20_000_000

T = TypeVar("T")


@dataclass
class _Meter:
    """Whether work counts in this context, and how much of it was spent."""

    counts_work: bool
    units: int = 0


@dataclass
class _Stages:
    """Seconds on the wall that stages of planning share, and what they have spent of them."""

    limit_s: float
    spent_s: float = 0.0


# Per context, so that two threads may plan at once.
_METER: ContextVar[_Meter] = ContextVar("sn_memory.clock", default=_Meter(False))  # noqa: B039
_STAGES: ContextVar[_Stages | None] = ContextVar("sn_memory.stages", default=None)


@contextmanager
def counting(work: bool) -> Iterator[None]:
    """Let `now` tell counted work from here on, from nothing; or else seconds on the wall."""
    with _within(_METER, _Meter(work)):
        yield


@contextmanager
def sharing(limit_s: float) -> Iterator[None]:
    """Let all stages inside share so many seconds."""
    with _within(_STAGES, _Stages(limit_s)):
        yield


@contextmanager
def _within(variable: ContextVar[T], value: T) -> Iterator[None]:
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)


@contextmanager
def stage() -> Iterator[float]:
    """Yield the seconds that a stage may take, and count them; outside of `sharing`, inf.

    A tenth at least of what all share, for a search that comes when all is spent.
    """
    stages, began = _STAGES.get(), time.perf_counter()
    if stages is None:
        yield math.inf
        return
    try:
        yield max(stages.limit_s - stages.spent_s, stages.limit_s / 10)
    finally:
        stages.spent_s += time.perf_counter() - began


def now() -> float:
    """Return the seconds on the wall, or what was counted so far in place of them."""
    meter = _METER.get()
    if not meter.counts_work:
        return time.perf_counter()
    return meter.units / UNITS_PER_S


def spend(units: int) -> None:
    """Count work."""
    _METER.get().units += units


def late_or_units(deadline: float) -> Callable[[], bool] | int:
    """Return what ends a compiled search at a moment of `now`: a question, or the units left."""
    if not counts_work():
        return lambda: now() > deadline
    return units(deadline - now())


def counts_work() -> bool:
    """Whether `now` tells counted work."""
    return _METER.get().counts_work


def units(seconds: float) -> int:
    """Return the work that stands for so many seconds, 0 at least, 2**62 at most."""
    return int(min(max(seconds, 0.0) * UNITS_PER_S, 2.0**62))
