"""The joint graph of torch.compile as the calls of a training step, so that it is planned as one.

torch's own hook for budgets, CustomKnapsackSolver, is given a list of values and may say which are
saved: not when they are rebuilt, nor what is live meanwhile, so no plan goes through it. The
partition function sees the whole joint graph. Here that graph becomes what `capture` would have
made of it; partition.py writes the plan back.
"""

from __future__ import annotations

import operator
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import fx
from torch.utils._pytree import tree_flatten, tree_leaves
from torch.utils.checkpoint import CheckpointPolicy

from ..errors import TraceError
from ..trace.record import Call, Captured, Recording, View, form_of, is_view, written


@dataclass(frozen=True)
class Joint:
    """A joint graph and the calls it makes.

    Parameters
    ----------
    captured
        The calls; functional, so hardly any writes in place.
    module
        The joint graph.
    nodes
        Per call, its node.
    storages
        Per node that is a tensor, its storage.
    outputs, gradients
        What the forward and the backward graph return: nodes and plain values.
    descriptions
        What torch says of each of those, forward and backward.
    """

    captured: Captured
    module: fx.GraphModule
    nodes: tuple[fx.Node, ...]
    storages: dict[fx.Node, int]
    outputs: tuple[Any, ...]
    gradients: tuple[Any, ...]
    descriptions: tuple[list[Any], list[Any]]

    @cached_property
    def parts(self) -> dict[fx.Node, list[fx.Node]]:
        """Per call that returns several tensors, the nodes that take one of them."""
        found: dict[fx.Node, list[fx.Node]] = {}
        for node in self.storages:
            if node.target is operator.getitem:
                found.setdefault(node.all_input_nodes[0], []).append(node)
        return found

    @cached_property
    def bases(self) -> dict[int, list[fx.Node]]:
        """Per storage, the nodes that first hold it: placeholders, or results of one call."""
        found = {self.storages[it]: [it] for it in (*self.primals, *self.output_gradients)}
        for node, call in zip(self.nodes, self.captured.recording.calls, strict=True):
            for result in (node, *self.parts.get(node, ())):
                storage = self.storages.get(result)
                if storage in call.makes:
                    found.setdefault(storage, []).append(result)
        return found

    @property
    def primals(self) -> list[fx.Node]:
        """Placeholders of the forward graph."""
        return [it for it in _placeholders(self.module) if not _is_output_gradient(it)]

    @property
    def output_gradients(self) -> list[fx.Node]:
        """Placeholders for the gradients of what the forward graph returns."""
        return [it for it in _placeholders(self.module) if _is_output_gradient(it)]


def joint_of(module: fx.GraphModule, num_forward_outputs: int, static: list[int]) -> Joint:
    """Read a joint graph.

    Parameters
    ----------
    module
        As AOTAutograd hands it to a partition function.
    num_forward_outputs
        How many of what it returns belong to the forward graph.
    static
        Which placeholders are parameters and buffers.

    Raises
    ------
    TraceError
        For symbolic shapes, and for what is no call of a kernel (control flow, subgraphs).
    """
    reader = _Reader()
    primals = [it for it in _placeholders(module) if not _is_output_gradient(it)]
    for place, node in enumerate(primals):
        if not isinstance(node.meta.get("val"), torch.Tensor):
            raise TraceError(
                f"torch.compile hands {node.name} in as a number that may change; a plan is for "
                "fixed shapes. Compile without dynamic shapes, or plan with backend='graph'."
            )
        reader.give(node, "parameter" if place in static else "input")
    end = next(iter(module.graph.find_nodes(op="output")))
    results = tree_leaves(end.args)
    told = tree_leaves(end.meta.get("desc", [None] * len(results)), is_leaf=lambda it: it is None)
    outputs, gradients = results[:num_forward_outputs], results[num_forward_outputs:]
    for node in module.graph.nodes:
        if node.op == "placeholder":
            reader.meet(node)
        elif node.op == "get_attr":
            reader.give(node, "constant")
    forward, backward = _halves(module)
    for node in forward:
        reader.read(node, "forward")
    boundary = len(reader.calls)
    for node in backward:
        reader.read(node, "backward")
    view = reader.view
    # Parameters first: the device of the first is the one that is planned for.
    ordered = sorted(range(len(primals)), key=lambda it: it not in static)
    captured = Captured(
        recording=reader.recording,
        boundary=boundary,
        parameters=tuple((primals[it].name, view(primals[it])) for it in ordered),
        buffers=(),
        inputs=(),
        outputs=tuple(view(it) if it in reader.storages else it for it in outputs),
        output_form=None,
        differentiable=(),
        output_gradients=tuple(view(it) for it in _placeholders(module) if _is_output_gradient(it)),
        gradients=tuple((it.name, view(it)) for it in gradients if isinstance(it, fx.Node)),
    )
    return Joint(
        captured,
        module,
        tuple(reader.nodes),
        reader.storages,
        tuple(outputs),
        tuple(gradients),
        (told[:num_forward_outputs], told[num_forward_outputs:]),
    )


def _halves(module: fx.GraphModule) -> tuple[list[fx.Node], list[fx.Node]]:
    """Return the calls up to the first that needs an output's gradient, and the rest.

    What the model writes to its buffers and inputs stands at the end of a joint graph. It belongs
    to the forward pass: the backward pass may never come, or not before another forward pass.
    """
    late: set[fx.Node] = {it for it in _placeholders(module) if _is_output_gradient(it)}
    forward: list[fx.Node] = []
    rest: list[fx.Node] = []
    for node in module.graph.nodes:
        if node.op == "call_function":
            if late & set(node.all_input_nodes):
                late.add(node)
                rest.append(node)
            else:
                (rest if rest else forward).append(node)
    early = {it for it in rest if it not in late and _writes_in_forward(it)}
    for node in reversed(rest):
        if node in early:
            early |= set(node.all_input_nodes)
    forward += [it for it in rest if it in early]
    return forward, [it for it in rest if it not in early]


def _writes_in_forward(node: fx.Node) -> bool:
    return (
        isinstance(node.target, torch._ops.OpOverload)
        and node.target._schema.is_mutable
        and node.meta.get("partitioner_tag") != "must_be_in_backward"
    )


def copy_statistics(module: fx.GraphModule) -> None:
    """Let batch norm read copies of its running statistics, which the forward pass overwrites.

    What reads a tensor that was overwritten cannot be run again; its statistics are small.
    """
    graph = module.graph
    write = torch.ops.aten.copy_.default
    written = {it.args[0] for it in graph.find_nodes(op="call_function", target=write)}
    copies: dict[fx.Node, fx.Node] = {}
    functional = torch.ops.aten._native_batch_norm_legit_functional.default
    for node in graph.find_nodes(op="call_function", target=functional):
        for statistic in (it for it in node.args[3:5] if it in written):
            if statistic not in copies:
                value = statistic.meta["val"]
                with graph.inserting_before(node), value.fake_mode:
                    copy = graph.call_function(torch.ops.aten.clone.default, (statistic,))
                    copy.meta |= {"val": value.clone(), "recompute": CheckpointPolicy.MUST_SAVE}
                copies[statistic] = copy
            node.replace_input_with(statistic, copies[statistic])


@dataclass
class _Reader:
    """Gives numbers to storages and makes calls of nodes, in order."""

    recording: Recording = field(default_factory=Recording)
    nodes: list[fx.Node] = field(default_factory=list)
    storages: dict[fx.Node, int] = field(default_factory=dict)
    # By address; the graph keeps its fake tensors, so no address is used twice.
    numbers: dict[int, int] = field(default_factory=dict)

    @property
    def calls(self) -> list[Call]:
        return self.recording.calls

    def give(self, node: fx.Node, role: str) -> None:
        """Note a node that is there before the first call."""
        if self.meet(node):
            self.recording.given.setdefault(self.storages[node], role)
            if role == "constant":
                self.recording.constants.setdefault(self.storages[node], node.meta["val"])

    def meet(self, node: fx.Node) -> bool:
        """Give a number to the storage of a node; says whether it has one."""
        value = node.meta.get("val")
        if not isinstance(value, torch.Tensor):
            return False
        self.storages[node] = self.number(value)
        return True

    def number(self, value: torch.Tensor) -> int:
        key = value.untyped_storage()._cdata
        if key not in self.numbers:
            self.numbers[key] = len(self.numbers)
            size = value.untyped_storage().nbytes()
            if not isinstance(size, int):
                raise TraceError(
                    f"a tensor of shape {tuple(value.shape)} has a symbolic size; a plan is for "
                    "one size. Plan with backend='graph', or compile without dynamic=True."
                )
            self.recording.nbytes.append(size)
            self.recording.device.append(value.device)
        return self.numbers[key]

    def view(self, node: fx.Node) -> View:
        return form_of(node.meta["val"], self.storages[node])

    def read(self, node: fx.Node, phase: str) -> None:
        """Make a call of a node, unless it only looks at what is there."""
        if node.target is operator.getitem:
            self.meet(node)
            return
        if not isinstance(node.target, torch._ops.OpOverload):
            raise TraceError(
                f"torch.compile makes a call of {node.target} ({node.name}), which is no kernel, "
                "so its memory cannot be planned. Plan with backend='graph' or 'modules'."
            )
        known = len(self.recording.nbytes)
        outputs = tuple(
            form_of(it, self.number(it)) if isinstance(it, torch.Tensor) else None
            for it in tree_flatten(node.meta.get("val"))[0]
        )
        self.meet(node)
        flat, spec = tree_flatten((node.args, node.kwargs))
        views = tuple(
            self.view(it)
            if it in self.storages
            else it.meta.get("val", it.name)
            if isinstance(it, fx.Node)
            else it
            for it in flat
        )
        makes = tuple(range(known, len(self.recording.nbytes)))
        writes = written(node.target, views, spec)
        random = torch.Tag.nondeterministic_seeded in node.target.tags
        if not makes and not writes and not random and is_view(views, outputs):
            return
        random = random or node.meta.get("recompute") is CheckpointPolicy.MUST_SAVE
        self.calls.append(
            Call(node.target, views, spec, outputs, makes, writes, phase, random, node.name)
        )
        self.nodes.append(node)


def _placeholders(module: fx.GraphModule) -> list[fx.Node]:
    return list(module.graph.find_nodes(op="placeholder"))


def _is_output_gradient(node: fx.Node) -> bool:
    return "tangents" in str(node.target)
