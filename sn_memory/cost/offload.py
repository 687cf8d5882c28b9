"""The schedule of a choice, and the cost of moving storages to the host on two transfer lanes.

vDNN (Rhu et al., MICRO 2016) and SuperNeurons copy out as soon as a storage is made and prefetch
one layer ahead. Here each copy has a window: the device memory is freed when the copy out ends, and
allocated again as late as the copy back allows, both timed on the shared lanes, so that copies that
overlap with ops cost nothing.

If that frees too little, ops wait for a copy: right after the use before it, until it is out, or
right before the use after it, until it is back. That frees the most memory and costs the most.

The search plans with the smallest workspace of each op. SuperNeurons (Wang et al., PPoPP 2018,
section 3.5) chooses the algorithm of a convolution at run time, by the memory that happens to be
free. A plan knows the free memory at each op, so `equip` chooses once, as part of the prediction.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import accumulate

from ..graph.graph import Ints, Ints32
from ..graph.liveness import Holes, most_together


@dataclass(frozen=True)
class HostCopy:
    """One stay on the host, in run numbers.

    Copied out after `left`, its device memory freed after `freed`, allocated again before
    `fetched`.
    """

    storage: int
    left: int
    freed: int
    fetched: int


@dataclass(frozen=True)
class Schedule:
    """The result of simulating a choice: what runs when, what is live, and the cost.

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
        [runs] the way each op runs; empty: all in the default way.
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
    def last_reruns(self) -> dict[int, int]:
        """The last moment at which an op is rerun, by op; without ops that run once."""
        return {op: at for op, at in zip(self.ops, self.at, strict=True) if op != at}


class Impossible(Exception):  # noqa: N818 - describes the choice; caught by every caller
    """An infeasible choice: a rebuild would need a storage that cannot be rebuilt."""


def equip(holes: Holes, schedule: Schedule, budget_bytes: int) -> Schedule:
    """Return a schedule with the fastest way that fits for each run, and its new costs.

    A run for which nothing fits gets the way with the smallest workspace, which the schedule's peak
    includes.
    """
    spaces, seconds = holes.graph.arrays.workspace_bytes, holes.graph.arrays.seconds
    ways, total = [], 0.0
    live = schedule.live_bytes.copy()
    for run, op in enumerate(schedule.ops):
        way = 0
        # A single way is already included in `live`.
        if len(spaces[op]) > 1:
            without = int(live[run]) - holes.workspace[op]
            room = budget_bytes - without
            fits = [index for index, space in enumerate(spaces[op]) if space <= room]
            least = min(range(len(spaces[op])), key=lambda index: spaces[op][index])
            # Of equally fast ways, the one with the smaller workspace.
            costs = list(zip(seconds[op], spaces[op], strict=True))
            way = min(fits, key=costs.__getitem__, default=least)
            live[run] = without + spaces[op][way]
        ways.append(way)
        total += seconds[op][way]
    return replace(schedule, live_bytes=live, run_seconds=total, ways=tuple(ways))


# For which copies of a stay on the host the ops wait: neither, the one out, the one back, or both.
BESIDE, OUT, BACK, BOTH = 0, 1, 2, 3


def windows(
    holes: Holes, moved: Mapping[int, int], needed: Mapping[int, int] | None = None
) -> dict[int, tuple[int, int]]:
    """Return per hole the op after which memory is freed and the op before which it is allocated.

    Times are those of all ops run once, and of the waits in `moved`; reruns only widen the windows.
    Holes too short for both copies get the narrowest window, and the ops wait. Holes with no op
    inside are left out.

    holes : the holes of a graph
    moved : the holes that are spent on the host, each with the copies that ops wait for
    needed : per hole that a rebuild needs back before its end, the op by which it is needed
    """
    device = holes.graph.device
    if not device.can_offload:
        return {}
    ends = list(accumulate(holes.seconds))
    clock = ends[-1] if ends else 0.0
    starts = [end - seconds for end, seconds in zip(ends, holes.seconds, strict=True)]
    ending = {
        hole: min(holes.end[hole], (needed or {}).get(hole, holes.end[hole])) for hole in moved
    }
    chosen = [hole for hole in ending if ending[hole] - holes.start[hole] > 1]
    out: dict[int, int] = {}
    # When the lane is free; by how much waits have delayed the ops.
    lane = late = 0.0
    for hole in sorted(chosen, key=lambda hole: (holes.start[hole], hole)):
        copy = device.to_host_s(holes.bytes[holes.storage[hole]])
        left = ends[holes.start[hole]]
        lane = max(lane, left + late) + copy
        if moved[hole] & OUT:
            out[hole] = holes.start[hole]
            late = lane - left
        else:
            # The first op that ends after the copy; `ends` exclude waits, so subtract `late`.
            place = bisect_left(ends, lane - late, lo=holes.start[hole])
            # At least one op has to lie between freeing the memory and allocating it again.
            out[hole] = min(place, ending[hole] - 2)
    result: dict[int, tuple[int, int]] = {}
    # The same from the end, so that each copy back is as late as those after it allow; by how much
    # the ops before them have to be earlier.
    lane, early = float("inf"), 0.0
    for hole in sorted(chosen, key=lambda hole: (-ending[hole], hole)):
        copy = device.to_device_s(holes.bytes[holes.storage[hole]])
        need = starts[ending[hole]] if ending[hole] < len(starts) else clock
        lane = min(lane, need - early) - copy
        if moved[hole] & BACK:
            result[hole] = (out[hole], ending[hole])
            early = need - lane
        else:
            place = bisect_right(starts, lane + early) - 1
            result[hole] = (out[hole], min(max(place, out[hole] + 1), ending[hole]))
    return result


def lane_seconds(holes: Holes, schedule: Schedule) -> float:
    """Return when a schedule ends, waits for transfers included."""
    if not schedule.host_copies:
        return schedule.run_seconds
    device, sizes = holes.graph.device, holes.bytes
    if not device.can_offload:
        raise ValueError("the schedule moves storages, but the device states no transfer speeds")
    leave: dict[int, list[int]] = {}
    free: dict[int, list[int]] = {}
    fetch: dict[int, list[int]] = {}
    for host_copy in schedule.host_copies:
        leave.setdefault(host_copy.left, []).append(host_copy.storage)
        free.setdefault(host_copy.freed, []).append(host_copy.storage)
        fetch.setdefault(host_copy.fetched, []).append(host_copy.storage)
    clock = down = up = 0.0
    copied: dict[int, float] = {}
    ready: dict[int, float] = {}
    reads, options = holes.graph.arrays.reads, holes.graph.arrays.seconds
    for run, op in enumerate(schedule.ops):
        # In the order of the actions: copies back, the run, copies out, frees.
        for storage in fetch.get(run, ()):
            begin = max(up, copied[storage], clock)
            up = device.to_device_s(sizes[storage], begin)
            ready[storage] = up
        if ready:
            for storage in reads[op]:
                clock = max(clock, ready.get(storage, 0.0))
        # Without ways, each op runs as the holes are priced: see `lean` of `liveness.holes`.
        clock += options[op][schedule.ways[run]] if schedule.ways else holes.seconds[op]
        for storage in leave.get(run, ()):
            begin = max(down, clock, ready.pop(storage, 0.0))
            down = device.to_host_s(sizes[storage], begin)
            copied[storage] = down
        for storage in free.get(run, ()):
            clock = max(clock, copied[storage])
    return max([clock, *ready.values()])


def host_peak_bytes(holes: Holes, schedule: Schedule) -> int:
    """Return the most bytes that a schedule has on the host at any time."""
    # A fetch before run n comes before a copy out after run n.
    copies = schedule.host_copies
    return most_together((copy.left, copy.fetched, holes.bytes[copy.storage]) for copy in copies)
