"""Optimal recomputation of very small graphs: A* over everything that can be on the device.

A state is the number of ops done and the set of storages present, each in a version. From it, the
next op or any earlier one may run in any of its ways, and when one does not fit any storage may be
given up. The seconds of the ops still to come are an admissible estimate, so the first complete
state taken from the queue is optimal. The number of states is exponential in the storages: this is
for graphs of about ten ops, where it makes `auto` optimal, and for judging the other planners.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass
from itertools import count

from .graph import Graph
from .plan import Step

# A state: ops done, then what is present as sorted (storage, version) pairs.
State = tuple[int, tuple[tuple[int, int], ...]]


@dataclass(frozen=True)
class Exact:
    """An optimal plan: its steps, and what they lead to."""

    steps: tuple[Step, ...]
    peak_bytes: int
    seconds: float


def solve(graph: Graph, budget_bytes: int, *, most_states: int = 200_000) -> Exact | None:
    """Return a fastest plan within the budget; None if there is no plan.

    Raises MemoryError when more than `most_states` states would have to be looked at.
    """
    arrays = graph.arrays
    count_ops = len(graph.ops)
    sizes, base = arrays.bytes.tolist(), graph.base_bytes
    resident, keep = arrays.resident.tolist(), arrays.keep.tolist()
    to_come = [0.0] * (count_ops + 1)
    for op in range(count_ops - 1, -1, -1):
        to_come[op] = to_come[op + 1] + min(arrays.seconds[op])
    writes_before = _resident_versions(graph)
    ticket = count()
    start: State = (0, ())
    best: dict[State, float] = {start: 0.0}
    origin: dict[State, tuple[State, Step, int]] = {}
    queue = [(to_come[0], next(ticket), 0.0, start)]
    while queue:
        _, _, cost, state = heapq.heappop(queue)
        if cost > best[state]:
            continue
        done, pairs = state
        present = dict(pairs)
        if done == count_ops and _complete(graph, keep, resident, present):
            return _path(origin, state, cost, base)
        if len(best) > most_states:
            raise MemoryError(f"more than {most_states} states for {count_ops} ops")
        moves: list[tuple[float, State, Step, int]] = []
        held = base + sum(sizes[storage] for storage in present)
        crowded: set[int] = set()
        for op in range(min(done + 1, count_ops)):
            if op < done and not graph.ops[op].repeatable:
                continue
            wanted = zip(arrays.reads[op], arrays.version[op], strict=True)
            versions = writes_before[done]
            if any((versions[s] if resident[s] else present.get(s, -1)) != v for s, v in wanted):
                continue
            letting_go = () if op < done else arrays.releases[op]
            if any(s not in present and s not in arrays.outputs[op] for s in letting_go):
                continue
            room = budget_bytes - held - sum(sizes[storage] for storage in arrays.outputs[op])
            way = _fastest(arrays.seconds[op], arrays.workspace_bytes[op], room)
            if way is None or way != min(
                range(len(arrays.seconds[op])), key=arrays.seconds[op].__getitem__
            ):
                crowded.update(set(present).difference(arrays.reads[op], letting_go))
            if way is None:
                continue
            after = dict.fromkeys(arrays.outputs[op], 0) | present
            for storage in arrays.writes[op]:
                if not resident[storage]:
                    after[storage] += 1
            after_state = (max(done, op + 1), tuple(sorted(after.items())))
            spent = cost + arrays.seconds[op][way]
            live = budget_bytes - room + arrays.workspace_bytes[op][way]
            moves.append((spent, after_state, Step("run", graph.ops[op].name, way), live))
        for storage in crowded:
            rest = tuple(pair for pair in pairs if pair[0] != storage)
            moves.append((cost, (done, rest), Step("free", graph.storages[storage].name), base))
        for spent, after_state, step, live in moves:
            if spent < best.get(after_state, float("inf")):
                best[after_state] = spent
                origin[after_state] = (state, step, live)
                guess = spent + to_come[after_state[0]]
                heapq.heappush(queue, (guess, next(ticket), spent, after_state))
    return None


def _resident_versions(graph: Graph) -> list[list[int]]:
    """Per number of ops done, the version of each resident storage; only first runs change it."""
    versions = [[0] * len(graph.storages)]
    for written in graph.arrays.writes:
        after = list(versions[-1])
        for storage in written:
            after[storage] += 1
        versions.append(after)
    return versions


def _fastest(seconds: tuple[float, ...], spaces: tuple[int, ...], room: int) -> int | None:
    fits = [way for way, space in enumerate(spaces) if space <= room]
    return min(fits, key=seconds.__getitem__, default=None)


def _complete(
    graph: Graph, keep: list[bool], resident: list[bool], present: dict[int, int]
) -> bool:
    final = {storage: 0 for storage, kept in enumerate(keep) if kept and not resident[storage]}
    for written in graph.arrays.writes:
        for storage in written:
            if storage in final:
                final[storage] += 1
    return all(present.get(storage) == version for storage, version in final.items())


def _path(
    origin: dict[State, tuple[State, Step, int]], state: State, seconds: float, base: int
) -> Exact:
    steps, most = [], base
    while state in origin:
        state, step, live = origin[state]
        steps.append(step)
        most = max(most, live)
    return Exact(tuple(steps[::-1]), most, seconds)
