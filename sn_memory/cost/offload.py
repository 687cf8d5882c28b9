"""What it costs to move storages to the host and back: two lanes beside the ops.

vDNN (Rhu et al., MICRO 2016) and SuperNeurons copy out as soon as a storage is made and fetch one
layer ahead. Here each copy has a window: the device memory is given back when the copy out ends,
and taken again as late as the copy back allows, both counted on the lanes they share, so that what
fits in the time of the ops beside it costs nothing.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Iterable, Mapping

from ..graph.idle import Gaps
from .schedule import Schedule


def windows(
    gaps: Gaps, moved: Iterable[int], needed: Mapping[int, int] | None = None
) -> dict[int, tuple[int, int]]:
    """Return for each gap the op after which memory is free and the op before which it is taken.

    `needed` gives gaps an earlier op than their end by which they must be back, for rebuilds.

    Times are those of the ops run once each; reruns only widen the windows. Gaps too short for
    both copies get the narrowest window, and the ops wait. Gaps with no op inside are left out.
    """
    device = gaps.graph.device
    if device.to_host_bytes_per_s is None or device.to_device_bytes_per_s is None:
        return {}
    ends, clock = [], 0.0
    for seconds in gaps.seconds:
        clock += seconds
        ends.append(clock)
    starts = [end - seconds for end, seconds in zip(ends, gaps.seconds, strict=True)]
    ending = {gap: min(gaps.end[gap], (needed or {}).get(gap, gaps.end[gap])) for gap in moved}
    chosen = [gap for gap in ending if ending[gap] - gaps.start[gap] > 1]
    out: dict[int, int] = {}
    lane = 0.0
    for gap in sorted(chosen, key=lambda it: (gaps.start[it], it)):
        size = gaps.bytes[gaps.storage[gap]]
        copy = device.transfer_latency_s + size / device.to_host_bytes_per_s
        lane = max(lane, ends[gaps.start[gap]]) + copy
        place = bisect_left(ends, lane, lo=gaps.start[gap])
        out[gap] = min(place, ending[gap] - 2)
    result: dict[int, tuple[int, int]] = {}
    lane = float("inf")
    for gap in sorted(chosen, key=lambda it: (-ending[it], it)):
        size = gaps.bytes[gaps.storage[gap]]
        copy = device.transfer_latency_s + size / device.to_device_bytes_per_s
        need = starts[ending[gap]] if ending[gap] < len(starts) else clock
        lane = min(lane, need) - copy
        place = bisect_right(starts, lane) - 1
        result[gap] = (out[gap], min(max(place, out[gap] + 1), ending[gap]))
    return result


def lane_seconds(gaps: Gaps, schedule: Schedule) -> float:
    """Return when a schedule ends, waits for transfers included."""
    if not schedule.trips:
        return schedule.run_seconds
    device, sizes = gaps.graph.device, gaps.bytes
    out_speed, back_speed = device.to_host_bytes_per_s, device.to_device_bytes_per_s
    if out_speed is None or back_speed is None:
        raise ValueError("the schedule moves storages, but the device states no transfer speeds")
    leave: dict[int, list[int]] = {}
    free: dict[int, list[int]] = {}
    fetch: dict[int, list[int]] = {}
    for trip in schedule.trips:
        leave.setdefault(trip.left, []).append(trip.storage)
        free.setdefault(trip.freed, []).append(trip.storage)
        fetch.setdefault(trip.fetched, []).append(trip.storage)
    clock = down = up = 0.0
    copied: dict[int, float] = {}
    ready: dict[int, float] = {}
    reads, options = gaps.graph.arrays.reads, gaps.graph.arrays.seconds
    for run, op in enumerate(schedule.ops):
        for storage in fetch.get(run, ()):
            begin = max(up, copied[storage], clock)
            up = begin + device.transfer_latency_s + sizes[storage] / back_speed
            ready[storage] = up
        if ready:
            for storage in reads[op]:
                clock = max(clock, ready.get(storage, 0.0))
        clock += options[op][schedule.ways[run]] if schedule.ways else gaps.seconds[op]
        for storage in leave.get(run, ()):
            begin = max(down, clock, ready.pop(storage, 0.0))
            down = begin + device.transfer_latency_s + sizes[storage] / out_speed
            copied[storage] = down
        for storage in free.get(run, ()):
            clock = max(clock, copied[storage])
    return max([clock, *ready.values()])


def host_peak_bytes(gaps: Gaps, schedule: Schedule) -> int:
    """Return the most bytes that a schedule has on the host at any one time."""
    events = [(trip.left, 1, gaps.bytes[trip.storage]) for trip in schedule.trips]
    # A fetch before run n comes before a copy out after run n.
    events += [(trip.fetched, 0, -gaps.bytes[trip.storage]) for trip in schedule.trips]
    held = most = 0
    for _, _, size in sorted(events):
        held += size
        most = max(most, held)
    return most
