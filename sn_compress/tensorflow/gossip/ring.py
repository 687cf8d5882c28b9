"""ring_shuffle for TensorFlow: a tf.data.Dataset that passes used batches on to the next rank.

batches = ring_shuffle(images, labels, batch_size=64)
model.fit(batches, epochs=8)
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ...gossip.ring import Ring
from ...gossip.settings import message_prefix
from .optimizer import ranks_of


def ring_shuffle(*arrays: Any, batch_size: int, seed: int = 0, process_set: Any = None) -> Any:
    """Return a tf.data.Dataset of this rank's shard that passes used batches on to the next rank.

    Parameters are those of sn_compress.torch.gossip.ring_shuffle. Each iteration over it is one
    epoch; all ranks must iterate in the same way.

    Returns a Dataset of tuples of batches; its attribute `ring` has state_dict() and
    load_state_dict(), between epochs.
    """
    peers = ranks_of(process_set)
    rank, ranks, name = peers.rank(), peers.size(), message_prefix("ring", peers)
    fields = [np.asarray(array) for array in arrays]
    count = tf.constant([len(fields[0]) if fields else 0])
    counts = hvd.allgather(count, name=f"{name}.counts", process_set=peers) if ranks > 1 else count
    ring = Ring(fields, counts=counts.numpy().tolist(), rank=rank, batch_size=batch_size, seed=seed)
    # One thread for Horovod's blocking call, while the batch is used.
    sender = ThreadPoolExecutor(1, thread_name_prefix=name)
    splits = tf.one_hot((rank + 1) % ranks, ranks, dtype=tf.int32) * ring.wire_bytes

    def exchanged(wire: Any) -> Any:
        if ranks == 1:
            return wire
        return hvd.alltoall(tf.constant(wire), splits, name=name, process_set=peers)[0].numpy()

    def send(step: int, wire: Any) -> Callable[[], Any]:
        return sender.submit(exchanged, wire).result

    def epoch() -> Iterator[tuple[Any, ...]]:
        yield from map(tuple, ring.epoch_of(send))

    signature = tuple(tf.TensorSpec((None, *f.shape[1:]), f.dtype) for f in fields)
    batches = tf.data.Dataset.from_generator(epoch, output_signature=signature)
    batches = batches.apply(tf.data.experimental.assert_cardinality(ring.steps))
    batches.ring = ring
    return batches
