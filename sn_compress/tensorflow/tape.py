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
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any, NoReturn

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from ..codecs.gather import wire_bytes
from ..compression import settings_of
from ..errors import CompressError
from ..settings import Settings
from .alike import (
    agree_at_trace,
    as_variables,
    compared,
    said_of_compression,
    said_of_variables,
)
from .traced import NO_VARIABLE, Traced
from .tracing import Call, find_call

_log = logging.getLogger(__name__)
_FLOATS = (tf.float32, tf.float16, tf.bfloat16)
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
# One call of Memory.slots serves all gradients of a call of Horovod, and so does one theta where it
# follows what steps have lost.
_slots_in: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


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


@dataclass(frozen=True)
class OnItsWay:
    """A gradient on its way, and how the nodes of its graph call Python."""

    call: Call
    memory: Memory
    like: Any  # the gradient: shape and dtype of the result
    slot: Any  # of its variable, a tensor
    slots: Any  # what keeps the calls from being folded away
    mark: str  # in the names of its collectives
    theta: Any  # of the step, a tensor; None if the step alone tells it

    def python(self, function: Callable[..., Any], inputs: list[Any], outputs: Any) -> Any:
        """A node that calls `function(key, *inputs)` at each step."""

        def run(slot: Any, _: Any, *values: Any) -> Any:
            return function(self.memory.key(self.call.name, int(slot)), *values)

        with tf.device("CPU"):
            return tf.numpy_function(run, [self.slot, self.slots, *inputs], outputs, stateful=False)

    def name(self, kind: str) -> str | None:
        """Of a collective; Horovod names it after its input where the user gave none."""
        return self.call.name and f"sn_{kind}_{self.call.name}"

    def ranks(self) -> int:
        """Asked at each step: an elastic run changes it after the trace."""
        return int(self.call.process_set.size())

    def factor(self) -> float:
        """From the mean to what was asked for."""
        return float(self.call.scale * (self.ranks() if self.call.op == hvd.Sum else 1))

    def restored(self, mean: Any) -> Any:
        """The mean as the gradient: shape, dtype, and the gradient of a plain hvd.allreduce."""
        mean.set_shape([self.like.shape.num_elements()])
        mean = tf.cast(tf.reshape(mean, self.like.shape), self.like.dtype)
        if self.call.sources is None:
            return _differentiable(self.like, mean, self.call)
        return mean


@dataclass(frozen=True)
class Gathering:
    """The payloads of all ranks, as a node of the graph."""

    way: OnItsWay
    gathered: Any  # [ranks * payload bytes] uint8

    @_as_written
    def finish(self, _: Any) -> Any:
        way, n = self.way, self.way.like.shape.num_elements()

        def decode(key: str | None, gathered: Any) -> Any:
            return way.memory.mean(key, gathered, ranks=way.ranks(), n=n, factor=way.factor())

        return way.restored(way.python(decode, [self.gathered], tf.float32))


@dataclass(frozen=True)
class Summing:
    """The beginning of a step of the shared exchange, as nodes of the graph."""

    way: OnItsWay
    dense: Any  # [] bool
    whole: Any  # [n or 0] float32, to be averaged if it is dense
    words: Any  # [words or 0] int32, to be summed if not

    @_as_written
    def finish(self, _: Any) -> Any:
        return self.way.restored(tf.cond(self.dense, self._averaged, lambda: self._summed(1)))

    def _averaged(self) -> Any:
        mean = self._reduce(self.whole, hvd.Average, "dense")

        def learn(key: str, mean: Any) -> Any:
            return self.way.memory.learn(key, mean, factor=self.way.factor())

        return self.way.python(learn, [mean], tf.float32)

    def _summed(self, turn: int, words: Any = None) -> Any:
        total = self._reduce(self.words if words is None else words, hvd.Sum, f"round{turn}")

        def advance(key: str, total: Any) -> Any:
            return self.way.memory.advance(key, total, factor=self.way.factor())

        more, words, mean = self.way.python(advance, [total], [tf.bool, tf.int32, tf.float32])
        if turn == ROUNDS:
            return mean
        more.set_shape([])
        return tf.cond(more, lambda: self._summed(turn + 1, words), lambda: mean)

    def _reduce(self, tensor: Any, op: Any, kind: str) -> Any:
        tensor.set_shape([None])
        return hvd.allreduce(
            tf.identity(tensor, name=f"{self.way.mark}_{kind}"),
            op=op,
            name=self.way.name(kind),
            ignore_name_scope=self.way.call.ignore_name_scope,
            process_set=self.way.call.process_set,
        )


@_as_written
def compress(tensor: Any, settings: Settings, frame: FrameType) -> tuple[Any, Any]:
    """One gradient on its way; see Compression."""
    call = find_call(frame, tensor)
    _check(call)
    tensor = tf.convert_to_tensor(tensor)
    if call.sources and call.place is not None and tensor.shape.num_elements() is None:
        # Made dense from sparse, a gradient has lost its shape; its variable has not.
        tensor = tf.ensure_shape(tensor, call.sources[call.place].shape)
    memory = _memory(call.compression, settings)
    memory.traffic.speaks = call.process_set.rank() == 0
    said = [*said_of_compression(call.compression), ("op", str(call.op))]
    if call.sources is not None and all(v is not None for v in call.sources):
        said += said_of_variables(call.sources)
    agree_at_trace(memory.asked, call.process_set, said, memory.count_beside)
    n = tensor.shape.num_elements()
    shared = settings.exchange == "shared"
    fits = tensor.dtype in _FLOATS and n is not None and not _unclear(call, shared)
    if not fits or not memory.takes(_label(call, tensor), tensor.shape.as_list()):
        return _send_plain(_after_slots(tensor, call, memory), call, memory)
    return _send(tensor, call, memory, shared)


def _after_slots(tensor: Any, call: Call, memory: Memory) -> Any:
    """A tensor that travels plain, behind what is done once in a step for all of a tape."""
    if call.sources is None or tf.executing_eagerly():
        return tensor
    with tf.control_dependencies([_slots(tensor, call, memory)]):
        return tf.identity(tensor)


def _unclear(call: Call, shared: bool) -> bool:
    """Whether nothing tells which memory would be meant."""
    if call.sources is None:
        # A gather works without memory; the shared exchange is nothing but memory.
        return shared and call.name is None
    if call.place is None:
        return True
    return shared and not isinstance(call.sources[call.place], tf.Variable)


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


def _label(call: Call, tensor: Any) -> str:
    """A name for a gradient while its graph is made."""
    return call.name or f"{call.place}:{tensor.shape}"


def _send_plain(tensor: Any, call: Call, memory: Memory) -> tuple[Any, Any]:
    wire, ctx = tensor, None
    if tensor.dtype == tf.bfloat16:  # Horovod reduces no bfloat16
        wire, ctx = tf.cast(tensor, tf.float32), Cast(tensor.dtype)
    elements = tensor.shape.num_elements()
    label, size = _label(call, tensor), wire.dtype.size
    if elements is not None:
        memory.traffic.fixed(label, elements, elements * size)
        return wire, ctx

    def count(elements: Any) -> Any:
        memory.count_plain(label, int(elements), int(elements) * size)
        return np.int64(0)

    with tf.device("CPU"):
        counted = tf.numpy_function(count, [tf.size(wire)], tf.int64)
    with tf.control_dependencies([counted]):
        return tf.identity(wire), ctx


def _send(tensor: Any, call: Call, memory: Memory, shared: bool) -> tuple[Any, Any]:
    _say_host_once()
    slots = _slots(tensor, call, memory)
    slot = tf.constant(NO_VARIABLE, tf.int64) if call.place is None else slots[call.place]
    mark = "sn_plain" if call.place is None else f"sn_{call.place}"
    theta = _theta_of_step(tensor, call, memory, slots) if memory.learns else None
    way = OnItsWay(call, memory, tensor, slot, slots, mark, theta)
    values = tf.reshape(tf.cast(tensor, tf.float32), [-1])
    # Grouped all-reduces want one dtype, that of the plain tensors beside it.
    dtype = tf.float32 if tensor.dtype == tf.bfloat16 else tensor.dtype
    token = tf.identity(tf.zeros([1], dtype), name=f"{mark}_token")
    return token, (_begin(way, values) if shared else _gather(way, values))


def _gather(way: OnItsWay, values: Any) -> Gathering:
    known = [] if way.theta is None else [way.theta]
    payload = way.python(way.memory.encode, [values, *known], tf.uint8)
    fixed = way.memory.settings.fixed
    size = wire_bytes(way.memory.codec.payload_bytes(values.shape[0])) if fixed else None
    payload.set_shape([size])
    gathered = hvd.allgather(
        tf.identity(payload, name=f"{way.mark}_payload"),
        name=way.name("payload"),
        ignore_name_scope=way.call.ignore_name_scope,
        process_set=way.call.process_set,
    )
    return Gathering(way, gathered)


def _begin(way: OnItsWay, values: Any) -> Summing:
    shape = tuple(way.like.shape)

    def begin(key: str, values: Any) -> Any:
        return way.memory.begin(
            key, values, shape=shape, ranks=way.ranks(), rank=way.call.process_set.rank()
        )

    dense, whole, words = way.python(begin, [values], [tf.bool, tf.float32, tf.int32])
    dense.set_shape([])
    return Summing(way, dense, whole, words)


def _theta_of_step(tensor: Any, call: Call, memory: Memory, slots: Any) -> Any:
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
    known = _slots_in[slots.graph]
    key = memory, tuple(map(id, call.sources or ())), "theta"
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


def _slots(tensor: Any, call: Call, memory: Memory) -> Any:
    """The slots of all variables of the call, [variables] int64, -1 for what is no variable."""
    sources = call.sources or ()
    if tf.executing_eagerly():
        return tf.constant([], tf.int64)
    # That of the gradient, since we are in a branch of it; a constant has none.
    symbolic = tf.is_symbolic_tensor(tensor)
    graph = tensor.graph if symbolic else tf.compat.v1.get_default_graph()
    known = _slots_in.setdefault(graph, {})
    key = memory, tuple(map(id, sources))
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
