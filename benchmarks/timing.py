"""Alternating steps, so that other load on the machine affects all of them equally."""

from __future__ import annotations

import time
from collections.abc import Callable, Hashable, Mapping
from typing import TypeVar

Name = TypeVar("Name", bound=Hashable)
Value = TypeVar("Value")


def interleave(
    steps: Mapping[Name, Callable[[], Value]],
    rounds: int,
    *,
    settle: int = 0,
    rotate: bool = False,
) -> dict[Name, list[Value]]:
    """What each step returns, one after the other in each round.

    settle : rounds before those, which do not count
    rotate : each round begins with another step
    """
    names = list(steps)
    taken: dict[Name, list[Value]] = {name: [] for name in names}
    for number in range(settle + rounds):
        first = number % len(names) if rotate else 0
        for name in names[first:] + names[:first]:
            value = steps[name]()
            if number >= settle:
                taken[name].append(value)
    return taken


def timed(run: Callable[[], object], clock: Callable[[], float] = time.process_time) -> float:
    """Seconds while something runs: of this process's CPU time, or of another clock."""
    start = clock()
    run()
    return clock() - start
