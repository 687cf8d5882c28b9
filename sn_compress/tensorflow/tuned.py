"""AutoCompression in TensorFlow: which tensors a graph is traced with, and how it asks again.

A graph sends each tensor in one way for good. While the tuner measures, a Python function at the
beginning of a step asks it about all tensors; where it says otherwise than when the graph was
traced, functions are traced again. The step under way still runs as it is: on all ranks, as what
the tuner says comes from summed integers. While it rests nothing is asked, and a variable counts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ..base.errors import CompressError
from .alike import elastic


@dataclass(frozen=True)
class Tensor:
    """One that the tuner is asked about; `nbytes` as it travels plain."""

    shape: tuple[int, ...]
    elements: int
    nbytes: int


@dataclass(frozen=True)
class Tuned:
    """What one call of Horovod's is traced with.

    tensors : all that the tuner chooses for, in their order
    plain : those that travel plain
    rest : steps from the next one on in which the tuner need not be asked, 0 while it measures
    """

    tensors: Mapping[str, Tensor]
    plain: frozenset[str]
    rest: int

    @property
    def counted(self) -> list[tuple[str, int, int]]:
        """Of those that travel plain name, elements and bytes."""
        found = [(name, self.tensors[name]) for name in sorted(self.plain)]
        return [(name, it.elements, it.nbytes) for name, it in found]


def refuse_untraced(functions: bool = True) -> None:
    """Raise CompressError where a choice could not be followed by tracing again.

    functions : whether those that are being traced are known
    """
    if elastic():
        where = "in an elastic run, whose ranks change under a graph"
    elif tf.executing_eagerly():
        where = "outside of a tf.function"
    elif not functions:
        where = f"in a graph that is no tf.function of TensorFlow {tf.__version__}"
    else:
        return
    raise untraced(where)


def untraced(where: str) -> CompressError:
    """AutoCompression where no graph can be traced again for other tensors."""
    return CompressError(
        f"AutoCompression {where}; expected a tape or hvd.allreduce(name=...) inside a "
        "tf.function, or Keras: the step is traced again when the choice changes. Use "
        "LowRankCompression here, and ask sn_compress.predict whether it pays."
    )


def asking(ask: Callable[[], None]) -> Any:
    """A node, [] int64 zero, that calls Python at each step."""

    def run() -> Any:
        ask()
        return np.int64(0)

    with tf.device("CPU"):
        asked = tf.numpy_function(run, [], tf.int64)
    asked.set_shape([])
    return asked


def with_owed(tensor: Any, pay: Callable[[Any], Any]) -> Any:
    """A gradient with what was not sent of it yet: `pay` is told [n] float32 and returns it."""
    with tf.device("CPU"):
        # What is owed is no function of the gradient: nothing is differentiated through Python.
        values = tf.stop_gradient(tf.reshape(tf.cast(tensor, tf.float32), [-1]))
        left = tf.numpy_function(pay, [values], tf.float32)
    return tensor + tf.cast(tf.reshape(left, tensor.shape), tensor.dtype)


def mean_over(process_set: Any, n: int, own: Any) -> Any:
    """The mean, [n] float32, over the ranks that have such a vector; called by all of them.

    own : [n], or None on a rank that has none
    """
    wire = np.zeros(n + 1, np.float32)  # the last one counts the ranks that have it
    if own is not None:
        wire[:n], wire[n] = own, 1
    summed = hvd.allreduce(wire, op=hvd.Sum, process_set=process_set).numpy()
    return summed[:n] / max(summed[n], 1)
