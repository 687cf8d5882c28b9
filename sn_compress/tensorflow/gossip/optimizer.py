"""GossipOptimizer for Keras 3 on TensorFlow: each rank averages with one other per step.

    optimizer = GossipOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, loss, jit_compile=False)
    model.fit(shard_of_this_rank, callbacks=[Consensus()])

The algorithm is that of sn_compress.torch.gossip. Messages are sent by Horovod's alltoall, an op of
the graph, with splits that are zero except for one partner. With overlap it depends only on the
weights from before the step, so TensorFlow runs it in parallel with the forward and backward pass.
Codecs run in NumPy, as Python functions within the graph.

The class of the optimizer passed is changed to a subclass, as in sn_compress.tensorflow.keras: its
settings, variables and what Keras saves stay the same.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from ...codecs.base import Codec
from ...consistency import agree
from ...errors import CompressError
from ...gossip import differences
from ...gossip.differences import PULL, Differences, Shape
from ...gossip.settings import GossipSettings, message_prefix
from ...gossip.topology import Topology
from ..gained import become

__all__ = ["Consensus", "GossipOptimizer"]


class Gossip:
    """The gossip of one optimizer: tables of partners by step, and the copies a codec needs."""

    def __init__(self, settings: GossipSettings, process_set: Any) -> None:
        self.settings, self.process_set = settings, process_set
        self.rank, self.ranks = process_set.rank(), process_set.size()
        graph = settings.graph(self.ranks)
        # The graph looks up partners by step in a table, so they must be periodic.
        if graph.rotate:
            raise CompressError(
                f"got topology {graph!r}; expected one that does not rotate, under TensorFlow"
            )
        partners = [graph.partner(self.rank, step) for step in range(graph.steps)]
        self._sources = np.array([partner.source for partner in partners])
        self._targets = np.array([partner.target for partner in partners])
        self._weights = np.array([partner.weight for partner in partners], np.float32)
        self.copies: Differences | None = None
        # Created outside of any trace, and not as Keras variables, which Keras would save.
        self.spread = tf.Variable(np.nan, dtype=tf.float64, trainable=False)  # not measured yet
        self.averages = tf.Variable(0, dtype=tf.int64, trainable=False)
        self.average_bytes = tf.Variable(0, dtype=tf.int64, trainable=False)
        self._prefix = message_prefix("gossip", process_set)

    def build(self, variables: Sequence[Any]) -> None:
        """Give all ranks the weights of rank 0; CompressError unless their settings are equal."""
        sets = self.process_set

        def total(name: str, words: Any) -> Any:
            summed = hvd.allreduce(tf.constant(words), op=hvd.Sum, name=name, process_set=sets)
            return summed.numpy()

        if self.ranks > 1:
            tensors = [
                (f"variable {place}", f"{tuple(v.shape)} {v.dtype}")
                for place, v in enumerate(variables)
            ]
            agree(
                [*self.settings.fingerprint(self.ranks), *tensors], total=total, rank=self.rank,
                ranks=self.ranks, name=f"{self._prefix}.agree",
                do="Give all ranks the same model, and GossipOptimizer the same arguments.",
            )  # fmt: skip
            hvd.broadcast_variables([v.value for v in variables], 0, process_set=sets)
        self.copies = self.settings.copies([tuple(v.shape) for v in variables])
        if self.copies is not None:
            self.copies.restart(flattened(variables).numpy())

    # In the graph

    def deltas(self, tensors: Sequence[Any], step: Any, kind: str) -> list[Any]:
        """Return what mixing adds to each tensor, float32: weight * (received - sent)."""
        flat, sizes = flattened(tensors), [int(np.prod(t.shape)) for t in tensors]
        turn = tf.cast(step % len(self._targets), tf.int32)
        source, target = tf.gather(self._sources, turn), tf.gather(self._targets, turn)
        weight = tf.gather(self._weights, turn)
        coded = self.copies is not None and kind == "w"
        if coded:
            wire, sent = tf.numpy_function(self._pack, [flat, target], (tf.uint8, tf.float32))
        else:
            wire, sent = flat, flat
        # An idle rank is its own target, and takes part with nothing, as all ranks must.
        active = tf.cast(target != self.rank, tf.int32)
        wire = wire[: tf.size(wire) * active]
        splits = tf.one_hot(target, self.ranks, dtype=tf.int32) * tf.size(wire)
        received, _ = hvd.alltoall(
            wire, splits, name=f"{self._prefix}.{kind}", process_set=self.process_set
        )
        if coded:
            received = tf.numpy_function(self._unpack, [received, source], tf.float32)
        # An idle rank receives nothing and adds nothing.
        received = tf.cond(tf.size(received) > 0, lambda: received, lambda: sent)
        n = sum(sizes)
        delta = weight * self.settings.factor * (tf.reshape(received, [n]) - tf.reshape(sent, [n]))
        parts = tf.split(delta, sizes)
        return [tf.reshape(part, t.shape) for part, t in zip(parts, tensors, strict=True)]

    def _pack(self, values: Any, target: Any) -> tuple[Any, Any]:
        assert self.copies is not None
        wire, copy = self.copies.begin(values, int(target), self.rank)
        return wire, copy.copy()  # the next message to this target changes the original in place

    def _unpack(self, wire: Any, source: Any) -> Any:
        assert self.copies is not None
        return self.copies.unpack(wire, int(source)) if wire.size else np.empty(0, np.float32)

    def measure(self, variables: Sequence[Any], step: Any) -> None:
        """Every `every` steps measure the spread; if it is above the limit, take the exact mean."""
        interval, limit = self.settings.every, self.settings.limit
        if not interval:
            return
        # Both conditions are equal on all ranks, as the spread comes from a sum over them: a rank
        # that started an all-reduce alone would hang.
        turn = step % interval == 0
        over = tf.cond(turn, lambda: self._over_limit(variables), lambda: tf.constant(False))
        if limit is not None:
            tf.cond(over, lambda: self.consensus(variables), lambda: tf.constant(0))

    def _over_limit(self, variables: Sequence[Any]) -> Any:
        flat = flattened(variables)
        n = sum(int(np.prod(v.shape)) for v in variables)
        rows = differences.rows_of(n)
        filled = tf.reshape(
            tf.pad(flat, [[0, rows * differences.WIDTH - n]]), [rows, differences.WIDTH]
        )
        numbers = tf.cast(tf.linalg.matvec(filled, differences.signs(rows), True), tf.float64)
        norm = tf.cast(tf.reduce_sum(flat**2), tf.float64)
        total = hvd.allreduce(
            tf.concat([numbers, tf.stack([tf.reduce_sum(numbers**2), norm])], 0),
            name=f"{self._prefix}.spread", op=hvd.Sum, process_set=self.process_set,
        )  # fmt: skip
        # Eagerly, a plain float would come back as float32.
        spread = tf.numpy_function(
            lambda t: np.float64(differences.spread(t, self.ranks)), [total], tf.float64
        )
        self.spread.assign(tf.ensure_shape(spread, []))
        limit = self.settings.limit
        return tf.constant(False) if limit is None else self.spread > limit

    def consensus(self, weights: Sequence[Any], also: Sequence[Any] = ()) -> Any:
        """Give all ranks the mean of these variables; copies restart from the weights."""
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
        # All ranks have the mean now, so all copies restart from it.
        assert self.copies is not None
        self.copies.restart(values)
        return np.int32(0)


def _wide(variable: Any) -> Any:
    return tf.float64 if variable.dtype == "float64" else tf.float32


def flattened(tensors: Sequence[Any]) -> Any:
    """Concatenate all values as float32, [n]."""
    return tf.concat(
        [tf.reshape(tf.cast(tf.convert_to_tensor(t), tf.float32), [-1]) for t in tensors], 0
    )


class _Gossiping:
    """Methods added to an optimizer; the first base of its new class."""

    _sn: Gossip

    def build(self, variables: Any) -> None:
        super().build(variables)  # type: ignore[misc]
        with tf.init_scope():
            self._sn.build(self._trainable_variables)  # type: ignore[attr-defined]

    def apply(self, grads: Any, trainable_variables: Any = None) -> None:
        if GraphOrParentsInXlaContext(tf.compat.v1.get_default_graph()):
            raise CompressError(
                "gossip in a function that XLA compiles (jit_compile=True); expected a plain "
                "tf.function. In Keras: model.compile(jit_compile=False)."
            )
        gossip, settings = self._sn, self._sn.settings
        if gossip.ranks == 1:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        if not self.built:  # type: ignore[has-type]
            # Keras would build it in `apply`; with overlap the weights are sent before that.
            with tf.init_scope():
                self.build(list(trainable_variables))
            self.built = True
        variables = list(self._trainable_variables)  # type: ignore[attr-defined]
        # Keras's own count of calls: the same on all ranks, and saved with the optimizer. Copied
        # before `apply` counts this call.
        step = tf.identity(self._iterations.value)  # type: ignore[attr-defined]
        # With overlap, send the weights from before the update, in parallel with the backward pass.
        if settings.overlap:
            deltas = gossip.deltas(variables, step, "w")
            super().apply(grads, trainable_variables)  # type: ignore[misc]
        else:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            deltas = gossip.deltas(variables, step, "w")
        for variable, delta in zip(variables, deltas, strict=True):
            variable.assign(variable.value + tf.cast(delta, variable.dtype))
        if settings.momentum:
            tf.cond(step % settings.momentum == 0, lambda: self._mix_momenta(step), lambda: step)
        gossip.measure(variables, step)

    def _momenta(self) -> list[Any]:
        """Return the optimizer's own variables with the shapes of its parameters, e.g. momentum."""
        # By shape, as each Keras optimizer has different attributes for them.
        shapes = {tuple(v.shape) for v in self._trainable_variables}  # type: ignore[attr-defined]
        floats = (v for v in self.variables if "float" in str(v.dtype))  # type: ignore[attr-defined]
        return [v for v in floats if len(v.shape) and tuple(v.shape) in shapes]

    def _mix_momenta(self, step: Any) -> Any:
        momenta = self._momenta()
        if momenta:
            deltas = self._sn.deltas(momenta, step, "m")
            for variable, delta in zip(momenta, deltas, strict=True):
                variable.assign(variable.value + tf.cast(delta, variable.dtype))
        return step

    def consensus(self, also: Sequence[Any] = ()) -> None:
        if self._sn.ranks == 1:
            return
        trainable = list(self._trainable_variables)  # type: ignore[attr-defined]
        floats = [v for v in also if "float" in str(v.dtype)]
        self._sn.consensus(trainable, [*self._momenta(), *floats])

    @property
    def spread(self) -> float | None:
        value = float(self._sn.spread.numpy())
        return None if np.isnan(value) else value

    def report(self) -> dict[str, float]:
        sizes = [int(np.prod(v.shape)) for v in self._trainable_variables]  # type: ignore[attr-defined]
        copies, share = self._sn.copies, float(np.mean(self._sn._targets != self._sn.rank))
        once = 4 * sum(sizes) if copies is None else copies.wire_bytes
        return {
            "steps": int(self._iterations.numpy()),  # type: ignore[attr-defined]
            "bytes_per_step": share * once,
            "averages": int(self._sn.averages.numpy()),
            "average_bytes": int(self._sn.average_bytes.numpy()),
        }

    def state_dict(self) -> dict[str, Any]:
        return {} if self._sn.copies is None else self._sn.copies.state_dict()

    def load_state_dict(self, state: dict[str, Any]) -> None:
        if not isinstance(state, dict) or (self._sn.copies is None) != (not state):
            raise CompressError(
                "got a state saved with a codec for an optimizer without one, or the reverse; "
                "expected one saved with the same codec, and an optimizer that is built"
            )
        if self._sn.copies is not None:
            self._sn.copies.load_state_dict(state)


class Consensus(keras.callbacks.Callback):  # type: ignore[misc]
    """Take the exact mean of all ranks before each validation and at the end of each epoch.

    Put it before callbacks that save the model. Batch normalisation statistics are averaged too.
    """

    def on_test_begin(self, logs: Any = None) -> None:
        """Called by Keras."""
        self._take()

    def on_epoch_end(self, epoch: int, logs: Any = None) -> None:
        """Called by Keras."""
        self._take()

    def _take(self) -> None:
        optimizer = self.model.optimizer
        if optimizer.built:
            optimizer.consensus(also=self.model.non_trainable_variables)


def ranks_of(process_set: Any) -> Any:
    """Return the process set, by default of all ranks; CompressError if this rank is not in it."""
    peers = hvd.global_process_set if process_set is None else process_set
    if not peers.included():
        raise CompressError(f"this rank is not in {peers}; expected a process set that has it")
    return peers


def GossipOptimizer(  # noqa: N802 - named as Horovod names its own
    optimizer: Any,
    *,
    topology: str | Topology = "dissemination",
    momentum: int = 0,
    overlap: bool = True,
    codec: Codec | Callable[[Shape], Codec] | None = None,
    pull: float = PULL,
    limit: float | None = None,
    every: int = 10,
    process_set: Any = None,
) -> Any:
    """Make a Keras optimizer average weights with one other rank per step; changed and returned.

    Parameters and added methods are those of sn_compress.torch.gossip.GossipOptimizer; all weights
    are sent in one message per step. Rotating topologies raise CompressError: the graph would need
    an infinite table. `state_dict()` returns the copies of a codec; all else is in Keras's
    variables.
    """
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if not isinstance(optimizer, keras.optimizers.Optimizer) or isinstance(optimizer, _Gossiping):
        raise CompressError(f"got a {kind}; expected an optimizer of Keras 3 on TensorFlow, once")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.built:
        raise CompressError(
            f"got a {kind}{', built already' * optimizer.built}; expected one that is new and does "
            "not scale the loss: ranks would skip different steps. Train in float32 or bfloat16."
        )
    settings = GossipSettings(
        topology, momentum=momentum, overlap=overlap, codec=codec, pull=pull, limit=limit,
        every=every,
    )  # fmt: skip
    return become(optimizer, _Gossiping, Gossip(settings, ranks_of(process_set)))
