"""FFTCompression for TensorFlow tensors in stock Horovod: eager tapes and tf.function.

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

import io
import json
import logging
import os
import re
import threading
import weakref
from dataclasses import dataclass
from functools import cache
from types import FrameType
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from ..errors import CompressError, PayloadError
from ..exchange.gather import mean_of_gathered
from ..feedback import ErrorFeedback
from .compression import Settings
from .tracing import Call, find_call
from .traffic import Traffic

_log = logging.getLogger(__name__)
_FLOATS = (tf.float32, tf.float16, tf.bfloat16)
_HANDLE = re.compile(r'ResourceHandle\(name="([^"]+)"')
_NO_MEMORY = -1
_as_written = tf.autograph.experimental.do_not_convert


class Memory(tf.train.experimental.PythonState):  # type: ignore[misc]
    """What belongs to one FFTCompression: codec, error memory, counts.

    It goes into a checkpoint like a variable: `tf.train.Checkpoint(memory=memory_of(fft))`. It
    differs between ranks, so each rank writes and reads a checkpoint of its own.
    """

    def __init__(self, settings: Settings) -> None:
        super().__init__()
        self.settings = settings
        threads = tf.config.threading.get_intra_op_parallelism_threads()
        self.codec = settings.codec(threads or len(os.sched_getaffinity(0)))
        self.feedback = ErrorFeedback(self.codec, decay=settings.decay)
        self.traffic = Traffic()
        self._lock = threading.Lock()  # TensorFlow encodes several gradients at a time
        self._slot_of: dict[str, int] = {}
        self._keys: list[str] = []

    def slots(self, *handles: Any) -> Any:
        """One number per variable, [variables] int64, numbered as they first come.

        A handle is known by the name in its text, such as "kernel/12", where the second part is
        TensorFlow's count of all variables of the process.
        """
        found = []
        with self._lock:
            for handle in handles:
                match = _HANDLE.search(repr(handle))
                if match is None:
                    raise CompressError(
                        f"the handle {handle!r} of a variable has no name; expected one as "
                        "TensorFlow 2.21 writes it. Please report your version of TensorFlow."
                    )
                if match[1] not in self._slot_of:
                    self._slot_of[match[1]] = len(self._keys)
                    self._keys.append(f"{len(self._keys)}:{match[1].rpartition('/')[0]}")
                found.append(self._slot_of[match[1]])
        return np.array(found, np.int64)

    def encode(self, name: str | None, slot: int, values: Any) -> Any:
        """The payload of a gradient, [payload bytes] uint8."""
        key = name if slot == _NO_MEMORY else self._keys[slot]
        if key is None or not self.settings.feedback:
            payload = self.codec.encode(values)
        else:
            payload = self.feedback.encode(key, values)
        with self._lock:
            saturated = self.traffic.payload(key, values.size, payload, extra=0)
        if saturated:
            _log.warning(
                "%s: values beyond the fixed window were clipped; see `saturated` in the report",
                key,
            )
        return payload.buffer

    def clear(self) -> None:
        """Forget all variables and what was dropped of them: for models that are gone."""
        with self._lock:
            self._slot_of.clear()
            self._keys.clear()
            self.feedback = ErrorFeedback(self.codec, decay=self.settings.decay)

    def report(self) -> dict[str, float]:
        """See FFTCompression.report."""
        with self._lock:
            return self.traffic.report()

    def state_dict(self) -> dict[str, Any]:
        """The error memory by variable ("0:kernel"), as arrays; it differs between ranks."""
        return self.feedback.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what state_dict returned on the same rank."""
        self.feedback.load_state_dict(state)

    def serialize(self) -> bytes:
        """Called by tf.train.Checkpoint."""
        state = self.state_dict()
        arrays, head = {}, {**state, "rank": hvd.rank(), "ranks": hvd.size(), "memory": {}}
        for name, entry in state["memory"].items():
            head["memory"][name] = {"n": entry["n"], "parts": len(entry["coefficients"])}
            arrays |= {f"{name}/{i}": part for i, part in enumerate(entry["coefficients"])}
        stream = io.BytesIO()
        np.savez(stream, head=np.frombuffer(json.dumps(head).encode(), np.uint8), **arrays)
        return stream.getvalue()

    def deserialize(self, string_value: bytes) -> None:
        """Called by tf.train.Checkpoint."""
        with np.load(io.BytesIO(string_value), allow_pickle=False) as arrays:
            head = json.loads(arrays["head"].tobytes())
            if head["rank"] != hvd.rank():
                raise CompressError(
                    f"this error memory was saved by rank {head['rank']} of {head['ranks']} and "
                    f"read by rank {hvd.rank()}; expected its own. Save one checkpoint per rank, "
                    "with the rank in its name."
                )
            for name, entry in head["memory"].items():
                parts = range(entry.pop("parts"))
                entry["coefficients"] = [arrays[f"{name}/{i}"] for i in parts]
        self.load_state_dict(head)


# A compression that is dropped takes its memory along, unless Horovod's cache holds it.
_memories: weakref.WeakKeyDictionary[Any, Memory] = weakref.WeakKeyDictionary()
# One call of Memory.slots serves all gradients of a call of Horovod.
_slots_in: weakref.WeakKeyDictionary[Any, dict[Any, Any]] = weakref.WeakKeyDictionary()


def memory_of(compression: Any) -> Memory:
    """What an FFTCompression remembers and has sent, for all tapes that were given it.

    To keep two models apart in reports and checkpoints, give each its own:
    `FFTCompression.using()` returns a new one each time.
    """
    settings = getattr(compression, "settings", None)
    if not isinstance(settings, Settings):
        raise CompressError(
            f"got {compression!r}; expected FFTCompression or what FFTCompression.using(...) "
            "returned"
        )
    return _memory(compression, settings)


def _memory(compression: Any, settings: Settings) -> Memory:
    if compression not in _memories:
        _memories[compression] = Memory(settings)
    return _memories[compression]


def report(tape: Any) -> dict[str, float]:
    """Always CompressError: a tape lives for one step, its FFTCompression for the run."""
    raise CompressError(
        f"got a {type(tape).__name__}; expected the optimizer of sn_compress.horovod.keras. For "
        "tapes, sn_compress.horovod.tensorflow.memory_of(compression) has report(), state_dict() "
        "and load_state_dict(), and goes into tf.train.Checkpoint."
    )


def state_dict(tape: Any) -> dict[str, Any]:
    """Always CompressError, see report."""
    return report(tape)


def load_state_dict(tape: Any, state: dict[str, Any]) -> None:
    """Always CompressError, see report."""
    report(tape)


@dataclass(frozen=True)
class Cast:
    """A tensor that went uncompressed in a type Horovod can reduce."""

    dtype: tf.DType

    @_as_written
    def finish(self, reduced: Any) -> Any:
        return tf.cast(reduced, self.dtype)


@dataclass(frozen=True)
class Gathering:
    """A payload on its way, as a node of the graph."""

    gathered: Any  # [ranks * payload bytes] uint8
    call: Call
    memory: Memory
    like: Any  # the gradient: shape and dtype of the result

    @_as_written
    def finish(self, _: Any) -> Any:
        n = self.like.shape.num_elements()
        with tf.device("CPU"):
            mean = tf.numpy_function(
                lambda gathered: self._mean(gathered, n), [self.gathered], tf.float32,
                stateful=False,
            )  # fmt: skip
        mean.set_shape([n])
        mean = tf.cast(tf.reshape(mean, self.like.shape), self.like.dtype)
        if self.call.sources is None:
            return _differentiable(self.like, mean, self.call)
        return mean

    def _mean(self, gathered: Any, n: int) -> Any:
        # Asked at each step: an elastic run changes it after the trace.
        ranks = self.call.process_set.size()
        try:
            mean = mean_of_gathered(self.memory.codec, gathered, ranks, n)
        except PayloadError as error:
            if all(part.any() for part in np.array_split(gathered, ranks)):
                raise
            # Horovod puts zeros in the place of a rank that has joined.
            raise CompressError(
                f"{self.like.name if tf.is_symbolic_tensor(self.like) else 'tensor'}: another "
                "rank called hvd.join(), after which Horovod gathers nothing. Give all ranks "
                "equally many batches (drop_remainder=True), or train without compression."
            ) from error
        factor = self.call.scale * (ranks if self.call.op == hvd.Sum else 1)
        return mean if factor == 1.0 else mean * np.float32(factor)


@_as_written
def compress(tensor: Any, settings: Settings, frame: FrameType) -> tuple[Any, Any]:
    """One gradient on its way; see FFTCompression."""
    call = find_call(frame, tensor)
    _check(call)
    tensor = tf.convert_to_tensor(tensor)
    if call.place is not None and tensor.shape.num_elements() is None:
        # Made dense from sparse, a gradient has lost its shape; its variable has not.
        tensor = tf.ensure_shape(tensor, call.sources[call.place].shape)
    memory = _memory(call.compression, settings)
    n = tensor.shape.num_elements()
    unclear = call.sources is not None and call.place is None
    if tensor.dtype not in _FLOATS or n is None or n < settings.min_elements or unclear:
        return _send_plain(tensor, call, memory)
    return _send_payload(tensor, call, memory)


def _check(call: Call) -> None:
    if call.op not in (hvd.Average, hvd.Sum):
        raise CompressError(
            f"{call.name or 'gradient'}: FFTCompression takes op=hvd.Average or hvd.Sum; Adasum, "
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


def _send_plain(tensor: Any, call: Call, memory: Memory) -> tuple[Any, Any]:
    wire, ctx = tensor, None
    if tensor.dtype == tf.bfloat16:  # Horovod reduces no bfloat16
        wire, ctx = tf.cast(tensor, tf.float32), Cast(tensor.dtype)
    elements = tensor.shape.num_elements()
    if elements is not None:
        name = call.name or f"{call.place}:{tensor.shape}"
        memory.traffic.fixed(name, elements, elements * wire.dtype.size)
    return wire, ctx


def _send_payload(tensor: Any, call: Call, memory: Memory) -> tuple[Any, Any]:
    _say_host_once()
    slots = _slots(tensor, call, memory)
    slot = _NO_MEMORY if call.place is None else slots[call.place]
    with tf.device("CPU"):
        values = tf.reshape(tf.cast(tensor, tf.float32), [-1])
        payload = tf.numpy_function(
            lambda values, slot, _: memory.encode(call.name, int(slot), values),
            [values, slot, slots],
            tf.uint8,
            stateful=False,
        )
    payload.set_shape([memory.codec.payload_bytes(tensor.shape.num_elements())])
    # Horovod names its operations after their inputs where no name is given.
    mark = "sn_plain" if call.place is None else f"sn_{call.place}"
    gathered = hvd.allgather(
        tf.identity(payload, name=mark),
        name=call.name and f"sn_{call.name}",
        ignore_name_scope=call.ignore_name_scope,
        process_set=call.process_set,
    )
    # Grouped all-reduces want one dtype, that of the plain tensors beside it.
    dtype = tf.float32 if tensor.dtype == tf.bfloat16 else tensor.dtype
    token = tf.identity(tf.zeros([1], dtype), name=f"{mark}_token")
    return token, Gathering(gathered, call, memory, tensor)


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

        def find(*found: Any) -> Any:
            slots = np.full(len(sources), _NO_MEMORY, np.int64)
            slots[list(handles)] = memory.slots(*found)
            return slots

        with graph.as_default(), tf.device("CPU"):
            known[key] = tf.py_function(find, list(handles.values()), tf.int64)
            known[key].set_shape([len(sources)])
    return known[key]


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
