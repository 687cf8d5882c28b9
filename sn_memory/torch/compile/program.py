"""Forward and backward graph of a plan, written as names: plain data that can be kept in a file.

torch's own partition is the ground: its forward graph stays, but for what it hands over, and its
backward graph is written anew in the order of the plan, with nodes of the forward graph copied
where the plan runs a kernel again. A node is copied with all it needs that is in no buffer, so
whatever fusion makes of the copy, it computes the same.
"""

from __future__ import annotations

import hashlib
import operator
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch
from torch import fx
from torch.utils.checkpoint import CheckpointPolicy

try:
    from torch._functorch._aot_autograd.descriptors import SavedForBackwardsAOTOutput
except ImportError:  # told by the back end, which needs torch 2.13
    SavedForBackwardsAOTOutput = None  # type: ignore[assignment,misc]

from ..errors import ReplayError

SAVED, GIVEN, FORWARD, BACKWARD = "saved", "given", "forward", "backward"


@dataclass(frozen=True)
class Program:
    """A partition.

    Parameters
    ----------
    ground
        Hash of the two graphs it was written for.
    setting
        torch's budget and solver those were made with; None: without one.
    saved
        Nodes of the forward graph that it hands over, in order.
    lines
        The backward graph's nodes, in order: whence, name, and per node it uses there, the number
        of the line that stands for it. None at all: the two graphs as they are.
    results
        The numbers of the lines that the backward graph returns; None where it returns nothing.
    """

    ground: str
    setting: tuple[float, str] | None
    saved: tuple[str, ...]
    lines: tuple[tuple[str, str, tuple[tuple[str, int], ...]], ...]
    results: tuple[int | None, ...]

    def data(self) -> dict[str, Any]:
        """Return it as what JSON can hold."""
        return {
            "ground": self.ground,
            "setting": self.setting,
            "saved": self.saved,
            "lines": self.lines,
            "results": self.results,
        }

    @staticmethod
    def of(data: dict[str, Any]) -> Program:
        """Read it from what `data` returned."""
        lines = tuple(
            (kind, name, tuple((used, int(line)) for used, line in uses))
            for kind, name, uses in data["lines"]
        )
        share, solver = data["setting"] or (None, "")
        setting = None if share is None else (float(share), str(solver))
        saved, results = tuple(data["saved"]), tuple(data["results"])
        return Program(data["ground"], setting, saved, lines, results)


def ground_of(forward: fx.GraphModule, backward: fx.GraphModule) -> str:
    """Return a hash of what a program refers to."""
    text = hashlib.sha256()
    for module in (forward, backward):
        for node in module.graph.nodes:
            used = [it.name for it in node.all_input_nodes]
            text.update(f"{node.op} {node.name} {node.target} {used}\n".encode())
    return text.hexdigest()


def end_of(module: fx.GraphModule) -> fx.Node:
    """Return the node that returns."""
    return next(iter(module.graph.find_nodes(op="output")))


def results_of(module: fx.GraphModule) -> list[Any]:
    """Return what a graph returns."""
    return list(end_of(module).args[0])  # type: ignore[arg-type]


def copyable(node: fx.Node, changed: Iterable[fx.Node] = ()) -> bool:
    """Whether a node of the forward graph may be computed a second time, in the backward graph.

    changed : placeholders whose tensors the forward pass writes to
    """
    if node.op == "get_attr":
        return True
    if node.op == "placeholder":
        return node not in changed
    if node.target is operator.getitem:
        return True
    target = node.target
    if not isinstance(target, torch._ops.OpOverload) or target._schema.is_mutable:
        return False
    if torch.Tag.nondeterministic_seeded in target.tags or "c10d" in target.namespace:
        return False
    if "inductor_seed" in str(target) and "lookup" not in str(target):
        return False
    # The user's own word in a selective checkpoint.
    return node.meta.get("recompute") is not CheckpointPolicy.MUST_SAVE


def rebuilt(
    forward: fx.GraphModule, backward: fx.GraphModule, outputs: int, program: Program
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return the two graphs of a program.

    Parameters
    ----------
    forward, backward
        torch's own partition.
    outputs
        How many results of the forward graph go to the caller.

    Raises
    ------
    ReplayError
        If the program was written for other graphs.
    """
    if program.ground != ground_of(forward, backward):
        raise ReplayError(
            "the graphs that torch.compile made are not those that were planned. Plan again."
        )
    if not program.lines:
        return forward, backward
    first = _forward(forward, outputs, program.saved)
    theirs = {it.name: it for it in backward.graph.nodes}
    own = {it.name: it for it in forward.graph.nodes}
    graph = fx.Graph()
    made: list[fx.Node] = []
    for kind, name, uses in program.lines:
        if kind in (SAVED, GIVEN):
            like = own[name] if kind == SAVED else theirs[name]
            node = graph.placeholder(name)
            node.meta = dict(like.meta)
        else:
            like = own[name] if kind == FORWARD else theirs[name]
            line_of = dict(uses)
            node = graph.node_copy(like, lambda it, line_of=line_of: made[line_of[it.name]])
        made.append(node)
    end = graph.output(tuple(None if it is None else made[it] for it in program.results))
    end.meta = dict(end_of(backward).meta)
    graph.lint()
    root = _root(forward, backward)
    return first, fx.GraphModule(root, graph)


def _forward(forward: fx.GraphModule, outputs: int, saved: tuple[str, ...]) -> fx.GraphModule:
    graph = fx.Graph()
    here: dict[str, fx.Node] = {}
    for node in forward.graph.nodes:
        if node.op != "output":
            here[node.name] = graph.node_copy(node, lambda it: here[it.name])
    mine = results_of(forward)[:outputs]
    end = graph.output(
        (
            *(here[it.name] if isinstance(it, fx.Node) else it for it in mine),
            *(here[it] for it in saved),
        )
    )
    before = end_of(forward)
    end.meta = dict(before.meta)
    told = list(before.meta.get("desc", ()))[:outputs]
    if told:
        end.meta["desc"] = [*told, *(SavedForBackwardsAOTOutput(at) for at in range(len(saved)))]
    graph.eliminate_dead_code()
    graph.lint()
    return fx.GraphModule(forward, graph)


def _root(forward: fx.GraphModule, backward: fx.GraphModule) -> dict[str, Any]:
    """Return what get_attr nodes of either graph find."""
    found: dict[str, Any] = {}
    for module in (forward, backward):
        for node in module.graph.find_nodes(op="get_attr"):
            it: Any = module
            for part in str(node.target).split("."):
                it = getattr(it, part)
            found[str(node.target)] = it
    return found
