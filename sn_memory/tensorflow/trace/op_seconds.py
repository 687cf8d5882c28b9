"""Seconds and workspace of each op: measured once per signature, kept in a file.

Each op is run alone, eagerly, on random values of its shapes. The allocator's trace shows what it
allocates in addition to its results: reordered operands, transposed copies, indices of maxima. Ops
that cannot run like this (loops, ops that change something) are estimated by the roofline, without
workspace.
"""

from __future__ import annotations

import logging
import math
import os
import time
from collections.abc import Callable, Iterable, Mapping
from contextlib import nullcontext
from functools import partial
from typing import Any

import tensorflow as tf
from tensorflow.python.eager import context, execute
from tensorflow.python.framework import config

from ...cost.op_times import OpTimes, is_seconds, plain_name, quickest, while_time_lasts
from ...graph.graph import Graph
from ...graph.records import Device
from ..memory import MARK, Allocations, has_statistics
from ..model import wait_for
from . import kernels
from .capture import Node

log = logging.getLogger(__name__)

Cost = tuple[float | None, int]


class MeasuredCosts(OpTimes):
    """Seconds and workspace bytes of nodes, from the file of a device or measured now."""

    def __init__(self, device: str) -> None:
        super().__init__(cache_name(device), is_cost, circumstances())
        self.device = device

    def __call__(self, node: Node) -> Cost:
        # Ops that could not be timed, or for lack of time were not, are left to the roofline.
        return self.table.get(self._key(node)) or (None, 0)

    def measure(self, nodes: Iterable[Node]) -> None:
        """Measure nodes that are not in the table yet."""
        missing = {key: node.op for node in nodes if (key := self._key(node)) not in self.table}
        if not missing:
            return
        # One trace for all: TensorFlow logs a few lines for each one that is opened.
        counted = Allocations(self.device) if has_statistics(self.device) else nullcontext()
        with counted as allocations:
            timed = while_time_lasts(
                {key: partial(_seconds, op, self.device, MARK + key) for key, op in missing.items()}
            )
        scratch = allocations.scratch_bytes if allocations else {}
        for key, seconds in timed.items():
            self.table[key] = None if seconds is None else [seconds, scratch.get(MARK + key, 0)]

    def _key(self, node: Node) -> str:
        return self.key(signature(node.op))


def costs_as_in(graph: Graph, nodes: Mapping[str, Node]) -> Callable[[Node], Cost]:
    """Return costs of nodes from those of ops with the same names in another graph.

    They are scaled by the elements that a node reads and writes; nodes with other names are
    estimated by the roofline.

    nodes : those of the other graph's ops, by name
    """
    ops = {op.name: op for op in graph.ops if op.name in nodes}

    def cost(node: Node) -> Cost:
        op = ops.get(node.name)
        if op is None:
            return None, 0
        share = _elements(node.op) / max(1, _elements(nodes[node.name].op))
        space = op.workspaces[0].bytes if op.workspaces else 0
        return None if op.seconds is None else op.seconds * share, math.ceil(space * share)

    return cost


def _elements(op: Any) -> int:
    return sum(int(value.shape.num_elements() or 0) for value in (*op.inputs, *op.outputs))


def is_cost(value: Any) -> bool:
    """Whether a value read from a file is a measured Cost: seconds and bytes."""
    if not isinstance(value, list) or len(value) != 2:
        return False
    seconds, space = value
    return is_seconds(seconds) and type(space) is int and 0 <= space < 2**62


def circumstances() -> str:
    """Settings of TensorFlow on which the time or the kernel of an op depends."""
    settings = {
        "tf32": tf.config.experimental.tensor_float_32_execution_enabled(),
        "deterministic": config.is_op_determinism_enabled(),
        "onednn": os.environ.get("TF_ENABLE_ONEDNN_OPTS"),
        "between": tf.config.threading.get_inter_op_parallelism_threads(),
    }
    return str(settings)


def cache_name(device: str) -> str:
    """Name of the file of costs for a device, this TensorFlow and this number of threads."""
    for card in tf.config.list_physical_devices("GPU") if "GPU" in device else ():
        if card.name.endswith(device):
            device = tf.config.experimental.get_device_details(card).get("device_name", device)
    threads = tf.config.threading.get_intra_op_parallelism_threads() or os.cpu_count()
    return f"op-costs-4-{plain_name(f'{device}-{threads}')}-tensorflow-{tf.__version__}.json"


def signature(op: Any) -> str:
    """Everything that the cost of an op depends on, as text."""
    attrs = op.node_def.attr
    # Attributes with an underscore are annotations of graph passes and gradients.
    settings = [f"{key}={attrs[key]}" for key in sorted(attrs) if not key.startswith("_")]
    inputs = []
    for tensor in op.inputs:
        # Known integers are parameters of the op: axes, sizes, paddings.
        value = kernels.constant(tensor) if tensor.dtype.is_integer else None
        inputs.append(f"{tensor.dtype.name}{tensor.shape}{'' if value is None else value.tolist()}")
    return f"{op.type}({', '.join(inputs)}){settings}"


def measured_device(device: str) -> Device:
    """Return the measured speeds of a device: matrix products and copies."""
    with tf.device(device):
        side = 1024 if "CPU" in device else 8192
        matrix = tf.random.uniform((side, side))
        product_s = _best(lambda: tf.matmul(matrix, matrix))
        block = tf.random.uniform((1 << 24,))
        copy_s = _best(lambda: tf.negative(block))
    # A copy reads and writes four bytes of each element.
    return Device(device, 2 * side**3 / product_s, 2 * 4 * (1 << 24) / copy_s)


def _seconds(op: Any, device: str, mark: str) -> float | None:
    """Run an op alone; return its seconds. It runs once under the mark in the profiler's trace."""
    types = {value.dtype for value in (*op.inputs, *op.outputs)}
    # Run alone, they would change something, or need a graph, a handle or a function.
    if (
        kernels.has_effect(op)
        or op.type in kernels.LOOPS
        or types & {tf.resource, tf.variant, tf.string}
        or any(attr.HasField("func") for attr in op.node_def.attr.values())
    ):
        return None
    attrs = [item for attr in op.op_def.attr for item in (attr.name, op.get_attr(attr.name))]
    try:
        with tf.device(device):
            inputs = [_filled(value) for value in op.inputs]

            def work() -> Any:
                return execute.execute(
                    op.type.encode(), len(op.outputs), inputs, tuple(attrs), context.context()
                )

            seconds = _best(work)
            with tf.profiler.experimental.Trace(mark):
                # Held beyond the mark: what is freed within it counts as workspace.
                result = work()
            # Unknown sizes were filled with zeros, for which some kernels do nothing.
            for got, expected in zip(result, op.outputs, strict=True):
                expected.shape.assert_is_compatible_with(got.shape)
            return seconds
    # Some ops do not run on synthetic values: an index out of range, an unknown shape.
    except (tf.errors.OpError, TypeError, ValueError, RuntimeError) as error:
        log.info(
            "%s could not be timed (%s); its seconds are estimated by a roofline", op.type, error
        )
        return None


def _filled(tensor: Any) -> Any:
    known = kernels.constant(tensor)
    if known is not None:
        return tf.constant(known, tensor.dtype)
    if tensor.dtype.is_floating:
        # Not zeros: denormals and zeros are slower or faster than values seen in training.
        return tf.cast(tf.random.uniform(tensor.shape, 0.1, 1.0), tensor.dtype)
    # Indices: 0 is in every range.
    return tf.zeros(tensor.shape, tensor.dtype)


def _best(work: Callable[[], Any]) -> float:
    """Seconds of the fastest of a few runs, after a warm-up."""
    return quickest(lambda: wait_for(work()), time.perf_counter)
