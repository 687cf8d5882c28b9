"""Better by ruin and repair: forget part of a good choice, fit it again, keep what is faster.

Greedy fitting decides in one order and cannot take a group of decisions back. Undoing all that ends
in a random stretch of the execution, or a random part of everything, and fitting again from there
visits other orders (Schrimpf et al., 2000). What is undone may come back as a stay on the host. The
random numbers are fixed, so the same search gives the same plan.
"""

from __future__ import annotations

import random

from ...base.clock import now
from ...cost.offload import BESIDE, BOTH, windows
from ...graph.holes import KEEP, Holes
from .greedy import fit, trim
from .mixed import Mixed, carried

# A trial this much slower than the best is still gone on from, at first; the less, the more
# attempts have failed (record-to-record travel, Dueck, 1993).
SLACK = 0.02
# How far prices are off in an attempt, in doublings (standard deviation).
NOISE = (0.0, 0.3, 1.0)


def refine(
    holes: Holes,
    start: Mixed,
    budget_bytes: int,
    *,
    offload: bool,
    enough_s: float,
    tries: int,
    deadline: float,
) -> Mixed:
    """Return the fastest choice found, the given one at worst.

    Ends after `tries` attempts in a row without gain, at the deadline, or below `enough_s`.
    """
    draw = random.Random(0)
    natural = holes.natural()
    best = here = start
    idle = 0
    while idle < tries and now() < deadline and best.seconds > enough_s:
        idle += 1
        ruined = _ruined(holes, here, natural, draw, offload=offload)
        if ruined is None:
            continue
        noise = draw.choice(NOISE)
        found = _repaired(holes, *ruined, budget_bytes, draw, noise, deadline)
        if found is None:
            continue
        if found.seconds < here.seconds or found.seconds < best.seconds * (
            1 + SLACK * (1 - idle / tries)
        ):
            here = found
        if found.seconds < best.seconds * (1 - 1e-9):
            best, idle = found, 0
    return best


def _ruined(
    holes: Holes, here: Mixed, natural: list[int], draw: random.Random, *, offload: bool
) -> tuple[list[int], dict[int, int]] | None:
    """Undo what ends in a stretch, in part; None if there was nothing to undo."""
    count = len(holes.graph.ops)
    length = max(2, int(count * draw.uniform(0.02, 0.4)))
    begin = draw.randrange(count)
    part = draw.uniform(0.2, 1.0)
    # In some attempts nothing new leaves for the host: lanes have little room to begin with.
    leaving = draw.choice((0.0, 0.05, 0.3)) if offload else 0.0
    choice, moved = list(here.choice), dict(here.moved)
    for hole, held in enumerate(here.choice):
        if not begin <= holes.end[hole] < begin + length:
            continue
        if (held != natural[hole] or hole in moved) and draw.random() < part:
            # A rebuild on the way to something else may be dropped again, up to some moment.
            later = held != KEEP and draw.random() < 0.15
            choice[hole] = draw.randint(holes.start[hole], count) if later else natural[hole]
            moved.pop(hole, None)
            if leaving and holes.may_leave(hole) and draw.random() < leaving:
                moved[hole] = draw.choice((BESIDE, BOTH))
        elif held == KEEP and hole not in moved and draw.random() < 0.1 and holes.is_free(hole):
            if leaving and holes.may_leave(hole) and draw.random() < leaving:
                moved[hole] = draw.choice((BESIDE, BOTH))
            elif holes.rebuildable[holes.storage[hole]]:
                choice[hole] = 0
    if choice == here.choice and moved == here.moved:
        return None
    return choice, moved


def _repaired(
    holes: Holes,
    choice: list[int],
    moved: dict[int, int],
    budget_bytes: int,
    draw: random.Random,
    noise: float,
    deadline: float,
) -> Mixed | None:
    """Return a choice within the budget that starts from this one; None if none was found."""
    for hole in moved:
        choice[hole] = KEEP
    moves = windows(holes, moved)
    factors = [2 ** draw.gauss(0, noise) for _ in choice] if noise else ()
    fitted = fit(
        holes, choice, budget_bytes, deadline=deadline, moves=moves, rounds=20, factors=factors
    )
    if fitted is None:
        return None
    trimmed, _ = trim(holes, fitted[0], budget_bytes, deadline=deadline, moves=moves)
    found = carried(holes, trimmed, moved)
    if found is None or found.schedule.peak_bytes > budget_bytes:
        return None
    return found
