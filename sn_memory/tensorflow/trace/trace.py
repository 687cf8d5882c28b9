"""trace: a training step of a model, or a step function, as a graph; no step is taken.

plan, estimate and verify start here. capture.py turns a step into a list of ops, to_graph.py turns
that into a graph, and op_seconds.py measures their costs.
"""

from __future__ import annotations

from collections.abc import Hashable
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import keras
import tensorflow as tf
from keras.src.backend.common import global_state  # has no public name

from ...cost.devices import NOMINAL, is_here, speeds
from ...graph.graph import Graph
from ...graph.records import Device, Storage
from ..errors import warn
from ..guards import constants_of
from ..memory import bytes_of, main_device
from ..model import call_arguments, has_values
from .capture import (
    Captured,
    capture_model,
    capture_step,
    flat,
    values_at_call,
    values_of_step,
    with_sample_shapes,
)
from .op_seconds import MeasuredCosts, costs_as_in, measured_device
from .to_graph import Costs, GraphBinding, to_graph, updates_first

OPTIMIZER = "optimizer state"


@dataclass(frozen=True)
class Trace:
    """A traced training step.

    named : the graph with its names
    captured : the ops behind it
    structure : for a step, what it returns, with the symbolic tensors of the trace in it; for a
        model, what was recorded at its `call`: arguments, results, variables, gradients
    constants : those of a step's arguments that are not tensors, by position
    """

    named: GraphBinding
    captured: Captured
    structure: Any
    constants: dict[tuple[Hashable, ...], Any] = field(default_factory=dict)

    @property
    def graph(self) -> Graph:
        """The graph, for `plan_graph`, `check_plan` and the reports."""
        return self.named.graph

    @property
    def uncounted(self) -> str:
        """The bytes that the graph does not count, as a sentence; "" if it counts all."""
        names = self.named.buffers.uncounted
        if not names:
            return ""
        return (
            f"the bytes of {len(names)} values are not counted, such as {names[0]!r}: a trace does "
            "not show what loops collect in lists, nor how much other ranks and Python functions "
            "send"
        )


def trace(
    model: Any,
    sample: Any,
    *,
    profile: bool = True,
    device: Device | str | None = None,
    optimizer: Any = None,
) -> Trace:
    """Record a training step as a graph. Model and variables are left unchanged.

    Parameters
    ----------
    model
        A built Keras 3 model: forward, loss, backward; the loss is an op outside of the plan. Or a
        step function, with or without tf.function, that contains the tape, the loss and,
        optionally, the update: then all of that is planned.
    sample
        Its input: a tensor, array or tf.TensorSpec, or a tuple of them as positional arguments;
        other structures (dicts, lists) are one argument. Only shapes and types matter, and values
        on which inner shapes depend: the ops before those run once.
    profile
        Measure seconds and workspace of each op once per signature; kept in a file in the user's
        cache folder. Otherwise, a roofline and no workspaces.
    device
        Speeds for the roofline; default: measured, or nominal without `profile`. Or a name of the
        table, e.g. "h100": then no op is timed, since the times would be those of this machine. Ops
        are those of the graph that TensorFlow makes here, and workspaces of that device's kernels
        are not modelled.
    optimizer
        A Keras optimizer whose state is counted as resident, for a model.

    Raises
    ------
    TraceError
        For a step that cannot be traced, or whose plan would lose something; the message says
        where.

    Examples
    --------
    >>> import keras
    >>> import tensorflow as tf
    >>> import sn_memory.tensorflow
    >>> layers = [keras.Input((4,)), keras.layers.Dense(512, "relu"), keras.layers.Dense(256)]
    >>> sample = tf.TensorSpec((64, 4))
    >>> traced = sn_memory.tensorflow.trace(keras.Sequential(layers), sample, profile=False)
    >>> [op.kind for op in traced.graph.ops][:5]
    ['matmul', 'biasadd', 'relu', 'matmul', 'biasadd']
    """
    args = call_arguments(sample)
    if isinstance(model, keras.Model):
        captured, structure, name = *capture_model(model, args), model.name
        inputs = partial(values_at_call, model, sample)
    else:
        concrete, log = capture_step(model, args)
        # In the executor's order: in a trace all updates come after all gradients.
        captured = updates_first(flat(concrete.graph, log))
        structure = concrete.structured_outputs
        name = getattr(model, "__name__", "step")
        inputs = partial(values_of_step, sample)
    if has_values(sample):
        captured = with_sample_shapes(captured, inputs)
    place = main_device()
    profile = profile and (not isinstance(device, str) or is_here(device))
    rates = speeds(device) or (measured_device(place) if profile else NOMINAL)
    held = 0 if optimizer is None else optimizer_bytes(model, optimizer)
    extra = [Storage(OPTIMIZER, held, "state")] if optimizer is not None else []

    def graph_of(costs: Costs) -> GraphBinding:
        return to_graph(
            captured, name=name, device=rates, costs=costs, allocator="tensorflow", extra=extra
        )

    # First with seconds by the roofline, to find out which ops to measure.
    named = graph_of(lambda node: (None, 0))
    if profile:
        costs = MeasuredCosts(place)
        costs.measure(captured.nodes[at] for at in named.node_of.values())
        costs.save(place)
        named = graph_of(costs)
    return Trace(named, captured, structure, constants_of(args))


def trace_like(
    model: Any,
    args: tuple[Any, ...],
    kwargs: dict[str, Any],
    before: Trace,
    *,
    training: bool | None = True,
) -> Trace:
    """Record a training step of an already traced model for other arguments; no op is run.

    Ops of one model have the same names at any batch size and length: seconds and workspaces are
    those of the trace before, scaled by the number of elements.

    args, kwargs, training : of the model's call, with tf.TensorSpec in place of tensors
    before : the earlier trace, whose device and optimizer state are taken over
    """
    captured, structure = capture_model(model, args, kwargs, training=training)
    nodes = {name: before.captured.nodes[at] for name, at in before.named.node_of.items()}
    named = to_graph(
        captured,
        name=model.name,
        device=before.graph.device,
        costs=costs_as_in(before.graph, nodes),
        allocator="tensorflow",
        extra=[storage for storage in before.graph.storages if storage.name == OPTIMIZER],
    )
    return Trace(named, captured, structure)


def optimizer_bytes(model: Any, optimizer: Any) -> int:
    """Bytes of the variables of a Keras optimizer for a model; if possible, none are created.

    If the variables cannot be determined, a PlanWarning says why, and none are counted.
    """
    optimizer = keras.optimizers.get(optimizer)
    try:
        built = optimizer if optimizer.built else _built_twin(optimizer, model)
        return sum(map(bytes_of, built.variables))
    except Exception as error:  # noqa: BLE001 - custom optimizers may raise anything
        warn(
            f"the variables of {type(optimizer).__name__} are unknown before its first step "
            f"({type(error).__name__}: {error}), so none are counted. Build it first, or leave "
            "room for them."
        )
        return 0


# Where Keras keeps the variables that it creates when the outermost stateless scope ends.
_WAITING = "uninitialized_variables"


def _built_twin(optimizer: Any, model: Any) -> Any:
    """Return a twin of an optimizer that has its variables for a model."""
    kind, settings = type(optimizer), optimizer.get_config()
    twin = kind.from_config(settings)
    # Otherwise Keras would create the twin's variables at the end of the next outermost scope.
    waiting = list(global_state.get_global_attribute(_WAITING) or ())
    try:
        with keras.StatelessScope(initialize_variables=False):
            twin.build(model.trainable_variables)
    except ValueError:
        # Adafactor and Nadam have variables made from numbers, which no scope defers. They are
        # really created, on the host, and freed immediately.
        twin = kind.from_config(settings)
        with tf.device("CPU:0"):
            twin.build(model.trainable_variables)
    finally:
        global_state.set_global_attribute(_WAITING, waiting)
    return twin
