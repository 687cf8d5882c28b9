"""What csrc/memory/fitting.cpp does, in plain Python: a choice fitted and trimmed."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from sn_memory.base.progress import now
from sn_memory.cost.offload import Impossible, Schedule
from sn_memory.graph.graph import Floats, Ints
from sn_memory.graph.liveness import KEEP, Holes
from sn_memory.plan.simulate import simulate


class Presence:
    """What a schedule has on the device when, and what it runs again when, by op of the graph."""

    def __init__(self, holes: Holes, schedule: Schedule) -> None:
        self.holes = holes
        self.spans: dict[int, list[tuple[int, int]]] = {}
        for storage, first, last in schedule.intervals.tolist():
            span = (schedule.at[first], schedule.at[last])
            self.spans.setdefault(storage, []).append(span)
        self.again = schedule.last_reruns

    def there(self, storage: int, at: int) -> bool:
        """Whether a storage is there just before op `at`."""
        return any(first < at <= last for first, last in self.spans.get(storage, ()))

    def closure_seconds(self, storage: int, at: int) -> float:
        """Return the seconds of ops to run before op `at` to make a storage that is not there.

        Ops that run again then or later anyway are free: what they make is only made earlier.
        Infinity when the storage cannot be made again.
        """
        holes = self.holes
        total, seen, missing = 0.0, {storage}, [storage]
        while missing:
            here = missing.pop()
            if not holes.rebuildable[here]:
                return float("inf")
            for op in holes.chain[here]:
                if op >= at:
                    break
                if self.again.get(op, -1) >= at:
                    continue
                if holes.expires[op] < at:
                    return float("inf")
                total += holes.seconds[op]
                for source in holes.graph.arrays.reads[op]:
                    if source not in seen and holes.chain[source]:
                        seen.add(source)
                        if not self.there(source, at):
                            missing.append(source)
        return total


def fit(
    holes: Holes,
    choice: Sequence[int],
    budget_bytes: int,
    *,
    deadline: float,
    moves: dict[int, tuple[int, int]] | None = None,
    rounds: int = 200,
    factors: Sequence[float] = (),
) -> tuple[list[int], Schedule] | None:
    """Return what `sn_memory.plan.search.candidates.fit` returns."""
    current = list(choice)
    banned: set[int] = set(moves or ())
    schedule = _lowered(holes, current, moves)
    for _ in range(rounds):
        if schedule is None:
            return None
        over = _excess(holes, schedule, budget_bytes)
        if not over.any():
            return current, schedule
        if now() > deadline:
            return None
        changes = _changes(holes, current, schedule, over, banned, factors, deadline)
        if not changes:
            return None
        trial = list(current)
        for hole, held in changes:
            trial[hole] = held
        after = _lowered(holes, trial, moves)
        if after is None:
            # Some of them do not go together; find out which, one by one.
            trial = list(current)
            for hole, held in changes:
                if now() > deadline:
                    return None
                before, trial[hole] = trial[hole], held
                if _lowered(holes, trial, moves) is None:
                    trial[hole] = before
                    banned.add(hole)
            after = _lowered(holes, trial, moves)
        current, schedule = trial, after
    return None


def _lowered(
    holes: Holes, choice: Sequence[int], moves: dict[int, tuple[int, int]] | None
) -> Schedule | None:
    try:
        return simulate(holes, choice, moves)
    except Impossible:
        return None


def _changes(
    holes: Holes,
    choice: list[int],
    schedule: Schedule,
    over: Ints,
    banned: set[int],
    factors: Sequence[float],
    deadline: float,
) -> list[tuple[int, int]]:
    """Pick holes to let go, cheapest per relieved byte first, until nothing is over by estimate.

    Empty if there are none or time is over.

    A storage that is kept can leave at the start of its hole. One that was rebuilt early, for the
    sake of another, can be dropped after that and rebuilt once more later.
    """
    last_over = len(over) - 1 - int((over > 0)[::-1].argmax())
    total = np.concatenate(([0], np.cumsum(over > 0)))
    rows: list[tuple[int, int, int]] = []
    for hole, storage in enumerate(holes.storage):
        left, right = holes.start[hole] + 1, holes.end[hole]
        inner = hole + 1 < holes.first[storage + 1]
        usable = inner and holes.rebuildable[storage] and holes.bytes[storage] > 0
        if usable and choice[hole] == KEEP and hole not in banned and total[right] > total[left]:
            rows.append((hole, left, right))
    for storage, first, last in schedule.intervals.tolist():
        if not holes.rebuildable[storage] or not holes.bytes[storage]:
            continue
        begun = schedule.at[first]
        if begun == schedule.ops[first]:
            continue
        hole = _hole_at(holes, storage, begun)
        # At the op of the rebuild itself, what is dropped may make room for the rest of it.
        left, right = begun, min(holes.end[hole], schedule.at[last])
        early = right > left and not holes.stays[hole] and KEEP < choice[hole] <= begun
        if early and hole not in banned and total[right] > total[left]:
            rows.append((hole, left, right))
    if not rows:
        return []
    presence, dear = Presence(holes, schedule), sum(holes.seconds)
    table = np.array(rows, np.int64)
    storages = [holes.storage[hole] for hole, _, _ in rows]
    prices: Floats = np.array(
        [
            presence.closure_seconds(storage, right)
            for storage, (_, _, right) in zip(storages, rows, strict=True)
        ]
    )
    # What costs a whole step to rebuild is a mistake, even where nothing else is left to take.
    alive = np.isfinite(prices) & (prices <= dear)
    if factors:
        prices *= np.array([factors[hole] for hole, _, _ in rows])
    weight = np.array([holes.bytes[storage] for storage in storages], np.int64)
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
        hole, left, right = rows[best]
        kept = choice[hole] == KEEP
        changes.append((hole, 0 if kept else min(right, last_over + 1)))
        over[left:right] = np.maximum(over[left:right] - weight[best], 0)
    return changes


def _covered(over: Ints, left: Ints, right: Ints) -> Ints:
    """Return for each span how many of its ops are over the budget."""
    total = np.concatenate(([0], np.cumsum(over > 0)))
    result: Ints = total[right] - total[left]
    return result


def trim(
    holes: Holes,
    choice: Sequence[int],
    schedule: Schedule,
    order: Sequence[int],
    budget_bytes: int,
    *,
    deadline: float,
    moves: dict[int, tuple[int, int]] | None,
    filtered: bool,
) -> tuple[list[int], Schedule]:
    """Return what `sn_memory.plan.search.candidates.trim` returns for holes in this order."""
    current, best = list(choice), schedule
    room = _room(holes, best, budget_bytes)
    for hole in order:
        if now() > deadline:
            break
        size = holes.bytes[holes.storage[hole]]
        until = _back(best, holes, hole)
        if (
            filtered
            and until > holes.start[hole] + 1
            and room[holes.start[hole] + 1 : until].min() < size
        ):
            continue
        before = current[hole]
        current[hole] = KEEP
        trial = _lowered(holes, current, moves)
        if (
            trial is not None
            and trial.peak_bytes <= budget_bytes
            and trial.run_seconds <= best.run_seconds
        ):
            best = trial
            room = _room(holes, best, budget_bytes)
        else:
            current[hole] = before
    return current, best


def _room(holes: Holes, schedule: Schedule, budget_bytes: int) -> Ints:
    """Return the bytes left under the budget at each op, its rebuilds included: [ops] int64."""
    most = np.zeros(len(holes.graph.ops), np.int64)
    np.maximum.at(most, np.array(schedule.at), schedule.live_bytes)
    return budget_bytes - most


def _back(schedule: Schedule, holes: Holes, hole: int) -> int:
    """Return the op before which a storage that left in a hole is there again."""
    return min(
        (
            schedule.at[first]
            for storage, first, _ in schedule.intervals.tolist()
            if storage == holes.storage[hole]
            and holes.start[hole] < schedule.at[first] <= holes.end[hole]
        ),
        default=holes.end[hole],
    )


def _excess(holes: Holes, schedule: Schedule, budget_bytes: int) -> Ints:
    """Return how far above the budget each op's moment is, its rebuilds included: [ops] int64."""
    over = np.zeros(len(holes.graph.ops), np.int64)
    np.maximum.at(over, np.array(schedule.at), schedule.live_bytes - budget_bytes)
    return np.maximum(over, 0)


def _hole_at(holes: Holes, storage: int, at: int) -> int:
    """Return the hole of a storage in which op `at` lies, its end included."""
    for hole in holes.of(storage):
        if holes.end[hole] >= at:
            return hole
    return holes.first[storage + 1] - 1
