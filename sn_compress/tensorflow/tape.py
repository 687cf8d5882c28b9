"""Compression of TensorFlow tensors in stock Horovod: eager tapes and tf.function.

Horovod calls `compress` once per tensor, while tracing, not in every step. So the first call
creates the nodes for all gradients of the tape: those of `graph.py`, or a single one that runs the
engine (`memory.py`). Horovod's own all-reduces get one zero each.
"""

from __future__ import annotations

import logging
import sys
from collections.abc import Hashable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cache
from types import FrameType
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.ops.control_flow_v2_func_graphs import CondBranchFuncGraph

from ..errors import CompressError
from ..settings import Settings
from .agreement import (
    Choice,
    Tensor,
    compared,
    elastic,
    fingerprint_of_compression,
    refuse_untraced,
    untraced,
)
from .graph import Collectives, GraphStep, after
from .host_step import cut
from .memory import OptimizerState, memory_of
from .nodes import NodeSum
from .tracing import Call, Plain, find_call, passed, wire_type
from .variables import NO_VARIABLE, as_variables, digest_of, fingerprint_of_variables

__all__ = ["compress", "compressed_means", "memory_of", "refuse_xla"]

_log = logging.getLogger(__name__)
_FLOATS = (tf.float32, tf.float16, tf.bfloat16)
_as_written = tf.autograph.experimental.do_not_convert


def _ask_memory(tape: Any, *_: Any) -> NoReturn:
    raise CompressError(
        f"got a {type(tape).__name__}; expected the optimizer of sn_compress.tensorflow.keras. A "
        "tape lives for one step, its compression for the run: error memories and reports are in "
        "sn_compress.tensorflow.tape.memory_of(compression)."
    )


# Methods of Compression for optimizers; with TensorFlow alone gradients come from a tape.
report = residuals = restart = state_dict = load_state_dict = synchronize = _ask_memory
watch = Elastic = _ask_memory


@_as_written
def compress(tensor: Any, settings: Settings, frame: FrameType) -> tuple[Any, Any]:
    """Send one gradient; see Compression.compress."""
    call = find_call(frame, tensor)
    _check(call)
    tensor = _shaped(tensor, call, call.place)
    if not _reaches_others(call):
        return tensor, None  # Horovod traces this, but never runs it
    memory = memory_of(call.compression)
    fingerprint = fingerprint_of_compression(call.compression)
    # `accumulates` decides whether steps can be undone, so it must be equal on all ranks.
    fingerprint += [("op", str(call.op)), ("accumulates", str(memory.accumulates))]
    if call.sources is not None and all(v is not None for v in call.sources):
        fingerprint += fingerprint_of_variables(call.sources)
    memory.agree(call.process_set, fingerprint)
    exchange = Exchanged(None, {}, {})
    if call.sources is not None:
        exchange = _of_tape(call, memory)
    elif _takes(tensor, None, call, memory):
        if call.name is None:
            memory.engine.theta.refuse_unnamed()
        exchange = exchanged(call, memory, Source({None: call.name}), {None: tensor})
    place = call.place
    if place not in exchange.means:
        tensor = exchange.plain.get(place, tensor)
        if exchange.start is not None:
            with after(exchange.start):
                tensor = tf.identity(tensor)
        if place not in exchange.plain:
            tensor = _count_plain(tensor, _label(call, place, tensor), memory)
        return Plain.compress(tensor)
    # Grouped all-reduces need a single dtype, that of the plain tensors in the group.
    mark = "sn_plain" if place is None else f"sn_{place}"
    with after(exchange.start if memory.nodes.serve(call) else None):
        token = tf.identity(tf.zeros([1], wire_type(tensor)), name=f"{mark}_token")
    return token, Mean(tensor, exchange.means[place], call)


@dataclass(frozen=True)
class Mean:
    """A gradient's mean, computed together with those of its call."""

    like: Any  # the gradient: shape and dtype of the result
    mean: Any  # [n] float32
    call: Call

    @_as_written
    def finish(self, _: Any) -> Any:
        """Return the mean in the gradient's shape and dtype; differentiable for hvd.allreduce."""
        mean = tf.cast(tf.reshape(self.mean, self.like.shape), self.like.dtype)
        if self.call.sources is None:
            return _differentiable(self.like, mean, self.call)
        return mean


def _differentiable(tensor: Any, mean: Any, call: Call) -> Any:
    """Return `mean`, with the gradient of a plain hvd.allreduce of `tensor`."""

    @tf.custom_gradient
    def reduced(tensor: Any, mean: Any) -> Any:
        def gradient(upstream: Any) -> tuple[Any, Any]:
            back = hvd.allreduce(
                upstream, op=call.op, prescale_factor=call.scale, process_set=call.process_set
            )
            return back, None

        return tf.identity(mean), gradient

    return reduced(tensor, mean)


@dataclass(frozen=True)
class Source:
    """Identifies the gradients that a call exchanges.

    names : key of each gradient's memory; None if the trace may be reused for other variables,
        which are then identified by their handles at each step
    handles : of the variables in that case, by index
    owner : whose parameters are compared; see OptimizerState.sameness_of
    variables : TensorFlow variables to be compared
    sparse : tf.IndexedSlices, which are only counted, each with its name or index
    """

    names: Mapping[Any, str | None] | None
    handles: Mapping[int, Any] = field(default_factory=dict)
    owner: Hashable = None
    variables: Sequence[Any] = ()
    sparse: Sequence[tuple[str | int, Any]] = ()


@dataclass(frozen=True)
class Exchanged:
    """The results of a call, by index of the gradient.

    start : a node that starts the step; None if nothing has to wait for it
    means : [n] float32
    plain : gradients that AutoCompression sends uncompressed, residuals added; already counted
    """

    start: Any
    means: Mapping[Any, Any]
    plain: Mapping[Any, Any]


def exchanged(
    call: Call, memory: OptimizerState, source: Source, tensors: Mapping[Any, Any]
) -> Exchanged:
    """Average gradients, keyed by index, as nodes of the graph or by the engine."""
    # Which gradients are compressed, and which of them this rank exchanges: in a hierarchical
    # exchange those that it owns in its node.
    names = source.names or dict.fromkeys(tensors)
    choice = None
    if memory.settings.tune and tensors:
        choice = _choice(call, memory, names, tensors)
    taken = {} if choice is not None and choice.plain else tensors
    sizes = [tensor.shape.num_elements() for tensor in taken.values()]
    taken_names = [names[place] for place in taken]
    nodes = memory.nodes.sum(call, dict(zip(taken_names, sizes, strict=True)))
    mine = list(range(len(taken_names))) if nodes is None else nodes.mine  # those in buckets
    buckets = [[mine[at] for at in part] for part in cut([sizes[at] for at in mine])]
    variables, scale = _variables(call, memory, taken), None
    vectors = [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in taken.values()]
    # Residuals are those of unscaled gradients, as scales change between steps.
    if call.sources is not None and (scale := memory.scale()) is not None:
        vectors = [values / scale for values in vectors]
    # The step becomes graph nodes if at least ten steps are the same; else the engine runs it.
    earlier, graph = _earlier(memory), None
    if None not in taken_names:
        graph = memory.graph_step(
            [{str(taken_names[at]): sizes[at] for at in part} for part in buckets], source.owner,
            choice, variables and [variables[at] for at in mine], earlier.graphs, nodes,
        )  # fmt: skip
    # What the step starts with, and what its exchange waits for.
    here = memory.nodes.all_are_here(call, vectors)
    ask_tuner = None
    if choice is not None and (graph is None or not graph.rests):
        ask_tuner = memory.asking(choice, graph)
    if graph is None:
        with after(here):
            start, slots = _begin(call, memory, source)
        start = here if start is None else start
        if ask_tuner is not None:
            start = ask_tuner if start is None else start + ask_tuner
        # Several calls in a graph run one after another, in the order of the trace: the engine
        # blocks in collectives, which all ranks must reach in the same order.
        with after(*earlier.nodes(), start):
            means = _by_engine(call, memory, taken_names, taken, vectors, variables, slots)
    else:
        with after(here):
            start, means = _by_graph(
                call, memory, source, graph, buckets, vectors, variables, nodes
            )  # fmt: skip
        earlier.graphs.add(graph)
        if ask_tuner is not None:
            start += ask_tuner
        elif not taken:
            start = None  # all are sent as in stock Horovod, which waits for nothing
    if scale is not None:
        means = [mean * scale for mean in means]  # the training loop will unscale them
    earlier.means[:] = means
    sent = {
        place: _with_residual(tensor, str(names[place]), memory)
        for place, tensor in tensors.items()
        if place not in taken
    }
    return Exchanged(start, dict(zip(taken, means, strict=True)), sent)


def _with_residual(tensor: Any, name: str, memory: OptimizerState) -> Any:
    """Return a gradient to be sent uncompressed plus its residual."""
    shared = memory.engine.shared
    if not shared.remembers(name):
        return tensor

    def release(gradient: Any) -> Any:
        # Keep the residual if the gradient has NaN: it would be lost with the step.
        if not shared.remembers(name) or not np.isfinite(gradient).all():
            return np.zeros(gradient.size, np.float32)
        residual = shared.release(name)
        # The next trace needs no node for this residual.
        memory.forget_traces()
        return residual

    with tf.device("CPU"):
        # The residual does not depend on the gradient, and Python functions are not differentiable.
        values = tf.stop_gradient(tf.reshape(tf.cast(tensor, tf.float32), [-1]))
        residual = tf.numpy_function(release, [values], tf.float32)
    return tensor + tf.cast(tf.reshape(residual, tensor.shape), tensor.dtype)


@dataclass
class _Earlier:
    """What was traced in a graph so far for one memory; means : of the last call."""

    means: list[Any]
    graphs: set[GraphStep]

    def nodes(self) -> list[Any]:
        """Return the nodes that the engine's next exchange in the graph must wait for."""
        return [*self.means, *(value for graph in self.graphs for value in graph.remembered())]


def _earlier(memory: OptimizerState) -> _Earlier:
    if tf.executing_eagerly():
        return _Earlier([], set())
    known = _made_in(tf.compat.v1.get_default_graph())
    earlier: _Earlier = known.setdefault((memory, "earlier"), _Earlier([], set()))
    return earlier


def _variables(call: Call, memory: OptimizerState, places: Iterable[Any]) -> list[Any] | None:
    """Return the variables of a tape's gradients; None if all gradients count as applied.

    A tape does not tell the outcomes of its gradients; see `variables.py`.
    """
    if not call.sources or memory.accumulates or not memory.settings.feedback:
        return None
    variables = [call.sources[place] for place in places]
    return variables if all(isinstance(source, tf.Variable) for source in variables) else None


def _digests(variables: Sequence[Any]) -> Any:
    values = [tf.raw_ops.ReadVariableOp(resource=v.handle, dtype=v.dtype) for v in variables]
    return tf.stack([digest_of(value) for value in values])


def _choice(
    call: Call, memory: OptimizerState, names: Mapping[Any, str | None], tensors: Mapping[Any, Any]
) -> Choice:
    """Return AutoCompression's choice for the gradients of a call being traced."""
    tunable = {}
    for place, tensor in tensors.items():
        name, n = names[place], tensor.shape.num_elements()
        if name is None:
            refuse_untraced()
            raise untraced("in a tape that Horovod traces, whose graph may serve any variables")
        tunable[name] = Tensor(tuple(tensor.shape), n, n * wire_type(tensor).size)
    variables = _variables(call, memory, tensors)
    known = {} if variables is None else dict(zip(tunable, variables, strict=True))
    return memory.choose(tunable, call.process_set, known)


def _begin(call: Call, memory: OptimizerState, source: Source) -> tuple[Any, Any]:
    """Return a node that starts a step of the engine, and the slots of all variables.

    The node counts sparse gradients and compares parameters when due; None if neither is needed.
    Slots are [variables] int64, or None if names are known.
    """
    compares = source.variables and memory.settings.check_every and not elastic()
    if not (source.handles or source.sparse or compares):
        return None, None
    places, variables = list(source.handles), len(call.sources or ())
    parts = [part for _, slices in source.sparse for part in (slices.values, slices.indices)]
    sizes = [part.dtype.size for part in parts]
    latest: list[Any] = []

    def begin(*values: Any) -> Any:
        slots, owner = np.full(variables, NO_VARIABLE, np.int64), source.owner
        if places:
            slots[places] = memory.variables.slots(map(repr, values[: len(places)]))
            owner = slots.tobytes()
        counts = [int(count) for count in values[len(places) :]]
        nbytes = [count * size for count, size in zip(counts, sizes, strict=True)]
        for at, (label, _) in enumerate(source.sparse):
            if not isinstance(label, str):
                label = memory.variables.name(int(slots[label])) or f"{label}:sparse"
            sent = nbytes[2 * at] + nbytes[2 * at + 1]
            memory.engine.traffic.sparse(label, counts[2 * at], sent)
        latest[:] = [memory.sameness_of(owner)]
        return slots, latest[0].step()

    call_python = tf.py_function if places else tf.numpy_function  # the latter takes no handles
    with tf.device("CPU"):
        inputs = [*source.handles.values(), *(tf.size(part) for part in parts)]
        slots, is_due = call_python(begin, inputs, [tf.int64, tf.bool])
    slots.set_shape([variables])
    is_due.set_shape([])
    start = tf.cast(is_due, tf.int64)
    if compares:
        start += compared(
            is_due, source.variables, call.process_set, memory.count_beside,
            lambda: (latest[0], latest[0].steps - 1),
        )  # fmt: skip
    return start, slots if places else None


def _by_engine(
    call: Call,
    memory: OptimizerState,
    names: Sequence[str | None],
    tensors: Mapping[Any, Any],
    vectors: Sequence[Any],
    variables: Sequence[Any] | None,
    slots: Any,
) -> list[Any]:
    """Return the means of gradients, [n] float32 each, computed by one Python function for all."""
    if not vectors:
        return []
    places, shapes = list(tensors), [tuple(tensor.shape) for tensor in tensors.values()]

    def average(*values: Any) -> Any:
        known_names, inputs = names, iter(values)
        if slots is not None:
            numbers = next(inputs)
            known_names = [memory.variables.name(int(numbers[place])) for place in places]
        digests = None if variables is None else next(inputs).tolist()
        means = [np.array(vector) for vector in inputs]  # copies: TensorFlow's are read-only
        memory.average(known_names, shapes, means, digests, call)
        return means

    _warn_host_once()
    with tf.device("CPU"):
        inputs = [] if slots is None else [slots]
        inputs += [] if variables is None else [_digests(variables)]
        means = tf.numpy_function(average, [*inputs, *vectors], [tf.float32] * len(vectors))
    # Eagerly, a list of one tensor is returned as a tensor.
    means = means if isinstance(means, list) else [means]
    for mean, vector in zip(means, vectors, strict=True):
        mean.set_shape(vector.shape)
    return means


@cache
def _warn_host_once() -> None:
    if tf.config.list_logical_devices("GPU"):
        _log.warning("gradients on a GPU are copied to the host and encoded there")


def _by_graph(
    call: Call,
    memory: OptimizerState,
    source: Source,
    graph: GraphStep,
    buckets: Sequence[Sequence[int]],
    vectors: Sequence[Any],
    variables: Sequence[Any] | None,
    nodes: NodeSum | None,
) -> tuple[Any, list[Any]]:
    """Return a node that starts the step, and the means of gradients, as graph nodes."""
    start, check = graph.begin(memory.trace_again)
    if source.variables and memory.settings.check_every:
        start += compared(check, source.variables, call.process_set, memory.count_beside, graph.now)
    for label, slices in source.sparse:
        graph.count_sparse(str(label), slices.values, slices.indices)
    if not vectors:
        return start, []

    # Nothing is sent before the graph has counted the step, or has failed because it has ended.
    with tf.control_dependencies([start]):
        vectors = list(map(tf.identity, vectors))
    order = [at for part in buckets for at in part]
    digests = _digests([variables[at] for at in order]) if variables and order else None

    def step(by: Collectives, values: Mapping[int, Any]) -> dict[int, Any]:
        averaged = graph.step(
            [[values[at] for at in part] for part in buckets], by, digests, memory.warn_dropped
        )
        return dict(zip(order, (mean for part in averaged for mean in part), strict=True))

    if nodes is None:
        mean_of = step(Collectives(call), dict(enumerate(vectors)))
    else:
        codec = memory.engine.theta.next_codec
        mean_of = dict(enumerate(nodes.average(call, memory.settings, codec, vectors, step)))
    factor, means = call.factor(), [mean_of[at] for at in range(len(vectors))]
    return start, means if factor == 1 else [mean * factor for mean in means]


def compressed_means(
    call: Call, gradients: Sequence[Any], names: Sequence[str], variables: Sequence[Any], owner: Any
) -> tuple[Any, list[Any], list[Any]]:
    """Return a node that starts the step, means by gradient, and the gradients to send plain.

    A mean is None if its gradient is to be sent uncompressed; a residual may have been added to it.

    variables, owner : see Source; variables are Keras's
    """
    memory = memory_of(call.compression)
    _check(call)
    tensors, sparse = {}, []
    for at, (gradient, name) in enumerate(zip(gradients, names, strict=True)):
        if hasattr(gradient, "indices"):
            sparse.append((variables[at].path, gradient))
        elif _fits(gradient) and memory.takes(name, gradient.shape.as_list()):
            tensors[at] = gradient
        else:
            _count_plain(gradient, name, memory)
    source = Source(
        dict(enumerate(names)), owner=owner, variables=as_variables(variables), sparse=sparse
    )
    exchange = exchanged(call, memory, source, tensors)
    sent = [exchange.plain.get(at, gradient) for at, gradient in enumerate(gradients)]
    means = [
        Mean(gradient, exchange.means[at], call).finish(None) if at in exchange.means else None
        for at, gradient in enumerate(gradients)
    ]
    return exchange.start, means, sent


def _of_tape(call: Call, memory: OptimizerState) -> Exchanged:
    """Return the results for a tape's gradients.

    Horovod passes one tensor at a time, each in its own branch. Their shared nodes are created
    once, in the graph that contains the branches.
    """
    graph = _graph_of(call)
    known = _made_in(graph)
    key = memory, "means", tuple(map(id, call.gradients))
    if key not in known:
        with graph.as_default():
            tensors = {}
            for place, gradient in enumerate(call.gradients):
                if gradient is None or hasattr(gradient, "indices"):
                    continue
                # A tensor that is the gradient of two variables has no memory.
                once = sum(other is gradient for other in call.gradients) == 1
                tensor = _shaped(gradient, call, place)
                if _takes(tensor, place if once else None, call, memory):
                    tensors[place] = tensor
            exchange = exchanged(call, memory, _source_of(call, memory), tensors)
        # Keep the gradients alive, so that their ids are not reused.
        known[key] = exchange, call.gradients
    result: Exchanged = known[key][0]
    return result


def _source_of(call: Call, memory: OptimizerState) -> Source:
    """Return the Source of a tape's gradients."""
    sources = call.sources or ()
    handles = {place: v.handle for place, v in enumerate(sources) if isinstance(v, tf.Variable)}
    arguments = passed(sys._getframe(1))
    variables = as_variables(sources)
    sparse = [pair for pair in enumerate(call.gradients) if hasattr(pair[1], "indices")]
    if any(
        tf.is_symbolic_tensor(handle) or any(handle is argument for argument in arguments)
        for handle in handles.values()
    ):  # handles are arguments of the trace, which may be reused for other variables
        return Source(None, handles, None, variables, sparse)
    slots = np.full(len(sources), NO_VARIABLE, np.int64)
    slots[list(handles)] = memory.variables.slots(map(repr, handles.values()))
    names = {place: memory.variables.name(int(slot)) for place, slot in enumerate(slots)}
    named = [(names[place] or f"{place}:sparse", slices) for place, slices in sparse]
    return Source(names, {}, slots.tobytes(), variables, named)


def _shaped(tensor: Any, call: Call, place: int | None) -> Any:
    """Return a gradient with its static shape, which conversion from sparse to dense loses."""
    tensor = tf.convert_to_tensor(tensor)
    if call.sources and place is not None and tensor.shape.num_elements() is None:
        return tf.ensure_shape(tensor, call.sources[place].shape)
    return tensor


def _takes(tensor: Any, place: int | None, call: Call, memory: OptimizerState) -> bool:
    """Whether a gradient of a call is compressed."""
    shared = memory.settings.exchange == "shared"
    # If the memory cannot be identified, a gather works without; the shared exchange needs it.
    if call.sources is None:
        known = call.name is not None or not shared
    else:
        source = None if place is None else call.sources[place]
        known = isinstance(source, tf.Variable) or not (shared or place is None)
    if not known or not _fits(tensor):
        return False
    return memory.takes(_label(call, place, tensor), tensor.shape.as_list())


def _fits(tensor: Any) -> bool:
    """Whether a gradient can be compressed, ignoring its size."""
    return tensor.dtype in _FLOATS and tensor.shape.num_elements() is not None


def _check(call: Call) -> None:
    if call.op not in (hvd.Average, hvd.Sum):
        raise CompressError(
            f"{call.name or 'gradient'}: compression takes op=hvd.Average or hvd.Sum; Adasum, "
            "Min, Max and Product need the dense tensor. Use another op, or no compression."
        )
    refuse_xla()


def refuse_xla() -> None:
    """Raise CompressError if TensorFlow is tracing for XLA."""
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise CompressError(
            "gradients cannot be compressed or reduced by Horovod in a function that XLA compiles "
            "(jit_compile=True); expected a plain tf.function. In Keras: "
            "model.compile(jit_compile=False)."
        )


def _label(call: Call, place: int | None, tensor: Any) -> str:
    """Return a name for a gradient while its step is traced."""
    name = call.name if place == call.place else None
    return name or f"{place}:{tensor.shape}"


def _count_plain(tensor: Any, label: str, memory: OptimizerState) -> Any:
    """Count a tensor that is sent uncompressed; return the tensor to use."""
    size, elements = wire_type(tensor).size, tensor.shape.num_elements()
    if elements is not None:
        memory.engine.traffic.fixed(label, elements, elements * size)
        return tensor

    def count(elements: Any) -> Any:
        memory.engine.traffic.plain(label, int(elements), int(elements) * size)
        return np.int64(0)

    with tf.device("CPU"):
        counted = tf.numpy_function(count, [tf.size(tensor)], tf.int64)
    with tf.control_dependencies([counted]):
        return tf.identity(tensor)


def _reaches_others(call: Call) -> bool:
    """Whether a tape sends anything: the condition of Horovod's own tf.cond."""
    sets = call.process_set
    return not call.branch or elastic() or bool(sets.included() and sets.size() > 1)


def _graph_of(call: Call) -> Any:
    """Return the graph of a call: Horovod puts every gradient of a tape in a separate branch."""
    graph = tf.compat.v1.get_default_graph()
    inner = call.branch and isinstance(graph, CondBranchFuncGraph)
    return graph.outer_graph if inner else graph


def _made_in(graph: Any) -> dict[Any, Any]:
    """Return the objects created once per graph, stored on the graph."""
    if not hasattr(graph, "_sn_made"):
        graph._sn_made = {}
    return graph._sn_made  # type: ignore[no-any-return]
