"""When storages are on the host: the copies of a plan, and what is then on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...graph.graph import Ints
from ...plan.plan import Plan
from ...run.loss import LOSS
from ..trace.record import Captured
from ..trace.to_graph import STATE, Named
from .host_arena import HostCopy


@dataclass(frozen=True)
class Journeys:
    """The host copies of a plan, and per action that is part of one, which."""

    host_copies: list[HostCopy]
    at: dict[int, int]


def journeys_of(named: Named, captured: Captured, plan: Plan) -> Journeys:
    """Return the host copies that a plan makes."""
    host_copies: list[HostCopy] = []
    at: dict[int, int] = {}
    away: dict[int, int] = {}
    for place, (kind, target, _) in enumerate(plan.actions):
        if kind not in ("offload", "free", "prefetch") or target in named.random_states:
            continue
        storage = named.storage_of[target]
        if kind == "offload":
            away[storage] = at[place] = len(host_copies)
            nbytes = captured.recording.nbytes[storage]
            # Where it is freed and comes back is told by later actions; it may never come back.
            host_copies.append(HostCopy(storage, place, place, len(plan.actions), nbytes))
        elif kind == "free" and storage in away:
            at[place] = away[storage]
            host_copies[away[storage]] = replace(host_copies[away[storage]], freed=place)
        elif kind == "prefetch":
            at[place] = host_copy = away.pop(storage)
            host_copies[host_copy] = replace(host_copies[host_copy], end=place)
    return Journeys(host_copies, at)


def live_bytes(named: Named, plan: Plan) -> Ints:
    """Bytes on the device at each action of a plan, with all its host copies made."""
    graph = named.graph
    size = {
        it.name: int(nbytes) for it, nbytes in zip(graph.storages, graph.arrays.bytes, strict=True)
    }
    outputs = {op.name: op.outputs for op in graph.ops}
    held = {it.name for it in graph.storages if it.resident}
    live, curve = graph.base_bytes, []
    for kind, target, _ in plan.actions:
        made = set(outputs[target]) if kind == "run" else set()
        if kind == "prefetch":
            made = {target}
        live += sum(size[it] for it in made - held)
        held |= made
        curve.append(live)
        if kind == "free":
            held.discard(target)
            live -= size[target]
    return np.array(curve, dtype=np.int64)


def waiting_bytes(named: Named, plan: Plan) -> tuple[int, int]:
    """Bytes that a forward pass holds until its backward pass: all, and inputs and outputs of it.

    Those on the host count as well: copies that the peak of one pass has room for are not made.
    """
    graph = named.graph
    size = dict(zip((it.name for it in graph.storages), graph.arrays.bytes.tolist(), strict=True))
    inputs = {it.name for it in graph.storages if it.role == "input"}
    held = inputs | ({STATE} & size.keys())
    callers = inputs | set(graph.ops[graph.op_index[LOSS]].inputs)
    away: set[str] = set()
    for kind, target, _ in plan.actions:
        if kind == "run" and target == LOSS:
            break
        if kind == "run":
            held |= set(graph.ops[graph.op_index[target]].outputs)
        elif kind == "offload":
            away.add(target)
        elif kind == "free" and target not in away:
            held.discard(target)
        away -= {target} if kind == "prefetch" else set()
    return sum(size[it] for it in held), sum(size[it] for it in held & callers)
