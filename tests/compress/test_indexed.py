"""Sparse lists: which elements are chosen, and where they are put back."""

from __future__ import annotations

import numpy as np
import pytest

from sn_compress.ops import indexed, quantize


@pytest.mark.parametrize("k", [1, 7, 40])
def test_largest_is_what_a_stable_sort_gives(k):
    rng = np.random.default_rng(0)
    for rows in (rng.standard_normal((6, 40)), rng.integers(-2, 3, (6, 40)), np.zeros((6, 40))):
        values = rows.astype(np.float32)
        keys = np.abs(values).view(np.int32)
        assert np.array_equal(indexed.largest(values, k), quantize.largest_keys(keys, k))


def test_a_vector_is_full_chunks_and_a_rest():
    cut = indexed.runs(130, 64, lambda length: length // 10)
    assert [(run.start, run.count, run.length, run.kept) for run in cut] == [
        (0, 2, 64, 6),
        (128, 1, 2, 0),
    ]
    assert indexed.total(cut) == 12
    assert indexed.runs(0, 64, int) == indexed.runs(0, None, int) == []


@pytest.mark.parametrize("chunk", [None, 7, 64, 130])
def test_chosen_positions_come_back_from_their_indices(chunk):
    x = np.random.default_rng(0).standard_normal(130).astype(np.float32)
    cut = indexed.runs(130, chunk, lambda length: max(1, length // 5))
    inside, positions = indexed.select(x, cut)
    assert (np.diff(positions) > 0).all()
    for bits in (9, 32, 64):
        data = indexed.write_indices(inside, bits)
        assert data.size == indexed.index_bytes(cut, bits)
        found = indexed.read_indices(data, inside.size, bits)
        assert np.array_equal(indexed.locate(found, cut), positions)
