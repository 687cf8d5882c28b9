"""What a choice leads to: runs in order, who is there when, live bytes; and the steps of a plan."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from .arrays import Ints
from .gaps import Gaps
from .plan import Step


@dataclass(frozen=True)
class Trip:
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
        (storage, first run, last run) during which it is on the device.
    live_bytes
        [runs] int64.
    run_seconds
        Summed seconds of all runs; waits for transfers come on top.
    trips
        The stays on the host.
    ways
        [runs] the way each op is carried out; empty: all by default.
    """

    ops: list[int]
    at: list[int]
    intervals: list[tuple[int, int, int]]
    live_bytes: Ints
    run_seconds: float
    trips: tuple[Trip, ...] = ()
    ways: tuple[int, ...] = ()

    @cached_property
    def peak_bytes(self) -> int:
        return int(self.live_bytes.max(initial=0))

    @cached_property
    def starts(self) -> dict[int, list[int]]:
        """Per storage, the runs at which its intervals begin."""
        found: dict[int, list[int]] = {}
        for storage, first, _ in self.intervals:
            found.setdefault(storage, []).append(first)
        return found


class Impossible(Exception):  # noqa: N818 - says what the choice is; caught by every caller
    """A choice that cannot be carried out: a rebuild would need what cannot be made again."""


def steps(gaps: Gaps, schedule: Schedule) -> tuple[Step, ...]:
    """Write a schedule down as the steps of a plan."""
    graph = gaps.graph
    ways = schedule.ways or (0,) * len(schedule.ops)
    names = [storage.name for storage in graph.storages]
    after: list[list[Step]] = [[] for _ in schedule.ops]
    before: list[list[Step]] = [[] for _ in schedule.ops]
    end = len(schedule.ops) - 1
    for trip in schedule.trips:
        after[trip.left].append(Step("offload", names[trip.storage]))
        before[trip.fetched].append(Step("prefetch", names[trip.storage]))
    for storage, _, run in schedule.intervals:
        if run != end or not graph.storages[storage].keep:
            after[run].append(Step("free", names[storage]))
    result: list[Step] = []
    for run, op in enumerate(schedule.ops):
        result += before[run]
        result.append(Step("run", graph.ops[op].name, ways[run]))
        result += after[run]
    return tuple(result)
