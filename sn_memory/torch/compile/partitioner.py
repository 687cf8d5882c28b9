"""torch's own partitions of a joint graph, one for each setting of its memory budget.

`activation_memory_budget` caps what is saved between the passes, as a share of what torch saves by
default, and a knapsack solver chooses what is saved within it. torch recomputes the rest in the
backward pass, random numbers included, which then differ from those of the forward pass (pytorch
issue 190758). So each node that draws random numbers is marked MUST_SAVE before torch partitions
the graph, and a budget of 0, which ignores these marks, is never used.
"""

from __future__ import annotations

import copy
import hashlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import fx
from torch._functorch import config as functorch_config
from torch._functorch.partitioners import min_cut_rematerialization_partition
from torch.utils.checkpoint import CheckpointPolicy

from .backend import Setting

with warnings.catch_warnings():
    # torch's own modules import names that torch has deprecated.
    warnings.simplefilter("ignore", DeprecationWarning)
    from torch._inductor.compile_fx import compile_fx
    from torch._inductor.custom_graph_pass import CustomPartitionerFn

# What a torch.compile back end returns: called with the inputs, it returns a list of outputs.
Run = Callable[..., Any]

# `ilp` is often the best (benchmarks/compiled_peaks.py).
SOLVERS = ("ilp", "dp", "greedy")


@dataclass(frozen=True)
class Partition:
    """The two graphs that a joint graph is partitioned into.

    forward, backward : the graphs
    outputs : how many results of the forward graph go to the caller; the others are saved
    """

    forward: fx.GraphModule
    backward: fx.GraphModule
    outputs: int

    def saved(self) -> dict[str, int]:
        """Return names and bytes of values saved for the backward pass, without the inputs."""
        values = {
            node.name: node.meta["val"]
            for node in results_of(self.forward)[self.outputs :]
            if node.op != "placeholder" and isinstance(node.meta.get("val"), torch.Tensor)
        }
        # Not `nbytes`: the size of a generator's state, saved for recomputed ops, is symbolic.
        return {name: int(value.numel()) * value.itemsize for name, value in values.items()}


class BudgetPartitioner(CustomPartitionerFn):
    """Partitions a joint graph by a setting. torch's caches hash it by `uuid`."""

    def __init__(self, setting: Setting) -> None:
        self.setting = setting

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph."""
        return partitioned(gm, joint_inputs, options, self.setting)

    def uuid(self) -> str:
        """Return a hash of the setting and of this package's code."""
        return hashlib.sha256(f"{self.setting} {version()}".encode()).hexdigest()


class JointRecorder(CustomPartitionerFn):
    """Partitions a joint graph as torch does by default, and keeps the graph.

    plain : torch's own partition; None until torch.compile has called this
    """

    def __init__(self) -> None:
        self.plain: Partition | None = None

    def __call__(
        self, gm: fx.GraphModule, joint_inputs: Sequence[object], **options: Any
    ) -> tuple[fx.GraphModule, fx.GraphModule]:
        """Return the forward and the backward graph."""
        self._joint, self._inputs, self._options = copied(gm), joint_inputs, options
        forward, backward = partitioned(gm, joint_inputs, options, None)
        self.plain = Partition(copied(forward), copied(backward), options["num_fwd_outputs"])
        return forward, backward

    def __deepcopy__(self, _: Any) -> JointRecorder:
        # Inductor copies its configuration, which contains this object.
        return self

    def uuid(self) -> None:
        """Return None, which disables torch's caches: with a hit no joint graph is passed here."""

    def dtypes(self) -> set[torch.dtype]:
        """Return the dtypes of all values of the joint graph."""
        values = (node.meta.get("val") for node in self._joint.graph.nodes)
        return {value.dtype for value in values if isinstance(value, torch.Tensor)}

    def partition(self, setting: Setting) -> Partition:
        """Return the partition of another setting."""
        parts = partitioned(copied(self._joint), self._inputs, self._options, setting)
        return Partition(*parts, self._options["num_fwd_outputs"])


def partitioned(
    joint: fx.GraphModule, inputs: Any, fields: dict[str, Any], setting: Setting | None
) -> tuple[fx.GraphModule, fx.GraphModule]:
    """Return torch's partition, with a memory budget if a setting is given."""
    if setting is None:
        return min_cut_rematerialization_partition(joint, inputs, **fields)
    if not 0 < setting.share < 1:
        raise ValueError(f"got a budget of {setting.share}, expected one between 0 and 1.")
    mark_unrepeatable(joint)
    with functorch_config.patch(
        activation_memory_budget=setting.share,
        activation_memory_budget_solver=setting.solver,
    ):
        return min_cut_rematerialization_partition(joint, inputs, **fields)


def compile_step(
    module: fx.GraphModule,
    inputs: list[Any],
    partitioner: CustomPartitionerFn | None,
    *,
    separately: bool = True,
) -> Run:
    """Compile a traced model.

    separately : in a separate tracing context, to be run and measured. Otherwise Inductor's
        assertions are omitted, 190 calls in a U-Net's step: sizes and strides were checked when it
        was measured, and do not change from step to step.
    """
    patches: dict[str, Any] = {} if partitioner is None else {"custom_partitioner_fn": partitioner}
    if partitioner is not None and not separately:
        patches |= {"size_asserts": False, "alignment_asserts": False}
    context = torch._guards.TracingContext.get()
    # The backward graph is compiled now as well, so that failures occur during planning.
    settings = {"force_non_lazy_backward_lowering": True}
    if isinstance(partitioner, JointRecorder):
        # Cached graphs are not partitioned again, and the recorder would see no joint graph.
        settings["enable_autograd_cache"] = False
    with functorch_config.patch(**settings):
        if not separately:
            return compile_fx(module, inputs, config_patches=patches)  # type: ignore[arg-type]
        with torch._guards.tracing(copy.copy(context)):
            return compile_fx(copied(module), inputs, config_patches=patches)  # type: ignore[arg-type]


def mark_unrepeatable(joint: fx.GraphModule) -> None:
    """Mark nodes MUST_SAVE that would compute something else if they were recomputed.

    They draw random numbers, or read an input that the forward pass overwrites. With Inductor's own
    random numbers only seeds are drawn; numbers computed from a seed are reproducible.
    """
    write = torch.ops.aten.copy_.default
    writes = list(joint.graph.find_nodes(op="call_function", target=write))
    written = {write.args[0] for write in writes}
    for node in joint.graph.nodes:
        if node.op != "call_function" or node in writes:
            continue
        draws = isinstance(node.target, torch._ops.OpOverload) and (
            torch.Tag.nondeterministic_seeded in node.target.tags
        )
        if draws or written.intersection(node.all_input_nodes):
            node.meta["recompute"] = CheckpointPolicy.MUST_SAVE


def copied(module: fx.GraphModule) -> fx.GraphModule:
    """Return a copy of a graph that shares its fake tensors, whose storages identify aliases."""
    graph = fx.Graph()
    copies: dict[fx.Node, fx.Node] = {}
    for node in module.graph.nodes:
        copy = copies[node] = graph.node_copy(node, copies.__getitem__)
        copy.meta = dict(node.meta)
        if hasattr(node, "_dynamo_source"):
            copy._dynamo_source = node._dynamo_source  # type: ignore[attr-defined]
    result = fx.GraphModule(module, graph)
    result.meta = dict(module.meta)
    # AOTAutograd uses these to tell parameters from inputs, which partitions depend on.
    if hasattr(module, "_param_name_to_source"):
        result._param_name_to_source = module._param_name_to_source
    return result


def results_of(module: fx.GraphModule) -> list[Any]:
    """Return the results of a graph."""
    return list(module.graph.output_node().args[0])  # type: ignore[arg-type]


def version() -> str:
    """Return a hash of this package's code, which affects what is compiled."""
    files = sorted(Path(__file__).parent.glob("*.py"))
    return hashlib.sha256(b"".join(file.read_bytes() for file in files)).hexdigest()
