"""Fitting a choice under a budget by the prices of rebuilds, and taking back what was not needed.

`fit` lets go what relieves the most over-budget bytes per second of closure (`recompute.py`),
lowers the choice, looks at the true peak, and repeats; `trim` then takes decisions back. Both run
in the compiled extension where there is one; their twins here are what it is tested against.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...base.clock import after, now
from ...cost.recompute import Presence
from ...cost.schedule import Impossible, Schedule
from ...graph.idle import KEEP, Gaps
from ...graph.numbers import Floats, Ints
from ..compiled import compiled
from ..simulate import lower

# Graphs of up to this many ops are lowered for every decision that `trim` might take back.
TRY_ALL = 6000


def _gap_at(gaps: Gaps, storage: int, at: int) -> int:
    """Return the gap of a storage in which op `at` lies, its end included."""
    for gap in gaps.of(storage):
        if gaps.end[gap] >= at:
            return gap
    return gaps.first[storage + 1] - 1


def excess(gaps: Gaps, schedule: Schedule, budget_bytes: int) -> Ints:
    """Return how far above the budget each op's moment is, its rebuilds included: [ops] int64."""
    over = np.zeros(len(gaps.graph.ops), np.int64)
    np.maximum.at(over, np.array(schedule.at), schedule.live_bytes - budget_bytes)
    return np.maximum(over, 0)


def fit(
    gaps: Gaps,
    choice: Sequence[int],
    budget_bytes: int,
    *,
    deadline: float,
    moves: dict[int, tuple[int, int]] | None = None,
    rounds: int = 200,
    factors: Sequence[float] = (),
) -> tuple[list[int], Schedule] | None:
    """Let storages go until the true peak is within the budget.

    `factors`, one per gap, are multiplied to the prices: other factors, another order.
    Returns the choice and its schedule, or None if this way leads nowhere or time is over.
    """
    native = compiled(gaps)
    if native is None:
        return fit_in_python(
            gaps, choice, budget_bytes,
            deadline=deadline, moves=moves, rounds=rounds, factors=factors,
        )  # fmt: skip
    found = native.fit(choice, budget_bytes, after(deadline), moves, rounds, factors)
    return None if found is None else (found, lower(gaps, found, moves))


def fit_in_python(
    gaps: Gaps,
    choice: Sequence[int],
    budget_bytes: int,
    *,
    deadline: float,
    moves: dict[int, tuple[int, int]] | None = None,
    rounds: int = 200,
    factors: Sequence[float] = (),
) -> tuple[list[int], Schedule] | None:
    """Do what `fit` does without the compiled extension."""
    current = list(choice)
    banned: set[int] = set(moves or ())
    schedule = _lowered(gaps, current, moves)
    for _ in range(rounds):
        if schedule is None:
            return None
        over = excess(gaps, schedule, budget_bytes)
        if not over.any():
            return current, schedule
        if now() > deadline:
            return None
        changes = _changes(gaps, current, schedule, over, banned, factors, deadline)
        if not changes:
            return None
        trial = list(current)
        for gap, held in changes:
            trial[gap] = held
        after = _lowered(gaps, trial, moves)
        if after is None:
            # Some of them do not go together; find out which, one by one.
            trial = list(current)
            for gap, held in changes:
                if now() > deadline:
                    return None
                before, trial[gap] = trial[gap], held
                if _lowered(gaps, trial, moves) is None:
                    trial[gap] = before
                    banned.add(gap)
            after = _lowered(gaps, trial, moves)
        current, schedule = trial, after
    return None


def _lowered(
    gaps: Gaps, choice: Sequence[int], moves: dict[int, tuple[int, int]] | None
) -> Schedule | None:
    try:
        return lower(gaps, choice, moves)
    except Impossible:
        return None


def _changes(
    gaps: Gaps,
    choice: list[int],
    schedule: Schedule,
    over: Ints,
    banned: set[int],
    factors: Sequence[float],
    deadline: float,
) -> list[tuple[int, int]]:
    """Pick gaps to let go, cheapest per relieved byte first, until nothing is over by estimate.

    Empty if there are none or time is over.

    A storage that is kept can leave at the start of its gap. One that was rebuilt early, for the
    sake of another, can be dropped after that and rebuilt once more later.
    """
    last_over = len(over) - 1 - int((over > 0)[::-1].argmax())
    total = np.concatenate(([0], np.cumsum(over > 0)))
    rows: list[tuple[int, int, int]] = []
    for gap, storage in enumerate(gaps.storage):
        left, right = gaps.start[gap] + 1, gaps.end[gap]
        inner = gap + 1 < gaps.first[storage + 1]
        usable = inner and gaps.rebuildable[storage] and gaps.bytes[storage] > 0
        if usable and choice[gap] == KEEP and gap not in banned and total[right] > total[left]:
            rows.append((gap, left, right))
    for storage, first, last in schedule.intervals:
        if not gaps.rebuildable[storage] or not gaps.bytes[storage]:
            continue
        begun = schedule.at[first]
        if begun == schedule.ops[first]:
            continue
        gap = _gap_at(gaps, storage, begun)
        # At the op of the rebuild itself, what is dropped may make room for the rest of it.
        left, right = begun, min(gaps.end[gap], schedule.at[last])
        early = right > left and not gaps.stays[gap] and KEEP < choice[gap] <= begun
        if early and gap not in banned and total[right] > total[left]:
            rows.append((gap, left, right))
    if not rows:
        return []
    presence, dear = Presence(gaps, schedule), sum(gaps.seconds)
    table = np.array(rows, np.int64)
    storages = [gaps.storage[gap] for gap, _, _ in rows]
    prices: Floats = np.array(
        [
            presence.closure_seconds(storage, right)
            for storage, (_, _, right) in zip(storages, rows, strict=True)
        ]
    )
    # What costs a whole step to rebuild is a mistake, even where nothing else is left to take.
    alive = np.isfinite(prices) & (prices <= dear)
    if factors:
        prices *= np.array([factors[gap] for gap, _, _ in rows])
    weight = np.array([gaps.bytes[storage] for storage in storages], np.int64)
    over = over.copy()
    changes = []
    while over.any() and alive.any():
        if now() > deadline:
            return []
        # As a whole number this may pass 64 bits.
        relief = _covered(over, table[:, 1], table[:, 2]).astype(float) * weight.astype(float)
        score = np.where(alive & (relief > 0), (prices + 1e-12) / np.maximum(relief, 1), np.inf)
        best = int(score.argmin())
        if not np.isfinite(score[best]):
            break
        alive[best] = False
        gap, left, right = rows[best]
        kept = choice[gap] == KEEP
        changes.append((gap, 0 if kept else min(right, last_over + 1)))
        over[left:right] = np.maximum(over[left:right] - weight[best], 0)
    return changes


def _covered(over: Ints, left: Ints, right: Ints) -> Ints:
    """Return for each span how many of its ops are over the budget."""
    total = np.concatenate(([0], np.cumsum(over > 0)))
    result: Ints = total[right] - total[left]
    return result


def trim(
    gaps: Gaps,
    choice: Sequence[int],
    schedule: Schedule,
    budget_bytes: int,
    *,
    deadline: float,
    moves: dict[int, tuple[int, int]] | None = None,
) -> tuple[list[int], Schedule]:
    """Take decisions back, dearest first, where the budget allows and seconds are saved.

    On large graphs, where lowering is dear, only what fits into the room left at every op of the
    gap is tried; that misses cases where fewer rebuilds make the room.
    """
    filtered = len(gaps.graph.ops) > TRY_ALL
    order = _dearest(gaps, choice)
    native = compiled(gaps)
    if native is None:
        return trim_in_python(
            gaps, choice, schedule, order, budget_bytes,
            deadline=deadline, moves=moves, filtered=filtered,
        )  # fmt: skip
    found = native.trim(choice, order, budget_bytes, after(deadline), moves, filtered=filtered)
    return found, lower(gaps, found, moves)


def _dearest(gaps: Gaps, choice: Sequence[int]) -> list[int]:
    """Return the gaps let go before a later use, dearest per byte first."""
    inner = [
        gap
        for gap, held in enumerate(choice)
        if held != KEEP and gap + 1 < gaps.first[gaps.storage[gap] + 1]
    ]
    price = {
        gap: sum(gaps.seconds[op] for op in gaps.chain[gaps.storage[gap]])
        / max(1, gaps.bytes[gaps.storage[gap]])
        for gap in inner
    }
    return sorted(inner, key=lambda gap: -price[gap])


def trim_in_python(
    gaps: Gaps,
    choice: Sequence[int],
    schedule: Schedule,
    order: Sequence[int],
    budget_bytes: int,
    *,
    deadline: float,
    moves: dict[int, tuple[int, int]] | None,
    filtered: bool,
) -> tuple[list[int], Schedule]:
    """Do what `trim` does, gaps in this order, without the compiled extension."""
    current, best = list(choice), schedule
    room = _room(gaps, best, budget_bytes)
    for gap in order:
        if now() > deadline:
            break
        size = gaps.bytes[gaps.storage[gap]]
        until = _back(best, gaps, gap)
        if (
            filtered
            and until > gaps.start[gap] + 1
            and room[gaps.start[gap] + 1 : until].min() < size
        ):
            continue
        before = current[gap]
        current[gap] = KEEP
        trial = _lowered(gaps, current, moves)
        if (
            trial is not None
            and trial.peak_bytes <= budget_bytes
            and trial.run_seconds <= best.run_seconds
        ):
            best = trial
            room = _room(gaps, best, budget_bytes)
        else:
            current[gap] = before
    return current, best


def _room(gaps: Gaps, schedule: Schedule, budget_bytes: int) -> Ints:
    """Return the bytes left under the budget at each op, its rebuilds included: [ops] int64."""
    most = np.zeros(len(gaps.graph.ops), np.int64)
    np.maximum.at(most, np.array(schedule.at), schedule.live_bytes)
    return budget_bytes - most


def _back(schedule: Schedule, gaps: Gaps, gap: int) -> int:
    """Return the op before which a storage that left in a gap is there again."""
    return min(
        (
            schedule.at[first]
            for first in schedule.starts.get(gaps.storage[gap], ())
            if gaps.start[gap] < schedule.at[first] <= gaps.end[gap]
        ),
        default=gaps.end[gap],
    )
