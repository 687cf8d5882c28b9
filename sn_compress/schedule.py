"""Schedules of theta, the fraction dropped at each step.

Every rank must use the same theta at the same step, so a schedule is a function of the step.
Varying values are rounded to a few discrete levels, because theta determines the payload size, and
Horovod renegotiates whenever a size changes.

`docs/convergence.md` has the condition under which dropping without error feedback converges.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

from .errors import CompressError

_RUNGS_PER_HALVING = 4
_LEAST_KEPT = 2**-10  # the lowest level, reached when the learning rate falls to 0
_SAMPLES = 2**12  # steps at which `Annealed` samples the rate to average what is kept


class Schedule(Protocol):
    """Anything that returns a theta for each step."""

    def theta(self, step: int) -> float:
        """Fraction of coefficients dropped at this step (0 is the first), in [0, 1)."""


def on_ladder(theta: float) -> float:
    """Round theta to the nearest level: keep = 1 - theta is a power of 2**(-1/4); 0 stays 0.

    There are 41 levels from keep = 1 to 1/1024.
    """
    keep = 1 - theta
    return 1 - 2 ** (round(_RUNGS_PER_HALVING * math.log2(keep)) / _RUNGS_PER_HALVING)


@dataclass(frozen=True)
class Constant:
    """The same theta at every step."""

    value: float

    def __post_init__(self) -> None:
        _check_theta(self.value)

    def theta(self, step: int) -> float:
        return self.value


@dataclass(frozen=True)
class Warmup:
    """Ramp from dense to the following schedule, in equal factors of keep (DGC: 75, 93.75, ... %).

    Parameters
    ----------
    steps : length of the warm-up
    then : the schedule after the warm-up; it starts at its own step 0
    dense : fraction of the warm-up during which nothing is dropped
    """

    steps: int
    then: Schedule
    dense: float = 0.25

    def __post_init__(self) -> None:
        if self.steps < 1 or not 0 <= self.dense <= 1:
            raise CompressError(
                f"Warmup: steps={self.steps!r}, dense={self.dense!r}; expected at least one step "
                "and a fraction from 0 to 1"
            )

    def theta(self, step: int) -> float:
        if step >= self.steps:
            return self.then.theta(step - self.steps)
        # `dense` may be 1: the ramp is then below 0 at all steps.
        ramp = (step / self.steps - self.dense) / max(1 - self.dense, 1e-9)
        if ramp <= 0:
            return 0.0
        keep = (1 - self.then.theta(0)) ** ramp
        return on_ladder(1 - keep)


@dataclass(frozen=True)
class Diminishing:
    """The paper's schedule: theta, and with it the loss, falls with the learning rate.

    Parameters
    ----------
    start : theta at step 0
    rate : function of the step: its learning rate over that of step 0, in (0, 1]
    power : theta falls as rate**power; the convergence condition requires 1/2
    """

    start: float
    rate: Callable[[int], float]
    power: float = 0.5

    def __post_init__(self) -> None:
        _check_theta(self.start)
        if not 0 <= self.power < math.inf:  # else theta would leave [0, 1) while training
            raise CompressError(f"Diminishing: power={self.power!r}; expected a power of 0 or more")

    def __repr__(self) -> str:
        return f"Diminishing(start={self.start!r}, rate={_called(self.rate)}, power={self.power!r})"

    def theta(self, step: int) -> float:
        return on_ladder(self.start * _fraction(self, self.rate, step) ** self.power)


@dataclass(frozen=True)
class Annealed:
    """Lets the fraction kept fall with the learning rate, at the same mean as a constant theta.

    Residuals held back by error feedback reach the weights late, multiplied by a later step's
    learning rate. So, for the same total bytes, it pays to send more while the rate is high. Use it
    with feedback, for a run of known length whose learning rate falls; see docs/convergence.md.

    Parameters
    ----------
    mean : the constant theta that sends as much: 1 - theta has the mean 1 - mean over all steps
    rate : function of the step: its learning rate over the highest one, in [0, 1]
    steps : length of the run; the last theta applies afterwards
    power : 1 - theta falls as rate**power, never below 2**-10. 6/7 minimizes the sum of
        (rate * error)**2 if the error falls as (1 - theta)**(-2/3)

    >>> import math
    >>> schedule = Annealed(0.9, lambda step: (1 + math.cos(math.pi * step / 1000)) / 2, 1000)
    >>> [round(1 - schedule.theta(step), 3) for step in (0, 500, 900)]
    [0.177, 0.105, 0.008]
    """

    mean: float
    rate: Callable[[int], float]
    steps: int
    power: float = 6 / 7

    def __post_init__(self) -> None:
        _check_theta(self.mean)
        if self.steps < 1 or not 0 < self.power < math.inf:
            raise CompressError(
                f"Annealed: steps={self.steps!r}, power={self.power!r}; expected at least one "
                "step and a power above 0"
            )
        sampled = range(0, self.steps, -(-self.steps // _SAMPLES))
        total = math.fsum(_fraction(self, self.rate, step) ** self.power for step in sampled)
        if not total:
            raise CompressError(
                "Annealed: rate(step) is 0 at every step; expected the learning rate as a "
                "fraction of its highest value"
            )
        # Not a field: it follows from the fields, and would appear in the repr that ranks compare.
        object.__setattr__(self, "_highest", (1 - self.mean) * len(sampled) / total)

    def __repr__(self) -> str:
        return (
            f"Annealed(mean={self.mean!r}, rate={_called(self.rate)}, steps={self.steps!r}, "
            f"power={self.power!r})"
        )

    def theta(self, step: int) -> float:
        rate = _fraction(self, self.rate, min(step, self.steps - 1))
        fraction = self._highest * rate**self.power  # type: ignore[attr-defined]
        return on_ladder(1 - min(1.0, max(fraction, _LEAST_KEPT)))


def stays(schedule: Schedule, step: int) -> bool:
    """Whether theta is known to be the same at this step and all later ones."""
    while isinstance(schedule, Warmup):
        warmup: Warmup = schedule
        if step < warmup.steps:
            return False
        schedule, step = warmup.then, step - warmup.steps
    return isinstance(schedule, Constant)


def _called(rate: Callable[[int], float]) -> str:
    """A function's name for a repr; its own repr has an address, which differs between ranks."""
    return getattr(rate, "__qualname__", type(rate).__qualname__)


def _fraction(schedule: Schedule, rate: Callable[[int], float], step: int) -> float:
    """The learning rate at a step as a fraction of its first or highest value."""
    value = rate(step)
    if not 0 <= value <= 1:
        raise CompressError(
            f"{type(schedule).__name__}: rate({step}) = {value!r}; expected the learning rate as a "
            "fraction of its highest value, from 0 to 1"
        )
    return value


def _check_theta(theta: float) -> None:
    if not 0 <= theta < 1:
        raise CompressError(f"theta={theta!r}; expected a fraction from 0 (keep all) to below 1")
