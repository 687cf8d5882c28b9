"""The peak of a step with compressed activations, before it runs; and beside what is measured.

The step is traced as it is compressed, and its peak counted by the lifetimes of what its ops make,
in the order of the trace. TensorFlow need not run it in that order. But compressing waits for
nothing, decompressing for the gradient that it serves, and the gradient of a layer's input for
those of its weights: what else may change places is small.
"""

from __future__ import annotations

from collections import Counter
from contextlib import AbstractContextManager
from dataclasses import replace
from typing import Any, Protocol

import tensorflow as tf

from ...activations import Peaks
from ...cost.devices import NOMINAL
from ...graph.graph import Graph
from ...graph.liveness import peak
from ..compress.kept import all_counted
from ..eager import asked
from ..model import call_arguments, model_step, put_back, variables_of
from ..trace import kernels
from ..trace.capture import Captured, capture_model
from ..trace.op_seconds import unmeasured
from ..trace.to_graph import to_graph

_RUNS = 3


class Compressing(Protocol):
    """What is asked of CompressedActivations."""

    model: Any

    def sizes_known(self) -> AbstractContextManager[None]: ...

    def paused(self) -> AbstractContextManager[None]: ...


def predicted_peak(compressed: Compressing, sample: Any) -> int:
    """Return the peak of a step on a sample; nothing is allocated."""
    return peak(_graph(compressed, sample)).bytes


def peaks(compressed: Compressing, sample: Any) -> Peaks:
    """Run a step with and without compression, after it was predicted."""
    graph = _graph(compressed, sample)
    args = tf.nest.map_structure(
        tf.convert_to_tensor, sample if isinstance(sample, tuple) else (sample,)
    )

    def measured() -> list[int]:
        variables = variables_of(compressed.model)
        step = model_step(compressed.model)
        with put_back(variables):
            step(*args)  # it is traced, and kernels get ready
            found = [asked(lambda: step(*args), variables).peak_bytes for _ in range(_RUNS)]
        return [graph.base_bytes + it for it in found]

    with compressed.paused():
        plain = measured()
    with all_counted():
        ours = measured()
    # Ops change places from run to run: what is said to be saved is the least.
    return Peaks(min(plain), peak(graph).bytes, max(ours), graph.base_bytes)


def _graph(compressed: Compressing, sample: Any) -> Graph:
    with compressed.sizes_known():
        captured, _ = capture_model(compressed.model, call_arguments(sample))
    named = to_graph(
        _constants_pushed_down(captured),
        name=compressed.model.name,
        device=NOMINAL,
        costs=unmeasured,
        allocator="tensorflow",
    )
    return named.graph


def _constants_pushed_down(captured: Captured) -> Captured:
    """Return a step in which c * (x * y) is x * (c * y), as TensorFlow's own rewriting has it.

    The product with y is made where y is, in the forward pass if y is of it, and held. So it goes
    with the softmax of attention, whose gradient ends with a product with the scale.
    """
    nodes, producer = list(captured.nodes), captured.producer
    reads = Counter(value for node in nodes for value in node.inputs)
    place = {at: (at, 0) for at in range(len(nodes))}
    for at, node in enumerate(nodes):
        if node.op.type != "Mul":
            continue
        known = [kernels.constant(captured.tensors[it]) is not None for it in node.inputs]
        if sum(known) != 1:
            continue
        product, c = node.inputs if known[1] else reversed(node.inputs)
        inner_at = producer.get(product, at)
        inner = nodes[inner_at]
        if inner.op.type != "Mul" or reads[product] > 1 or product in captured.outputs:
            continue
        x, y = inner.inputs
        shapes = {tuple(captured.tensors[it].shape.as_list()) for it in (x, y, product)}
        if len(shapes) == 1:
            nodes[inner_at] = replace(inner, inputs=(c, y))
            nodes[at] = replace(node, inputs=(product, x))
            place[inner_at] = (producer.get(y, -1), 1)
    return replace(captured, nodes=[nodes[at] for at in sorted(place, key=lambda it: place[it])])
