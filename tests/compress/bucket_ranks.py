"""Ranks of NumPy and of torch in one process, and the all-reduces of one bucket between them."""

from __future__ import annotations

import numpy as np
import torch
from rounds import all_reduce, drive
from samples import alike

from sn_compress.allreduce.bucket import Bucket
from sn_compress.allreduce.methods.base import StepOptions

LIBRARIES = [lambda array: np.array(array), lambda array: torch.from_numpy(np.array(array))]


def bits(array):
    return np.asarray(array).tobytes()


def new_state(bucket, like):
    return bucket._named(part.new_state(like) for part in bucket.parts)


def begin(bucket, state, means):
    each = zip(bucket.parts, bucket._states(state), bucket._by_part(means), strict=True)
    return bucket._named(part.begin(own, mine) for part, own, mine in each)


class Ranks:
    """Ranks of one bucket, every other one of torch; what they share has the same bits on all."""

    def __init__(self, parts, ranks, libraries=LIBRARIES):
        self.bucket, self.ranks = Bucket(parts), ranks
        self.of = [libraries[rank % len(libraries)] for rank in range(ranks)]
        self.states = [new_state(self.bucket, of(np.zeros(1, np.float32))) for of in self.of]
        self.memories = [
            [np.zeros(shape, np.float32) for shape in self.bucket.shapes] for _ in self.of
        ]

    def begin(self, means):
        pairs = [zip(means, self.bucket.shapes, strict=True) for _ in self.of]
        self.states = [
            begin(self.bucket, state, [of(mean.reshape(shape)) for mean, shape in pair])
            for of, state, pair in zip(self.of, self.states, pairs, strict=True)
        ]

    def step(self, gradients, joined=(), damage=None):
        """One step. Returns the results by rank, without `joined`.

        gradients : by rank, then by tensor
        damage : a round, a word and a bit of it that is turned
        """
        live = [rank for rank in range(self.ranks) if rank not in joined]
        steps = []
        for rank in live:
            pairs = zip(self.memories[rank], gradients[rank], strict=True)
            matrices = [self.of[rank](m + g.reshape(m.shape)) for m, g in pairs]
            options = StepOptions(self.ranks, rank, exact=True)
            steps.append(self.bucket.step(self.states[rank], matrices, options))

        def combine(round_, words):
            assert words[0].shape == (self.bucket.words(self.ranks)[round_],)
            return all_reduce(words, damage[1:] if damage and damage[0] == round_ else None)

        results = dict(zip(live, drive(steps, combine), strict=True))
        first = results[live[0]]
        for each in results.values():
            alike((each.state, each.mean), (first.state, first.mean))
        if not bool(first.lost) and not bool(first.damaged):
            for rank, each in results.items():
                self.memories[rank] = [np.asarray(left) for left in each.residuals]
                self.states[rank] = each.state
        for rank in joined:
            self.states[rank] = {n: self.of[rank](np.asarray(v)) for n, v in first.state.items()}
        return results


def chance(rng, ranks, shapes, share=1.0):
    """Gradients by rank, then by tensor; of each a share of the rows is not zero."""

    def drawn(rows, *others):
        kept = rng.random((rows, *[1] * len(others))) < share
        return (rng.standard_normal((rows, *others)) * kept).astype(np.float32)

    return [[drawn(*shape) for shape in shapes] for _ in range(ranks)]
