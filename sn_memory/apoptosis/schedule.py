"""When neurons are looked at, and how many may go at once.

    quick        early: at `every` steps, then at gaps that double; at most half of a layer
    adaptive     every `every` steps; while nothing is found, gaps double up to 16 times that; at
                 most a quarter of a layer
    aggressive   every `every` steps, always; at most three quarters of a layer

Siegel, Daily, Vishnu 2016 name variants by how often and how far they go; the numbers are ours.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Final

# The most of a layer's neurons that may go in one event.
_SHARE: Final = MappingProxyType({"quick": 0.5, "adaptive": 0.25, "aggressive": 0.75})
_LONGEST = 16


@dataclass(frozen=True)
class Schedule:
    """Where a schedule stands: a value; `after` gives the next one.

    Parameters
    ----------
    name
        "quick", "adaptive" or "aggressive".
    every
        Steps before the first event, at least 1.

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

    def __post_init__(self) -> None:
        if self.name not in _SHARE:
            raise ValueError(
                f"schedule: got {self.name!r}, expected one of {', '.join(_SHARE)}. Choose one."
            )
        if self.every < 1:
            raise ValueError(f"every: got {self.every}, expected 1 or more steps. Raise it.")

    @property
    def next_step(self) -> int:
        return self.last_step + self.gap * self.every

    @property
    def share(self) -> float:
        return _SHARE[self.name]

    def is_due(self, step: int) -> bool:
        return step >= self.next_step

    def after(self, step: int, *, merged: bool) -> Schedule:
        """Return the schedule once the event at `step` is over."""
        gap = 1
        if self.name == "quick":
            gap = 2 * self.gap
        elif self.name == "adaptive" and not merged:
            gap = min(2 * self.gap, _LONGEST)
        return replace(self, gap=gap, last_step=step)
