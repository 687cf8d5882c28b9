"""Offload and recompute together: which hole is better spent on the host than rebuilt.

The lanes carry what fits beside the ops for nothing; beyond that a copy delays the step, and a
rebuild costs what it costs. The relaxation splits the storages between the two. Here its split is
made whole: moved holes get windows, the rest is fitted, and then single holes change sides while
the replayed time of ops and lanes falls. Where windows leave too much on the device, ops wait for
the copies.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from ...base.clock import now
from ...cost.offload import BESIDE, BOTH, host_peak_bytes, lane_seconds
from ...cost.schedule import Impossible, Schedule
from ...graph.holes import KEEP, Holes
from ..bound import Relaxed
from ..simulate import simulate_moved
from .greedy import fit


@dataclass(frozen=True)
class Mixed:
    """A choice with moved holes, carried out.

    Parameters
    ----------
    choice
        See `simulate`.
    moved
        The holes that are spent on the host, each with the copies that ops wait for: see `windows`.
    schedule, seconds
        What it leads to.
    """

    choice: list[int] = field(repr=False)
    moved: Mapping[int, int]
    schedule: Schedule = field(repr=False)
    seconds: float


def carried(shape: Holes, choice: Sequence[int], moved: Mapping[int, int]) -> Mixed | None:
    """Carry a choice with moved holes out; None if that cannot be, or the host is too small."""
    try:
        schedule, _ = simulate_moved(shape, choice, moved)
    except Impossible:
        return None
    pinned = shape.graph.device.pinned_bytes
    if pinned is not None and host_peak_bytes(shape, schedule) > pinned:
        return None
    return Mixed(list(choice), dict(moved), schedule, lane_seconds(shape, schedule))


def all_moved(shape: Holes) -> Mixed | None:
    """Return what leaves the least on the device without rebuilds: all is away between its uses."""
    leaves = [hole for hole in range(shape.count) if shape.may_leave(hole)]
    return carried(shape, shape.natural(), dict.fromkeys(leaves, BOTH))


def from_relaxed(
    shape: Holes, relaxed: Relaxed, budget_bytes: int, *, recompute: bool, deadline: float
) -> list[Mixed]:
    """Make a relaxation's split whole, within the budget: by windows, and where ops wait."""
    choice, moved = shape.natural(), []
    for storage, kept in relaxed.kept.items():
        for hole in shape.of(storage):
            spans = shape.start[hole] < relaxed.at < shape.end[hole]
            if not spans or shape.stays[hole] or not shape.bytes[storage]:
                continue
            if relaxed.moved[storage] > max(0.5, kept):
                # The host copy is the storage: nothing of it is to be rebuilt from elsewhere.
                choice[hole] = KEEP
                if hole + 1 < shape.first[storage + 1]:
                    moved.append(hole)
            elif recompute and shape.rebuildable[storage]:
                choice[hole] = KEEP if kept > 0.5 else 0
    found: list[Mixed] = []
    for waits in (BESIDE, BOTH):
        start = _within(
            shape, choice, dict.fromkeys(moved, waits), budget_bytes,
            recompute=recompute, deadline=deadline,
        )  # fmt: skip
        if start is not None:
            found.append(start)
            if start.choice == choice:
                break
    return found


def _within(
    shape: Holes,
    choice: list[int],
    moved: Mapping[int, int],
    budget_bytes: int,
    *,
    recompute: bool,
    deadline: float,
) -> Mixed | None:
    """Carry out what keeps the budget; what does not is fitted, where ops may run twice."""
    start = carried(shape, choice, moved)
    if start is None or start.schedule.peak_bytes <= budget_bytes:
        return start
    if not recompute:
        return None
    try:
        _, windows = simulate_moved(shape, choice, moved)
        fitted = fit(shape, choice, budget_bytes, deadline=deadline, moves=windows)
    except Impossible:
        return None
    if fitted is None:
        return None
    again = carried(shape, fitted[0], moved)
    return again if again is not None and again.schedule.peak_bytes <= budget_bytes else None


def improve(
    shape: Holes, start: Mixed, budget_bytes: int, *, recompute: bool, deadline: float
) -> Mixed:
    """Let single holes change sides, dearest first, as long as the time falls."""
    best = start
    for _ in range(4):
        before = best.seconds
        for hole in _dearest(shape, best):
            if now() > deadline:
                return best
            for choice, moved in _sides(shape, best, hole, recompute):
                trial = carried(shape, choice, moved)
                if (
                    trial is not None
                    and trial.schedule.peak_bytes <= budget_bytes
                    and trial.seconds < best.seconds
                ):
                    best = trial
        if best.seconds > before * (1 - 1e-4):
            break
    return best


def _dearest(shape: Holes, mixed: Mixed) -> list[int]:
    """Return the holes let go or moved, those first that cost most per byte."""
    price: dict[int, float] = {}
    for hole, held in enumerate(mixed.choice):
        storage = shape.storage[hole]
        inner = hole + 1 < shape.first[storage + 1] and shape.bytes[storage] > 0
        if hole in mixed.moved:
            price[hole] = lane_share(shape, storage) / shape.bytes[storage]
        elif inner and held != KEEP and shape.chain[storage][0] in mixed.schedule.again:
            own = sum(shape.seconds[op] for op in shape.chain[storage])
            price[hole] = own / shape.bytes[storage]
    return sorted(price, key=lambda hole: -price[hole])


def lane_share(shape: Holes, storage: int) -> float:
    """Return the seconds that a round trip of a storage takes of the slower lane."""
    device = shape.graph.device
    speeds = [device.to_host_bytes_per_s, device.to_device_bytes_per_s]
    slowest = min(speed for speed in speeds if speed is not None)
    return device.transfer_latency_s + shape.bytes[storage] / slowest


def _sides(
    shape: Holes, mixed: Mixed, hole: int, recompute: bool
) -> list[tuple[list[int], Mapping[int, int]]]:
    """Return what else can be done in a hole: stay, leave to be rebuilt, move, wait less."""
    held = list(mixed.choice)
    held[hole] = KEEP
    rest = {other: waits for other, waits in mixed.moved.items() if other != hole}
    sides: list[tuple[list[int], Mapping[int, int]]] = [(held, rest)]
    if hole in mixed.moved:
        if recompute and shape.rebuildable[shape.storage[hole]]:
            dropped = list(mixed.choice)
            dropped[hole] = 0
            sides.append((dropped, rest))
        sides += [(held, {**rest, hole: waits}) for waits in range(mixed.moved[hole])]
    elif not shape.held[shape.storage[hole]]:
        sides += [(held, {**rest, hole: waits}) for waits in (BESIDE, BOTH)]
    return sides
