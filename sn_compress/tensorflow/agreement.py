"""Horovod's TensorFlow: agreement of ranks while tracing, and comparisons in steps of the graph."""

from __future__ import annotations

import logging
import os
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.elastic import notification_manager

from .. import __version__
from ..consistency import Fingerprint, ParameterCheck, agree, all_equal, digest, digest_words
from ..errors import CompressError
from ..ops import products

_log = logging.getLogger(__name__)
_DIGEST_WORDS = 17  # length of `digest_words`, 8 bytes each
_DO = (
    "Give all ranks the same model and variables in the same order, the same number of optimizers, "
    "and the same arguments."
)


def elastic() -> bool:
    """Whether this is an elastic run: no comparisons while tracing, as new ranks trace later."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def fingerprint_of_compression(compression: Any) -> list[tuple[str, str]]:
    """Return the name of a compression, and its settings if it is one of ours."""
    settings = getattr(compression, "settings", None)
    return [
        ("compression", getattr(compression, "__name__", type(compression).__name__)),
        *(settings.fingerprint() if settings else ()),
        ("version of sn_compress", __version__),
    ]


def agree_at_trace(
    agreed: set[str],
    process_set: Any,
    fingerprint: Fingerprint,
    count: Callable[[int], None] | None = None,
) -> None:
    """Raise CompressError on every rank unless all trace the same; compares each fingerprint once.

    agreed : what this compression or optimizer has already compared
    count : called with the number of bytes that this rank sent
    """
    key = repr((process_set.process_set_id, fingerprint))
    if key in agreed or elastic():
        return
    with tf.init_scope():
        # In a TensorFlow 1 graph, sums have no values yet.
        if not tf.executing_eagerly():
            return
        agree(
            fingerprint, total=partial(total, process_set, count), rank=process_set.rank(),
            ranks=process_set.size(), name="sn.agree", do=_DO,
        )  # fmt: skip
    agreed.add(key)


def hardware_fingerprint() -> Fingerprint:
    """Return a fingerprint that is equal on ranks with bit-identical matrix products."""
    # The engine computes with NumPy, graphs with TensorFlow.
    arrays = np.zeros(1, np.float32), tf.zeros(1)
    return [pair for array in arrays for pair in products.hardware_fingerprint(array)]


def differs(
    process_set: Any, count: Callable[[int], None], name: str, fingerprint: Fingerprint
) -> bool:
    """Whether ranks have different fingerprints; blocks, and all ranks call it."""
    return not all_equal(total(process_set, count, name, digest_words(fingerprint)))


def total(process_set: Any, count: Callable[[int], None] | None, name: str, words: Any) -> Any:
    """Sum over the ranks; blocks."""
    if count is not None:
        count(words.nbytes)
    wire = tf.constant(words)
    return hvd.allreduce(wire, op=hvd.Sum, name=name, process_set=process_set).numpy()


def refuse_joined(
    process_set: Any, count: Callable[[int], None] | None, name: str, message: str
) -> None:
    """Raise CompressError on every rank, with this message, if any has called hvd.join().

    With a joined rank any collective except a sum, to which it adds zero, ends Horovod on all
    ranks.
    """
    # Horovod 0.28.1 starts an all-to-all on a joined rank from its response cache, and crashes
    # there (decision 40).
    if total(process_set, count, name, np.ones(1, np.int32))[0] != process_set.size():
        raise CompressError(message)


def compared(
    is_due: Any,
    variables: Sequence[Any],
    process_set: Any,
    count: Callable[[int], None],
    find: Callable[[], tuple[ParameterCheck, int]],
) -> Any:
    """Return a node, [] int64, that fails on every rank if `is_due` is true and variables differ.

    is_due : whether this step compares them
    variables : TensorFlow variables, compared as they are before the step
    count : called with the number of bytes that this rank sends
    find : called at run time; returns the check that counts steps, and the step about to begin
    """
    names = [variable.name for variable in variables]

    def fingerprint_of(values: Sequence[Any]) -> Fingerprint:
        return [(name, digest(value)) for name, value in zip(names, values, strict=True)]

    def ask(*values: Any) -> Any:
        count(8 * _DIGEST_WORDS)
        return digest_words(fingerprint_of(values))

    def judge(summed: Any, *values: Any) -> Any:
        sameness, at = find()
        if not all_equal(summed):
            raise sameness.error(
                at, fingerprint_of(values), total=partial(total, process_set, count),
                rank=process_set.rank(), ranks=process_set.size(),
            )  # fmt: skip
        sameness.passed(at)
        return np.int64(0)

    def compare() -> Any:
        values = [
            tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
            for variable in variables
        ]
        words = tf.numpy_function(ask, values, tf.int64)
        words.set_shape([_DIGEST_WORDS])
        # Horovod names an all-reduce after the node that it sums.
        words = tf.identity(words, name="sn_same")
        summed = hvd.allreduce(words, op=hvd.Sum, process_set=process_set)
        judged = tf.numpy_function(judge, [summed, *values], tf.int64)
        judged.set_shape([])
        return judged

    # On the tensor itself, not a copy: a memory planner needs its shape as well.
    is_due.set_shape([])
    with tf.device("CPU"):
        return tf.cond(is_due, compare, lambda: tf.constant(0, tf.int64), name="sn_rare_compare")


class Restarts:
    """Detects that Horovod has restarted, as when ranks join or leave in an elastic run.

    happened : whether it has, since this was last set to False
    """

    def __init__(self, reset: Callable[[], None]) -> None:
        self._reset, self.happened = reset, False
        self._followed: weakref.WeakSet[Any] = weakref.WeakSet()

    def since_last(self) -> bool:
        """Return `happened`; track elastic states, as Horovod notifies only those of restarts."""
        for state in notification_manager._listeners:
            if state not in self._followed:
                self._followed.add(state)
                state.register_reset_callbacks([self._note])
        return self.happened

    def _note(self) -> None:
        self._reset()
        self.happened = True

    @staticmethod
    def warn(compression: str) -> None:
        """Warn that memories are lost."""
        if hvd.rank() == 0:
            _log.warning(
                "ranks have come or gone, and %s begins anew on all: what was not sent yet is "
                "lost. memory_of(compression).synchronize(), in Keras %s.synchronize(optimizer), "
                "keeps it: on all ranks, where the function that hvd.elastic.run is given begins",
                compression,
                compression,
            )


@dataclass(frozen=True)
class Tensor:
    """A tensor whose method the tuner chooses; nbytes : its size when sent uncompressed."""

    shape: tuple[int, ...]
    elements: int
    nbytes: int


@dataclass(frozen=True)
class Choice:
    """AutoCompression's choice for one Horovod call, valid until it is traced again.

    tensors : all that the tuner chooses for, in order
    plain : whether they are sent uncompressed; a single choice for all tensors (decision 89)
    rests : whether the tuner has finished measuring and is not called any more
    """

    tensors: Mapping[str, Tensor]
    plain: bool
    rests: bool

    @property
    def counted(self) -> list[tuple[str, int, int]]:
        """Name, elements and bytes of the tensors sent uncompressed."""
        pairs = sorted(self.tensors.items()) if self.plain else ()
        return [(name, tensor.elements, tensor.nbytes) for name, tensor in pairs]


def refuse_untraced(functions: bool = True) -> None:
    """Raise CompressError if retracing, which puts a new choice into effect, is impossible.

    functions : whether the functions being traced are known
    """
    if elastic():
        where = "in an elastic run, whose ranks change under a graph"
    elif tf.executing_eagerly():
        where = "outside of a tf.function"
    elif not functions:
        where = f"in a graph that is not of a tf.function of TensorFlow {tf.__version__}"
    else:
        return
    raise untraced(where)


def untraced(where: str) -> CompressError:
    """The error for AutoCompression where the graph cannot be retraced."""
    return CompressError(
        f"AutoCompression {where}; expected a tape or hvd.allreduce(name=...) inside a "
        "tf.function, or Keras: the step is traced again when the choice changes. Use "
        "LowRankCompression here, and ask sn_compress.predict whether it pays."
    )
