"""Gradients of one call of Horovod that travel together, as nodes of a graph.

Python functions are declared stateless. Stateful ones TensorFlow runs one after the other in the
order of the program, and then no two collectives would ever travel together. What a stateless
function may suffer is being folded away when its input is a constant; therefore each takes the
result of one stateful function beside the gradients, `slots`, which is also what finds the variable
where a trace may serve other variables than those it was made with
(`docs/decisions/0009-variables-of-a-trace.md`).
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Any

import horovod.tensorflow as hvd
import tensorflow as tf

from ..engine.buckets import Buckets
from .alike import elastic
from .memory import Memory
from .nodes.payload_nodes import one, when_all_are_present
from .tracing import Call

_log = logging.getLogger(__name__)
ROUNDS = 3  # of the shared exchange, at most: sizes, and two for low rank
_as_written = tf.autograph.experimental.do_not_convert


@dataclass(frozen=True)
class Cast:
    """A tensor that went uncompressed in a type Horovod can reduce."""

    dtype: tf.DType

    @_as_written
    def finish(self, reduced: Any) -> Any:
        return tf.cast(reduced, self.dtype)


def wire_type(tensor: Any) -> Any:
    """As what a tensor that is not compressed travels: Horovod reduces no bfloat16."""
    return tf.float32 if tensor.dtype == tf.bfloat16 else tensor.dtype


class Plain:
    """A compression of Horovod's that only makes a type of what Horovod cannot reduce: bfloat16."""

    @staticmethod
    @_as_written
    def compress(tensor: Any) -> tuple[Any, Any]:
        """Called by Horovod."""
        wire = wire_type(tensor)
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
    scale : factor on the gradients, a tensor, of a loss scaler; None if there is none
    """

    call: Call
    memory: Memory
    names: Sequence[str | None]
    places: Sequence[int | None]
    tensors: Sequence[Any]
    slots: Any
    mark: str
    theta: Any = None
    scale: Any = None

    @property
    def sizes(self) -> list[int]:
        """Elements of each gradient."""
        return [tensor.shape.num_elements() for tensor in self.tensors]

    def vectors(self) -> list[Any]:
        """The gradients, not scaled, [n] float32 each."""
        flat = [tf.reshape(tf.cast(tensor, tf.float32), [-1]) for tensor in self.tensors]
        return flat if self.scale is None else [values / self.scale for values in flat]

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

    def gather(self, payload: Any) -> Any:
        """All ranks' payloads of this bucket, one behind the other."""
        return hvd.allgather(
            tf.identity(payload, name=f"{self.mark}_payload"),
            name=self.name("payload"),
            ignore_name_scope=self.call.ignore_name_scope,
            process_set=self.call.process_set,
        )

    def alltoall(self, payloads: Any, splits: Sequence[int]) -> Any:
        """What all ranks have for this one, one behind the other.

        splits : of each rank, how much of `payloads` it is to have
        """
        came, _ = hvd.alltoall(
            tf.identity(payloads, name=f"{self.mark}_parts"),
            splits=tf.constant(splits, tf.int32),
            name=self.name("parts"),
            ignore_name_scope=self.call.ignore_name_scope,
            process_set=self.call.process_set,
        )
        return came

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
    each = [memory.codec.payload_bytes(n) for n in sizes]
    size = sum(each) if memory.settings.fixed else None
    payload.set_shape([size])
    present = bucket.reduce(one(bucket.vectors()[0]), hvd.Sum, "ranks")
    sets = bucket.call.process_set
    ranks = hvd.size_op(sets.process_set_id) if elastic() else sets.size()
    every = bucket.gather(when_all_are_present(payload, present, ranks))
    if size is not None and not elastic():  # who plans the step's memory has to know it
        every.set_shape([bucket.ranks() * size])
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


def means_of(bucket: Bucket) -> list[Any]:
    """The means of a bucket's gradients, [n] float32 each, as nodes of the graph."""
    _say_host_once()
    return (summed if bucket.memory.settings.exchange == "shared" else gathered)(bucket)


def cut(sizes: Sequence[int]) -> list[list[int]]:
    """Which tensors, of so many elements, go into each bucket, in order."""
    layout = Buckets((str(at), size, None) for at, size in enumerate(sizes))
    return [[int(at) for at in names] for names in layout.members]


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
