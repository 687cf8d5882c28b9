"""What `Apoptosis` is for every framework: settings, steps that are counted, and when to look."""

from __future__ import annotations

import logging
import time
from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Sequence
from dataclasses import replace
from statistics import median
from typing import Any, Final

import numpy as np

from .events import Event, Merged
from .merge import Choice, choose
from .reader import Reader
from .schedule import Schedule

_log = logging.getLogger(__name__)
_SAVED = ("gap", "last_step", "least")
# Durations of so many steps are kept: their median says how long a step takes.
_DURATIONS = 32
# Batches that are kept, and decide.
BATCHES: Final = 8
# Measured on small nets; those for which more is needed train for longer, too.
_FIRST_LOOK_S: Final = 0.05


class StepClock:
    """Ticks once a step; the median of the last ones is no test, pause or first compilation."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._seconds: deque[float] = deque(maxlen=_DURATIONS)

    def tick(self) -> None:
        """Say that a step is over."""
        now = time.perf_counter()
        if self._last is not None:
            self._seconds.append(now - self._last)
        self._last = now

    def forget(self) -> None:
        """Let the next tick end no step: what is between is a look, and steps may differ after."""
        self._last = None
        self._seconds.clear()

    def steps_in(self, seconds: float) -> float:
        """Return how many steps take `seconds`; 0 before the second tick."""
        if not self._seconds:
            return 0.0
        return seconds / max(median(self._seconds), 1e-9)


class Paced(ABC):
    """Counts steps and looks when the schedule says so; a rim says how."""

    def __init__(
        self,
        *,
        tolerance: float,
        every: int,
        min_width: int,
        round_to: int,
        schedule: str,
        overhead: float | None,
    ) -> None:
        if not 0 < tolerance < 1:
            raise ValueError(
                f"tolerance: got {tolerance}, expected above 0 and below 1. 0.01 is mild."
            )
        for name, value in (("min_width", min_width), ("round_to", round_to)):
            if value < 1:
                raise ValueError(f"{name}: got {value}, expected 1 or more. Raise it.")
        self.tolerance, self.min_width, self.round_to = tolerance, min_width, round_to
        self.schedule = Schedule(schedule, every, overhead=overhead)
        self.steps = 0
        self.events: list[Event] = []
        self._largest_rate, self._allowed = 0.0, tolerance
        self._clock = StepClock()

    @property
    def is_near(self) -> bool:
        """Whether the batches of now may still be kept when the next look comes."""
        return self.steps + BATCHES >= self.schedule.next_step

    def step(self) -> Event:
        """Count one step of training; if the schedule says so, look, and merge what may go.

        Returns
        -------
        Event
            True if the model changed: make wrappers and recorded functions anew then.

        Raises
        ------
        AgreementError
            On all ranks, if they came to different decisions; nothing is changed.
        """
        self.steps += 1
        self._clock.tick()
        rate = self._rate()
        self._largest_rate = max(self._largest_rate, rate)
        if self._largest_rate > 0:
            # A change is mended by training on, and a small rate mends little.
            self._allowed = self.tolerance * rate / self._largest_rate
        if not (self._allowed and self.schedule.is_due(self.steps)):
            return Event(self.steps)
        if self.schedule.is_open:
            cost = self._largest_of_ranks(self._clock.steps_in(_FIRST_LOOK_S))
            self.schedule = self.schedule.before_first(cost)
            if not self.schedule.is_due(self.steps):
                return Event(self.steps)
        start = time.perf_counter()
        merged, refused = self._look()
        event = Event(self.steps, merged, refused, time.perf_counter() - start)
        cost = 0.0
        if self.schedule.overhead is not None:
            # Of the slowest rank, so that all look again at the same step.
            cost = self._largest_of_ranks(self._clock.steps_in(event.seconds))
        self._clock.forget()
        self.schedule = self.schedule.after(self.steps, merged=bool(merged), cost_steps=cost)
        if event:
            self.events.append(event)
            widths = ", ".join(f"{one.group} {one.before} -> {one.after}" for one in merged)
            _log.info("step %d: %s, in %.2f s", self.steps, widths, event.seconds)
        return event

    def state_dict(self) -> dict[str, Any]:
        """Return where the schedule stands; the model and its optimizer are saved beside it."""
        where = {name: getattr(self.schedule, name) for name in _SAVED}
        return {"steps": self.steps, "largest_rate": self._largest_rate, **where}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on where `state_dict` was taken."""
        self.steps, self._largest_rate = state["steps"], state["largest_rate"]
        self.schedule = replace(self.schedule, **{name: state[name] for name in _SAVED})

    def _choose(self, readers: Sequence[Reader], block: int) -> Choice | None:
        """Return what may go of a group of `block` channels each; None if any is not finite."""
        if not all(
            np.isfinite(reader.fit).all() and np.isfinite(reader.samples).all()
            for reader in readers
        ):
            return None
        return choose(
            readers,
            tolerance=self._allowed,
            share=self.schedule.share,
            min_width=-(-self.min_width // block),
            round_to=-(-self.round_to // block),
        )

    @abstractmethod
    def _look(self) -> tuple[tuple[Merged, ...], dict[str, str]]:
        """Look now; return what was merged, and which groups were left and why."""

    @abstractmethod
    def _rate(self) -> float:
        """Return the learning rate of now, the largest if there are several."""

    @abstractmethod
    def _largest_of_ranks(self, value: float) -> float: ...
