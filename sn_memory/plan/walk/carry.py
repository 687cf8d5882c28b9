"""From a sequence of events to a plan: frees, ways, clocks and the peak.

Each copy of a storage is freed right after the last event that reads it: no policy can do better
for its sequence. What is being copied out goes when the copy is complete, or at `settle`. Clocks
and bytes follow `docs/graph_format.md`, as `replay.py` does on its own account.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import replace

from ...base.clock import spend
from ...graph.graph import Graph
from ...graph.liveness import baseline_seconds, unplanned_bytes
from ..plan import Decision, Plan
from .meter import Meter
from .walk import Event

# Units of work to carry an event out.
EVENT = 100


def choose(plans: Iterable[Plan], budget_bytes: int | None) -> Plan:
    """Return the fastest plan that keeps the budget; where none does, the one of least peak.

    Without a budget it is the one of least peak too: that is what these policies are for.
    """
    found = list(plans)
    least = min(found, key=lambda plan: (plan.peak_bytes, plan.seconds))
    if budget_bytes is None or least.peak_bytes > budget_bytes:
        return least
    fitting = [plan for plan in found if plan.peak_bytes <= budget_bytes]
    return replace(min(fitting, key=lambda plan: plan.seconds), budget_bytes=budget_bytes)


def carry_out(
    graph: Graph,
    events: list[Event],
    *,
    planner: str,
    reasons: Mapping[int, str],
    within_bytes: int | None = None,
) -> Plan:
    """Turn a sequence into a plan.

    Parameters
    ----------
    events
        What a Walk noted; every op of the graph runs at least once.
    reasons
        Storage -> why it is rebuilt or offloaded, for those that are.
    within_bytes
        Take the fastest way that fits into this at each op; None takes the default way.
    """
    meter = Meter(graph, within_bytes)
    for (kind, number, fresh), dying in zip(events, _deaths(graph, events), strict=True):
        spend(EVENT)
        meter.collect()
        if kind == "run":
            made = meter.run(number)
            # What came out again and nobody asked for: its last reader has gone before.
            dying += [storage for storage in made if storage not in fresh]
        elif kind == "offload":
            meter.offload(number)
        elif kind == "prefetch":
            meter.prefetch(number)
        elif number in meter.dead:
            meter.free(number)
        for storage in dying:
            meter.die(storage)
    for storage in list(meter.dead):
        meter.free(storage)
    return Plan(
        actions=tuple(meter.actions),
        decisions=tuple(_decisions(graph, events, reasons)),
        planner=planner,
        peak_bytes=meter.peak,
        seconds=max([meter.compute, *meter.ready.values()]),
        # Every op runs at least once, whatever the plan.
        lower_bound_seconds=sum(min(ways) for ways in graph.arrays.seconds),
        baseline_peak_bytes=unplanned_bytes(graph),
        baseline_seconds=baseline_seconds(graph),
        seconds_sources=graph.seconds_sources,
        graph_name=graph.name,
    )


def _deaths(graph: Graph, events: list[Event]) -> list[list[int]]:
    """Per event, the storages that nobody reads after it before they are made again."""
    arrays = graph.arrays
    needed = {s for s, held in enumerate((arrays.keep | arrays.resident).tolist()) if held}
    first: dict[int, int] = {}
    for at, event in enumerate(events):
        if event.kind == "run":
            first.setdefault(event.number, at)
    deaths: list[list[int]] = [[] for _ in events]
    for at in range(len(events) - 1, -1, -1):
        kind, number, fresh = events[at]
        if kind == "run":
            used = set(arrays.reads[number])
            if first[number] == at:
                used.update(arrays.releases[number])
            deaths[at] = [s for s in sorted(used | set(fresh)) if s not in needed]
            needed |= used
            needed.difference_update(fresh)
        elif kind == "offload":
            deaths[at] = [] if number in needed else [number]
            needed.add(number)
        elif kind == "prefetch":
            needed.discard(number)
    return deaths


def _decisions(
    graph: Graph, events: Iterable[Event], reasons: Mapping[int, str]
) -> Iterable[Decision]:
    arrays, device = graph.arrays, graph.device
    cost: dict[int, float] = {}
    times: dict[int, int] = {}
    seen: set[int] = set()
    offloaded: set[int] = set()
    for kind, number, fresh in events:
        if kind == "offload":
            offloaded.add(number)
        elif kind == "run" and number not in seen:
            seen.add(number)
        elif kind == "run":
            for storage in fresh:
                times[storage] = times.get(storage, 0) + 1
                share = arrays.seconds[number][0] / len(fresh)
                cost[storage] = cost.get(storage, 0.0) + share
    lanes = (device.to_host_bytes_per_s, device.to_device_bytes_per_s)
    for number, record in enumerate(graph.storages):
        if record.resident:
            continue
        size, reason = int(arrays.bytes[number]), reasons.get(number, "the rule of the policy")
        if number in offloaded:
            wire = sum(size / lane + device.transfer_latency_s for lane in lanes if lane)
            yield Decision(record.name, "offload", reason, size, wire)
        elif number in times:
            technique = "recompute" if times[number] == 1 else "recompute_each"
            yield Decision(record.name, technique, reason, size, cost[number])
        else:
            yield Decision(record.name, "keep", "held to its last use")
