"""Buckets of the sized form whose payloads are gathered: the frequencies of FFTCompression.

As long as theta stays, payloads are as large at every step. Horovod's all-gather is in the graph
between nodes that encode and nodes that decode (`payload_nodes.py`), or two collectives where there
are many ranks (`scattered.py`). Memories are variables, in coefficients as the codec keeps them.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ...base.sameness import digest
from ...codecs.frequency import batched
from ...codecs.frequency.fft import FFTCodec
from ...engine.feedback import ErrorFeedback
from ...engine.scattered import Shares, shares_of
from ...engine.theta import ThetaInTime
from ...ops.spectra import transforms
from ...report import Ran
from . import kernels, scattered
from .outcomes import restored
from .payload_nodes import PayloadNodes, arrived, one, when_all_are_present
from .sized import Collectives
from .variables import variable


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
    scatter : whether payloads go to owners where that brings a rank fewer bytes
    undoable : keep what was remembered before the last step
    """

    def __init__(
        self,
        theta: ThetaInTime,
        feedback: ErrorFeedback | None,
        tensors: Mapping[str, int],
        *,
        scatter: bool = False,
        undoable: bool = False,
    ) -> None:
        self._theta, self._feedback, self._scatter = theta, feedback, scatter
        self.names, self._sizes = tuple(tensors), list(tensors.values())
        self._codec = theta.codec_of(self.names[0])
        self._began = [theta.step_of(name) for name in self.names]
        self._traced = False
        self._shares: Shares | None = None
        self._rank = 0
        self._memories = None if feedback is None else self._borrowed(feedback)
        self._committed = None
        if undoable and self._memories is not None:
            self._committed = [[variable(part) for part in own] for own in self._memories]

    def _borrowed(self, feedback: ErrorFeedback) -> list[list[Any]]:
        found = []
        for name, n in zip(self.names, self._sizes, strict=True):
            state = feedback.memory_of(name, np.broadcast_to(np.float32(0), (n,)))
            found.append([variable(part) for part in state])
            # Not twice in memory; `read` brings it back.
            feedback.replace(name, [np.broadcast_to(np.float32(0), part.shape) for part in state])
        feedback.settled(self.names)
        return found

    def _begin(self, dropped: Any) -> list[list[Any]] | None:
        """What is remembered when a step begins."""
        if self._memories is None or self._committed is None or dropped is None:
            return self._memories and [[it.read_value() for it in own] for own in self._memories]
        now = [part.read_value() for own in self._memories for part in own]

        def before() -> list[Any]:
            tensors = enumerate(zip(self._committed or (), self._memories or (), strict=True))
            return [
                tf.where(dropped[at], old.read_value(), new.read_value())
                for at, pair in tensors
                for old, new in zip(*pair, strict=True)
            ]

        found = iter(restored(dropped, now, before))
        memories = [[next(found) for _ in own] for own in self._memories]
        for own, parts in zip(self._committed, memories, strict=True):
            for part, value in zip(own, parts, strict=True):
                part.assign(value)
        return memories

    def step(
        self, number: int, vectors: Sequence[Any], by: Collectives, dropped: Any = None
    ) -> tuple[list[Any], Any]:
        """See SizedBucket."""
        self._traced = True
        memories, decay = self._begin(dropped), 1.0
        if self._feedback is not None:
            decay = self._feedback.decay
        nodes = PayloadNodes(self._codec, self._sizes, decay)
        self._shares, self._rank = None, by.rank
        present = by.total(one(vectors[0]), number, 0)
        if self._scatter:
            self._shares = shares_of(self._codec, tuple(self._sizes), by.ranks)
        if self._shares is None:
            words, left, told = nodes.encode(vectors, memories)
            words = when_all_are_present(words, present, by.ranks)
            came = arrived(by.gather(words, number), [int(words.shape[0])] * by.ranks)
            means = nodes.decode(tf.reshape(came, [by.ranks, -1]), self._sizes)
        else:
            for_owners = PayloadNodes(self._shares.parts, self._sizes, decay)
            means, left, told = scattered.step(
                for_owners, nodes, self._shares, vectors, memories, number, present, by
            )
        with tf.control_dependencies(means):
            for own, parts in zip(self._memories or (), left, strict=True):
                for part, value in zip(own, parts, strict=True):
                    part.assign(value)
        return means, told

    def remembered(self) -> list[Any]:
        """See SizedBucket."""
        return [part.read_value() for own in self._memories or () for part in own]

    def read(self, steps: int) -> None:
        """See SizedBucket."""
        if self._memories is not None and self._feedback is not None:
            for at, (name, own) in enumerate(zip(self.names, self._memories, strict=True)):
                self._feedback.replace(name, [part.numpy() for part in own])
                if self._committed is not None:
                    before = [part.numpy() for part in self._committed[at]]
                    self._feedback.reopen(name, before)
        for name, first in zip(self.names, self._began, strict=True):
            self._theta.go_to(name, first + steps)

    def ran(self, steps: int) -> list[Ran]:
        """See SizedBucket."""
        if not self._traced:
            return []
        sent = list(map(self._codec.payload_bytes, self._sizes))
        if self._shares is not None:
            sent = self._shares.sent(self._rank, len(sent))
        return [
            Ran(name, n, 4 * n, nbytes, "frequencies", steps)
            for name, n, nbytes in zip(self.names, self._sizes, sent, strict=True)
        ]
