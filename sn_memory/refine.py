"""Better by ruin and repair: forget part of a good choice, fit it again, keep what is faster.

Greedy fitting decides in one order and cannot take a group of decisions back. Undoing all that ends
in a random stretch of the execution, or a random part of everything, and fitting again from there
visits other orders (Schrimpf et al., 2000). The random numbers are fixed, so the same search gives
the same plan.
"""

from __future__ import annotations

import random
from collections.abc import Sequence

from .clock import now
from .gaps import KEEP, Gaps
from .recompute import fit, trim
from .schedule import Schedule


def refine(
    gaps: Gaps,
    choice: Sequence[int],
    schedule: Schedule,
    budget_bytes: int,
    *,
    enough_s: float,
    tries: int,
    deadline: float,
) -> tuple[list[int], Schedule]:
    """Return the fastest choice found, the given one at worst.

    Ends after `tries` attempts in a row without gain, at the deadline, or below `enough_s`.
    """
    draw = random.Random(0)
    best, found = list(choice), schedule
    natural = gaps.natural()
    count = len(gaps.graph.ops)
    idle = 0
    while idle < tries and now() < deadline and found.run_seconds > enough_s:
        idle += 1
        trial = list(best)
        length = max(2, int(count * draw.uniform(0.02, 0.4)))
        begin = draw.randrange(count)
        part = draw.uniform(0.2, 1.0)
        for gap, held in enumerate(best):
            hit = begin <= gaps.end[gap] < begin + length and draw.random() < part
            if hit and held != natural[gap]:
                trial[gap] = natural[gap]
            elif hit and held == KEEP and draw.random() < 0.1 and _free(gaps, gap):
                trial[gap] = 0
        if trial == best:
            continue
        fitted = fit(gaps, trial, budget_bytes, deadline=deadline, rounds=20)
        if fitted is None or fitted[1].run_seconds > found.run_seconds * 1.2:
            continue
        trimmed, after = trim(gaps, *fitted, budget_bytes, deadline=deadline)
        if after.peak_bytes <= budget_bytes and after.run_seconds < found.run_seconds:
            best, found, idle = trimmed, after, 0
    return best, found


def _free(gaps: Gaps, gap: int) -> bool:
    """Whether a gap between two uses may be let go at all."""
    storage = gaps.storage[gap]
    inner = gap + 1 < gaps.first[storage + 1]
    return inner and gaps.rebuildable[storage] and gaps.end[gap] - gaps.start[gap] > 1
