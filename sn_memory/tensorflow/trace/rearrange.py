"""Updates as early as the executor runs them: as soon as what they read is there.

A trace has all updates after all gradients, so that a graph in its order holds every gradient to
the end. The executor does not wait: a variable is updated when its gradient is there. The step is
put into that order before anything is planned.
"""

from __future__ import annotations

from dataclasses import replace

from . import kernels
from .buffers import phases
from .capture import Captured, Node


def updates_first(captured: Captured) -> Captured:
    """Return a step with its updates moved to where all that they read is there.

    Moved are ops after the backward pass without effect, and those that only change variables. A
    variable is changed after all that read it before in the trace, and read after all that changed
    it before. All else keeps its order.
    """
    nodes, phase, waits = captured.nodes, phases(captured), _waits(captured)
    begin = next((at for at, it in enumerate(phase) if it == "backward"), len(nodes))
    movable = [_may_move(node, captured) for node in nodes]
    early = [it == "update" and movable[at] for at, it in enumerate(phase)]
    # What updates read beside gradients (rates, decay) is traced after the backward pass as well.
    fetched = [at > begin and movable[at] and it == "forward" for at, it in enumerate(phase)]
    due: list[int] = []
    for at, before in enumerate(waits):
        soonest = max((due[it] for it in before), default=0)
        due.append(soonest if early[at] or fetched[at] else at)
    wanted = list(range(len(nodes)))
    for at in reversed(range(len(nodes))):
        if fetched[at]:
            due[at] = max(due[at], wanted[at])
        for it in waits[at]:
            wanted[it] = min(wanted[it], due[at])
    order = sorted(range(len(nodes)), key=lambda at: (due[at], at))
    return replace(captured, nodes=[nodes[at] for at in order])


def _may_move(node: Node, captured: Captured) -> bool:
    if (
        kernels.is_random(node.op)
        or kernels.is_collective(node.op)
        or node.op.type in kernels.LOOPS
    ):
        return False
    return not kernels.has_effect(node.op) or (
        kernels.changes_variables(node.op) and any(it in captured.variables for it in node.inputs)
    )


def _waits(captured: Captured) -> list[set[int]]:
    """Return, per node, those that must come before it."""
    producer = captured.producer
    number = {id(node.op): at for at, node in enumerate(captured.nodes)}
    # Of a value that lies in a variable's buffer, the handle of that variable.
    lies_in: dict[int, int] = {handle: handle for handle in captured.variables}
    users: dict[int, list[int]] = {}
    changed: dict[int, int] = {}
    found: list[set[int]] = []
    for at, node in enumerate(captured.nodes):
        before = {producer[value] for value in node.inputs if value in producer}
        before.update(number[id(it)] for it in node.op.control_inputs if id(it) in number)
        effect = kernels.has_effect(node.op)
        if node.op.type == kernels.READS or kernels.passes_on(node.op):
            for source, result in zip(node.inputs, node.outputs, strict=False):
                if source in lies_in:
                    lies_in[result] = lies_in[source]
        for handle in {lies_in[value] for value in node.inputs if value in lies_in}:
            if handle in changed:
                before.add(changed[handle])
            if effect:
                before.update(users.get(handle, ()))
                users[handle], changed[handle] = [], at
            users.setdefault(handle, []).append(at)
        # A control input may have been traced later; the trace's own order did without it.
        found.append({it for it in before if it < at})
    return found
