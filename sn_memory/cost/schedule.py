"""What a choice leads to: runs in order, who is there when, live bytes; and each op's fastest way.

Storages come first: the search plans with the smallest workspace of each op, and what is left over
goes to speed. SuperNeurons (Wang et al., PPoPP 2018, section 3.5) chooses the way to carry out a
convolution at run time, by what happens to be free. A plan knows what is free at every op, so the
choice is made once, in `equip`, and is part of the prediction.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property

from ..graph.graph import Ints, Ints32
from ..graph.holes import Holes


@dataclass(frozen=True)
class HostCopy:
    """One stay on the host, in run numbers.

    Copied out after `left`, its device memory given back after `freed`, taken again before
    `fetched`.
    """

    storage: int
    left: int
    freed: int
    fetched: int


@dataclass(frozen=True)
class Schedule:
    """What a choice leads to.

    Parameters
    ----------
    ops
        [runs] op numbers in the order they run.
    at
        [runs] the op of the graph's order before which (or as which) each run happens.
    intervals
        [n, 3] int32: storage, first run, last run during which it is on the device.
    live_bytes
        [runs] int64.
    run_seconds
        Summed seconds of all runs; waits for transfers come on top.
    host_copies
        The stays on the host.
    ways
        [runs] the way each op is carried out; empty: all by default.
    """

    ops: list[int]
    at: list[int]
    intervals: Ints32
    live_bytes: Ints
    run_seconds: float
    host_copies: tuple[HostCopy, ...] = ()
    ways: tuple[int, ...] = ()

    @cached_property
    def peak_bytes(self) -> int:
        return int(self.live_bytes.max(initial=0))

    @cached_property
    def again(self) -> dict[int, int]:
        """The last moment at which an op runs again, by op; those that run once are not there."""
        return {op: at for op, at in zip(self.ops, self.at, strict=True) if op != at}

    @cached_property
    def starts(self) -> dict[int, list[int]]:
        """Per storage, the runs at which its intervals begin."""
        found: dict[int, list[int]] = {}
        for storage, first, _ in self.intervals.tolist():
            found.setdefault(storage, []).append(first)
        return found


class Impossible(Exception):  # noqa: N818 - says what the choice is; caught by every caller
    """A choice that cannot be carried out: a rebuild would need what cannot be made again."""


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
