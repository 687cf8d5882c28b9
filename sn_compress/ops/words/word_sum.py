"""A checksum that is linear in the words, so that the sum of the ranks' must be that of the sum."""

from __future__ import annotations

import numpy as np

from ...devices.arrays import Array, Constant, namespace

PRIME = 2**20 - 3  # the sum of 2047 checksums fits a word
_BLOCK = 2**11  # products below 2**51 whose sum fits int64

_factors: dict[int, Constant] = {}


def factors(words: int) -> Constant:
    """What each word is multiplied with, [words] int64: 1, 0, 3, 4, ..., PRIME - 1, 1, 2, ..."""
    if words not in _factors:
        made = 1 + np.arange(words, dtype=np.int64) % (PRIME - 1)
        made[1] = 0
        _factors[words] = Constant(made)
    return _factors[words]


def word_sum(words: Array) -> Array:
    """0-d int64: the sum of factor_i * word_i modulo a prime, word 1, its own place, left out.

    A prime, and no factor a multiple of it, so that no change of a single bit goes unseen, wherever
    it is. Factors count up from 1 and begin again below the prime. words : [n] int32, 2 or more
    """
    xp, count = namespace(words), words.shape[0]
    terms = xp.multiply(words, factors(count).on(words))
    whole = count // _BLOCK * _BLOCK
    # Summed in blocks before it is divided: a division costs as much as many products.
    total = xp.sum(terms[whole:])
    if whole:
        blocks = xp.sum(xp.reshape(terms[:whole], (-1, _BLOCK)), axis=1)
        total = total + xp.sum(blocks % PRIME)
    return total % PRIME
