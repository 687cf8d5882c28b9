"""Random numbers that can be drawn again."""

from __future__ import annotations

import math

import numpy as np

from sn_compress.ops import codes


def test_chance_depends_on_seed_step_and_position_only():
    first = codes.uniform_words(3, 5, 100)
    assert np.array_equal(first[:33], codes.uniform_words(3, 5, 33))
    for seed, step in ((4, 5), (3, 6), (5, 3)):
        assert not np.array_equal(first, codes.uniform_words(seed, step, 100))


def test_chance_is_the_same_in_every_version():
    """The stream is a promise of NumPy's; a change would make old runs impossible to repeat."""
    assert codes.uniform_words(1, 2, 4).tolist() == [3042142985, 1328497427, 564130602, 1533115363]


def test_certain_things_happen_and_impossible_ones_never():
    certain = np.array([0.0, 1.0] * 5000)
    assert np.array_equal(codes.happens(certain, 0, 0), certain == 1)


def test_normal_numbers_are_normal():
    """Mean and variance of 10,000: outside six deviations once in 10**8 runs."""
    x = codes.normal_matrix(1, 100, 100).astype(np.float64)
    assert abs(x.mean()) < 6 / 100
    assert abs(x.var() - 1) < 6 * math.sqrt(2) / 100
