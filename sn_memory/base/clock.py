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
from typing import Final

# What stands for a second where work is counted. A unit is one op of a graph that the compiled
# search carries out on paper; it does 8 to 30 million of them in a second.
UNITS_PER_S: Final = 20_000_000


class _Meter:
    """What counts in this context, and how much of it was spent."""

    __slots__ = ("counts", "units")

    def __init__(self, *, counts: bool) -> None:
        self.counts, self.units = counts, 0


# Per context, so that two threads may plan at once. The first belongs to all, and never ends.
_OF_ALL: Final = _Meter(counts=False)
_METER: ContextVar[_Meter] = ContextVar("sn_memory.clock", default=_OF_ALL)


@contextmanager
def counting(work: bool) -> Iterator[None]:
    """Let `now` tell counted work from here on, from nothing; or else seconds on the wall."""
    token = _METER.set(_Meter(counts=work))
    try:
        yield
    finally:
        _METER.reset(token)


class Shared:
    """Seconds on the wall that stages of planning share: timing ops, and searches.

    Parameters
    ----------
    limit_s
        Of all together.
    """

    def __init__(self, limit_s: float) -> None:
        self.limit_s, self.spent_s = limit_s, 0.0

    @property
    def left_s(self) -> float:
        """What is left; a tenth at least, for a search that comes when all is spent."""
        return max(self.limit_s - self.spent_s, self.limit_s / 10)


_SHARED: ContextVar[Shared | None] = ContextVar("sn_memory.shared", default=None)


@contextmanager
def sharing(limit_s: float) -> Iterator[None]:
    """Let all stages inside share so many seconds."""
    token = _SHARED.set(Shared(limit_s))
    try:
        yield
    finally:
        _SHARED.reset(token)


@contextmanager
def stage() -> Iterator[float]:
    """Yield the seconds that a stage may take, and count them; outside of `sharing`, inf."""
    shared, began = _SHARED.get(), time.perf_counter()
    try:
        yield math.inf if shared is None else shared.left_s
    finally:
        if shared is not None:
            shared.spent_s += time.perf_counter() - began


def now() -> float:
    """Return the seconds on the wall, or what was counted so far in place of them."""
    meter = _METER.get()
    if not meter.counts:
        return time.perf_counter()
    return meter.units / UNITS_PER_S


def spend(units: int) -> None:
    """Count work."""
    _METER.get().units += units


def after(deadline: float) -> Callable[[], bool]:
    """Return what asks whether it is later than this moment of `now`."""
    return lambda: now() > deadline


def late_or_units(deadline: float) -> Callable[[], bool] | int:
    """Return what a compiled search ends by: what `after` does, or the units that are left."""
    if not counts_work():
        return after(deadline)
    return units(deadline - now())


def counts_work() -> bool:
    """Whether `now` tells counted work."""
    return _METER.get().counts


def units(seconds: float) -> int:
    """Return the work that stands for so many seconds, 0 at least, 2**62 at most."""
    return int(min(max(seconds, 0.0) * UNITS_PER_S, 2.0**62))
