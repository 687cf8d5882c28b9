"""A step run by the engine on the host, inside a Python function of the graph.

Collectives are Horovod's, called from that function one after another.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Sequence
from contextlib import suppress
from functools import partial
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf
from horovod.common.elastic import HorovodInternalError

from ..arrays import to_host
from ..collective import Buckets, Collective, Gradient
from ..engine.engine import Engine
from .agreement import refuse_joined, total
from .graph_buckets import JOINED
from .tracing import Call


def average(
    engine: Engine,
    gradients: Sequence[Gradient],
    call: Call,
    mark: str,
    count: Callable[[int], None],
) -> None:
    """Average gradients in place, all of them compressed; all ranks pass the same ones.

    mark : prefix of the names of collectives
    count : called with the bytes that this rank sends besides gradients
    """
    sets = call.process_set
    # Tensors that are dense in this step come first, in separate buckets.
    engine.begin(gradients)
    step = engine.sort(gradients, ranks=sets.size(), total=partial(total, sets, count), taken=True)
    for number, bucket in enumerate(_buckets(step.dense)):
        flat = _tensor(np.concatenate([engine.dense_values(gradient) for gradient in bucket]))
        mean = hvd.allreduce(
            flat, op=hvd.Average, name=f"{mark}.{number}.dense", process_set=sets
        ).numpy()
        ends = np.cumsum([gradient.elements for gradient in bucket])
        for gradient, part in zip(bucket, np.split(mean, ends[:-1]), strict=True):
            engine.learn(str(gradient.name), part)
            gradient.values[:] = part
    for number, bucket in enumerate(_buckets(step.coded)):
        rounds = engine.rounds(bucket, ranks=sets.size(), rank=sets.rank())
        results: Any = None
        with suppress(StopIteration):
            for turn in itertools.count():
                name = f"{mark}.{number}.{turn}"
                results = [_carried(carry, name, sets) for carry in rounds.send(results)]


def cut(sizes: Sequence[int]) -> list[list[int]]:
    """Return the indices of tensors, given by their sizes, in each bucket, in order."""
    layout = Buckets((str(at), size, None) for at, size in enumerate(sizes))
    return [[int(at) for at in names] for names in layout.members]


def _buckets(gradients: Sequence[Gradient]) -> list[list[Gradient]]:
    return [
        [gradients[at] for at in part]
        for part in cut([gradient.elements for gradient in gradients])
    ]


def _tensor(words: Any) -> Any:
    # By default TensorFlow would place it on a GPU, and copy it there and back.
    with tf.device("CPU"):
        return tf.constant(to_host(words))


def _carried(carry: Collective, name: str, process_set: Any) -> Any:
    """Run a collective and return its result."""
    words, how = _tensor(carry.words), {"name": name, "process_set": process_set}
    if carry.kind == "sum":
        return hvd.allreduce(words, op=hvd.Sum, **how).numpy()
    # Only a sum is safe if a rank has joined.
    refuse_joined(process_set, None, f"{name}.ranks", JOINED)
    if carry.kind == "gather":
        return hvd.allgather(words, **how).numpy()
    splits = tf.constant(carry.to_ranks(process_set.rank()), tf.int32)
    try:
        return hvd.alltoall(words, splits=splits, **how)[0].numpy()
    except tf.errors.UnknownError as error:
        # hvd.elastic.run recognizes failed collectives by this name, but not by alltoall's own.
        raise HorovodInternalError(f"HorovodAllreduce, of all to all: {error.message}") from None
