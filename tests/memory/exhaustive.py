"""The optimum by looking at everything: the oracle for `auto` on graphs of a few ops.

States are (ops done, what is present in which version); every free, first run and rerun in every
way is an edge; seconds are the length. Plain label correcting, no estimate, no pruning.
"""

import math

from sn_memory import Graph


def optimum(graph: Graph, budget_bytes: int) -> float:
    """Fewest seconds of any plan without transfers within the budget; infinity if there is none."""
    names = {storage.name: storage for storage in graph.storages}
    names.update({alias: names[target] for alias, target in graph.aliases.items()})
    base = sum(storage.bytes for storage in graph.storages if storage.resident)
    seen_at = []  # per op, the version of each storage it names
    written: dict[str, int] = {}
    for op in graph.ops:
        seen_at.append({name: written.get(name, 0) for name in (*op.inputs, *op.writes)})
        for name in op.writes:
            written[name] = written.get(name, 0) + 1
    kept = {s.name: written.get(s.name, 0) for s in graph.storages if s.keep and not s.resident}
    labels = {(0, frozenset()): 0.0}
    work = [(0, frozenset())]
    best = math.inf
    while work:
        state = work.pop()
        done, present = state
        cost, here = labels[state], dict(present)
        if cost >= best:
            continue
        if done == len(graph.ops) and all(here.get(name) == kept[name] for name in kept):
            best = cost
            continue
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
            if number == done and any(n not in here and n not in op.outputs for n in op.releases):
                continue
            after = dict.fromkeys(op.outputs, 0) | here
            after.update({name: here[name] + 1 for name in op.writes if name in here})
            made = sum(names[name].bytes for name in op.outputs)
            ways = [(way.bytes, way.seconds) for way in op.workspaces] or [(0, op.seconds)]
            for space, seconds in ways:
                if held + made + space <= budget_bytes:
                    target = (max(done, number + 1), frozenset(after.items()))
                    follow.append((cost + seconds, target))
        for length, target in follow:
            if length < labels.get(target, math.inf) and length < best:
                labels[target] = length
                work.append(target)
    return best
