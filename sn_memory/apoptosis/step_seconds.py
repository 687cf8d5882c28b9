"""How long a step of training takes, so that what a look costs can be said in steps."""

from __future__ import annotations

import time
from collections import deque
from statistics import median

_KEPT = 32


class StepClock:
    """Ticks once a step; the median of the last ones is no test, pause or first compilation."""

    def __init__(self) -> None:
        self._last: float | None = None
        self._seconds: deque[float] = deque(maxlen=_KEPT)

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
