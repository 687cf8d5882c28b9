"""The ways to carry one block of the chain out, each a trade of memory for time.

An *option* says what a block holds while later blocks are at work, how high it rises in its own
turn, and how many seconds its rebuilds cost. Options come from relaxations at several held bytes
and from fits at several peaks; those that another one beats are left out.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ...base.clock import now
from ...cost.schedule import Impossible, Schedule
from ...graph.holes import KEEP, Holes
from ..bound import relax
from ..simulate import simulate
from .blocks import Block
from .greedy import fit, trim


@dataclass(frozen=True)
class Option:
    """One way to carry a block out.

    Parameters
    ----------
    held_bytes
        Held from its forward to its backward, what crosses into the next block included.
    peak_bytes
        The most in its own forward or backward, above what earlier blocks hold.
    extra_s
        Seconds of rebuilds.
    choice
        Per hole of the block's own graph.
    """

    held_bytes: int
    peak_bytes: int
    extra_s: float
    choice: tuple[int, ...] = field(repr=False)


def options(block: Block, *, deadline: float, points: int = 8) -> list[Option]:
    """Return the block's ways to trade held bytes and peak for seconds, none worse in all three."""
    shape = block.shape
    natural = shape.natural()
    start = simulate(shape, natural)
    found = [_option(block, natural, start)]
    rest = block.last - block.first
    base = shape.graph.base_bytes
    incoming = sum(shape.bytes[storage] for storage in shape.graph.arrays.outputs[rest])
    held = found[0].held_bytes
    least = sum(shape.bytes[storage] for storage in shape.graph.arrays.reads[rest])
    for point in range(points):
        if now() > deadline:
            break
        room = least + (held - least) * point // points
        relaxed = relax(shape, rest, base + incoming + room, offload=False, deadline=deadline)
        if relaxed is None:
            continue
        choice = list(natural)
        for storage, kept in relaxed.kept.items():
            for hole in shape.of(storage):
                spans = shape.start[hole] < rest < shape.end[hole] and not shape.stays[hole]
                if spans and shape.rebuildable[storage]:
                    choice[hole] = KEEP if kept > 0.999 else 0
        _consider(block, choice, found)
    low = max(_working_set(shape), base)
    for point in range(1, points):
        if now() > deadline:
            break
        target = low + (start.peak_bytes - low) * point // points
        fitted = fit(shape, natural, target, deadline=deadline, rounds=30)
        if fitted is not None:
            choice, _ = trim(shape, fitted[0], target, deadline=deadline)
            _consider(block, choice, found)
    return _best(found)


def _working_set(shape: Holes) -> int:
    return shape.graph.base_bytes + max(
        sum(shape.bytes[storage] for storage in touched) for touched in shape.touched
    )


def _consider(block: Block, choice: list[int], found: list[Option]) -> None:
    try:
        schedule = simulate(block.shape, choice)
    except Impossible:
        return
    found.append(_option(block, choice, schedule))


def _option(block: Block, choice: list[int], schedule: Schedule) -> Option:
    shape = block.shape
    rest = block.last - block.first
    base = shape.graph.base_bytes
    incoming = sum(shape.bytes[storage] for storage in shape.graph.arrays.outputs[rest])
    run = schedule.ops.index(rest)
    return Option(
        int(schedule.live_bytes[run]) - base - incoming,
        schedule.peak_bytes - base,
        schedule.run_seconds - sum(shape.seconds),
        tuple(choice),
    )


def _best(found: list[Option]) -> list[Option]:
    """Leave out options that another one beats or equals in all three."""
    kept: list[Option] = []
    for option in sorted(found, key=lambda it: (it.extra_s, it.held_bytes, it.peak_bytes)):
        if not any(
            other.held_bytes <= option.held_bytes and other.peak_bytes <= option.peak_bytes
            for other in kept
        ):
            kept.append(option)
    return kept
