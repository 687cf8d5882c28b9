"""When storages are on the host: the copies of a plan, and what is then on the device."""

from __future__ import annotations

from dataclasses import dataclass, replace

import numpy as np

from ...graph.numbers import Ints
from ...plan.plan import Plan
from ..trace.captured import Captured
from ..trace.to_graph import Named
from .host_arena import HostCopy


@dataclass(frozen=True)
class Journeys:
    """The host copies of a plan, and per step that is part of one, which."""

    host_copies: list[HostCopy]
    at: dict[int, int]


def journeys_of(named: Named, captured: Captured, plan: Plan) -> Journeys:
    """Return the host copies that a plan makes."""
    host_copies: list[HostCopy] = []
    at: dict[int, int] = {}
    away: dict[int, int] = {}
    for place, (action, target, _) in enumerate(plan.steps):
        if action not in ("offload", "free", "prefetch"):
            continue
        storage = named.storage_of[target]
        if action == "offload":
            away[storage] = at[place] = len(host_copies)
            nbytes = captured.recording.nbytes[storage]
            # Where it is freed and comes back is told by later steps; it may never come back.
            host_copies.append(HostCopy(storage, place, place, len(plan.steps), nbytes))
        elif action == "free" and storage in away:
            at[place] = away[storage]
            host_copies[away[storage]] = replace(host_copies[away[storage]], freed=place)
        elif action == "prefetch":
            at[place] = host_copy = away.pop(storage)
            host_copies[host_copy] = replace(host_copies[host_copy], end=place)
    return Journeys(host_copies, at)


def live_bytes(named: Named, plan: Plan) -> Ints:
    """Bytes on the device at each step of a plan, with all its host copies made."""
    graph = named.graph
    size = {
        it.name: int(nbytes) for it, nbytes in zip(graph.storages, graph.arrays.bytes, strict=True)
    }
    outputs = {op.name: op.outputs for op in graph.ops}
    held = {it.name for it in graph.storages if it.resident}
    live, curve = graph.base_bytes, []
    for action, target, _ in plan.steps:
        made = set(outputs[target]) if action == "run" else set()
        if action == "prefetch":
            made = {target}
        live += sum(size[it] for it in made - held)
        held |= made
        curve.append(live)
        if action == "free":
            held.discard(target)
            live -= size[target]
    return np.array(curve, dtype=np.int64)
