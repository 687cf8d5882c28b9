"""Random numbers that depend on (seed, step, position) and on nothing else.

A generator that is carried along gives other numbers after a restart, or when tensors come in
another order. Philox (Salmon et al. 2011) is a function of a key and a counter: here the key is
(seed, step) and the counter the position, so any step can be done again, bit by bit. NumPy
promises the stream of its bit generators across versions, unlike that of its distributions.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt


def uniform_words(seed: int, step: int, n: int) -> npt.NDArray[np.uint32]:
    """[n] uint32, uniform and independent; 0 <= seed, step < 2**64."""
    key = np.array([seed, step], np.uint64)
    raw = np.asarray(np.random.Philox(key=key).random_raw((n + 1) // 2), "<u8")
    return raw.view("<u4")[:n].astype(np.uint32, copy=False)


def happens(probability: npt.NDArray[np.float64], seed: int, step: int) -> npt.NDArray[np.bool_]:
    """True with the given probabilities, to 2**-32; never where it is 0, always where it is 1."""
    words = uniform_words(seed, step, probability.size).reshape(probability.shape)
    return np.asarray(words < probability * 2.0**32)


def normal_matrix(seed: int, rows: int, cols: int) -> npt.NDArray[np.float32]:
    """[rows, cols] float32, standard normal; the same on every rank (Box-Muller)."""
    count = (rows * cols + 1) // 2
    words = uniform_words(seed, 0, 2 * count).astype(np.float64)
    radius = np.sqrt(-2 * np.log((words[:count] + 1) * 2.0**-32))
    angle = words[count:] * (2 * np.pi * 2.0**-32)
    pairs = np.concatenate([radius * np.cos(angle), radius * np.sin(angle)])
    return pairs[: rows * cols].reshape(rows, cols).astype(np.float32)
