"""Which way to carry each op out: the fastest whose workspace fits what the plan leaves free.

SuperNeurons (Wang et al., PPoPP 2018, section 3.5) does this for convolutions at run time, by what
happens to be free. A plan knows what is free at every op, so the choice can be made once, here,
and can be part of the prediction. Storages come first: the search plans with the smallest workspace
of each op, and what is left over goes to speed.
"""

from __future__ import annotations

from dataclasses import replace

from ..graph.holes import Holes
from .schedule import Schedule


def equip(holes: Holes, schedule: Schedule, budget_bytes: int | None) -> Schedule:
    """Return a schedule with the fastest way that fits for each run, and what follows from it.

    With no budget each run may use any workspace. A run for which nothing fits gets the way with
    the smallest workspace, and the schedule's peak says so.
    """
    spaces, seconds = holes.graph.arrays.workspace_bytes, holes.graph.arrays.seconds
    ways, total = [], 0.0
    live = schedule.live_bytes.copy()
    for run, op in enumerate(schedule.ops):
        way = 0
        if len(spaces[op]) > 1:
            without = int(live[run]) - holes.workspace[op]
            room = max(spaces[op]) if budget_bytes is None else budget_bytes - without
            fits = [each for each, space in enumerate(spaces[op]) if space <= room]
            least = min(range(len(spaces[op])), key=lambda each: spaces[op][each])
            way = min(fits, key=lambda each: (seconds[op][each], spaces[op][each]), default=least)
            live[run] = without + spaces[op][way]
        ways.append(way)
        total += seconds[op][way]
    return replace(schedule, live_bytes=live, run_seconds=total, ways=tuple(ways))
