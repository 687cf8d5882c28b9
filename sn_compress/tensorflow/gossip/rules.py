"""The rules of sn_compress.tensorflow.gossip: what is mixed with what, as ops of the graph.

Messages are Horovod's alltoall with splits that are zero but for one partner. What a codec makes of
them runs in NumPy, in the middle of the graph.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ...base.agreement import agree, plain
from ...codecs.base import Codec
from ...gossip import sketch
from ...gossip.differences import Differences, Shape
from ...gossip.names import prefix
from ...gossip.topology import Topology


class Gossip:
    """How one optimizer gossips: tables by step, and the copies that a codec needs."""

    def __init__(
        self,
        topology: Topology,
        *,
        average: str,
        momentum: int,
        overlap: bool,
        codec: Codec | Callable[[Shape], Codec] | None,
        pull: float,
        limit: float | None,
        every: int,
        process_set: Any,
    ) -> None:
        self.topology, self.average, self.momentum = topology, average, momentum
        self.overlap, self.codec, self.pull = overlap, codec, pull if codec else 1.0
        self.limit, self.every, self.process_set = limit, every, process_set
        self.rank, self.ranks = process_set.rank(), process_set.size()
        own = [topology.partner(self.rank, step) for step in range(topology.steps)]
        self._sources = np.array([partner.source for partner in own])
        self._targets = np.array([partner.target for partner in own])
        self._weights = np.array([partner.weight for partner in own], np.float32)
        self.copies: Differences | None = None
        # Made where no trace is under way, and past Keras, which would save them.
        self.spread = tf.Variable(np.nan, dtype=tf.float64, trainable=False)
        self.averages = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.average_bytes = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._prefix = prefix("gossip", process_set)

    def build(self, variables: Sequence[Any]) -> None:
        """All ranks get the weights of rank 0; CompressError unless they have the same settings."""
        if self.ranks > 1:
            self._agree(variables)
            hvd.broadcast_variables([v.value for v in variables], 0, process_set=self.process_set)
        if self.codec is not None:
            self.copies = Differences([tuple(v.shape) for v in variables], self.codec)
            self.copies.restart(flattened(variables).numpy())

    def _agree(self, variables: Sequence[Any]) -> None:
        # A function from shapes to codecs shows an address at best: its codecs are of a size.
        codec = self.codec if isinstance(self.codec, Codec) else self.codec is not None
        names = ("topology", "average", "momentum", "overlap", "pull", "limit", "every")
        said = [(f"setting {name}", plain(getattr(self, name))) for name in names]
        tensors = [
            (f"variable {place}", f"{tuple(v.shape)} {v.dtype}")
            for place, v in enumerate(variables)
        ]

        def total(name: str, words: Any) -> Any:
            sets = self.process_set
            return hvd.allreduce(
                tf.constant(words), op=hvd.Sum, name=name, process_set=sets
            ).numpy()

        agree(
            [*said, ("setting codec", plain(codec)), *tensors], total=total, rank=self.rank,
            ranks=self.ranks, name=f"{self._prefix}.agree",
            do="Give all ranks the same model, and GossipOptimizer the same arguments.",
        )  # fmt: skip

    # In the graph.

    def deltas(self, tensors: Sequence[Any], step: Any, kind: str) -> list[Any]:
        """What mixing adds to each tensor, float32: weight * (partner's - own)."""
        flat = flattened(tensors)
        n = sum(int(np.prod(t.shape)) for t in tensors)
        turn = tf.cast(step % self.topology.steps, tf.int32)
        source, target = tf.gather(self._sources, turn), tf.gather(self._targets, turn)
        weight = tf.gather(self._weights, turn)
        coded = self.copies is not None and kind == "w"
        if coded:
            wire, own = tf.numpy_function(self._pack, [flat, target], (tf.uint8, tf.float32))
        else:
            wire, own = flat, flat
        active = tf.cast(target != self.rank, tf.int32)
        wire = wire[: tf.size(wire) * active]
        splits = tf.one_hot(target, self.ranks, dtype=tf.int32) * tf.size(wire)
        received, _ = hvd.alltoall(
            wire, splits, name=f"{self._prefix}.{kind}", process_set=self.process_set
        )
        if coded:
            received = tf.numpy_function(self._unpack, [received, source], tf.float32)
        # Who sits out hears nothing, and nothing is added.
        received = tf.cond(tf.size(received) > 0, lambda: received, lambda: own)
        delta = weight * self.pull * (tf.reshape(received, [n]) - tf.reshape(own, [n]))
        sizes = [int(np.prod(t.shape)) for t in tensors]
        parts = tf.split(delta, sizes)
        return [tf.reshape(part, t.shape) for part, t in zip(parts, tensors, strict=True)]

    def _pack(self, values: Any, target: Any) -> tuple[Any, Any]:
        copies = self.copies
        assert copies is not None
        if target == self.rank:
            return np.empty(0, np.uint8), values
        return copies.pack(values, int(target)), copies.told(int(target)).copy()

    def _unpack(self, wire: Any, source: Any) -> Any:
        assert self.copies is not None
        return self.copies.unpack(wire, int(source)) if wire.size else np.empty(0, np.float32)

    def measure(self, variables: Sequence[Any], step: Any) -> None:
        """Every so many steps, the spread; and the mean of all ranks if it is over the limit."""
        if not self.every:
            return
        turn = step % self.every == 0
        over = tf.cond(turn, lambda: self._over_limit(variables), lambda: tf.constant(False))
        if self.limit is not None:
            tf.cond(over, lambda: self.consensus(variables), lambda: tf.constant(0))

    def _over_limit(self, variables: Sequence[Any]) -> Any:
        flat = flattened(variables)
        n = sum(int(np.prod(v.shape)) for v in variables)
        rows = sketch.rows_of(n)
        filled = tf.reshape(tf.pad(flat, [[0, rows * sketch.WIDTH - n]]), [rows, sketch.WIDTH])
        numbers = tf.cast(tf.linalg.matvec(filled, sketch.signs(rows), True), tf.float64)
        norm = tf.cast(tf.reduce_sum(flat**2), tf.float64)
        total = hvd.allreduce(
            tf.concat([numbers, tf.stack([tf.reduce_sum(numbers**2), norm])], 0),
            name=f"{self._prefix}.spread", op=hvd.Sum, process_set=self.process_set,
        )  # fmt: skip
        found = tf.numpy_function(lambda t: sketch.spread(t, self.ranks), [total], tf.float64)
        self.spread.assign(tf.ensure_shape(found, []))
        return tf.constant(False) if self.limit is None else self.spread > self.limit

    def consensus(self, weights: Sequence[Any], also: Sequence[Any] = ()) -> Any:
        """Give all ranks the mean of these variables; copies begin anew from the weights."""
        variables = [*weights, *also]
        values = [tf.cast(tf.convert_to_tensor(v), _wide(v)) for v in variables]
        means = hvd.grouped_allreduce(
            values, name=f"{self._prefix}.mean.{len(values)}", op=hvd.Average,
            process_set=self.process_set,
        )  # fmt: skip
        for variable, mean in zip(variables, means, strict=True):
            variable.assign(tf.cast(mean, variable.dtype))
        self.averages.assign_add(1)
        size = sum(int(np.prod(value.shape)) * value.dtype.size for value in values)
        self.average_bytes.assign_add(size)
        if self.copies is None:
            return tf.constant(0)
        return tf.numpy_function(self._restart, [flattened(weights)], tf.int32)

    def _restart(self, values: Any) -> Any:
        assert self.copies is not None
        self.copies.restart(values)
        return np.int32(0)


def _wide(variable: Any) -> Any:
    return tf.float64 if variable.dtype in ("float64", tf.float64) else tf.float32


def flattened(tensors: Sequence[Any]) -> Any:
    """All values as float32, [n]."""
    return tf.concat(
        [tf.reshape(tf.cast(tf.convert_to_tensor(t), tf.float32), [-1]) for t in tensors], 0
    )
