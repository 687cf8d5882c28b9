"""Drives the rounds of several ranks in one process, in place of their collectives."""

from __future__ import annotations

import numpy as np
import torch


def drive(ranks, combine):
    """Drive generators of ranks to their end, all in the same collective: what each returns.

    combine : of the number of a collective and of what every rank sends in it, what each receives
    """
    sent, results, number = [next(rounds) for rounds in ranks], [], 0
    while sent:
        received, sent = combine(number, sent), []
        for rounds, own in zip(ranks, received, strict=True):
            try:
                sent.append(rounds.send(own))
            except StopIteration as end:
                results.append(end.value)
        number += 1
    assert len(results) == len(ranks), "all ranks begin as many collectives"
    return results


def all_reduce(words, damage=None):
    """The sum of the ranks' words, for each rank in its own library.

    damage : a word of the sum and a bit of it that is turned
    """
    assert len({each.shape for each in words}) == 1
    total = np.sum([np.asarray(each) for each in words], axis=0, dtype=np.int32)
    if damage is not None:
        total[damage[0]] ^= np.int32(1 << damage[1])
    return [
        torch.from_numpy(total.copy()) if torch.is_tensor(each) else total.copy() for each in words
    ]


def drive_one(rounds, reply):
    """One rank's words, round by round, and its result.

    reply : of the number of a round and of the rank's words, what it receives
    """
    sent = []

    def combine(number, words):
        sent.extend(words)
        return [reply(number, *words)]

    (result,) = drive([rounds], combine)
    return sent, result
