"""Improve candidates: annealing, ruin and repair, changes of single holes."""

from __future__ import annotations

import random
from collections.abc import Mapping

import numpy as np

from ...base.progress import late_or_units, now
from ...cost.offload import BESIDE, BOTH, windows
from ...graph.liveness import KEEP, Holes
from ..simulate import compiled
from .candidates import Candidate, carried, fit, trim

# Final temperature, as a share of the initial seconds.
COLD = 1e-5
# A trial this much slower than the best is still accepted at first, and less the more attempts have
# failed (record-to-record travel, Dueck, 1993).
SLACK = 0.02
# Noise of the prices in an attempt, in powers of two (standard deviation).
NOISE = (0.0, 0.3, 1.0)


def anneal(
    holes: Holes, start: Candidate, budget_bytes: int, *, offload: bool, recompute: bool,
    wait: bool, tries: int, warm: float, seed: int, deadline: float,
) -> Candidate | None:  # fmt: skip
    """Return the fastest found by simulated annealing within the budget, else the smallest peak.

    Better choices are accepted, at first also slightly worse ones. Greedy fitting only drops, and
    gets stuck near the floor, where a feasible plan briefly holds something expensive, drops it,
    and brings it back just in time. Here a choice may temporarily exceed the budget. Excess bytes
    have a price that rises while the choice exceeds the budget and falls while it keeps it, so that
    the search oscillates around what just fits (annealing: Kirkpatrick et al., 1983; strategic
    oscillation: Glover, 1977). Rebuilds and stays on the host are chosen together, by the simulated
    time of ops and lanes.
    csrc/memory/annealing.cpp does this at five microseconds a try on a graph of a hundred ops, a
    few hundred on thousands.

    offload, recompute : whether holes may be spent on the host; whether storages may be rebuilt
    wait : whether to try holes on the host with ops that wait for the copies
    tries : changes to try; the temperature falls over all of them, from `warm` on
    seed : of the random numbers

    None if the final choice is infeasible, or needs more than the host has.
    """
    device = holes.graph.device
    latency_s, out, back = 0.0, list[float](), list[float]()
    if offload and device.can_offload:
        latency_s, out, back = device.copy_seconds(holes.bytes)
    lanes = latency_s, np.array(out, np.float64), np.array(back, np.float64)
    pinned = -1 if device.pinned_bytes is None else device.pinned_bytes
    # 0 is a hole that is not moved.
    away = [1 + start.moved[hole] if hole in start.moved else 0 for hole in range(holes.count)]
    choice, away = compiled(holes).anneal(
        start.choice, away, budget_bytes, late_or_units(deadline), (*lanes, pinned), (warm, COLD),
        tries=tries, seed=seed, recompute=recompute, wait=wait,
    )  # fmt: skip
    return carried(holes, choice, {hole: kind - 1 for hole, kind in enumerate(away) if kind})


def refine(
    holes: Holes,
    start: Candidate,
    budget_bytes: int,
    *,
    offload: bool,
    enough_s: float,
    tries: int,
    deadline: float,
) -> Candidate:
    """Return the fastest found by ruin and repair, at worst `start`.

    Greedy fitting decides in one order and cannot undo a group of decisions. Undoing all decisions
    that end in a random stretch of the execution, or a random subset of all, and fitting again from
    there visits other orders (Schrimpf et al., 2000). An undone decision may be replaced by a stay
    on the host. The random numbers are fixed, so the same search gives the same plan.

    Ends after `tries` consecutive attempts without gain, at the deadline, or below `enough_s`.
    """
    draw = random.Random(0)
    natural = holes.natural()
    best = here = start
    idle = 0
    while idle < tries and now() < deadline and best.seconds > enough_s:
        idle += 1
        ruined = _ruined(holes, here, natural, draw, offload=offload)
        if ruined is None:
            continue
        noise = draw.choice(NOISE)
        repaired = _repaired(holes, *ruined, budget_bytes, draw, noise, deadline)
        if repaired is None:
            continue
        limit = best.seconds * (1 + SLACK * (1 - idle / tries))
        if repaired.seconds < max(here.seconds, limit):
            here = repaired
        # Rounding does not count as a gain, or the search would continue for it.
        if repaired.seconds < best.seconds * (1 - 1e-9):
            best, idle = repaired, 0
    return best


def _ruined(
    holes: Holes, here: Candidate, natural: list[int], draw: random.Random, *, offload: bool
) -> tuple[list[int], dict[int, int]] | None:
    """Undo part of the decisions that end in a stretch; None if there are none."""
    count = len(holes.graph.ops)
    length = max(2, int(count * draw.uniform(0.02, 0.4)))
    begin = draw.randrange(count)
    part = draw.uniform(0.2, 1.0)
    # In some attempts nothing new moves to the host, because lanes have little room.
    leaving = draw.choice((0.0, 0.05, 0.3)) if offload else 0.0
    choice, moved = list(here.choice), dict(here.moved)
    for hole, held in enumerate(here.choice):
        if not begin <= holes.end[hole] < begin + length:
            continue
        if (held != natural[hole] or hole in moved) and draw.random() < part:
            # An intermediate rebuild may be dropped again, up to some moment.
            later = held != KEEP and draw.random() < 0.15
            choice[hole] = draw.randint(holes.start[hole], count) if later else natural[hole]
            moved.pop(hole, None)
            if leaving and holes.may_leave(hole) and draw.random() < leaving:
                moved[hole] = draw.choice((BESIDE, BOTH))
        elif held == KEEP and hole not in moved and draw.random() < 0.1 and holes.is_free(hole):
            if leaving and holes.may_leave(hole) and draw.random() < leaving:
                moved[hole] = draw.choice((BESIDE, BOTH))
            elif holes.rebuildable[holes.storage[hole]]:
                choice[hole] = 0
    if choice == here.choice and moved == here.moved:
        return None
    return choice, moved


def _repaired(
    holes: Holes,
    choice: list[int],
    moved: dict[int, int],
    budget_bytes: int,
    draw: random.Random,
    noise: float,
    deadline: float,
) -> Candidate | None:
    """Return a choice within the budget that starts from this one; None if none was found."""
    # A storage on the host need not be rebuilt as well.
    for hole in moved:
        choice[hole] = KEEP
    moves = windows(holes, moved)
    factors = [2 ** draw.gauss(0, noise) for _ in choice] if noise else ()
    fitted = fit(
        holes, choice, budget_bytes, deadline=deadline, moves=moves, rounds=20, factors=factors
    )
    if fitted is None:
        return None
    trimmed, _ = trim(holes, fitted[0], budget_bytes, deadline=deadline, moves=moves)
    candidate = carried(holes, trimmed, moved)
    # Rebuilds may need a copy back earlier than in `moves`, which raises the peak.
    if candidate is None or candidate.peak_bytes > budget_bytes:
        return None
    return candidate


def improve(
    shape: Holes, start: Candidate, budget_bytes: int, *, recompute: bool, deadline: float
) -> Candidate:
    """Change the decision of single holes, the most expensive first, while seconds decrease."""
    best = start
    # Each change alters the cost of other holes, so all are tried again.
    for _ in range(4):
        before = best.seconds
        for hole in _dearest(shape, best):
            if now() > deadline:
                return best
            for choice, moved in _alternatives(shape, best, hole, recompute):
                trial = carried(shape, choice, moved)
                fits = trial is not None and trial.peak_bytes <= budget_bytes
                if trial is not None and fits and trial.seconds < best.seconds:
                    best = trial
        if best.seconds > before * (1 - 1e-4):
            break
    return best


def _dearest(shape: Holes, mixed: Candidate) -> list[int]:
    """Return the dropped or moved holes, the most expensive per byte first."""
    device, price = shape.graph.device, dict[int, float]()
    for hole, held in enumerate(mixed.choice):
        storage = shape.storage[hole]
        inner = hole + 1 < shape.first[storage + 1] and shape.bytes[storage] > 0
        if hole in mixed.moved:
            size = shape.bytes[storage]
            # The slower direction's lane is the one that other copies wait for.
            price[hole] = max(device.to_host_s(size), device.to_device_s(size)) / size
        # A hole without a rerun costs nothing.
        elif inner and held != KEEP and shape.chain[storage][0] in mixed.schedule.last_reruns:
            own = sum(shape.seconds[op] for op in shape.chain[storage])
            price[hole] = own / shape.bytes[storage]
    return sorted(price, key=lambda hole: -price[hole])


def _alternatives(
    shape: Holes, mixed: Candidate, hole: int, recompute: bool
) -> list[tuple[list[int], Mapping[int, int]]]:
    """Return the alternatives for a hole: keep it, drop it, move it, or make ops wait less."""
    held = list(mixed.choice)
    held[hole] = KEEP
    rest = {other: waits for other, waits in mixed.moved.items() if other != hole}
    others: list[tuple[list[int], Mapping[int, int]]] = [(held, rest)]
    if hole in mixed.moved:
        if recompute and shape.rebuildable[shape.storage[hole]]:
            dropped = list(mixed.choice)
            dropped[hole] = 0
            others.append((dropped, rest))
        others += [(held, {**rest, hole: waits}) for waits in range(mixed.moved[hole])]
    elif not shape.held[shape.storage[hole]]:
        others += [(held, {**rest, hole: waits}) for waits in (BESIDE, BOTH)]
    return others
