"""What no partition of a compiled step holds less than, however it is fused, ordered or run again.

When a step ends, its results are all there. And matrix products, convolutions and attention are
kernels of their own in every partition: while one runs, its operands and its result are in
buffers, beside what is resident and the results that it is computed from, which nothing makes
twice. The largest of these sums is the floor.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from torch import fx

from .partitioner import Partition, results_of

# The tensors among an op's first arguments that it reads from memory, and that Inductor fuses with
# nothing. What is added to a product may be the buffer of its result, so it is not counted.
_OPERANDS = {
    "mm": (0, 1),
    "bmm": (0, 1),
    "addmm": (1, 2),
    "baddbmm": (1, 2),
    "convolution": (0, 1),
    "convolution_backward": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu": (0, 1, 2),
    "_scaled_dot_product_flash_attention_for_cpu_backward": (0, 1, 2, 3, 4),
}
# Inductor takes out those of these that change no number: the result is then the operand's buffer.
_MAY_BE_NOTHING = frozenset(
    ("_to_copy", "_unsafe_view", "add", "cat", "ceil", "clone", "constant_pad_nd", "copy", "div")
    + ("convert_element_type", "device_put", "floor", "lift_fresh", "mul", "pow", "repeat", "round")
    + ("slice_scatter", "sub", "trunc")
)


class _Held:
    """Buffers that are there at one moment; several tensors in one buffer count as the largest."""

    def __init__(self, passed: dict[fx.Node, fx.Node]) -> None:
        self.passed = passed
        self.sizes: dict[fx.Node, int] = {}

    def copy(self) -> _Held:
        made = _Held(self.passed)
        made.sizes = dict(self.sizes)
        return made

    def add(self, node: Any) -> None:
        """Add what a node returns, a tensor or several."""
        if not isinstance(node, fx.Node):
            return
        val = node.meta.get("val")
        if isinstance(val, (tuple, list)):
            for it in node.users:
                if it.target is operator.getitem:
                    self.add(it)
        elif isinstance(val, torch.Tensor):
            root = _root(node, self.passed)
            self.sizes[root] = max(self.sizes.get(root, 0), _own_bytes(val))

    def bytes(self, resident: set[fx.Node]) -> int:
        return sum(size for node, size in self.sizes.items() if node not in resident)


def floor_bytes(partition: Partition, base_bytes: int) -> tuple[int, str]:
    """Return bytes that every partition of a step holds at some moment, and when that is.

    Parameters
    ----------
    partition
        One of them. What its forward graph returns to the caller, and the gradients that the
        caller gives for that, are held until the step ends.
    base_bytes
        What is resident: parameters, buffers, inputs.

    Returns
    -------
    The bytes, and the name of the node that runs then; empty: the step ends.
    """
    forward, backward = partition.forward, partition.backward
    handed = results_of(forward)[partition.outputs :]
    placeholders = list(backward.graph.find_nodes(op="placeholder"))
    passed = dict(zip(placeholders, handed, strict=False))
    resident = set(forward.graph.find_nodes(op="placeholder"))
    best, what = 0, ""
    always = _Held(passed)
    for module, results in ((forward, partition.results()), (backward, results_of(backward))):
        # Of the backward graph what needs a gradient: the rest may run in the forward pass, where
        # another partition is torch's.
        late = set(placeholders[len(handed) :]) if module is backward else None
        for given in late or ():
            always.add(given)
        for node, needed in _needed_results(module, results):
            if late is not None and late.intersection(node.all_input_nodes):
                late.add(node)
            if not _is_own_kernel(node) or (late is not None and node not in late):
                continue
            held = always.copy()
            for it in (*needed, *(node.args[at] for at in _OPERANDS[_name(node)]), node):
                held.add(it)
            if held.bytes(resident) > best:
                best, what = held.bytes(resident), node.name
        for it in results:
            always.add(it)
        if always.bytes(resident) > best:
            best, what = always.bytes(resident), ""
    return base_bytes + best, what


def _is_own_kernel(node: fx.Node) -> bool:
    """Whether a node runs as a kernel that Inductor fuses with nothing."""
    places = _OPERANDS.get(_name(node))
    if places is None:
        return False
    # A product with a row or a column of one element may be a sum inside a fused kernel.
    operands = [node.args[at] for at in places]
    return not _name(node).endswith("mm") or all(
        1 not in it.meta["val"].shape[-2:] for it in operands if isinstance(it, fx.Node)
    )


def _needed_results(
    module: fx.GraphModule, results: Sequence[Any]
) -> Iterable[tuple[fx.Node, list[fx.Node]]]:
    """Yield each node with those results that it is computed from."""
    wanted = {it for it in results if isinstance(it, fx.Node)}
    below: dict[fx.Node, frozenset[fx.Node]] = {}
    for node in module.graph.nodes:
        found: set[fx.Node] = set()
        for it in node.all_input_nodes:
            found |= below[it]
            if it in wanted:
                found.add(it)
        below[node] = frozenset(found)
        yield node, list(found)


def _root(node: fx.Node, passed: dict[fx.Node, fx.Node]) -> fx.Node:
    """Return the node whose buffer a node's tensor may lie in."""
    while True:
        if node in passed and isinstance(passed[node], fx.Node):
            node = passed[node]
        elif _is_other_look(node):
            node = node.all_input_nodes[0]
        else:
            return node


def _is_other_look(node: fx.Node) -> bool:
    if len(node.all_input_nodes) != 1:
        return False
    if node.target is operator.getitem:
        return _is_other_look(node.all_input_nodes[0])
    if _name(node) in _MAY_BE_NOTHING:
        made, given = (it.meta["val"] for it in (node, node.all_input_nodes[0]))
        return made.numel() == given.numel() and made.dtype == given.dtype
    schema = getattr(node.target, "_schema", None)
    return schema is not None and any(it.alias_info is not None for it in schema.returns)


def _name(node: fx.Node) -> str:
    packet = getattr(node.target, "overloadpacket", None)
    return "" if packet is None else str(packet.__name__)


def _own_bytes(val: torch.Tensor) -> int:
    """Bytes of a tensor's elements, each place once."""
    count = 1
    for size, stride in zip(val.size(), val.stride(), strict=True):
        count *= int(size) if stride else 1
    return min(count * val.element_size(), val.untyped_storage().nbytes()) if val.numel() else 0
