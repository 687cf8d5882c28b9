"""What it costs to move storages to the host and back: two lanes beside the ops.

vDNN (Rhu et al., MICRO 2016) and SuperNeurons copy out as soon as a storage is made and fetch one
layer ahead. Here each copy has a window: the device memory is given back when the copy out ends,
and taken again as late as the copy back allows, both counted on the lanes they share, so that what
fits in the time of the ops beside it costs nothing.

Where that is too little, ops wait for a copy: right after the use before it, until it is out, or
right before the use after it, until it is back. That frees the most memory and costs the most.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Mapping

from ..graph.holes import Holes
from ..graph.liveness import most_together
from .schedule import Schedule

# For which copies of a stay on the host the ops wait: neither, the one out, the one back, or both.
BESIDE, OUT, BACK, BOTH = 0, 1, 2, 3


def windows(
    holes: Holes, moved: Mapping[int, int], needed: Mapping[int, int] | None = None
) -> dict[int, tuple[int, int]]:
    """Return for each hole the op after which memory is free and the op before which it is taken.

    Times are those of the ops run once each, and of the waits in `moved`; reruns only widen the
    windows. Holes too short for both copies get the narrowest window, and the ops wait. Holes with
    no op inside are left out.

    Parameters
    ----------
    holes
        The holes of a graph.
    moved
        The holes that are spent on the host, each with the copies that ops wait for.
    needed
        Gives holes an earlier op than their end by which they must be back, for rebuilds.
    """
    device = holes.graph.device
    if device.to_host_bytes_per_s is None or device.to_device_bytes_per_s is None:
        return {}
    ends, clock = [], 0.0
    for seconds in holes.seconds:
        clock += seconds
        ends.append(clock)
    starts = [end - seconds for end, seconds in zip(ends, holes.seconds, strict=True)]
    ending = {
        hole: min(holes.end[hole], (needed or {}).get(hole, holes.end[hole])) for hole in moved
    }
    chosen = [hole for hole in ending if ending[hole] - holes.start[hole] > 1]
    out: dict[int, int] = {}
    # When the lane is free; by how much the ops have been put off by waits.
    lane = late = 0.0
    for hole in sorted(chosen, key=lambda hole: (holes.start[hole], hole)):
        size = holes.bytes[holes.storage[hole]]
        copy = device.transfer_latency_s + size / device.to_host_bytes_per_s
        left = ends[holes.start[hole]]
        lane = max(lane, left + late) + copy
        if moved[hole] & OUT:
            out[hole] = holes.start[hole]
            late = lane - left
        else:
            place = bisect_left(ends, lane - late, lo=holes.start[hole])
            out[hole] = min(place, ending[hole] - 2)
    result: dict[int, tuple[int, int]] = {}
    # The same from the end backwards: by how much the ops are put forward.
    lane, early = float("inf"), 0.0
    for hole in sorted(chosen, key=lambda hole: (-ending[hole], hole)):
        size = holes.bytes[holes.storage[hole]]
        copy = device.transfer_latency_s + size / device.to_device_bytes_per_s
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
    out_speed, back_speed = device.to_host_bytes_per_s, device.to_device_bytes_per_s
    if out_speed is None or back_speed is None:
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
    reads, seconds = holes.graph.arrays.reads, seconds_of_runs(holes, schedule)
    for run, op in enumerate(schedule.ops):
        for storage in fetch.get(run, ()):
            begin = max(up, copied[storage], clock)
            up = begin + device.transfer_latency_s + sizes[storage] / back_speed
            ready[storage] = up
        if ready:
            for storage in reads[op]:
                clock = max(clock, ready.get(storage, 0.0))
        clock += seconds[run]
        for storage in leave.get(run, ()):
            begin = max(down, clock, ready.pop(storage, 0.0))
            down = begin + device.transfer_latency_s + sizes[storage] / out_speed
            copied[storage] = down
        for storage in free.get(run, ()):
            clock = max(clock, copied[storage])
    return max([clock, *ready.values()])


def seconds_of_runs(holes: Holes, schedule: Schedule) -> list[float]:
    """Return the seconds of each run of a schedule, in the way it is carried out."""
    if not schedule.ways:
        return [holes.seconds[op] for op in schedule.ops]
    options = holes.graph.arrays.seconds
    return [options[op][way] for op, way in zip(schedule.ops, schedule.ways, strict=True)]


def host_peak_bytes(holes: Holes, schedule: Schedule) -> int:
    """Return the most bytes that a schedule has on the host at any one time."""
    # A fetch before run n comes before a copy out after run n.
    copies = schedule.host_copies
    return most_together((copy.left, copy.fetched, holes.bytes[copy.storage]) for copy in copies)
