"""The sketch by which the spread is measured."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sn_compress.gossip.differences import WIDTH, rows_of, signs, spread


def total(replicas):
    """The sum over the ranks of what each would send; replicas [ranks, n]."""
    rows = rows_of(replicas.shape[1])
    filled = np.zeros((len(replicas), rows * WIDTH))
    filled[:, : replicas.shape[1]] = replicas
    numbers = np.einsum("a,rab->rb", signs(rows), filled.reshape(len(replicas), rows, WIDTH))
    sums = [(numbers**2).sum(), (replicas**2).sum()]
    return np.concatenate([numbers.sum(0), sums])


@given(
    ranks=st.integers(1, 9),
    n=st.sampled_from([1, 255, 256, 257, 5000]),
    apart=st.sampled_from([1e-4, 0.03, 1.0]),
    seed=st.integers(0, 2**31),
)
def test_the_sketch_has_the_distance_of_the_ranks(ranks, n, apart, seed):
    rng = np.random.default_rng(seed)
    replicas = rng.standard_normal(n) + apart * rng.standard_normal((ranks, n))
    off = replicas - replicas.mean(0)
    expected = np.sqrt((off**2).sum() / (replicas**2).sum())
    found = spread(total(replicas), ranks)
    if n <= WIDTH:  # a single row: nothing is added up
        assert found == pytest.approx(expected, rel=1e-6, abs=1e-7)
    else:
        # Per pair of rows a normal product; the norm's deviation is 1 / sqrt(2 WIDTH) at most, for
        # a single direction (2 ranks). Six of these, and never once wrong in a million.
        assert found == pytest.approx(expected, rel=6 / np.sqrt(2 * WIDTH), abs=1e-7)


def test_equal_ranks_are_not_apart_and_signs_are_the_same_everywhere():
    replicas = np.tile(np.random.default_rng(0).standard_normal(3000), (7, 1))
    assert spread(total(replicas), 7) < 1e-7  # the root of a rounding of float64
    assert spread(np.zeros(WIDTH + 2), 3) == 0
    assert (signs(1000) == signs(1000)).all()
    assert set(signs(1000)) == {-1.0, 1.0}
    assert abs(signs(10_000).sum()) < 600  # six standard deviations of 100
