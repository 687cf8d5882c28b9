"""ring_shuffle for TensorFlow: a tf.data.Dataset whose used batches go to the next rank.

batches = ring_shuffle(images, labels, batch_size=64)
model.fit(batches, epochs=8)
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import horovod.tensorflow as hvd
import numpy as np
import tensorflow as tf

from ...base.errors import CompressError
from ...gossip.names import prefix
from ...gossip.ring import Ring


def ring_shuffle(*arrays: Any, batch_size: int, seed: int = 0, process_set: Any = None) -> Any:
    """A tf.data.Dataset of this rank's shard, of which each used batch goes to the next rank.

    Parameters are those of sn_compress.torch.gossip.ring_shuffle. Each iteration over it is one
    epoch; all ranks have to iterate alike.

    Returns a Dataset of tuples of batches; its attribute `ring` has state_dict() and
    load_state_dict(), between epochs.
    """
    peers = hvd.global_process_set if process_set is None else process_set
    if not peers.included():
        raise CompressError(f"this rank is not in {peers}; expected a process set that has it")
    rank, ranks, name = peers.rank(), peers.size(), prefix("ring", peers)
    fields = [np.asarray(array) for array in arrays]
    own = tf.constant([len(fields[0]) if fields else 0])
    counts = hvd.allgather(own, name=f"{name}.counts", process_set=peers) if ranks > 1 else own
    ring = Ring(fields, counts=counts.numpy().tolist(), rank=rank, batch_size=batch_size, seed=seed)
    # One thread, in which Horovod's blocking call waits while the batch is used.
    sender = ThreadPoolExecutor(1, thread_name_prefix=name)
    splits = tf.one_hot((rank + 1) % ranks, ranks, dtype=tf.int32) * ring.wire_bytes

    def send(wire: Any) -> Any:
        if ranks == 1:
            return wire
        return hvd.alltoall(tf.constant(wire), splits, name=name, process_set=peers)[0].numpy()

    def epoch() -> Iterator[tuple[Any, ...]]:
        ring.begin()
        coming = None
        try:
            for step in range(ring.steps):
                batch = ring.batch(step)
                if coming is not None:
                    ring.take(step - 1, coming.result())
                coming = sender.submit(send, ring.pack(batch))
                yield tuple(batch)
            assert coming is not None
            ring.take(ring.steps - 1, coming.result())
            ring.end()
        finally:
            if coming is not None:
                coming.result()

    signature = tuple(tf.TensorSpec((None, *f.shape[1:]), f.dtype) for f in fields)
    batches = tf.data.Dataset.from_generator(epoch, output_signature=signature)
    batches = batches.apply(tf.data.experimental.assert_cardinality(ring.steps))
    batches.ring = ring
    return batches
