"""What kind of layer an op is, for policies that were written for layers.

SuperNeurons and vDNN name layer types. A graph from elsewhere may use other words, or none, so a
kind is recognised by its words first and by its arithmetic per byte otherwise.
"""

from __future__ import annotations

import re
from typing import Final

from ...graph.graph import Graph

# Kinds as frameworks and papers write them: conv2d, aten.convolution, Conv2D, addmm, MatMul, FC ...
_CONV: Final = re.compile(r"conv")
_HEAVY: Final = re.compile(
    r"conv|linear|dense|matmul|einsum|\bfc\b|\bdot|\b(add|ba)?b?mm\b|attention"
)
_JOIN: Final = re.compile(r"join|concat|\bcat\b|fork|\bstack\b")
_SUM: Final = re.compile(r"\badd(v2|n|_)?\b")
# Above this a kernel is bound by arithmetic on any machine of the last decade: matrix products and
# convolutions of useful size pass it, elementwise ops and normalisations stay below.
_DENSE_FLOPS_PER_BYTE: Final = 10.0


def is_conv(graph: Graph, op: int) -> bool:
    """Whether the op convolves; without a kind, whether arithmetic bounds it."""
    kind = graph.ops[op].kind.lower()
    return bool(_CONV.search(kind)) if kind else _dense(graph, op)


def is_checkpoint(graph: Graph, op: int) -> bool:
    """Whether the op is of the types SuperNeurons keeps: CONV, FC, JOIN, FORK, CONCAT.

    A sum of two activations is a join; the sum of one and a parameter is not.
    """
    kind = graph.ops[op].kind.lower().replace("_", " ").replace(".", " ")
    if not kind:
        return _dense(graph, op)
    if _HEAVY.search(kind) or _JOIN.search(kind):
        return True
    arrays = graph.arrays
    made = sum(not arrays.resident[storage] for storage in arrays.reads[op])
    return bool(_SUM.search(kind)) and made >= 2


def _dense(graph: Graph, op: int) -> bool:
    record, arrays = graph.ops[op], graph.arrays
    moved = record.traffic_bytes
    if moved is None:
        moved = int(sum(arrays.bytes[s] for s in (*arrays.reads[op], *arrays.outputs[op])))
    return record.flops > _DENSE_FLOPS_PER_BYTE * max(moved, 1)
