"""What docs/graph_format.md says of a plan, once more: by names, with Python's own numbers.

Shares nothing with `sn_memory/check.py` but the records. It says whether a plan can be
carried out, and what peak and seconds it has then; not why not.
"""

from __future__ import annotations

from sn_memory import Graph, Plan

GRAINS = {"none": 1, "torch": 512, "tensorflow": 256}


class Wrong(Exception):  # noqa: N818 - it is the plan that is wrong
    """The plan cannot be carried out."""


def ensure(fact: bool) -> None:
    """Raise Wrong unless this is so."""
    if not fact:
        raise Wrong


def rounded(size: int, allocator: str) -> int:
    """Return a size as the allocator hands it out."""
    grain = GRAINS[allocator]
    return -(-size // grain) * grain


def judge(graph: Graph, plan: Plan) -> bool:
    """Whether the plan can be carried out, keeps its budget and predicts what happens."""
    try:
        peak, seconds = carry_out(graph, plan)
    except Wrong:
        return False
    return (
        (plan.budget_bytes is None or peak <= plan.budget_bytes)
        and peak == plan.peak_bytes
        and abs(seconds - plan.seconds) <= 1e-9 * max(1e-9, seconds)
        and plan.lower_bound_seconds <= seconds * (1 + 1e-9)
    )


def carry_out(graph: Graph, plan: Plan) -> tuple[int, float]:
    """Return peak and seconds; raises Wrong."""
    records = {storage.name: storage for storage in graph.storages}
    size = {name: rounded(storage.bytes, graph.allocator) for name, storage in records.items()}
    number = {op.name: at for at, op in enumerate(graph.ops)}
    device = graph.device
    # Per op: what it needs in which version.
    written = dict.fromkeys(records, 0)
    needs: list[dict[str, int]] = []
    for op in graph.ops:
        needs.append({name: written[name] for name in (*op.inputs, *op.writes)})
        for name in {*op.writes}:
            written[name] += 1
    here = {name: 0 for name, storage in records.items() if storage.resident}
    readable: dict[str, float] = {}
    host: dict[str, tuple[int, float]] = {}
    copying: dict[str, float] = {}
    order: list[int] = []
    ops_free = down_free = up_free = 0.0
    base = sum(size[name] for name in here)
    peak = base
    for kind, target, way in plan.actions:
        if kind == "run":
            ensure(target in number)
            at = number[target]
            op = graph.ops[at]
            outputs = op.outputs
            times = graph.arrays.seconds[at]
            ensure(way < len(times))
            ensure(all(here.get(name) == version for name, version in needs[at].items()))
            changed = {*op.writes}
            ensure(not changed & host.keys())
            if at in order:
                ensure(not (op.effect or op.collective or op.once))
                ensure(not op.random or op.replayable)
            else:
                order.append(at)
            begin = max([ops_free, *(readable.get(name, 0.0) for name in needs[at])])
            double = [name for name in outputs if name in here or name in host]
            here.update({name: 0 for name in outputs if name not in double})
            space = rounded(op.workspaces[way].bytes, graph.allocator) if op.workspaces else 0
            held = sum(size[name] for name in here)
            peak = max(peak, held + sum(size[name] for name in double) + space)
            for name in changed:
                here[name] += 1
            ops_free = begin + times[way]
            for name in (*outputs, *changed):
                if name in here:
                    readable[name] = max(readable.get(name, 0.0), ops_free)
            continue
        name = target
        ensure(name in records and not records[name].resident)
        held = sum(size[name] for name in here)
        if kind == "free":
            ensure(name in here)
            del here[name]
            ops_free = max(ops_free, copying.pop(name, 0.0), readable.pop(name, 0.0))
        elif kind == "offload":
            ensure(name in here and name not in host and device.can_offload)
            begin = max(down_free, ops_free, readable.get(name, 0.0))
            down_free = begin + device.transfer_latency_s + size[name] / device.to_host_bytes_per_s
            host[name], copying[name] = (here[name], down_free), down_free
            if device.pinned_bytes is not None:
                ensure(sum(size[name] for name in host) <= device.pinned_bytes)
        else:
            ensure(kind == "prefetch" and name in host and name not in here)
            here[name], copied = host.pop(name)
            begin = max(up_free, ops_free, copied)
            up_free = begin + device.transfer_latency_s + size[name] / device.to_device_bytes_per_s
            readable[name] = up_free
            held += size[name]
        peak = max(peak, held)
    ensure(sorted(order) == list(range(len(graph.ops))))
    kept = [at for at in order if graph.ops[at].ordered]
    ensure(kept == sorted(kept))
    for place, at in enumerate(order):
        if graph.ops[at].fixed:
            ensure(place == at and all(other < at for other in order[:place]))
    for name, record in records.items():
        if record.keep or record.resident:
            ensure(here.get(name) == written[name])
    return peak, max([ops_free, *readable.values()])
