"""Payloads of a bucket as nodes of a graph: made, checked on arrival, and read.

Compiled nodes where they serve (`kernels.py`), else the codec's array code.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate
from typing import Any

import tensorflow as tf

from ...codecs.frequency import batched
from ...codecs.frequency.fft import FFTCodec
from . import kernels

_OTHER_SIZE = (
    "PayloadError: gathered words are not as many as all ranks together send. Do all ranks run the "
    "same version with the same settings?"
)
_JOINED = (
    "CompressError: another rank called hvd.join(), and FFTCompression gathers payloads, which "
    "Horovod cannot do without it; none was sent. Give all ranks equally many batches "
    "(drop_remainder=True), or use LowRankCompression or AutoCompression, which allow hvd.join()."
)
_DAMAGED = (
    "PayloadError: the checksum, the header or a record of a payload is wrong: it was damaged on "
    "the way, or ranks run with different settings. If it happens again, suspect memory or the "
    "network."
)


class PayloadNodes:
    """Those of one codec.

    sizes : elements of the tensors that it is for
    decay : factor on the memories before they are added
    """

    def __init__(self, codec: FFTCodec, sizes: Sequence[int], decay: float) -> None:
        self.codec, self.decay = codec, decay
        self._compiled = kernels.serve(codec, sizes)

    def encode(
        self, vectors: Sequence[Any], memories: Sequence[Sequence[Any]] | None
    ) -> tuple[Any, list[list[Any]], Any]:
        """The payloads, [words] int32; the next memories; energy, error and saturated."""
        if not self._compiled:
            made = batched.encode(self.codec, vectors, memories, decay=self.decay, tally=True)
            return made.words, made.memories or [], made.numbers
        found = [
            kernels.encode(self.codec, vector, memory, decay=self.decay)
            for vector, memory in zip(vectors, memories or [[]] * len(vectors), strict=True)
        ]
        words, left, told = zip(*found, strict=True)
        return tf.concat(words, 0), list(left) if memories else [], tf.add_n(told)

    def decode(self, words: Any, sizes: Sequence[int]) -> list[Any]:
        """The means of tensors of so many elements; an error where a payload is damaged.

        words : [ranks, words] int32, of each rank their payloads one behind the other
        """
        codec, ranks = self.codec, int(words.shape[0])
        if not self._compiled:
            made = batched.decode(codec, words, sizes)
            sound = tf.debugging.Assert(~made.damaged, [_DAMAGED])
            with tf.control_dependencies([sound]):
                return [tf.identity(mean) for mean in made.means]
        flat = tf.reshape(words, [ranks * int(words.shape[1])])
        counts = [codec.payload_bytes(n) // 4 for n in sizes]
        return [
            kernels.decode(codec, flat, n, ranks=ranks, at=at)
            for n, at in zip(sizes, accumulate(counts, initial=0), strict=False)
        ]


def one(vector: Any) -> Any:
    """[1] int32 that adds this rank to a sum; of a vector, as sums of constants are folded away."""
    return tf.clip_by_value(tf.cast(vector[:1], tf.int32), 1, 1)


def when_all_are_present(words: Any, present: Any, ranks: Any) -> Any:
    """What is to be gathered; an error where a rank has joined: it would end Horovod on all ranks.

    present : [1] int32, the sum of `one` of each rank, to which one that has joined adds nothing
    """
    present = tf.debugging.Assert(tf.reduce_all(tf.equal(present, ranks)), [_JOINED])
    with tf.control_dependencies([present]):
        return tf.identity(words)


def arrived(every: Any, sizes: Sequence[int]) -> Any:
    """What has come, [words]; an error where that is not so.

    sizes : words that come of each rank
    """
    size = sum(sizes)
    whole = tf.debugging.Assert(tf.size(every) == size, [_OTHER_SIZE])
    every.set_shape([size])  # who plans the step's memory has to know it
    with tf.control_dependencies([whole]):
        return tf.identity(every)
