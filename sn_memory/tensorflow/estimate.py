"""estimate: the memory of a training step, by category, before any of it is allocated."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf

from ..cost.devices import is_here, named, speeds
from ..graph.graph import Graph
from ..graph.liveness import live_bytes, peak
from ..graph.records import Device
from ..plan.policies import policy
from ..run.estimate import Estimate
from ..run.reserved import stays
from .errors import warn
from .model import call_arguments
from .target import bfc_settings
from .trace.trace import Trace, optimizer_bytes, trace

_NOT_MODELLED = (
    "ops are those of the graph TensorFlow made here; kernels' workspaces on the named device are "
    "not modelled"
)


def estimate(
    model: Any, sample: Any, *, optimizer: Any = None, device: Device | str | None = None
) -> Estimate:
    """Estimate the memory of a training step. Allocates nothing besides the model itself.

    Parameters
    ----------
    model, sample
        As in `trace`; a tf.TensorSpec suffices for the sample.
    optimizer
        A Keras optimizer or its name, for a model.
    device
        Name of a known device, e.g. "h100": for its capacity, and for predicted seconds.

    Raises
    ------
    TraceError
        For a model or step that cannot be traced.

    Examples
    --------
    >>> import keras
    >>> import tensorflow as tf
    >>> import sn_memory.tensorflow
    >>> model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1000)])
    >>> sample = tf.TensorSpec((64, 1000))
    >>> found = sn_memory.tensorflow.estimate(model, sample, optimizer="adam")
    >>> found.parameters_bytes, found.gradients_bytes, found.fits("1GB")
    (4004000, 4004000, True)
    """
    target = named(device) if isinstance(device, str) and not is_here(device) else None
    rates = speeds(device)
    traced = trace(model, sample, profile=False, device=rates)
    if traced.uncounted:
        warn(f"A step holds more than estimated: {traced.uncounted}.")
    held = optimizer_bytes(model, optimizer) if optimizer is not None else 0
    args = call_arguments(sample)

    def step_of(batch: int) -> int:
        def resized(spec: Any) -> Any:
            sized = isinstance(spec, tf.TensorSpec)
            return tf.TensorSpec([batch, *spec.shape[1:]], spec.dtype) if sized else spec

        resized_args = tf.nest.map_structure(resized, args)
        return peak(trace(model, resized_args, profile=False).graph).bytes + held

    highest, captured, buffers = peak(traced.graph), traced.captured, traced.named.buffers
    # From the captured step: in the graph, small variables of all roles share one storage.
    roles = dict.fromkeys(("parameter", "state", "input"), 0)
    for value in (*captured.arguments, *captured.captures):
        role = "input" if value in captured.arguments else "state"
        if value in captured.variables and captured.variables[value].trainable:
            role = "parameter"
        roles[role] += buffers.sizes[value]
    # By root buffer: gradients of tied weights, or of the terms of a sum, may share one.
    gradients = {buffers.root[value] for value in captured.gradients}
    return Estimate(
        parameters_bytes=roles["parameter"],
        buffers_bytes=roles["state"],
        inputs_bytes=roles["input"],
        gradients_bytes=sum(buffers.sizes[root] for root in gradients),
        optimizer_bytes=held,
        activations_bytes=_left(traced),
        step_bytes=highest.bytes + held,
        # The step's peak already contains the optimizer's state.
        update_bytes=0,
        peak_op=traced.graph.ops[highest.op].name,
        batch=_batch(args) if isinstance(model, keras.Model) or args else None,
        _step_of=step_of,
        device="" if target is None else target.name,
        room_bytes=None if target is None else target.usable_bytes,
        reserved_bytes=_reserved(traced.graph, held, device),
        seconds=None if rates is None else sum(row[0] for row in traced.graph.arrays.seconds),
        notes=() if target is None else (_NOT_MODELLED,),
    )


def _reserved(graph: Graph, held: int, device: Device | str | None) -> int:
    """Bytes that a GPU's allocator reserves for the step after `held` bytes; 0 on a host."""
    settings = bfc_settings(device)
    if settings is None or not settings.caching:
        return 0
    # For the unplanned step: nothing is recomputed, everything is freed after its last use.
    resident, step = stays(graph, policy("liveness")(graph, budget_bytes=None))
    return settings.reserved([*resident, (0, 1, held)], step).peak_bytes


def _left(traced: Trace) -> int:
    """Bytes live after the last forward op, without resident storages."""
    graph = traced.graph
    forward = [at for at, op in enumerate(graph.ops) if op.phase == "forward"]
    if not forward:  # a single linear layer keeps nothing but its input
        return 0
    return int(live_bytes(graph)[forward[-1]] - graph.base_bytes)


def _batch(args: tuple[Any, ...]) -> int | None:
    # If the first dimensions of inputs differ, the batch size is unknown.
    specs = [spec for spec in tf.nest.flatten(args) if isinstance(spec, tf.TensorSpec)]
    sizes = {spec.shape[0] if spec.shape.rank else None for spec in specs}
    return sizes.pop() if len(sizes) == 1 else None
