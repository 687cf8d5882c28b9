"""When neurons are looked at, and how many may go at once.

    quick        early: at `every` steps, then at gaps that double; at most half of a layer
    adaptive     every `every` steps; while nothing is found, gaps double up to 16 times that; at
                 most a quarter of a layer
    aggressive   every `every` steps, always; at most three quarters of a layer

Siegel, Daily, Vishnu 2016 name variants by how often and how far they go; the numbers are ours.

A look costs time, and where nothing is to be had that time is lost. So gaps also grow until a look
takes at most `overhead` of the training between two of them; ten times that after one that merged,
as the next is then likely to merge as well. Before the first, what it will take is a guess.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

# The most of a layer's neurons that may go in one event.
_SHARE: Final = MappingProxyType({"quick": 0.5, "adaptive": 0.25, "aggressive": 0.75})
_LONGEST = 16
_PROMISING = 10.0


@dataclass(frozen=True)
class Schedule:
    """Where a schedule stands: a value; `after` gives the next one.

    Parameters
    ----------
    name
        "quick", "adaptive" or "aggressive".
    every
        Steps before the first event, at least 1.
    overhead
        The share of training time that looks may take, in (0, 1); None: gaps are what the name says
        and depend on no clock.

    >>> schedule = Schedule("adaptive", 100)
    >>> schedule.is_due(99), schedule.is_due(100)
    (False, True)
    >>> schedule.after(100, merged=False).next_step
    300
    """

    name: str
    every: int
    gap: int = 1
    last_step: int = 0
    overhead: float | None = None
    least: int = 0

    def __post_init__(self) -> None:
        if self.name not in _SHARE:
            raise ValueError(
                f"schedule: got {self.name!r}, expected one of {', '.join(_SHARE)}. Choose one."
            )
        if self.every < 1:
            raise ValueError(f"every: got {self.every}, expected 1 or more steps. Raise it.")
        if self.overhead is not None and not 0 < self.overhead < 1:
            raise ValueError(
                f"overhead: got {self.overhead}, expected above 0 and below 1, or None. Looks may "
                "take 0.02 of training time by default."
            )

    @property
    def next_step(self) -> int:
        return self.last_step + max(self.gap * self.every, self.least)

    @property
    def share(self) -> float:
        return _SHARE[self.name]

    def is_due(self, step: int) -> bool:
        return step >= self.next_step

    @property
    def is_open(self) -> bool:
        """Whether it has yet to be told how long the first look has to wait."""
        return self.overhead is not None and self.last_step == self.least == 0

    def before_first(self, cost_steps: float) -> Schedule:
        """Return the schedule whose first look waits until training could pay for it.

        `cost_steps` is how many steps of training could be done in the time that it may take.
        """
        assert self.overhead is not None
        return replace(self, least=max(1, math.ceil(cost_steps / self.overhead)))

    def after(self, step: int, *, merged: bool, cost_steps: float = 0.0) -> Schedule:
        """Return the schedule once the event at `step` is over.

        `cost_steps` is how many steps of training could have been done in the time that it took.
        """
        gap = 1
        if self.name == "quick":
            gap = 2 * self.gap
        elif self.name == "adaptive" and not merged:
            gap = min(2 * self.gap, _LONGEST)
        least = 0
        if self.overhead is not None:
            least = math.ceil(cost_steps / (self.overhead * (_PROMISING if merged else 1.0)))
        return replace(self, gap=gap, last_step=step, least=least)
