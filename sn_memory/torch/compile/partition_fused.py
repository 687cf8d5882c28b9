"""A plan of a compiled step's kernels as a program: which values are handed over, what runs when.

A kernel is the nodes that its buffers hold, with what of their making lies in no buffer. Kernels
of the backward pass are written in the plan's order; one of the forward pass that the plan runs
again is written there a second time, of values that are there at that moment.
"""

from __future__ import annotations

import operator
from collections.abc import Iterator

import torch
from torch import fx

from ...plan.plan import Plan
from ...run.loss import LOSS
from ..errors import ReplayError
from .dry_step import DryStep
from .kernel_graph import KernelGraph
from .lowering import Lowered
from .program import (
    BACKWARD,
    FORWARD,
    GIVEN,
    SAVED,
    Program,
    copyable,
    ground_of,
    results_of,
)


class Fused:
    """torch's own partition, lowered and run on paper: what its kernels and values are.

    Parameters
    ----------
    forward, backward
        The two graphs.
    lowered
        What Inductor makes of them.
    step
        What these do.
    outputs
        How many results of the forward graph go to the caller.
    """

    def __init__(
        self,
        forward: fx.GraphModule,
        backward: fx.GraphModule,
        lowered: tuple[Lowered, Lowered],
        step: DryStep,
        outputs: int,
    ) -> None:
        self.forward, self.backward, self.step, self.outputs = forward, backward, step, outputs
        own = {it.name: it for it in forward.graph.nodes}
        theirs = {it.name: it for it in backward.graph.nodes}
        self.saved = results_of(forward)[outputs:]
        self.placeholders = list(backward.graph.find_nodes(op="placeholder"))
        # Per node of the forward graph the value that holds it; per value the nodes.
        self.value_of: dict[fx.Node, int] = {}
        self.nodes_of: dict[int, list[fx.Node]] = {}
        watch = step.watch
        maker = {value: at for at, it in enumerate(watch.steps) for value in it.makes}
        self.maker = maker
        for value, made in enumerate(watch.values):
            late = maker.get(value, 0) >= step.boundary
            names = lowered[1].origins if late else lowered[0].origins
            nodes = theirs if late else own
            for name in made.names:
                node = nodes.get(names.get(name, ""))
                if node is not None and isinstance(node.meta.get("val"), torch.Tensor):
                    self.nodes_of.setdefault(value, []).append(node)
        ends = zip((*step.returned, *step.saved), results_of(forward), strict=True)
        begins = zip(step.inputs, forward.graph.find_nodes(op="placeholder"), strict=True)
        for held, node in (*ends, *begins):
            if held is not None and isinstance(node, fx.Node):
                self.nodes_of.setdefault(held, []).append(node)
        for value, found in self.nodes_of.items():
            for node in found:
                if node.graph is forward.graph:
                    self.value_of[node] = value
        # Placeholders whose tensors the forward pass writes to: `copy_` is its last word on them.
        self.changed = {
            it.args[0]
            for it in forward.graph.nodes
            if str(it.target) == "aten.copy_.default" and it.args[0].op == "placeholder"
        }
        self.late = _after_output_gradients(backward)

    def once(self) -> frozenset[int]:
        """Kernels of the forward pass that may not run twice."""
        found = set()
        for at, each in enumerate(self.step.watch.steps[: self.step.boundary]):
            nodes = [it for value in each.makes for it in self.nodes_of.get(value, ())[:1]]
            if not all(copyable(it, self.changed) for node in nodes for it in self._made_of(node)):
                found.add(at)
        return frozenset(found)

    def called(self) -> set[fx.Node]:
        """Nodes that are ops of torch when they run, fused with nothing.

        Of the backward graph those that need a gradient: others may run in the forward pass, where
        another partition is torch's.
        """
        found: set[fx.Node] = set()
        for each in self.step.watch.steps:
            if each.call is not None:
                found.update(it for made in each.makes for it in self.nodes_of.get(made, ()))
        # Of several results each is a node.
        found |= {it.all_input_nodes[0] for it in found if it.target is operator.getitem}
        return {it for it in found if it.graph is self.forward.graph or it in self.late}

    def _made_of(self, node: fx.Node) -> Iterator[fx.Node]:
        """A node and all that is computed with it: down to values in buffers."""
        seen, rest = {node}, [node]
        while rest:
            each = rest.pop()
            yield each
            for used in each.all_input_nodes:
                inside = used.op != "placeholder" and used not in self.value_of
                if (inside or used in self.changed) and used not in seen:
                    seen.add(used)
                    rest.append(used)

    def written(self, graph: KernelGraph, plan: Plan, setting: tuple[float, str] | None) -> Program:
        """Return the program of a plan of the graph; `setting` is what the partition is torch's by.

        Raises ReplayError where a node would be computed twice that may not be.
        """
        writer = _Writer(self)
        writer.carry_out(graph, plan)
        return writer.program(setting)


class _Writer:
    def __init__(self, fused: Fused) -> None:
        self.fused = fused
        self.lines: list[tuple[str, str, tuple[tuple[str, int], ...]]] = []
        self.saved: dict[fx.Node, int] = {}
        self.given: dict[str, int] = {}
        # Lines of values that were made again and are there now; of the backward graph's own.
        self.again: dict[fx.Node, int] = {}
        self.own: dict[fx.Node, int] = {}
        self.kept: set[int] = set()
        # Of one kernel: what is computed inside it.
        self.inside: dict[fx.Node, int] = {}
        self.replaced = dict(zip(fused.placeholders, fused.saved, strict=False))

    def carry_out(self, graph: KernelGraph, plan: Plan) -> None:
        fused, step = self.fused, self.fused.step
        actions = [(it.kind, it.target) for it in plan.actions]
        boundary = actions.index(("run", LOSS))
        for kind, target in actions[:boundary]:
            if kind == "run":
                self.kept.update(step.watch.steps[graph.step_of[target]].makes)
            else:
                self.kept.difference_update(graph.values_of[target])
        for kind, target in actions[boundary + 1 :]:
            if kind == "free":
                for value in graph.values_of[target]:
                    for node in fused.nodes_of.get(value, ()):
                        self.again.pop(node, None)
                continue
            at = graph.step_of[target]
            self.inside = {}
            for value in step.watch.steps[at].makes:
                for node in fused.nodes_of.get(value, ())[:1]:
                    if at < step.boundary:
                        self.again[node] = self.forward(node, anew=True)
                    else:
                        # What torch's budget makes again lies in a buffer, too: it is made once.
                        self.own[node] = self.backward(node)

    def program(self, setting: tuple[float, str] | None) -> Program:
        fused = self.fused
        self.inside = {}
        results = tuple(
            self.backward(it) if isinstance(it, fx.Node) else None
            for it in results_of(fused.backward)
        )
        # Placeholders come first: what is handed over, then what the caller gives.
        rest = [it for it in fused.placeholders[len(fused.saved) :] if it.name not in self.given]
        for node in rest:
            self.backward(node)
        late = [it for it in self.saved if it.meta.get("saved_tensor_with_no_vc_check")]
        order = [*(it for it in self.saved if it not in late), *late]
        given = [it.name for it in fused.placeholders[len(fused.saved) :]]
        first = [self.saved[it] for it in order] + [self.given[it] for it in given]
        moved = {line: place for place, line in enumerate(first)}
        for line in range(len(self.lines)):
            moved.setdefault(line, len(moved))
        ordered = sorted(range(len(self.lines)), key=moved.__getitem__)
        lines = tuple(
            (kind, name, tuple((used, moved[line]) for used, line in uses))
            for kind, name, uses in (self.lines[it] for it in ordered)
        )
        return Program(
            ground_of(fused.forward, fused.backward),
            setting,
            tuple(it.name for it in order),
            lines,
            tuple(None if it is None else moved[it] for it in results),
        )

    def line(self, kind: str, node: fx.Node, uses: dict[str, int]) -> int:
        self.lines.append((kind, node.name, tuple(uses.items())))
        return len(self.lines) - 1

    def forward(self, node: fx.Node, *, anew: bool = False) -> int:
        """Return the line that stands for a node of the forward graph."""
        # A kernel may lay an input out anew; Inductor does so again where it is needed.
        if not anew or node.op == "placeholder":
            if node in self.again:
                return self.again[node]
            if node in self.saved:
                return self.saved[node]
            if node in self.fused.changed and node not in self.fused.saved:
                raise ReplayError(f"{node.name} is changed by the forward pass.")
            if node.op == "placeholder" or self.fused.value_of.get(node) in self.kept:
                self.saved[node] = self.line(SAVED, node, {})
                return self.saved[node]
        if node in self.inside:
            return self.inside[node]
        if not copyable(node, self.fused.changed):
            raise ReplayError(f"{node.name} may not be computed twice.")
        uses = {it.name: self.forward(it) for it in node.all_input_nodes}
        self.inside[node] = self.line(FORWARD, node, uses)
        return self.inside[node]

    def backward(self, node: fx.Node) -> int:
        """Return the line that stands for a node of the backward graph."""
        if node in self.own:
            return self.own[node]
        if node in self.replaced:
            return self.forward(self.replaced[node])
        if node.op == "placeholder":
            self.given[node.name] = self.own[node] = self.line(GIVEN, node, {})
            return self.own[node]
        if node in self.inside:
            return self.inside[node]
        uses = {it.name: self.backward(it) for it in node.all_input_nodes}
        made = self.line(BACKWARD, node, uses)
        # What is made of handed-over values alone, in no buffer, is computed where it is used.
        (self.own if node in self.fused.late else self.inside)[node] = made
        return made


def _after_output_gradients(backward: fx.GraphModule) -> set[fx.Node]:
    late: set[fx.Node] = set()
    for node in backward.graph.nodes:
        if node.op == "placeholder":
            if "tangents" in node.name:
                late.add(node)
        elif late & set(node.all_input_nodes):
            late.add(node)
    return late
