"""Compression of TensorFlow tensors in stock Horovod: eager tapes and tf.function.

Horovod calls `compress` while it traces, never per step. So `compress` builds a graph: a Python
function that encodes, Horovod's all-gather of the payload, and in `finish` a Python function that
decodes the mean. Horovod's own all-reduce gets one zero.

The Python functions are declared stateless. Stateful ones TensorFlow runs one after the other in
the order of the program, and then no two collectives would ever travel together. What a stateless
function may suffer is being folded away when its input is a constant; therefore each takes the
result of one stateful function beside the gradient, `Memory.slots`, which is also what finds the
variable: the trace may serve other variables than those it was made with
(`docs/decisions/0009-variables-of-a-trace.md`).
"""

from __future__ import annotations

import logging
import os
import weakref
import zlib
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext
from tensorflow.python.ops.control_flow_v2_func_graphs import CondBranchFuncGraph

from ..codecs.gather import wire_bytes
from ..compression import settings_of
from ..errors import CompressError
from ..settings import Settings
from .alike import (
    agree_at_trace,
    as_variables,
    compared,
    elastic,
    said_of_compression,
    said_of_variables,
)
from .traced import NO_VARIABLE, Traced
from .tracing import Call, find_call

_log = logging.getLogger(__name__)
_FLOATS = (tf.float32, tf.float16, tf.bfloat16)
_BUCKET = 2**23  # elements, at most; larger tensors travel alone
ROUNDS = 3  # of the shared exchange, at most: sizes, and two for low rank
_as_written = tf.autograph.experimental.do_not_convert


class Memory(Traced, tf.train.experimental.PythonState):  # type: ignore[misc]
    """What belongs to one compression: codec, error memories, counts.

    It goes into a checkpoint like a variable: `tf.train.Checkpoint(memory=memory_of(fft))`. It
    differs between ranks, so each rank writes and reads a checkpoint of its own.
    """

    def __init__(self, settings: Settings) -> None:
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        super().__init__(settings, threads or len(os.sched_getaffinity(0)))

    def synchronize(self, root_rank: int = 0, *, process_set: Any = hvd.global_process_set) -> None:
        """See Compression.synchronize; called by all ranks of the set."""
        own = self.exchange()
        self.begin_anew()
        state = hvd.broadcast_object(self.state_dict(), root_rank, process_set=process_set)
        residuals = {}
        for name, n in sorted(own.sizes(state).items()):
            wire = np.zeros(n + 1, np.float32)  # the last one counts the ranks that have a memory
            if own.remembers(name):
                wire[:n], wire[n] = own.residual(name), 1
            total = hvd.allreduce(wire, op=hvd.Sum, process_set=process_set).numpy()
            residuals[name] = total[:n] / max(total[n], 1)
        own.take_over(state, residuals)
        self.follow(state)

    def serialize(self) -> bytes:
        """Called by tf.train.Checkpoint."""
        return self.to_bytes(hvd.rank())

    def deserialize(self, string_value: bytes) -> None:
        """Called by tf.train.Checkpoint."""
        self.from_bytes(string_value, hvd.rank())


# A compression that is dropped takes its memory along, unless Horovod's cache holds it.
_memories: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()


def memory_of(compression: Any) -> Memory:
    """What a compression remembers and has sent, for all tapes that were given it.

    To keep two models apart in reports and checkpoints, give each its own:
    `FFTCompression.using()` returns a new one each time.
    """
    return _memory(compression, settings_of(compression, "memory_of"))


def _memory(compression: Any, settings: Settings) -> Memory:
    if compression not in _memories:
        _memories[compression] = Memory(settings)
    return _memories[compression]


def _ask_memory(tape: Any, *_: Any) -> NoReturn:
    raise CompressError(
        f"got a {type(tape).__name__}; expected the optimizer of sn_compress.tensorflow.keras. A "
        "tape lives for one step, its compression for the run: what they remember and have sent is "
        "in sn_compress.tensorflow.tape.memory_of(compression)."
    )


# What Compression offers for optimizers; TensorFlow's own gradients come from a tape.
report = residuals = restart = state_dict = load_state_dict = synchronize = _ask_memory
watch = Elastic = _ask_memory


@dataclass(frozen=True)
class Cast:
    """A tensor that went uncompressed in a type Horovod can reduce."""

    dtype: tf.DType

    @_as_written
    def finish(self, reduced: Any) -> Any:
        return tf.cast(reduced, self.dtype)


def _wire_type(tensor: Any) -> Any:
    return tf.float32 if tensor.dtype == tf.bfloat16 else tensor.dtype


class Plain:
    """A compression of Horovod's that only makes a type of what Horovod cannot reduce: bfloat16."""

    @staticmethod
    @_as_written
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Called by Horovod."""
        wire = _wire_type(tensor)
        return (
            (tensor, None) if wire == tensor.dtype else (tf.cast(tensor, wire), Cast(tensor.dtype))
        )

    @staticmethod
    @_as_written
    def decompress(tensor: Any, ctx: Any) -> Any:
        """Called by Horovod."""
        return tensor if ctx is None else ctx.finish(tensor)


@dataclass(frozen=True)
class Mean:
    """A gradient's mean, made with those of its bucket."""

    like: Any  # the gradient: shape and dtype of the result
    mean: Any  # [n] float32
    call: Call

    @_as_written
    def finish(self, _: Any) -> Any:
        """The mean as the gradient: shape, dtype, and the gradient of a plain hvd.allreduce."""
        mean = tf.cast(tf.reshape(self.mean, self.like.shape), self.like.dtype)
        if self.call.sources is None:
            return _differentiable(self.like, mean, self.call)
        return mean


@dataclass(frozen=True)
class Bucket:
    """Gradients of one call that travel together, and how the nodes of its graph call Python.

    names, places : of each gradient, either what it is kept under or its place in `slots`
    tensors : of known shapes
    slots : of all variables of the call, which keeps the calls from being folded away
    mark : in the names of its collectives
    theta : of the step, a tensor; None if the step alone tells it
    """

    call: Call
    memory: Memory
    names: Sequence[str | None]
    places: Sequence[int | None]
    tensors: Sequence[Any]
    slots: Any
    mark: str
    theta: Any = None

    @property
    def sizes(self) -> list[int]:
        """Elements of each gradient."""
        return [tensor.shape.num_elements() for tensor in self.tensors]

    def vectors(self) -> list[Any]:
        """The gradients, [n] float32 each."""
        return [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in self.tensors]

    def python(self, function: Callable[..., Any], inputs: Sequence[Any], outputs: Any) -> Any:
        """A node that calls `function(keys, inputs)` at each step."""

        def run(slots: Any, *values: Any) -> Any:
            keys = [
                name if place is None else self.memory.key(name, int(slots[place]))
                for name, place in zip(self.names, self.places, strict=True)
            ]
            return function(keys, values)

        with tf.device("CPU"):
            made = tf.numpy_function(run, [self.slots, *inputs], outputs, stateful=False)
        # Eagerly, a list of one comes back as the one.
        return [made] if isinstance(outputs, list) and not isinstance(made, list) else made

    def reduce(self, tensor: Any, op: Any, kind: str) -> Any:
        """Horovod's all-reduce of a vector of this bucket."""
        return hvd.allreduce(
            tf.identity(tensor, name=f"{self.mark}_{kind}"),
            op=op,
            name=self.name(kind),
            ignore_name_scope=self.call.ignore_name_scope,
            process_set=self.call.process_set,
        )

    def name(self, kind: str) -> str | None:
        """Of a collective; Horovod names it after its input where the user gave none."""
        return self.call.name and f"{self.mark}_{kind}_{self.call.name}"

    def ranks(self) -> int:
        """Asked at each step: an elastic run changes it after the trace."""
        return int(self.call.process_set.size())

    def factor(self) -> float:
        """From the mean to what was asked for."""
        return float(self.call.scale * (self.ranks() if self.call.op == hvd.Sum else 1))


def gathered(bucket: Bucket) -> list[Any]:
    """The means of a bucket whose payloads are gathered: a Python function before and behind."""
    memory, sizes = bucket.memory, bucket.sizes
    known = [] if bucket.theta is None else [bucket.theta]

    def encode(keys: list[str | None], values: Sequence[Any]) -> Any:
        theta = float(values[-1]) if known else None
        return memory.encode(keys, values[: len(keys)], theta)

    def decode(keys: list[str | None], values: Sequence[Any]) -> Any:
        return memory.mean(
            keys, values[0], ranks=bucket.ranks(), sizes=sizes, factor=bucket.factor()
        )

    payload = bucket.python(encode, [*bucket.vectors(), *known], tf.uint8)
    each = [wire_bytes(memory.codec.payload_bytes(n)) for n in sizes]
    payload.set_shape([sum(each) if memory.settings.fixed else None])
    every = hvd.allgather(
        tf.identity(payload, name=f"{bucket.mark}_payload"),
        name=bucket.name("payload"),
        ignore_name_scope=bucket.call.ignore_name_scope,
        process_set=bucket.call.process_set,
    )
    means = bucket.python(decode, [every], [tf.float32] * len(sizes))
    for mean, n in zip(means, sizes, strict=True):
        mean.set_shape([n])
    return list(means)


def summed(bucket: Bucket) -> list[Any]:
    """The means of a bucket of the shared exchange: Python functions beside each all-reduce."""
    memory, sizes = bucket.memory, bucket.sizes
    shapes = [tuple(tensor.shape) for tensor in bucket.tensors]

    def begin(keys: list[str], values: Sequence[Any]) -> Any:
        rank = bucket.call.process_set.rank()
        return memory.begin(keys, values, shapes=shapes, ranks=bucket.ranks(), rank=rank)

    def learn(keys: list[str], values: Sequence[Any]) -> Any:
        return memory.learn(keys, values[0], sizes=sizes, factor=bucket.factor())

    def advance(keys: list[str], values: Sequence[Any]) -> Any:
        return memory.advance(keys, values[0], ranks=bucket.ranks(), factor=bucket.factor())

    def averaged() -> Any:
        mean = bucket.reduce(whole, hvd.Average, "dense")
        return bucket.python(learn, [mean], tf.float32)

    def rounds(turn: int, words: Any) -> Any:
        total = bucket.reduce(words, hvd.Sum, f"round{turn}")
        more, words, mean = bucket.python(advance, [total], [tf.bool, tf.int32, tf.float32])
        words.set_shape([None])
        if turn == ROUNDS:
            return mean
        more.set_shape([])
        return tf.cond(more, lambda: rounds(turn + 1, words), lambda: mean)

    dense, whole, words = bucket.python(begin, bucket.vectors(), [tf.bool, tf.float32, tf.int32])
    dense.set_shape([])
    whole.set_shape([None])
    words.set_shape([None])
    mean = tf.cond(dense, averaged, lambda: rounds(1, words))
    mean.set_shape([sum(sizes)])
    return list(tf.split(mean, sizes))


@_as_written
def compress(tensor: Any, settings: Settings, frame: FrameType) -> tuple[Any, Any]:
    """One gradient on its way; see Compression."""
    call = find_call(frame, tensor)
    _check(call)
    tensor = _shaped(tensor, call, call.place)
    if not _reaches_others(call):
        return tensor, None  # Horovod traces what it never runs
    memory = _memory(call.compression, settings)
    memory.traffic.speaks = call.process_set.rank() == 0
    said = [*said_of_compression(call.compression), ("op", str(call.op))]
    if call.sources is not None and all(v is not None for v in call.sources):
        said += said_of_variables(call.sources)
    agree_at_trace(memory.asked, call.process_set, said, memory.count_beside)
    if not _takes(tensor, call.place, call, memory):
        tensor = _after_slots(tensor, call, memory)
        return Plain.compress(_count_plain(tensor, _label(call, call.place, tensor), memory))
    # Grouped all-reduces want one dtype, that of the plain tensors beside it.
    mark = "sn_plain" if call.place is None else f"sn_{call.place}"
    token = tf.identity(tf.zeros([1], _wire_type(tensor)), name=f"{mark}_token")
    if call.sources is None:
        slots = _slots(call, memory)
        theta = _theta_of_step(call, memory, slots) if memory.learns else None
        (mean,) = means_of(Bucket(call, memory, [call.name], [None], [tensor], slots, mark, theta))
    else:
        assert call.place is not None
        mean = _means_of_tape(call, memory)[call.place]
    return token, Mean(tensor, mean, call)


def means_of(bucket: Bucket) -> list[Any]:
    """The means of a bucket's gradients, [n] float32 each, as nodes of the graph."""
    _say_host_once()
    return (summed if bucket.memory.settings.exchange == "shared" else gathered)(bucket)


def _reaches_others(call: Call) -> bool:
    """Whether a tape sends anything: Horovod asks the same, in a branch of the graph."""
    own = call.process_set
    return not call.branch or elastic() or bool(own.included() and own.size() > 1)


def compressed_means(call: Call, gradients: Sequence[Any], names: Sequence[str]) -> list[Any]:
    """The means of gradients that a rim names, as they are; None for what travels plain."""
    memory = _memory(call.compression, settings_of(call.compression, "DistributedOptimizer"))
    memory.traffic.speaks = call.process_set.rank() == 0
    _check(call)
    found: list[Any] = [None] * len(gradients)
    taken = []
    for at, (each, name) in enumerate(zip(gradients, names, strict=True)):
        if hasattr(each, "indices"):
            continue
        if _fits(each) and memory.takes(name, each.shape.num_elements()):
            taken.append(at)
        else:
            _count_plain(each, name, memory)
    slots = _slots(call, memory)
    theta = _theta_of_step(call, memory, slots) if memory.learns and taken else None
    for number, part in enumerate(cut([gradients[at].shape.num_elements() for at in taken])):
        own = [taken[at] for at in part]
        bucket = Bucket(
            call, memory, [names[at] for at in own], [None] * len(own),
            [gradients[at] for at in own], slots, f"sn_b{number}", theta,
        )  # fmt: skip
        for at, mean in zip(own, means_of(bucket), strict=True):
            found[at] = Mean(gradients[at], mean, call).finish(None)
    return found


def _means_of_tape(call: Call, memory: Memory) -> dict[int, Any]:
    """Those of all gradients of a tape's call that are compressed, by place, made once for all.

    Horovod hands over one tensor at a time, each in a branch of its own. What they have in common
    is made around these branches, with the first of them.
    """
    graph = _graph_of(call)
    known = _in_graph(graph)
    key = memory, "means", tuple(map(id, call.gradients))
    if key not in known:
        slots = _slots(call, memory)
        with graph.as_default():
            theta = _theta_of_step(call, memory, slots) if memory.learns else None
            places, tensors = [], []
            for place, each in enumerate(call.gradients):
                if each is None or hasattr(each, "indices"):
                    continue
                each = _shaped(each, call, place)
                once = sum(other is call.gradients[place] for other in call.gradients) == 1
                if _takes(each, place if once else None, call, memory):
                    places.append(place)
                    tensors.append(each)
            means: dict[int, Any] = {}
            for number, part in enumerate(cut([it.shape.num_elements() for it in tensors])):
                own = [places[at] for at in part]
                bucket = Bucket(
                    call, memory, [None] * len(own), own, [tensors[at] for at in part], slots,
                    f"sn_b{number}", theta,
                )  # fmt: skip
                means.update(zip(own, means_of(bucket), strict=True))
        # With the gradients, as ids are used again.
        known[key] = means, call.gradients
    found: dict[int, Any] = known[key][0]
    return found


def cut(sizes: Sequence[int]) -> list[list[int]]:
    """Which tensors, of so many elements, go into each bucket, in order."""
    found: list[list[int]] = []
    room = 0
    for at, size in enumerate(sizes):
        if not found or size > room:
            found.append([])
            room = _BUCKET
        found[-1].append(at)
        room -= size
    return found


def _shaped(tensor: Any, call: Call, place: int | None) -> Any:
    """Made dense from sparse, a gradient has lost its shape; its variable has not."""
    tensor = tf.convert_to_tensor(tensor)
    if call.sources and place is not None and tensor.shape.num_elements() is None:
        return tf.ensure_shape(tensor, call.sources[place].shape)
    return tensor


def _takes(tensor: Any, place: int | None, call: Call, memory: Memory) -> bool:
    """Whether a gradient of a call is compressed."""
    if not _fits(tensor) or _unclear(call, place, memory):
        return False
    return memory.takes(_label(call, place, tensor), tensor.shape.num_elements())


def _fits(tensor: Any) -> bool:
    """Whether a gradient could be compressed, whatever its size."""
    return tensor.dtype in _FLOATS and tensor.shape.num_elements() is not None


def _after_slots(tensor: Any, call: Call, memory: Memory) -> Any:
    """A tensor that travels plain, behind what is done once in a step for all of a tape."""
    if call.sources is None or tf.executing_eagerly():
        return tensor
    with tf.control_dependencies([_slots(call, memory)]):
        return tf.identity(tensor)


def _unclear(call: Call, place: int | None, memory: Memory) -> bool:
    """Whether nothing tells which memory would be meant."""
    shared = memory.settings.exchange == "shared"
    if call.sources is None:
        # A gather works without memory; the shared exchange is nothing but memory.
        return shared and call.name is None
    if place is None:
        return True
    return shared and not isinstance(call.sources[place], tf.Variable)


def _check(call: Call) -> None:
    if call.op not in (hvd.Average, hvd.Sum):
        raise CompressError(
            f"{call.name or 'gradient'}: compression takes op=hvd.Average or hvd.Sum; Adasum, "
            "Min, Max and Product need the dense tensor. Use another op, or no compression."
        )
    refuse_xla()


def refuse_xla() -> None:
    """Raise CompressError where TensorFlow traces for XLA, with what to do about it."""
    if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
        raise CompressError(
            "gradients cannot be compressed or reduced by Horovod in a function that XLA compiles "
            "(jit_compile=True); expected a plain tf.function. In Keras: "
            "model.compile(jit_compile=False)."
        )


def _label(call: Call, place: int | None, tensor: Any) -> str:
    """A name for a gradient while its graph is made."""
    name = call.name if place == call.place else None
    return name or f"{place}:{tensor.shape}"


def _count_plain(tensor: Any, label: str, memory: Memory) -> Any:
    """Count a tensor that travels plain; returns it, to go on with."""
    size = _wire_type(tensor).size
    elements = tensor.shape.num_elements()
    if elements is not None:
        memory.traffic.fixed(label, elements, elements * size)
        return tensor

    def count(elements: Any) -> Any:
        memory.count_plain(label, int(elements), int(elements) * size)
        return np.int64(0)

    with tf.device("CPU"):
        counted = tf.numpy_function(count, [tf.size(tensor)], tf.int64)
    with tf.control_dependencies([counted]):
        return tf.identity(tensor)


def _theta_of_step(call: Call, memory: Memory, slots: Any) -> Any:
    """Theta for all gradients of a call of Horovod, [] float64: made once for all of them.

    Every rank adds what it has lost since the last one, and the sum decides: so all have the same
    theta in the same step, in whatever order their threads encode.
    """
    if tf.executing_eagerly():
        raise CompressError(
            f"theta={memory.settings.theta!r} in an hvd.allreduce outside of a graph, where "
            "nothing tells steps apart; expected a DistributedGradientTape, Keras, or a call "
            "inside a tf.function. Or use a number, or a schedule of the step alone."
        )
    known = _in_graph(slots.graph)
    key = memory, "theta", tuple(map(id, call.sources or ()))
    if key not in known:

        def tell(_: Any) -> Any:
            memory.count_beside(16)
            return memory.lost()

        def hear(total: Any, slots: Any) -> Any:
            # Whatever was traced for these variables counts their steps.
            return np.float64(memory.begin_step(f"{zlib.crc32(slots.tobytes()):08x}", total))

        with slots.graph.as_default(), tf.device("CPU"):
            told = tf.numpy_function(tell, [slots], tf.float64)
            told.set_shape([2])
            total = hvd.allreduce(
                tf.identity(told, name="sn_lost"), op=hvd.Sum, process_set=call.process_set
            )
            theta = tf.numpy_function(hear, [total, slots], tf.float64)
            theta.set_shape([])
        known[key] = theta
    return known[key]


def _slots(call: Call, memory: Memory) -> Any:
    """The slots of all variables of the call, [variables] int64, -1 for what is no variable."""
    sources = call.sources or ()
    if tf.executing_eagerly():
        return tf.constant([], tf.int64)
    graph = _graph_of(call)
    known = _in_graph(graph)
    key = memory, "slots", tuple(map(id, sources))
    if key not in known:
        handles = {i: v.handle for i, v in enumerate(sources) if isinstance(v, tf.Variable)}
        places = [place for place, _ in call.sparse]
        sizes = [part.dtype.size for _, each in call.sparse for part in _parts(each)]

        def find(*found: Any) -> Any:
            slots = np.full(len(sources), NO_VARIABLE, np.int64)
            slots[list(handles)] = memory.slots(map(repr, found[: len(handles)]))
            counts = [int(count) for count in found[len(handles) :]]
            _count_sparse(memory, places, slots, counts, sizes)
            latest[:] = [memory.sameness_of(slots.tobytes())]
            return slots, latest[0].step()

        latest: list[Any] = []
        with graph.as_default(), tf.device("CPU"):
            counts = [tf.size(part) for _, each in call.sparse for part in _parts(each)]
            slots, due = tf.py_function(find, [*handles.values(), *counts], [tf.int64, tf.bool])
            slots.set_shape([len(sources)])
            variables = as_variables(sources)
            known[key] = slots + compared(
                due, variables, memory, call.process_set, lambda: latest[0]
            )
    return known[key]


def _graph_of(call: Call) -> Any:
    """That of a call: Horovod puts every gradient of a tape into a branch of its own."""
    graph = tf.compat.v1.get_default_graph()
    inner = call.branch and isinstance(graph, CondBranchFuncGraph)
    return graph.outer_graph if inner else graph


def _in_graph(graph: Any) -> dict[Any, Any]:
    """What was made once in a graph; it goes with the graph."""
    if not hasattr(graph, "_sn_made"):
        graph._sn_made = {}
    found: dict[Any, Any] = graph._sn_made
    return found


def _parts(sparse: Any) -> tuple[Any, Any]:
    return sparse.values, sparse.indices


def _count_sparse(
    memory: Memory, places: list[int], slots: Any, counts: list[int], sizes: list[int]
) -> None:
    """Count sparse gradients: their values and indices, by place, as many and as large as given."""
    nbytes = [count * size for count, size in zip(counts, sizes, strict=True)]
    for i, place in enumerate(places):
        key = memory.key(f"{place}:sparse", int(slots[place])) or ""
        memory.count_sparse(key, counts[2 * i], nbytes[2 * i] + nbytes[2 * i + 1])


def _differentiable(tensor: Any, mean: Any, call: Call) -> Any:
    """`mean`, with the gradient of a plain hvd.allreduce of `tensor`."""

    @tf.custom_gradient
    def reduced(tensor: Any, mean: Any) -> Any:
        def gradient(upstream: Any) -> tuple[Any, Any]:
            back = hvd.allreduce(
                upstream, op=call.op, prescale_factor=call.scale, process_set=call.process_set
            )
            return back, None

        return tf.identity(mean), gradient

    return reduced(tensor, mean)


@cache
def _say_host_once() -> None:
    if tf.config.list_logical_devices("GPU"):
        _log.warning("gradients on a GPU are copied to the host and encoded there")
