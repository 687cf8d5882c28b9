"""GossipOptimizer for Keras 3 on TensorFlow: each rank averages with one other per step.

    optimizer = GossipOptimizer(keras.optimizers.SGD(0.1, momentum=0.9))
    model.compile(optimizer, loss, jit_compile=False)
    model.fit(shard_of_this_rank, callbacks=[Consensus()])

The rules are those of sn_compress.torch.gossip. Messages are Horovod's alltoall with splits that
are zero but for one partner: an op of the graph. With overlap it needs nothing but the weights from
before the step, so TensorFlow runs it beside the forward and backward pass.

The optimizer that is passed changes its class to a subclass of its own, as in
sn_compress.tensorflow.keras: its settings, variables and what Keras saves stay as they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, Literal

import horovod.tensorflow as hvd
import keras
import numpy as np
import tensorflow as tf
from tensorflow.python.ops.control_flow_util import GraphOrParentsInXlaContext

from ...base.errors import CompressError
from ...codecs.base import Codec
from ...gossip.differences import PULL, Shape
from ...gossip.settings import check, graph_of
from ...gossip.topology import Topology
from .rules import Gossip

__all__ = ["Consensus", "GossipOptimizer"]


class _Gossiping:
    """What an optimizer gains; comes before its own class."""

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
        gossip = self._sn
        if gossip.ranks == 1:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        if not self.built:  # type: ignore[has-type]
            with tf.init_scope():
                self.build(list(trainable_variables))
            self.built = True
        variables = list(self._trainable_variables)  # type: ignore[attr-defined]
        # As Keras counts calls: the same on all ranks, and saved with the optimizer.
        step = tf.identity(self._iterations.value)  # type: ignore[attr-defined]
        if gossip.average == "gradients":
            grads = [
                tf.zeros(v.shape, v.dtype) if g is None else tf.convert_to_tensor(g)
                for g, v in zip(grads, trainable_variables or variables, strict=True)
            ]
            deltas = gossip.deltas(grads, step, "g")
            grads = [g + tf.cast(d, g.dtype) for g, d in zip(grads, deltas, strict=True)]
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            return
        if gossip.overlap:
            deltas = gossip.deltas(variables, step, "w")
            super().apply(grads, trainable_variables)  # type: ignore[misc]
        else:
            super().apply(grads, trainable_variables)  # type: ignore[misc]
            deltas = gossip.deltas(variables, step, "w")
        for variable, delta in zip(variables, deltas, strict=True):
            variable.assign(variable.value + tf.cast(delta, variable.dtype))
        if gossip.momentum:
            tf.cond(step % gossip.momentum == 0, lambda: self._mix_momenta(step), lambda: step)
        gossip.measure(variables, step)

    def _momenta(self) -> list[Any]:
        """The optimizer's own variables of the shapes of its parameters, such as momentum."""
        shapes = {tuple(v.shape) for v in self._trainable_variables}  # type: ignore[attr-defined]
        own = self.variables  # type: ignore[attr-defined]
        return [
            v for v in own if len(v.shape) and tuple(v.shape) in shapes and "float" in str(v.dtype)
        ]

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
        own = list(self._trainable_variables)  # type: ignore[attr-defined]
        floats = [v for v in also if "float" in str(v.dtype)]
        self._sn.consensus(own, [*self._momenta(), *floats])

    @property
    def spread(self) -> float | None:
        found = float(self._sn.spread.numpy())
        return None if np.isnan(found) else found

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
                "a state with copies for an optimizer without a codec, or the other way round; "
                "expected one saved with the same codec, and an optimizer that is built"
            )
        if self._sn.copies is not None:
            self._sn.copies.load_state_dict(state)


class Consensus(keras.callbacks.Callback):  # type: ignore[misc]
    """Take the exact mean of all ranks before each validation and at the end of each epoch.

    Put it before callbacks that save the model. The averages of batch normalisation are averaged.
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


def GossipOptimizer(  # noqa: N802 - named as Horovod names its own
    optimizer: Any,
    *,
    topology: str | Topology = "dissemination",
    average: Literal["weights", "gradients"] = "weights",
    momentum: int = 0,
    overlap: bool = True,
    codec: Codec | Callable[[Shape], Codec] | None = None,
    pull: float = PULL,
    limit: float | None = None,
    every: int = 10,
    process_set: Any = None,
) -> Any:
    """Make a Keras optimizer average with one other rank per step. It is returned, changed.

    Parameters, and what the optimizer gains, are those of sn_compress.torch.gossip.GossipOptimizer;
    there is one message a step for all weights. With a topology that rotates, CompressError: the
    graph would need a table without an end. `state_dict()` holds the copies of a codec; all else is
    in Keras's variables.
    """
    kind = f"{type(optimizer).__module__}.{type(optimizer).__qualname__}"
    if not isinstance(optimizer, keras.optimizers.Optimizer) or isinstance(optimizer, _Gossiping):
        raise CompressError(f"got a {kind}; expected an optimizer of Keras 3 on TensorFlow, once")
    if isinstance(optimizer, keras.optimizers.LossScaleOptimizer) or optimizer.built:
        raise CompressError(
            f"got a {kind}{', built already' * optimizer.built}; expected one that is new and does "
            "not scale the loss: ranks would skip different steps. Train in float32 or bfloat16."
        )
    check(average=average, codec=codec, momentum=momentum, pull=pull, limit=limit, every=every)
    peers = hvd.global_process_set if process_set is None else process_set
    if not peers.included():
        raise CompressError(f"this rank is not in {peers}; expected a process set that has it")
    graph = graph_of(topology, peers.size(), codec)
    if graph.rotate:
        raise CompressError(f"{graph!r}; expected one that does not rotate, in TensorFlow")
    own = type(optimizer)
    gossip = Gossip(
        graph, average=average, momentum=momentum, overlap=overlap, codec=codec, pull=pull,
        limit=limit, every=every, process_set=peers,
    )  # fmt: skip
    # Past Keras's own __setattr__, which would track what it is given.
    object.__setattr__(optimizer, "_sn", gossip)
    same_name = {"__module__": own.__module__, "__qualname__": own.__qualname__}
    object.__setattr__(optimizer, "__class__", type(own.__name__, (_Gossiping, own), same_name))
    return optimizer
