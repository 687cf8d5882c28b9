"""When a step with state on the host ends: fetches and stores on lanes beside the ops.

`graph/hosted.py` writes a fetch as an op, whose seconds the search counts as if the ops waited for
it. Carried out it is a copy: it starts where the plan runs it, behind the copies before it on its
lane, and the first op to read what it brings waits for it. Memory that a store reads is given back
when the store has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from ..graph.graph import Graph

COPIES = ("fetch", "store")


@dataclass(frozen=True)
class LaneSeconds:
    """What a step takes.

    Parameters
    ----------
    seconds
        When the last op and the last copy have ended.
    ops_s, copies_s
        Summed seconds of ops, and of fetches and stores.
    """

    seconds: float
    ops_s: float
    copies_s: float

    @property
    def hidden(self) -> float:
        """The share of the copies' seconds that passed beside ops; 1 where there are none."""
        if not self.copies_s:
            return 1.0
        return 1.0 - min(1.0, max(0.0, self.seconds - self.ops_s) / self.copies_s)


def lane_seconds(graph: Graph, actions: Sequence[tuple[str, str, int]]) -> LaneSeconds:
    """Return when these actions (kind, target, way) of a plan end, copies on their lanes.

    Only the kinds `run` and `free` are known: what else moves is priced by `cost/offload.py`.
    """
    arrays, index, names = graph.arrays, graph.op_index, graph.storage_index
    clock = back = out = ops_s = copies_s = 0.0
    ready: dict[int, float] = {}
    leaving: dict[int, float] = {}
    for kind, target, way in actions:
        if kind == "free":
            storage = names[target]
            clock = max(clock, leaving.pop(storage, 0.0), ready.pop(storage, 0.0))
            continue
        op = index[target]
        seconds = arrays.seconds[op][way]
        what = graph.ops[op].kind
        if what not in COPIES:
            clock = max([clock, *(ready.get(it, 0.0) for it in arrays.reads[op])]) + seconds
            ops_s += seconds
            continue
        copies_s += seconds
        if what == "fetch":
            back = max(back, clock) + seconds
            ready.update(dict.fromkeys(arrays.outputs[op], back))
        else:
            out = max([out, clock, *(ready.get(it, 0.0) for it in arrays.reads[op])]) + seconds
            leaving.update(dict.fromkeys(arrays.reads[op], out))
    return LaneSeconds(max([clock, out, *ready.values()]), ops_s, copies_s)
