"""Sessions of the all-reduce, of ranks in one process, and the sums between them."""

from __future__ import annotations

from contextlib import suppress

import numpy as np
import torch
from rounds import all_reduce, drive

from sn_compress.allreduce.exchange import AllReduceExchange
from sn_compress.arrays import namespace
from sn_compress.collective import Gradient


def sessions_of(ranks, **settings):
    """A session for each rank."""
    return [AllReduceExchange(**{"ratio": 20, "warmup": 1} | settings) for _ in range(ranks)]


def by_hand(session, names, values, *, ranks, rank=None):
    """The rounds of tensors, [n] each: yields words, is sent their sum, returns the means."""
    xp = namespace(values[0])
    means = [xp.reshape(xp.astype(each, xp.float32, copy=True), (-1,)) for each in values]
    gradients = [Gradient(*of) for of in zip(names, [m.shape for m in means], means, strict=True)]
    rounds, sums = session.rounds(gradients, ranks=ranks, rank=rank), None
    with suppress(StopIteration):
        while True:
            sums = [(yield rounds.send(sums)[0].words)]
    return means


def only(rounds):
    """Those of one tensor; return its mean."""
    (mean,) = yield from rounds
    return mean


def run(rounds, begun=lambda: None):
    """Drive the ranks' rounds as an all-reduce would.

    begun : called when all have their first words, for which sizes are proposed
    Returns the results, and how many words travelled in each round.
    """
    seen = []

    def combine(number, words):
        if number == 0:
            begun()
        seen.append(words[0].shape[0])
        return all_reduce(words)

    return drive(rounds, combine), seen


def rounds_of(sessions, name, gradients):
    """The ranks' rounds of one tensor, of gradients by rank."""
    pairs = enumerate(zip(sessions, gradients, strict=True))
    ranks = len(sessions)
    return [only(by_hand(own, [name], [g], ranks=ranks, rank=rank)) for rank, (own, g) in pairs]


def exchange(sessions, name, gradients):
    """One tensor's exchange, of gradients by rank; see `run`. All get the same bits."""
    means, seen = run(rounds_of(sessions, name, gradients))
    assert len({np.asarray(mean).tobytes() for mean in means}) == 1
    return means, seen


def exchange_all(sessions, names, gradients):
    """Several tensors in one exchange, of gradients by rank, then by name; see `run`."""
    ranks = len(sessions)
    means, seen = run(
        [
            by_hand(own, names, [values[n] for n in names], ranks=ranks, rank=rank)
            for rank, (own, values) in enumerate(zip(sessions, gradients, strict=True))
        ]
    )
    for each in zip(*means, strict=True):
        assert len({np.asarray(mean).tobytes() for mean in each}) == 1
    return means, seen


def dense(sessions, name, gradients, **how):
    """One tensor's dense step, of flat gradients by rank: the mean, from which sizes follow."""
    pairs = zip(sessions, gradients, strict=True)
    sent = [np.asarray(own.dense_values(name, values, **how)) for own, values in pairs]
    mean = np.mean(sent, axis=0, dtype=np.float64).astype(np.float32)
    for own, values in zip(sessions, gradients, strict=True):
        own.learn(name, torch.from_numpy(mean) if torch.is_tensor(values) else mean)
    return mean


def step(sessions, name, shape, gradients, **how):
    """One tensor's step, dense or not: the mean, and whether it was dense."""
    (begins,) = {own.dense(name, shape) for own in sessions}
    if begins:
        return dense(sessions, name, gradients, **how), True
    return np.asarray(exchange(sessions, name, gradients)[0][0]), False


def words_sent(session, tensors, ranks):
    """Of tensors of the cost model, once their sizes are chosen; which must be dense before."""
    rng = np.random.default_rng(0)
    for it in tensors:
        assert session.dense(it.name, it.shape)
        values = rng.standard_normal(it.elements).astype(np.float32)
        session.dense_values(it.name, values)
        session.learn(it.name, values)
    sent = 0
    for it in tensors:
        next(by_hand(session, [it.name], [np.ones(it.elements, np.float32)], ranks=ranks))
        sent += sum(session.words(it.name, ranks))
    return sent
