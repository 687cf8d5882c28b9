"""When a step with state on the host ends: copies, and updates by the host, beside the ops.

`graph/hosted.py` writes a fetch as an op, whose seconds the search counts as if the ops waited for
it. Carried out it is a copy: it starts where the plan runs it, behind the copies before it on its
lane, and the first op to read what it brings waits for it. Memory that a store reads is given back
when the store has ended. The host makes its updates one after the other, each when its gradient is
there.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..graph.graph import Graph

COPIES = ("fetch", "store", "bring")
BY_HOST = "host update"


@dataclass(frozen=True)
class LaneSeconds:
    """What a step takes.

    Parameters
    ----------
    seconds
        When the last op, the last copy and the last update by the host have ended.
    ops_s, copies_s, host_s
        Summed seconds of ops, of copies, and of updates by the host.
    """

    seconds: float
    ops_s: float
    copies_s: float
    host_s: float = 0.0

    @property
    def hidden(self) -> float:
        """The share of what copies and host take that passed beside ops; 1 where it is nothing."""
        beside = self.copies_s + self.host_s
        if not beside:
            return 1.0
        return 1.0 - min(1.0, max(0.0, self.seconds - self.ops_s) / beside)


def lane_seconds(graph: Graph, actions: Sequence[tuple[str, str, int]]) -> LaneSeconds:
    """Return when these actions (kind, target, way) of a plan end, copies on their lanes.

    Only the kinds `run` and `free` are known: what else moves is priced by `cost/offload.py`.
    """
    arrays, index, names = graph.arrays, graph.op_index, graph.storage_index
    clock = back = out = host = ops_s = copies_s = host_s = 0.0
    ready: dict[int, float] = {}
    leaving: dict[int, float] = {}
    # Since when what is on the host is as somebody wrote it.
    written: dict[int, float] = {}
    for kind, target, way in actions:
        if kind == "free":
            storage = names[target]
            clock = max(clock, leaving.pop(storage, 0.0), ready.pop(storage, 0.0))
            continue
        op = index[target]
        seconds = arrays.seconds[op][way]
        what = graph.ops[op].kind
        came = max((written.get(storage, 0.0) for storage in arrays.reads[op]), default=0.0)
        arrived = max((ready.get(storage, 0.0) for storage in arrays.reads[op]), default=0.0)
        if what == BY_HOST:
            host_s += seconds
            host = max(host, clock, came) + seconds
            written.update(dict.fromkeys(arrays.writes[op], host))
            continue
        if what not in COPIES:
            clock = max(clock, arrived) + seconds
            ops_s += seconds
            continue
        copies_s += seconds
        if what == "store":
            out = max(out, clock, arrived) + seconds
            leaving.update(dict.fromkeys(arrays.reads[op], out))
            written.update(dict.fromkeys(arrays.writes[op], out))
        else:
            back = max(back, clock, came) + seconds
            ready.update(dict.fromkeys((*arrays.outputs[op], *arrays.writes[op]), back))
    end = max([clock, out, host, *ready.values()])
    return LaneSeconds(end, ops_s, copies_s, host_s)
