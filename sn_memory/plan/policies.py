"""Planners of the literature by name: SuperNeurons' three, liveness, and sqrt(n).

    (graph: Graph, *, budget_bytes: int | None) -> Plan

A policy may ignore the budget, must not raise if its method finds nothing (then it returns the plan
with its smallest peak), and its plans pass `check_plan`.

`plan_graph(..., planner="auto")` begins from the choice of `sqrt_n`. Further planners of the
literature are in `benchmarks/rivals/planners`, for comparisons.

A policy decides which storages of the forward pass are dropped after their last use there, and what
happens after a rebuild. That is a choice for `simulate.py`; storages moved to the host have windows
that follow the layers, as in the paper, and not the clock.
"""

from __future__ import annotations

import math
import re
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Collection, Iterable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Final

import numpy as np

from ..cost.offload import BESIDE, Schedule, equip, windows
from ..graph.graph import Graph, Ints
from ..graph.liveness import KEEP, Holes, holes
from .plan import Plan
from .simulate import emit, simulate

Policy = Callable[..., Plan]
# How many sizes of the tensor cache are tried, from moving nothing to moving all convolutions.
_CACHE_SIZES = 8
# Kinds as named by frameworks and papers: conv2d, aten.convolution, Conv2D, addmm, MatMul, FC ...
_CONV: Final = re.compile(r"conv")
_HEAVY: Final = re.compile(
    r"conv|linear|dense|matmul|einsum|\bfc\b|\bdot|\b(add|ba)?b?mm\b|attention"
)
_JOIN: Final = re.compile(r"join|concat|\bcat\b|fork|\bstack\b")
_SUM: Final = re.compile(r"\badd(v2|n|_)?\b")
# Above this a kernel is compute-bound on any machine of the last decade: matrix products and
# convolutions of useful size exceed it, elementwise ops and normalisations stay below.
_DENSE_FLOPS_PER_BYTE: Final = 10.0


@dataclass(frozen=True)
class Origins:
    """The holes of a graph, and per storage, by number, the facts that policies need.

    last_use : its last use by any op; its producer if no op reads it
    last_forward, first_backward : its last use by a forward op, including its producer; its first
        use by any other op, the number of ops if there is none
    droppable : whether it may be dropped whenever it is complete, and rebuilt for each later use
    forward : whether forward ops make and complete it
    """

    shape: Holes
    last_use: list[int]
    last_forward: list[int]
    first_backward: list[int]
    droppable: list[bool]
    forward: list[bool]


def origins(shape: Holes) -> Origins:
    """Return the facts that policies need, in time linear in the graph's size (except sorting)."""
    graph, arrays, chain = shape.graph, shape.graph.arrays, shape.chain
    count, end = len(graph.storages), len(graph.ops)
    forward_op = [op.phase == "forward" for op in graph.ops]
    last_use: list[int] = arrays.producer.tolist()
    last_forward, first_backward = last_use.copy(), [end] * count
    settled = [True] * count
    for op, reads in enumerate(arrays.reads):
        for storage, version in zip(reads, arrays.version[op], strict=True):
            # Another op reads an earlier version, for which rebuilding the last one is no use.
            if version < len(chain[storage]) - 1 and storage not in arrays.writes[op]:
                settled[storage] = False
        for storage in reads:
            last_use[storage] = op
            if forward_op[op]:
                last_forward[storage] = op
            else:
                first_backward[storage] = min(first_backward[storage], op)
    # Each can be rebuilt just before op t for every t up to its expiry.
    expiry, droppable = [-1.0] * count, [False] * count
    # The inputs of a storage's makers are settled, and so complete, before the last maker.
    for storage in sorted(range(count), key=lambda s: chain[s][-1] if chain[s] else -1):
        if not shape.rebuildable[storage] or not settled[storage]:
            continue
        sources = {s for op in chain[storage] for s in arrays.reads[op]} - {storage}
        until = [shape.expires[op] for op in chain[storage]]
        expiry[storage] = min(until + [expiry[s] for s in sources if droppable[s]])
        droppable[storage] = expiry[storage] >= last_use[storage] and not bool(arrays.keep[storage])
    # A storage that a backward op still changes must not move between the two passes.
    forward = [
        bool(ops) and forward_op[ops[0]] and ops[-1] <= last_forward[storage]
        for storage, ops in enumerate(chain)
    ]
    return Origins(shape, last_use, last_forward, first_backward, droppable, forward)


def dropping(origin: Origins, kept: Collection[int], transient: Collection[int] = ()) -> list[int]:
    """Return the choice that drops all rebuildable storages after their last forward use.

    kept : storages made by the forward pass that stay
    transient : storages that are dropped again once something was rebuilt from them (the
        memory-centric way); others stay once rebuilt
    """
    shape, reads = origin.shape, origin.shape.graph.arrays.reads
    never = len(reads)
    choice = shape.natural()
    # Inputs of rebuilds stay after their own last use.
    for last in {first - 1 for first in shape.first if first}:
        if choice[last] == 0:
            choice[last] = KEEP
    sources = {
        storage: {source for op in shape.chain[storage] for source in reads[op]} - {storage}
        for storage, inside in enumerate(origin.forward)
        if inside and origin.droppable[storage] and storage not in kept
    }
    going = {source for made_of in sources.values() for source in made_of if source in transient}
    for hole, storage in enumerate(shape.storage):
        start = shape.start[hole]
        if storage not in sources or start < origin.last_forward[storage]:
            continue
        if start == origin.last_forward[storage]:
            choice[hole] = never if storage in going else 0
        elif storage in going and any(
            origin.first_backward[other] == start and storage in sources.get(other, ())
            for other in reads[start]
        ):
            # The op read it, and storages rebuilt from it.
            choice[hole] = never
    return choice


def liveness(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Keep each storage to its last use, as SuperNeurons' first stage and reference counts do."""
    shape = holes(graph)
    return emit(shape, simulate(shape, shape.natural()), planner="liveness")


def speed_centric(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Rebuild each segment once, and keep it."""
    return _plan(graph, budget_bytes, "superneurons_speed", lambda origin, kept: set())


def memory_centric(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Rebuild again for each backward layer."""
    every = range(len(graph.storages))
    return _plan(graph, budget_bytes, "superneurons_memory", lambda origin, kept: every)


def cost_aware(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Choose between the two by l_peak, segment by segment."""
    limit = max(_working_sets(graph), default=0)

    def transient(origin: Origins, kept: set[int]) -> set[int]:
        large = (
            segment
            for segment in segments(origin, kept)
            if _held_by_speed(graph, origin, segment) > limit
        )
        return set().union(*large)

    return _plan(graph, budget_bytes, "superneurons", transient)


def checkpoints(graph: Graph, origin: Origins) -> set[int]:
    """Return the storages that checkpoint layers make, and those with two forward readers."""
    readers = [0] * len(graph.storages)
    for op, record in enumerate(graph.ops):
        if record.phase == "forward":
            for storage in graph.arrays.reads[op]:
                # An op that changes it in place passes it on; only other readers share it.
                readers[storage] += storage not in graph.arrays.writes[op]
    inside = {s: ops[0] for s, ops in enumerate(origin.shape.chain) if origin.forward[s]}
    own = {storage for storage, op in inside.items() if is_checkpoint(graph, op)}
    # After the last checkpoint comes the loss: the backward pass starts there, nothing is dropped.
    last = max((inside[storage] for storage in own), default=0)
    return {s for s, op in inside.items() if s in own or readers[s] >= 2 or op > last}


def segments(origin: Origins, kept: set[int]) -> list[set[int]]:
    """Group dropped storages: those made from each other without a checkpoint between."""
    group: dict[int, set[int]] = {}
    for storage, makers in enumerate(origin.shape.chain):
        if not origin.forward[storage] or storage in kept or not origin.droppable[storage]:
            continue
        reads = origin.shape.graph.arrays.reads
        sources = [s for op in makers for s in reads[op] if s in group]
        home = group[sources[0]] if sources else set()
        home.add(storage)
        group[storage] = home
    return list({id(members): members for members in group.values()}.values())


def _working_sets(graph: Graph) -> Iterator[int]:
    # l_i: everything that op i reads or makes, except weights, and its scratch memory.
    arrays = graph.arrays
    for op, reads in enumerate(arrays.reads):
        used = {s for s in (*reads, *arrays.outputs[op]) if not arrays.resident[s]}
        yield int(sum(arrays.bytes[s] for s in used)) + min(arrays.workspace_bytes[op])


def _held_by_speed(graph: Graph, origin: Origins, segment: set[int]) -> int:
    # The largest sum of a rebuilt segment's remaining storages and the running backward op.
    arrays, most = graph.arrays, 0
    readers = {origin.first_backward[s] for s in segment} | {origin.last_use[s] for s in segment}
    for op in readers:
        if op < len(graph.ops) and graph.ops[op].phase != "forward":
            held = {s for s in segment if origin.last_use[s] >= op}
            held.update(s for s in (*arrays.reads[op], *arrays.outputs[op]))
            most = max(most, int(sum(arrays.bytes[s] for s in held if not arrays.resident[s])))
    return most


def _plan(
    graph: Graph,
    budget_bytes: int | None,
    planner: str,
    transient: Callable[[Origins, set[int]], Collection[int]],
) -> Plan:
    origin = origins(holes(graph))
    kept = checkpoints(graph, origin)
    shape, choice = origin.shape, dropping(origin, kept, transient(origin, kept))
    # With nothing on the host: shows where rebuilds read each storage, which windows depend on.
    plain = simulate(shape, choice)

    def draft(offloaded: Sequence[int]) -> Plan:
        moves = _windows(origin, offloaded, plain)
        schedule = _begun_early(shape, simulate(shape, choice, moves)) if moves else plain
        if budget_bytes is not None:
            schedule = equip(shape, schedule, budget_bytes)
        return emit(shape, schedule, planner=planner)

    movable = _offloadable(origin, kept, plain)
    if budget_bytes is None:
        return choose([draft([]), draft(movable)], None)
    drafts = []
    for size in range(_CACHE_SIZES + 1):
        drafts.append(draft(movable[: len(movable) * size // _CACHE_SIZES]))
        # Transfers only cost time: the fewest that suffice are the fastest.
        if drafts[-1].peak_bytes <= budget_bytes or not movable:
            break
    return choose(drafts, budget_bytes)


def _offloadable(origin: Origins, kept: Collection[int], schedule: Schedule) -> list[int]:
    """Return outputs of convolutions that are read after the forward pass, the oldest first.

    Reruns read as well. Empty if the graph's device states no transfer speeds.
    """
    graph, chain = origin.shape.graph, origin.shape.chain
    room = graph.device.pinned_bytes
    if not graph.device.can_offload:
        return []
    turns = (run for run, op in enumerate(schedule.ops) if graph.ops[op].phase != "forward")
    after = schedule.ops[next(turns, len(schedule.ops)) :]
    read = {storage for op in after for storage in graph.arrays.reads[op]}
    chosen, held = [], 0
    for storage in sorted(read & set(kept)):
        size = int(graph.arrays.bytes[storage])
        held_outside = graph.arrays.keep[storage] or graph.arrays.held[storage]
        # One that does not fit is skipped: a smaller one after it may still fit.
        has_room = room is None or held + size <= room
        if is_conv(graph, chain[storage][0]) and not held_outside and has_room:
            chosen.append(storage)
            held += size
    return chosen


def _windows(
    origin: Origins, offloaded: Sequence[int], plain: Schedule
) -> dict[int, tuple[int, int]]:
    """Return when the memory of each is freed and allocated again, by hole.

    The step waits for a copy out before the next checkpoint layer, and starts a copy back before
    the last such layer of the backward pass ahead of its reader, which may be a rerun.

    plain : the schedule in which all of them stay
    """
    shape, graph, leaving = origin.shape, origin.shape.graph, set(offloaded)
    steps = [op for op in range(len(graph.ops)) if is_checkpoint(graph, op)]
    forward = [op for op in steps if graph.ops[op].phase == "forward"]
    others = [op for op in steps if graph.ops[op].phase != "forward"]
    read: dict[int, int] = {}
    for op, at in zip(plain.ops, plain.at, strict=True):
        for storage in leaving.intersection(graph.arrays.reads[op]):
            if at > origin.last_forward[storage]:
                read.setdefault(storage, at)
    needed = {
        hole: read[storage]
        for hole, storage in enumerate(shape.storage)
        if storage in read
        and shape.start[hole] == origin.last_forward[storage]
        and shape.may_leave(hole)
    }
    result = {}
    for hole, (out, _) in windows(shape, dict.fromkeys(needed, BESIDE), needed).items():
        end, place = needed[hole], bisect_right(forward, shape.start[hole])
        freed = min(out, (forward[place] if place < len(forward) else end - 1) - 1)
        ahead = bisect_left(others, end) - 1
        result[hole] = freed, others[ahead] if ahead >= 0 and others[ahead] > freed else end
    return result


def _begun_early(shape: Holes, schedule: Schedule) -> Schedule:
    """Start copies out as soon as their storage is complete; ops may read it meanwhile."""
    fetched = {copy.storage: copy.fetched for copy in schedule.host_copies}
    first: dict[int, int] = {}
    read: dict[int, int] = {}
    for run, op in enumerate(schedule.ops):
        first.setdefault(op, run)
        for storage in fetched.keys() & set(shape.graph.arrays.reads[op]):
            if run >= fetched[storage]:
                read.setdefault(storage, run)
    copies = (
        replace(copy, left=first[shape.chain[copy.storage][-1]]) for copy in schedule.host_copies
    )
    # One lane brings all of them back: in the order of their readers.
    return replace(
        schedule,
        host_copies=tuple(sorted(copies, key=lambda copy: read.get(copy.storage, copy.fetched))),
    )


def choose(plans: Iterable[Plan], budget_bytes: int | None) -> Plan:
    """Return the fastest plan that keeps the budget; if none does, the one with the smallest peak.

    Without a budget, also the one with the smallest peak: that is what these policies are for.
    """
    candidates = list(plans)
    least = min(candidates, key=lambda plan: (plan.peak_bytes, plan.seconds))
    if budget_bytes is None or least.peak_bytes > budget_bytes:
        return least
    fitting = [plan for plan in candidates if plan.peak_bytes <= budget_bytes]
    return replace(min(fitting, key=lambda plan: plan.seconds), budget_bytes=budget_bytes)


def sqrt_n(graph: Graph, *, budget_bytes: int | None) -> Plan:
    """Cut into sqrt(n) segments of equally many forward ops; of equal bytes if that is too much.

    If layers differ, the largest segment sets the peak. Segments of `s` bytes each hold `total / s`
    cuts and one segment, which is minimal at the root of total times a cut's bytes.
    """
    origin = origins(holes(graph))
    plans = []
    for choice in sqrt_n_choices(origin):
        plans.append(emit(origin.shape, simulate(origin.shape, choice), planner="sqrt_n"))
        if budget_bytes is None or plans[0].peak_bytes <= budget_bytes:
            break
    return choose(plans, budget_bytes)


def sqrt_n_choices(origin: Origins) -> Iterator[list[int]]:
    """Yield the choice of segments of equally many forward ops, then of equal bytes."""
    graph = origin.shape.graph
    forward = [op for op, record in enumerate(graph.ops) if record.phase == "forward"]
    crossing = crossing_bytes(origin)
    width = max(1, math.isqrt(len(forward)))
    starts = range(0, max(0, len(forward) - width), width)
    yield of_cuts(origin, [narrowest(crossing, forward[at : at + width]) for at in starts])
    total = int(graph.arrays.bytes[np.array(origin.forward, bool)].sum())
    size = math.sqrt(total * float(crossing[forward].mean())) if forward else 0.0
    yield of_cuts(origin, cuts_by_bytes(graph, forward, crossing, size))


def crossing_bytes(origin: Origins) -> Ints:
    """Return what a cut right after each op would keep: bytes [ops] int64."""
    shape = origin.shape
    change = np.zeros(len(shape.graph.ops) + 1, np.int64)
    for storage, is_forward in enumerate(origin.forward):
        if is_forward:
            change[shape.chain[storage][0]] += shape.bytes[storage]
            change[origin.last_forward[storage]] -= shape.bytes[storage]
    return np.cumsum(change)[:-1]


def narrowest(crossing: Ints, window: Sequence[int]) -> int:
    """Return the op of a window after which a cut keeps the fewest bytes."""
    # The last of equal ones, so that segments do not shrink.
    return min(reversed(window), key=lambda op: int(crossing[op]))


def cuts_by_bytes(graph: Graph, forward: Sequence[int], crossing: Ints, size: float) -> list[int]:
    """Return where to cut so that each segment makes `size` bytes: algorithm 3 of the paper."""
    cuts, window, held = list[int](), list[int](), 0
    for op in forward:
        held += sum(int(graph.arrays.bytes[output]) for output in graph.arrays.outputs[op])
        # The cut may fall anywhere in the second half of the segment.
        if held > size / 2:
            window.append(op)
        if held > size:
            cuts.append(narrowest(crossing, window))
            window, held = [], 0
    return cuts


def of_cuts(origin: Origins, cuts: Sequence[int]) -> list[int]:
    """Return the choice that keeps what crosses a cut and rebuilds each segment once.

    cuts : ops, each the last of a segment
    """
    borders = np.array(sorted(cuts), np.int64)
    kept = set()
    for storage, is_forward in enumerate(origin.forward):
        if not is_forward:
            continue
        start = int(np.searchsorted(borders, origin.shape.chain[storage][0]))
        # The last segment is used immediately: dropping it would only cost time.
        if start == len(borders) or borders[start] < origin.last_forward[storage]:
            kept.add(storage)
    return dropping(origin, kept)


def is_conv(graph: Graph, op: int) -> bool:
    """Whether the op is a convolution; without a kind, whether it is compute-bound."""
    kind = graph.ops[op].kind.lower()
    return bool(_CONV.search(kind)) if kind else _dense(graph, op)


def is_checkpoint(graph: Graph, op: int) -> bool:
    """Whether the op is of the types SuperNeurons keeps: CONV, FC, JOIN, FORK, CONCAT.

    A sum of two activations is a join; the sum of an activation and a parameter is not.
    """
    # `\b` does not match at an underscore.
    kind = graph.ops[op].kind.lower().replace("_", " ").replace(".", " ")
    if not kind:
        return _dense(graph, op)
    if _HEAVY.search(kind) or _JOIN.search(kind):
        return True
    arrays = graph.arrays
    activations = sum(not arrays.resident[storage] for storage in arrays.reads[op])
    return bool(_SUM.search(kind)) and activations >= 2


def _dense(graph: Graph, op: int) -> bool:
    record, arrays = graph.ops[op], graph.arrays
    moved = record.traffic_bytes
    if moved is None:
        moved = int(sum(arrays.bytes[s] for s in (*arrays.reads[op], *arrays.outputs[op])))
    return record.flops > _DENSE_FLOPS_PER_BYTE * max(moved, 1)


_POLICIES: Final[dict[str, Policy]] = {
    "liveness": liveness,
    "superneurons_speed": speed_centric,
    "superneurons_memory": memory_centric,
    "superneurons": cost_aware,
    "sqrt_n": sqrt_n,
}


def names() -> tuple[str, ...]:
    """Return the names of all policies, in the order of the table."""
    return tuple(_POLICIES)


def policy(name: str) -> Policy:
    """Return the policy of this name; raise KeyError for an unknown name."""
    return _POLICIES[name]
