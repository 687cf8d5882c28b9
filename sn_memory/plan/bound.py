"""Lower bounds for any plan: on the peak, and on the seconds, both by relaxation.

Peak: when an op runs, its inputs, outputs and workspace are live, and so is everything that a later
op needs and that nothing can bring back.

Seconds: consider the moment when one op first runs. Whatever later ops need is then on the device,
on the host, or will be rebuilt afterwards, and a rebuild needs its inputs, which are on the device,
on the host, or rebuilt. The choice is a linear program (its integer form is a minimum cut with one
budget row); all other moments are ignored, so its value is a lower bound for every plan. The bound
is the best over a few moments.
"""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from ..base.progress import counts_work, now, spend, units
from ..graph.liveness import Holes, live_bytes

# Units of work: per entry of the matrix, and per row in a pivot.
ROW, PIVOT = 20, 1


@dataclass(frozen=True)
class Relaxed:
    """The solution of the linear program at one op.

    at : the op
    seconds : the bound
    kept : storage to the fraction that the relaxation keeps on the device at that moment
    moved : storage to the fraction that it keeps on the host
    """

    at: int
    seconds: float
    kept: dict[int, float]
    moved: dict[int, float]


def smallest_peak(holes: Holes, *, offload: bool) -> tuple[int, int]:
    """Return a lower bound on the peak of any plan, in bytes, and the op that sets it."""
    arrays, graph = holes.graph.arrays, holes.graph
    count = len(graph.ops)
    change = np.zeros(count + 1, np.int64)
    # Neither rebuilt nor moved: live from its first use to its last.
    stays = [
        bool(chain) and not _again(holes, chain[0]) and (not offload or holes.held[storage])
        for storage, chain in enumerate(holes.chain)
    ]
    for storage in np.flatnonzero(stays).tolist():
        mine = holes.of(storage)
        last = count if graph.storages[storage].keep else holes.start[mine[-1]] + 1
        change[holes.start[mine[0]]] += holes.bytes[storage]
        change[last] -= holes.bytes[storage]
    fixed = np.cumsum(change)[:-1]
    best, at = graph.base_bytes, 0
    for op in range(count):
        # Storages that stay are already in `fixed`, also while they are used.
        need = sum(holes.bytes[storage] for storage in holes.touched[op] if not stays[storage])
        total = graph.base_bytes + need + min(arrays.workspace_bytes[op]) + int(fixed[op])
        if total > best:
            best, at = total, op
    return best, at


def moments(holes: Holes, limit: int = 4) -> list[int]:
    """Return the ops worth a relaxation: where the most bytes wait for later ops."""
    curve = live_bytes(holes.graph)
    order = np.argsort(-curve, kind="stable")
    # Neighbouring ops have nearly the same live storages, so their bounds would be the same.
    spacing = max(1, len(curve) // 50)
    chosen: list[int] = []
    for op in order.tolist():
        if all(abs(op - other) >= spacing for other in chosen):
            chosen.append(op)
        if len(chosen) == limit:
            break
    return chosen


def relax(
    holes: Holes,
    at: int,
    budget_bytes: int,
    *,
    offload: bool,
    recompute: bool = True,
    lanes: float = 1.0,
    deadline: float = math.inf,
) -> Relaxed | None:
    """Solve the relaxation at one op; None if it has no solution or no time.

    No solution means that no plan keeps the budget. With `lanes` below 1 the transfers have only
    that share of their speed: then it is not a bound, but a start with fewer waits. `deadline` is a
    time of `progress.now()`.
    """
    if now() > deadline:
        return None
    # Imported here, as it takes 57 MiB with its threads' buffers.
    from scipy.optimize import linprog
    from scipy.sparse import csr_matrix

    graph, arrays = holes.graph, holes.graph.arrays
    fastest = [min(options) for options in arrays.seconds]
    before = [s for s, chain in enumerate(holes.chain) if chain and chain[0] < at]
    place = {storage: number for number, storage in enumerate(before)}
    width = len(before)
    # Columns: kept per storage, moved per storage, rerun per op before `at`, then the total time.
    moved, rerun, total = width, 2 * width, 2 * width + at
    # Arrays of numbers: lists of objects take ten times the bytes, too much for large graphs.
    rows, columns, values, limits = array("q"), array("q"), array("d"), array("d")

    def row(entries: Sequence[tuple[int, float]], at_least: float) -> None:
        for column, value in entries:
            rows.append(len(limits))
            columns.append(column)
            # `linprog` only takes upper limits.
            values.append(-value)
        limits.append(-at_least)

    def available(
        storage: int, made_by: Sequence[int], extra: Sequence[tuple[int, float]], at_least: float
    ) -> None:
        here = [(place[storage], 1.0), (moved + place[storage], 1.0), *extra]
        # A storage changed in place is rebuilt by all its ops, so each of them is a row.
        for op in made_by:
            row([*here, (rerun + op, 1.0)] if recompute and _again(holes, op) else here, at_least)

    low = np.zeros(total + 1)
    high = np.ones(total + 1)
    high[total] = np.inf
    # The columns of a technique that is not allowed are fixed at 0.
    if not offload:
        high[moved : moved + width] = 0.0
    for storage in before:
        if holes.held[storage]:
            high[moved + place[storage]] = 0.0
    # The op's own inputs are on the device.
    for storage in arrays.reads[at]:
        if storage in place:
            low[place[storage]] = 1.0
    # What later ops need is on the device, on the host, or rebuilt.
    for storage in before:
        last = holes.of(storage)[-1]
        if graph.storages[storage].keep or holes.start[last] > at:
            available(storage, [op for op in holes.chain[storage] if op < at], (), 1.0)
    # The same holds for the inputs of an op, to the extent that it is rerun.
    used = _reachable(holes, at, before)
    for op in range(at):
        if op not in used or not recompute:
            high[rerun + op] = 0.0
            continue
        for storage, version in zip(arrays.reads[op], arrays.version[op], strict=True):
            if storage in place:
                made_by = holes.chain[storage][: version + 1]
                available(storage, made_by, ((rerun + op, -1.0),), 0.0)
    # One row for the budget: what is kept must fit next to the op's own bytes.
    room = budget_bytes - graph.base_bytes - min(arrays.workspace_bytes[at])
    room -= sum(holes.bytes[storage] for storage in arrays.outputs[at])
    if room < 0:
        return None
    # Scaled by the room: coefficients in bytes are far from the zeros and ones of other rows.
    scale = max(1.0, float(room))
    row([(place[s], -holes.bytes[s] / scale) for s in before if holes.bytes[s]], -room / scale)
    # The total is at least the seconds of the ops with reruns, and those of either lane.
    reruns = [(rerun + op, -fastest[op]) for op in used]
    head, tail = sum(fastest[:at]), sum(fastest[at:])
    row([(total, 1.0), *reruns], head + tail)
    # Everything moved is on the host at this moment: its copy out overlaps only with earlier ops,
    # and its copy back only with later ones.
    out, back = graph.device.to_host_bytes_per_s, graph.device.to_device_bytes_per_s
    if offload and out is not None and back is not None:
        sizes = [(moved + place[s], float(holes.bytes[s])) for s in before]
        row([(total, 1.0), *reruns, *((c, -size / (out * lanes)) for c, size in sizes)], tail)
        row([(total, 1.0), *((c, -size / (back * lanes)) for c, size in sizes)], head)
    cost = np.zeros(total + 1)
    cost[total] = 1.0
    matrix = csr_matrix((values, (rows, columns)), shape=(len(limits), total + 1))
    spend(ROW * len(values))
    answer = linprog(
        cost,
        A_ub=matrix,
        b_ub=np.array(limits),
        bounds=np.column_stack([low, high]),
        method="highs",
        options=_limit(deadline, len(limits)),
    )
    spend(PIVOT * len(limits) * answer.nit)
    if answer.status != 0:
        return None
    solution = answer.x
    return Relaxed(
        at,
        float(answer.fun),
        {storage: float(solution[number]) for storage, number in place.items()},
        {storage: float(solution[moved + number]) for storage, number in place.items()},
    )


def _limit(deadline: float, rows: int) -> dict[str, float]:
    """Return the solver options that limit a linear program: seconds, or counted pivots."""
    left = deadline - now()
    if counts_work():
        # HiGHS stores the limit in 32 bits.
        return {"maxiter": min(units(left) // (PIVOT * rows), 2**31 - 1)}
    return {"time_limit": max(left, 0.0)}


def _again(holes: Holes, op: int) -> bool:
    """Whether the format allows an op to run twice; `Holes.rebuildable` requires more."""
    graph = holes.graph
    return graph.ops[op].repeatable and not any(
        graph.storages[storage].resident for storage in graph.arrays.writes[op]
    )


def _reachable(holes: Holes, at: int, before: Sequence[int]) -> set[int]:
    """Return the ops before `at` that a rebuild after it may run."""
    reads = holes.graph.arrays.reads
    wanted = [
        storage
        for storage in before
        if holes.start[holes.of(storage)[-1]] > at or holes.graph.storages[storage].keep
    ]
    seen, ops = set(wanted), set()
    while wanted:
        storage = wanted.pop()
        for op in holes.chain[storage]:
            if op >= at or op in ops or not _again(holes, op):
                continue
            ops.add(op)
            for source in reads[op]:
                if source not in seen and holes.chain[source]:
                    seen.add(source)
                    wanted.append(source)
    return ops
