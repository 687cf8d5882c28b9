"""The optimum by looking at everything: the oracle for `auto` on graphs of up to ten ops.

States are (ops done, what is present in which version); every free, first run and rerun in every
way is an edge; seconds are the length. Dijkstra's algorithm, no estimate. One thing is left out, to
make ten ops possible: what no op at all reads in that version, which need not be there at the end,
is never held beyond the op that made it, as that only takes room.
"""

import heapq
import math

from sn_memory import Graph


def optimum(graph: Graph, budget_bytes: int) -> float:
    """Fewest seconds of any plan without transfers within the budget; infinity if there is none."""
    names = {storage.name: storage for storage in graph.storages}
    base = sum(storage.bytes for storage in graph.storages if storage.resident)
    seen_at = []  # per op, the version of each storage it names
    written: dict[str, int] = {}
    for op in graph.ops:
        seen_at.append({name: written.get(name, 0) for name in (*op.inputs, *op.writes)})
        for name in op.writes:
            written[name] = written.get(name, 0) + 1
    kept = {s.name: written.get(s.name, 0) for s in graph.storages if s.keep and not s.resident}
    read = {pair for wanted in seen_at for pair in wanted.items()} | set(kept.items())
    start = (0, frozenset())
    labels, settled = {start: 0.0}, set()
    queue, ticket = [(0.0, 0, start)], 0
    while queue:
        cost, _, state = heapq.heappop(queue)
        if state in settled:
            continue
        settled.add(state)
        done, present = state
        here = dict(present)
        if done == len(graph.ops) and all(here.get(name) == kept[name] for name in kept):
            return cost
        follow = [(cost, (done, present - {pair})) for pair in present]
        held = base + sum(names[name].bytes for name in here)
        past = graph.ops[:done]
        resident = {name: sum(name in op.writes for op in past) for name in names}
        for number in range(min(done + 1, len(graph.ops))):
            op = graph.ops[number]
            wanted = seen_at[number]
            there = resident | here
            if any((there[n] if names[n].resident else here.get(n)) != wanted[n] for n in wanted):
                continue
            if number < done and (
                not op.repeatable or any(names[name].resident for name in op.writes)
            ):
                continue
            after = dict.fromkeys(op.outputs, 0) | here
            after.update({name: here[name] + 1 for name in op.writes if name in here})
            useful = {pair for pair in after.items() if pair in read}
            made = sum(names[name].bytes for name in op.outputs)
            ways = [(way.bytes, way.seconds) for way in op.workspaces] or [(0, op.seconds)]
            for space, seconds in ways:
                if held + made + space <= budget_bytes:
                    target = (max(done, number + 1), frozenset(useful))
                    follow.append((cost + seconds, target))
        for length, target in follow:
            if length < labels.get(target, math.inf):
                labels[target] = length
                ticket += 1
                heapq.heappush(queue, (length, ticket, target))
    return math.inf
