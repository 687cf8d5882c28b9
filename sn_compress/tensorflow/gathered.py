"""Buckets of the sized form whose payloads are gathered: the frequencies of FFTCompression.

As long as theta stays, payloads are as large at every step. Horovod's all-gather is in the graph
between nodes that encode and nodes that decode: compiled ones where they serve (`kernels.py`), else
the codec's array code. Memories are variables, in coefficients as the codec keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import tensorflow as tf

from ..codecs import batched
from ..codecs.fft import FFTCodec
from ..feedback import ErrorFeedback
from ..ops import transforms
from ..report import Ran
from ..sameness import digest
from ..theta import ThetaInTime
from . import kernels
from .sized import Collectives, variable

_OTHER_SIZE = (
    "PayloadError: gathered words are not as many as all ranks together send. Do all ranks run the "
    "same version with the same settings?"
)
_JOINED = (
    "CompressError: another rank called hvd.join(), after which Horovod gathers nothing. Give all "
    "ranks equally many batches (drop_remainder=True), or use LowRankCompression."
)
_DAMAGED = (
    "PayloadError: the checksum, the header or a record of a payload is wrong: it was damaged on "
    "the way, or ranks run with different settings. If it happens again, suspect memory or the "
    "network."
)


def serves(codec: FFTCodec, sizes: Sequence[int]) -> bool:
    """Whether there are nodes for a codec and vectors of so many elements."""
    return kernels.serve(codec, sizes) or batched.serves(codec)


def way_back(codec: FFTCodec) -> str:
    """What ranks have to say alike to decode alike: all but the transform is exact arithmetic."""
    block = codec.block or 4096
    if kernels.serve(codec, [block]) or not serves(codec, [block]):
        return "as on a host"
    within = "identity" if codec.transform == "axes" else codec.transform
    parts = block + 2 if within == "fft" else block
    bins = np.random.default_rng(0).standard_normal((1, parts)).astype(np.float32)
    return digest(
        transforms.Transform(within, block, codec.span).inverse(tf.constant(bins)).numpy()
    )


class GatheredBucket:
    """Tensors whose payloads travel together, and what this rank has not sent of them.

    theta : counts the steps of each tensor; all have the same theta now
    feedback : keeps the memories between forms; None to remember nothing
    tensors : names and elements
    """

    def __init__(
        self, theta: ThetaInTime, feedback: ErrorFeedback | None, tensors: Mapping[str, int]
    ) -> None:
        self._theta, self._feedback = theta, feedback
        self.names, self._sizes = tuple(tensors), list(tensors.values())
        self._codec = theta.codec_of(self.names[0])
        self._began = [theta.step_of(name) for name in self.names]
        self._compiled = kernels.serve(self._codec, self._sizes)
        self._traced = False
        self._memories = None if feedback is None else self._borrowed(feedback)

    def _borrowed(self, feedback: ErrorFeedback) -> list[list[Any]]:
        found = []
        for name, n in zip(self.names, self._sizes, strict=True):
            state = feedback.memory_of(name, np.broadcast_to(np.float32(0), (n,)))
            found.append([variable(part) for part in state])
            # Not twice in memory; `read` brings it back.
            feedback.replace(name, [np.broadcast_to(np.float32(0), part.shape) for part in state])
        return found

    def step(self, number: int, vectors: Sequence[Any], by: Collectives) -> tuple[list[Any], Any]:
        """See SizedBucket."""
        self._traced = True
        memories, decay = None, 1.0
        if self._memories is not None and self._feedback is not None:
            memories = [[part.read_value() for part in own] for own in self._memories]
            decay = self._feedback.decay
        words, left, told = self._encoded(vectors, memories, decay)
        every, size = by.gather(words, number), by.ranks * words.shape[0]
        whole = tf.debugging.Assert(tf.size(every) == size, [_OTHER_SIZE])
        every.set_shape([size])  # who plans the step's memory has to know it
        with tf.control_dependencies([whole]):
            gathered = tf.reshape(every, [by.ranks, words.shape[0]])
        alive = tf.debugging.Assert(tf.reduce_all(tf.reduce_any(gathered != 0, 1)), [_JOINED])
        with tf.control_dependencies([alive]):
            means = self._decoded(tf.reshape(gathered, [size]), by.ranks)
        with tf.control_dependencies(means):
            for own, parts in zip(self._memories or (), left, strict=True):
                for part, value in zip(own, parts, strict=True):
                    part.assign(value)
        return means, told

    def _encoded(
        self, vectors: Sequence[Any], memories: list[list[Any]] | None, decay: float
    ) -> tuple[Any, list[list[Any]], Any]:
        """The payloads, [words] int32; the next memories; energy, error and saturated."""
        if not self._compiled:
            made = batched.encode(self._codec, vectors, memories, decay=decay, tally=True)
            return made.words, made.memories or [], made.numbers
        found = [
            kernels.encode(self._codec, vector, memory, decay=decay)
            for vector, memory in zip(vectors, memories or [[]] * len(vectors), strict=True)
        ]
        words, left, told = zip(*found, strict=True)
        return tf.concat(words, 0), list(left) if memories else [], tf.add_n(told)

    def _decoded(self, gathered: Any, ranks: int) -> list[Any]:
        """The means; an error where a payload is damaged."""
        codec, sizes = self._codec, self._sizes
        if not self._compiled:
            made = batched.decode(codec, tf.reshape(gathered, [ranks, -1]), sizes)
            sound = tf.debugging.Assert(~made.damaged, [_DAMAGED])
            with tf.control_dependencies([sound]):
                return [tf.identity(mean) for mean in made.means]
        words = [codec.payload_bytes(n) // 4 for n in sizes]
        return [
            kernels.decode(codec, gathered, n, ranks=ranks, at=at)
            for n, at in zip(sizes, accumulate(words, initial=0), strict=False)
        ]

    def read(self, steps: int) -> None:
        """See SizedBucket."""
        if self._memories is not None and self._feedback is not None:
            for name, own in zip(self.names, self._memories, strict=True):
                self._feedback.replace(name, [part.numpy() for part in own])
        for name, first in zip(self.names, self._began, strict=True):
            self._theta.go_to(name, first + steps)

    def ran(self, steps: int) -> list[Ran]:
        """See SizedBucket."""
        if not self._traced:
            return []
        return [
            Ran(name, n, 4 * n, self._codec.payload_bytes(n), "frequencies", steps)
            for name, n in zip(self.names, self._sizes, strict=True)
        ]
