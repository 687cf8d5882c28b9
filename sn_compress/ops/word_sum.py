"""A checksum that is linear in the words, so that the sum of the ranks' must be that of the sum."""

from __future__ import annotations

from functools import lru_cache

import numpy as np

from ..arrays import Array, Constant, namespace

PRIME = 2**20 - 3  # the sum of 2047 checksums fits a word


@lru_cache(maxsize=1024)
def _factors(words: int) -> Constant:
    factors = 1 + np.arange(words, dtype=np.int64) % (PRIME - 1)
    factors[1] = 0
    return Constant(factors)


def word_sum(words: Array) -> Array:
    """0-d int64: the sum of factor_i * word_i modulo a prime, word 1, its own place, left out.

    A prime, and no factor a multiple of it, so that no change of a single bit goes unseen, wherever
    it is. Factors count up from 1 and begin again below the prime. words : [n] int32, 2 or more
    """
    xp = namespace(words)
    factors = _factors(words.shape[0]).on(words)
    return xp.sum(xp.astype(words, xp.int64) % PRIME * factors % PRIME) % PRIME
