"""Room that a schedule leaves, given to the copies that ops wait for.

Windows count with the lanes alone. Here what is copied out stays on the device until the copy has
ended, or until its room is needed, and a copy back begins as early as there is room for it, but no
earlier than it has to. The second is the first with time reversed.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np

from ...base.clock import spend
from ...cost.offload import lane_seconds, seconds_of_runs
from ...cost.schedule import HostCopy, Schedule
from ...graph.holes import Holes

# Units of work a run.
WORK = 400


@dataclass(frozen=True)
class _Copy:
    """A copy: after which run it may begin, after which its memory is given back, and at most."""

    begin: int
    end: int
    most: int
    bytes: int
    seconds: float


def widen(holes: Holes, schedule: Schedule, budget_bytes: int) -> Schedule:
    """Return a schedule whose ops wait less, within the budget; the given one where none does."""
    before = lane_seconds(holes, schedule)
    if before <= schedule.run_seconds:
        return schedule
    spend(WORK * len(schedule.ops))
    best, seconds = schedule, before
    for first_out in (True, False):
        live = schedule.live_bytes.tolist()
        host_copies = list(schedule.host_copies)
        for out in (first_out, not first_out):
            moved = _out if out else _back
            host_copies = moved(holes, schedule, host_copies, live, budget_bytes)
        trial = _with(schedule, host_copies, live, holes)
        found = lane_seconds(holes, trial)
        if found < seconds:
            best, seconds = trial, found
    return best


def _out(
    holes: Holes, schedule: Schedule, host_copies: list[HostCopy], live: list[int], budget: int
) -> list[HostCopy]:
    """Give memory back later, after copies out."""
    device = holes.graph.device
    assert device.to_host_bytes_per_s is not None
    copies = [
        _Copy(
            it.left, it.freed, it.fetched - 1, holes.bytes[it.storage],
            device.transfer_latency_s + holes.bytes[it.storage] / device.to_host_bytes_per_s,
        )
        for it in host_copies
    ]  # fmt: skip
    ends = _later(copies, seconds_of_runs(holes, schedule), live, budget)
    return [replace(it, freed=end) for it, end in zip(host_copies, ends, strict=True)]


def _back(
    holes: Holes, schedule: Schedule, host_copies: list[HostCopy], live: list[int], budget: int
) -> list[HostCopy]:
    """Take memory earlier, before copies back."""
    device, last = holes.graph.device, len(schedule.ops) - 1
    assert device.to_device_bytes_per_s is not None
    reads: dict[int, list[int]] = {it.storage: [] for it in host_copies}
    for run, op in enumerate(schedule.ops):
        for storage in holes.graph.arrays.reads[op]:
            if storage in reads:
                reads[storage].append(run)
    copies = []
    for it in host_copies:
        mine = reads[it.storage]
        place = bisect_left(mine, it.fetched)
        read = mine[place] if place < len(mine) else it.fetched
        seconds = device.transfer_latency_s + holes.bytes[it.storage] / device.to_device_bytes_per_s
        size = holes.bytes[it.storage]
        copies.append(_Copy(last - read, last - it.fetched, last - it.freed - 1, size, seconds))
    live.reverse()
    ends = _later(copies, seconds_of_runs(holes, schedule)[::-1], live, budget)
    live.reverse()
    # On the lane, and so at one run, what is read first comes first.
    order = sorted(range(len(copies)), key=lambda at: -copies[at].begin)
    return [replace(host_copies[at], fetched=last - ends[at]) for at in order]


def _later(
    copies: Sequence[_Copy], seconds: Sequence[float], live: list[int], budget: int
) -> list[int]:
    """Return the run after which each copy's memory is given back; enter that into `live`."""
    begins: dict[int, list[int]] = {}
    planned: dict[int, list[int]] = {}
    for at, copy in enumerate(copies):
        begins.setdefault(copy.begin, []).append(at)
        planned.setdefault(copy.end, []).append(at)
    ends = [copy.end for copy in copies]
    done = [0.0] * len(copies)
    # Copies whose memory could be given back, and is not yet.
    waiting: list[int] = []
    clock = lane = 0.0
    for run, own in enumerate(seconds):
        held = sum(copies[at].bytes for at in waiting)
        for at in list(waiting):
            if clock >= done[at] or copies[at].most < run or live[run] + held > budget:
                clock = max(clock, done[at])
                ends[at] = run - 1
                waiting.remove(at)
                held -= copies[at].bytes
        live[run] += held
        clock += own
        for at in begins.get(run, ()):
            lane = max(lane, clock) + copies[at].seconds
            done[at] = lane
        waiting += planned.get(run, ())
        waiting.sort(key=lambda at: done[at])
    return ends


def _with(
    schedule: Schedule, host_copies: Sequence[HostCopy], live: Sequence[int], holes: Holes
) -> Schedule:
    """Return the schedule with other ends of copies."""
    intervals = schedule.intervals.copy()
    opened = {(storage, first): at for at, (storage, first, _) in enumerate(intervals.tolist())}
    closed = {(storage, last): at for at, (storage, _, last) in enumerate(intervals.tolist())}
    old = {(it.storage, it.left): it for it in schedule.host_copies}
    for it in host_copies:
        was = old[it.storage, it.left]
        intervals[closed[it.storage, was.freed], 2] = it.freed
        intervals[opened[it.storage, was.fetched], 1] = it.fetched
    return replace(
        schedule,
        intervals=intervals,
        live_bytes=np.array(live, np.int64),
        host_copies=tuple(host_copies),
    )
