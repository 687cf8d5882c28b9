"""Offload and recompute together: which gap is better spent on the host than rebuilt.

The lanes carry what fits beside the ops for nothing; beyond that a copy delays the step, and a
rebuild costs what it costs. The relaxation splits the storages between the two. Here its split is
made whole: moved gaps get windows, the rest is fitted, and then single gaps change sides while the
replayed time of ops and lanes falls.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass, field

from ...base.clock import now
from ...cost.offload import host_peak_bytes, lane_seconds
from ...cost.recompute import Presence
from ...cost.schedule import Impossible, Schedule
from ...graph.idle import KEEP, Gaps
from ..bound import Relaxed
from ..simulate import lower_moved
from .greedy import fit


@dataclass(frozen=True)
class Joint:
    """A choice with moved gaps, carried out."""

    choice: list[int] = field(repr=False)
    moved: frozenset[int]
    schedule: Schedule = field(repr=False)
    seconds: float


def carried(shape: Gaps, choice: Sequence[int], moved: Collection[int]) -> Joint | None:
    """Carry a choice with moved gaps out; None if that cannot be, or the host is too small."""
    try:
        schedule, _ = lower_moved(shape, choice, moved)
    except Impossible:
        return None
    pinned = shape.graph.device.pinned_bytes
    if pinned is not None and host_peak_bytes(shape, schedule) > pinned:
        return None
    return Joint(list(choice), frozenset(moved), schedule, lane_seconds(shape, schedule))


def from_relaxed(
    shape: Gaps, relaxed: Relaxed, budget_bytes: int, *, recompute: bool, deadline: float
) -> Joint | None:
    """Make a relaxation's split whole and, where ops may run twice, fit the rest by rebuilds."""
    choice, moved = shape.natural(), []
    for storage, kept in relaxed.kept.items():
        for gap in shape.of(storage):
            spans = shape.start[gap] < relaxed.at < shape.end[gap]
            if not spans or shape.stays[gap] or not shape.bytes[storage]:
                continue
            if relaxed.moved[storage] > max(0.5, kept):
                # The host copy is the storage: nothing of it is to be rebuilt from elsewhere.
                choice[gap] = KEEP
                if gap + 1 < shape.first[storage + 1]:
                    moved.append(gap)
            elif recompute and shape.rebuildable[storage]:
                choice[gap] = KEEP if kept > 0.5 else 0
    start = carried(shape, choice, moved)
    if start is None or start.schedule.peak_bytes <= budget_bytes:
        return start
    if not recompute:
        return None
    try:
        _, windows = lower_moved(shape, choice, moved)
        fitted = fit(shape, choice, budget_bytes, deadline=deadline, moves=windows)
    except Impossible:
        return None
    if fitted is None:
        return None
    again = carried(shape, fitted[0], moved)
    return again if again is not None and again.schedule.peak_bytes <= budget_bytes else None


def improve(
    shape: Gaps, start: Joint, budget_bytes: int, *, recompute: bool, deadline: float
) -> Joint:
    """Let single gaps change sides, dearest first, as long as the time falls."""
    best = start
    for _ in range(4):
        before = best.seconds
        for gap in _dearest(shape, best):
            if now() > deadline:
                return best
            for choice, moved in _sides(shape, best, gap, recompute):
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


def _dearest(shape: Gaps, joint: Joint) -> list[int]:
    """Return the gaps let go or moved, those first that cost most per byte."""
    presence = Presence(shape, joint.schedule)
    price: dict[int, float] = {}
    for gap, held in enumerate(joint.choice):
        storage = shape.storage[gap]
        inner = gap + 1 < shape.first[storage + 1] and shape.bytes[storage] > 0
        if gap in joint.moved:
            price[gap] = lane_share(shape, storage) / shape.bytes[storage]
        elif inner and held != KEEP and shape.chain[storage][0] in presence.again:
            own = sum(shape.seconds[op] for op in shape.chain[storage])
            price[gap] = own / shape.bytes[storage]
    return sorted(price, key=lambda gap: -price[gap])


def lane_share(shape: Gaps, storage: int) -> float:
    """Return the seconds that a round trip of a storage takes of the slower lane."""
    device = shape.graph.device
    speeds = [device.to_host_bytes_per_s, device.to_device_bytes_per_s]
    slowest = min(speed for speed in speeds if speed is not None)
    return device.transfer_latency_s + shape.bytes[storage] / slowest


def _sides(
    shape: Gaps, joint: Joint, gap: int, recompute: bool
) -> list[tuple[list[int], frozenset[int]]]:
    """Return the other things that can be done in a gap: stay, leave to be rebuilt, move."""
    held = list(joint.choice)
    held[gap] = KEEP
    sides = [(held, joint.moved - {gap})]
    if gap in joint.moved:
        if recompute and shape.rebuildable[shape.storage[gap]]:
            dropped = list(joint.choice)
            dropped[gap] = 0
            sides.append((dropped, joint.moved - {gap}))
    else:
        sides.append((held, joint.moved | {gap}))
    return sides
