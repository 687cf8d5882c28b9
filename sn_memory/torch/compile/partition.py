"""A plan of a joint graph as the two graphs that torch.compile wants: forward and backward.

What a plan runs before the loss makes the forward graph, what it runs after it the backward graph;
a call that runs twice is a node in each. What is held in between is what the forward graph hands
over. Code generated from such a graph lets go of each value after its last use, which is where the
plan frees it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import fx
from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput

from ...plan.plan import Plan
from ...run.loss import LOSS
from ..errors import ReplayError
from ..trace.to_graph import Named
from .joint_graph import Joint

_Actions = list[tuple[str, str]]


def partitioned(joint: Joint, named: Named, plan: Plan) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the forward and the backward graph of a plan that keeps and recomputes.

    Raises ReplayError for a plan that moves storages.
    """
    actions = [(action.kind, action.target) for action in plan.actions]
    other = {kind for kind, _ in actions} - {"run", "free"}
    if other:
        raise ReplayError(
            f"the plan would {', '.join(sorted(other))}; under torch.compile storages are kept or "
            "recomputed. Plan with the techniques keep and recompute, or with backend='graph'."
        )
    boundary = actions.index(("run", LOSS))
    after = actions[boundary + 1 :]
    saved = _handed_over(joint, named, after)
    forward = _Half(joint, named, joint.primals)
    forward.carry_out(actions[:boundary])
    described = [SavedForBackwardsAOTOutput(place) for place in range(len(saved))]
    first = forward.module([*joint.outputs, *saved], [*joint.descriptions[0], *described])
    backward = _Half(joint, named, [*saved, *joint.output_gradients])
    backward.carry_out(after)
    return first, backward.module(list(joint.gradients), joint.descriptions[1])


def _handed_over(joint: Joint, named: Named, actions: _Actions) -> list[fx.Node]:
    """Nodes whose storages the backward graph uses before it makes them."""
    captured = joint.captured
    there = {view.storage for view in captured.output_gradients} | set(captured.recording.constants)
    needed: dict[int, None] = {}
    for kind, target in actions:
        if kind == "run":
            call = captured.recording.calls[named.call_of[target]]
            needed |= dict.fromkeys(it for it in (*call.reads, *call.writes) if it not in there)
            there |= set(call.makes)
    ends = [view.storage for _, view in captured.gradients if view is not None]
    needed |= dict.fromkeys(it for it in ends if it not in there)
    return [node for storage in needed for node in joint.bases[storage]]


class _Half:
    """One of the two graphs while it is written."""

    def __init__(self, joint: Joint, named: Named, given: list[fx.Node]) -> None:
        self.joint, self.named = joint, named
        self.graph = fx.Graph()
        # Which node stands for one of the joint graph now, and which of those lie on a storage.
        self.here: dict[fx.Node, fx.Node] = {}
        self.on: dict[int, set[fx.Node]] = {}
        self.calls = frozenset(joint.nodes)
        for node in given:
            made = self.graph.placeholder(node.name)
            made.meta = dict(node.meta)
            self.note(node, made)

    def note(self, node: fx.Node, made: fx.Node) -> fx.Node:
        self.here[node] = made
        if node in self.joint.storages:
            self.on.setdefault(self.joint.storages[node], set()).add(node)
        return made

    def carry_out(self, actions: _Actions) -> None:
        for kind, target in actions:
            if kind == "free":
                for node in self.on.pop(self.named.storage_of[target], ()):
                    del self.here[node]
                continue
            node = self.joint.nodes[self.named.call_of[target]]
            self.copied(node)
            # Taken apart at once: the tuple would hold all its tensors while one is left in it.
            for part in self.joint.parts.get(node, ()):
                if part not in self.here:
                    self.copied(part)

    def copied(self, node: fx.Node) -> fx.Node:
        made = self.graph.node_copy(node, self.taken)
        if made.target is torch.ops.aten.view.default:
            # Kernels of the CPU lay some results out otherwise than torch's rules say (the gradient
            # of a batch norm of transposed tokens), and then torch's own aot_eager fails here.
            made.target = torch.ops.aten.reshape.default
        return self.note(node, made)

    def taken(self, node: fx.Node) -> fx.Node:
        """Return what stands for a node; a view that is not there is taken anew."""
        if node in self.here:
            return self.here[node]
        if node in self.calls or node.op == "placeholder":
            raise ReplayError(
                f"{node.name} is used where the plan does not hold it. This is a fault of "
                "sn_memory: report it with the model; backend='graph' carries plans out otherwise."
            )
        return self.copied(node)

    def module(self, results: list[Any], described: list[Any]) -> fx.GraphModule:
        made = tuple(self.taken(it) if isinstance(it, fx.Node) else it for it in results)
        end = self.graph.output(made)
        end.meta["desc"] = described
        end.meta["output_stack_traces"] = [
            it.meta.get("stack_trace") if isinstance(it, fx.Node) else None for it in made
        ]
        self.graph.eliminate_dead_code()
        self.graph.lint()
        return fx.GraphModule(self.joint.module, self.graph)
