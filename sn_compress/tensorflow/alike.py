"""Horovod's TensorFlow: what ranks agree on while they trace, and compare at steps of the graph."""

from __future__ import annotations

import os
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any, Protocol

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from .. import __version__
from ..base.agreement import Said, agree, alike, question
from ..base.names import relative
from ..base.sameness import Sameness, digest
from ..engine import hardware
from ..settings import Settings

_DO = (
    "Give all ranks the same model and variables in the same order, as many optimizers, and the "
    "same arguments."
)


def elastic() -> bool:
    """Whether ranks may come that have not traced, and count their own steps: nothing is asked."""
    return os.environ.get("HOROVOD_ELASTIC") == "1"


def said_of_variables(variables: Sequence[Any]) -> list[tuple[str, str]]:
    """Their names, shapes and types, in order."""
    paths = [str(getattr(v, "path", None) or getattr(v, "name", "")) for v in variables]
    names = relative([path.partition(":")[0] for path in paths])
    return [
        (f"variable {place}", f"{name} {tuple(v.shape)} {getattr(v.dtype, 'name', v.dtype)}")
        for place, (name, v) in enumerate(zip(names, variables, strict=True))
    ]


def said_of_compression(compression: Any) -> list[tuple[str, str]]:
    """Its settings, if it is one of ours, or what it is."""
    settings = getattr(compression, "settings", None)
    said = [("compression", getattr(compression, "__name__", type(compression).__name__))]
    return [*said, *(settings.said() if settings else ()), ("version of sn_compress", __version__)]


def agree_at_trace(
    asked: set[str], process_set: Any, said: Said, count: Callable[[int], None] | None = None
) -> None:
    """Raise CompressError, on every rank, unless all trace the same; asked once for each.

    asked : what was, of this compression or optimizer: a rank that traces again asks nobody
    count : told the bytes that this rank sent
    """
    key = repr((process_set.process_set_id, said))
    if key in asked or elastic():
        return
    with tf.init_scope():
        if not tf.executing_eagerly():
            return
        agree(
            said, total=partial(total, process_set, count), rank=process_set.rank(),
            ranks=process_set.size(), name="sn.agree", do=_DO,
        )  # fmt: skip
    asked.add(key)


def unlike_in_hardware(process_set: Any, count: Callable[[int], None] | None = None) -> bool:
    """Whether products have other bits on other ranks, in NumPy or in TensorFlow; all ranks ask."""
    mine = [*hardware.said(np.zeros(1, np.float32)), *hardware.said(tf.zeros(1))]
    return not alike(total(process_set, count, "sn.hardware", question(mine)))


def unlike_in_nodes(
    process_set: Any, said: str, count: Callable[[int], None] | None = None
) -> bool:
    """Whether nodes of a graph decode payloads to other bits on other ranks; all ranks ask.

    said : what ranks have to say alike for that, see `gathered.way_back`
    """
    return not alike(total(process_set, count, "sn.nodes", question([("decoding", said)])))


def total(process_set: Any, count: Callable[[int], None] | None, name: str, words: Any) -> Any:
    """The sum over the ranks, at once."""
    if count is not None:
        count(words.nbytes)
    wire = tf.constant(words)
    return hvd.allreduce(wire, op=hvd.Sum, name=name, process_set=process_set).numpy()


class Counts(Protocol):
    """Whose steps are compared: a Memory."""

    @property
    def settings(self) -> Settings:
        """The user's."""

    def count_beside(self, nbytes: int) -> None:
        """Count what is no gradient."""


def compared(
    due: Any,
    variables: Sequence[Any],
    memory: Counts,
    process_set: Any,
    find: Callable[[], Any],
    before: Any = None,
) -> Any:
    """A node, [] int64: where `due` is true, it fails on every rank if variables differ.

    variables : of TensorFlow, as they are before the step
    find : the Sameness of the step under way, called when it runs
    before : the step that is about to begin, where the graph counts steps and not the Sameness
    """
    if not variables or not memory.settings.check_every or elastic():
        return tf.constant(0, tf.int64)
    names = [variable.name for variable in variables]

    def said_of(values: Sequence[Any]) -> Said:
        return [(name, digest(value)) for name, value in zip(names, values, strict=True)]

    def ask(*values: Any) -> Any:
        memory.count_beside(17 * 8)
        return question(said_of(values))

    def judge(asked: Any, at: Any, *values: Any) -> Any:
        sameness: Sameness = find()
        at = sameness.steps - 1 if before is None else int(at)
        if not alike(asked):
            raise sameness.apart(
                at, said_of(values), total=partial(total, process_set, memory.count_beside),
                rank=process_set.rank(), ranks=process_set.size(),
            )  # fmt: skip
        sameness.found(at)
        return np.int64(0)

    def compare() -> Any:
        values = [
            tf.raw_ops.ReadVariableOp(resource=variable.handle, dtype=variable.dtype)
            for variable in variables
        ]
        words = tf.numpy_function(ask, values, tf.int64)
        words.set_shape([17])
        words = tf.identity(words, name="sn_same")
        asked = hvd.allreduce(words, op=hvd.Sum, process_set=process_set)
        at = tf.constant(-1, tf.int64) if before is None else before
        judged = tf.numpy_function(judge, [asked, at, *values], tf.int64)
        judged.set_shape([])
        return judged

    # Said of the tensor itself, not of a copy: who plans the step's memory has to know it, too.
    due.set_shape([])
    with tf.device("CPU"):
        return tf.cond(due, compare, lambda: tf.constant(0, tf.int64), name="sn_rare_compare")


def as_variables(sources: Sequence[Any]) -> list[Any]:
    """Those of TensorFlow among what a tape or Keras calls variables."""
    found = [v if isinstance(v, tf.Variable) else getattr(v, "value", None) for v in sources]
    return [v for v in found if isinstance(v, tf.Variable)]
