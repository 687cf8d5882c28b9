"""Where in a model an op is: the path of its module, as names in the graph tell it."""

from __future__ import annotations

from typing import Final

from .graph import Graph

# What stands before the last slash where no module is named.
_NONE: Final = ("", "forward", "backward")


def module_of(graph: Graph, op: str) -> str:
    """Return the path of the module that an op, by name, belongs to; empty where nothing tells.

    Ops of the forward pass have it in their names (`layer1.0.conv1/convolution#3`), as TensorFlow's
    gradients have. An op of torch's backward pass belongs to the module whose parameter it reads,
    or else to that which made, last of all it reads, something in the forward pass.
    """
    if op not in graph.op_index:
        return ""
    path = _path(op)
    at = graph.op_index[op]
    if path or graph.ops[at].phase == "forward":
        return path
    reads, arrays = graph.arrays.reads[at], graph.arrays
    for storage in reads:
        record = graph.storages[storage]
        if record.role == "parameter" and "." in record.name:
            return record.name.rpartition(".")[0]
    makers = sorted((int(arrays.producer[it]) for it in reads), reverse=True)
    forward = [graph.ops[it].name for it in makers if it >= 0 and graph.ops[it].phase == "forward"]
    return next((found for name in forward if (found := _path(name))), "")


def _path(name: str) -> str:
    head = name.removeprefix("gradient_tape/").rpartition("/")[0]
    return "" if head in _NONE else head
