"""Better by ruin and repair: forget part of a good choice, fit it again, keep what is faster.

Greedy fitting decides in one order and cannot take a group of decisions back. Undoing all that ends
in a random stretch of the execution, or a random part of everything, and fitting again from there
visits other orders (Schrimpf et al., 2000). What is undone may come back as a stay on the host. The
random numbers are fixed, so the same search gives the same plan.
"""

from __future__ import annotations

import random

from ...base.clock import now
from ...cost.offload import windows
from ...graph.idle import KEEP, Gaps
from .greedy import fit, trim
from .mixed import Joint, carried

# A trial this much slower than the best is still gone on from, at first; the less, the more
# attempts have failed (record-to-record travel, Dueck, 1993).
SLACK = 0.02
# How far prices are off in an attempt, in doublings (standard deviation).
NOISE = (0.0, 0.3, 1.0)


def refine(
    gaps: Gaps,
    start: Joint,
    budget_bytes: int,
    *,
    offload: bool,
    enough_s: float,
    tries: int,
    deadline: float,
) -> Joint:
    """Return the fastest choice found, the given one at worst.

    Ends after `tries` attempts in a row without gain, at the deadline, or below `enough_s`.
    """
    draw = random.Random(0)
    natural = gaps.natural()
    best = here = start
    idle = 0
    while idle < tries and now() < deadline and best.seconds > enough_s:
        idle += 1
        ruined = _ruined(gaps, here, natural, draw, offload=offload)
        if ruined is None:
            continue
        noise = draw.choice(NOISE)
        found = _repaired(gaps, *ruined, budget_bytes, draw, noise, deadline)
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
    gaps: Gaps, here: Joint, natural: list[int], draw: random.Random, *, offload: bool
) -> tuple[list[int], set[int]] | None:
    """Undo what ends in a stretch, in part; None if there was nothing to undo."""
    count = len(gaps.graph.ops)
    length = max(2, int(count * draw.uniform(0.02, 0.4)))
    begin = draw.randrange(count)
    part = draw.uniform(0.2, 1.0)
    # In some attempts nothing new leaves for the host: lanes have little room to begin with.
    leaving = draw.choice((0.0, 0.05, 0.3)) if offload else 0.0
    choice, moved = list(here.choice), set(here.moved)
    for gap, held in enumerate(here.choice):
        if not begin <= gaps.end[gap] < begin + length:
            continue
        if (held != natural[gap] or gap in moved) and draw.random() < part:
            # A rebuild on the way to something else may be dropped again, up to some moment.
            later = held != KEEP and draw.random() < 0.15
            choice[gap] = draw.randint(gaps.start[gap], count) if later else natural[gap]
            moved.discard(gap)
            if leaving and _free(gaps, gap) and draw.random() < leaving:
                moved.add(gap)
        elif held == KEEP and gap not in moved and draw.random() < 0.1 and _free(gaps, gap):
            if leaving and draw.random() < leaving:
                moved.add(gap)
            elif gaps.rebuildable[gaps.storage[gap]]:
                choice[gap] = 0
    if choice == here.choice and moved == here.moved:
        return None
    return choice, moved


def _repaired(
    gaps: Gaps,
    choice: list[int],
    moved: set[int],
    budget_bytes: int,
    draw: random.Random,
    noise: float,
    deadline: float,
) -> Joint | None:
    """Return a choice within the budget that starts from this one; None if none was found."""
    for gap in moved:
        choice[gap] = KEEP
    moves = windows(gaps, sorted(moved))
    factors = [2 ** draw.gauss(0, noise) for _ in choice] if noise else ()
    fitted = fit(
        gaps, choice, budget_bytes, deadline=deadline, moves=moves, rounds=20, factors=factors
    )
    if fitted is None:
        return None
    trimmed, _ = trim(gaps, *fitted, budget_bytes, deadline=deadline, moves=moves)
    found = carried(gaps, trimmed, moved)
    if found is None or found.schedule.peak_bytes > budget_bytes:
        return None
    return found


def _free(gaps: Gaps, gap: int) -> bool:
    """Whether a gap between two uses is long enough, and its storage large enough, to leave."""
    storage = gaps.storage[gap]
    inner = gap + 1 < gaps.first[storage + 1]
    return inner and gaps.bytes[storage] > 0 and gaps.end[gap] - gaps.start[gap] > 1
