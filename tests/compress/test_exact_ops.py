"""Scales, digits, checksums, orthonormal rows: against naive forms, alike in two libraries."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from samples import alike, for_each

from sn_compress.errors import CompressError
from sn_compress.ops import fixed_point
from sn_compress.ops.fixed_point import MAX_RANKS, PRIME, Digits, FixedPointColumns, word_sum
from sn_compress.ops.orthonormal import Orthonormal, most, orthonormal
from sn_compress.ops.products import remember


@pytest.mark.parametrize("ranks", [1, 2, 8, 42, 43, 1024, MAX_RANKS])
@pytest.mark.parametrize("fine", [False, True])
@for_each("count", (0, 1, 31, 32, 33, 63, 1000))
def test_sums_of_digits_come_back(count, ranks, fine):
    digits = Digits.of(ranks, fine=fine)
    rng = np.random.default_rng(count)
    speak = min(ranks, 40)  # the others add zeros, or the largest digits
    each = rng.integers(-digits.limit, digits.limit, (speak, count), endpoint=True, dtype=np.int32)
    for rest in (0, digits.limit, -digits.limit):
        others = np.full(count, rest, np.int32)
        words = sum(digits.pack(e).astype(np.int64) for e in each)
        words = words + (ranks - speak) * digits.pack(others).astype(np.int64)
        assert words.size == digits.words(count)
        assert (np.abs(words) < 2**31).all()
        total = words.astype(np.int32)
        expected = each.sum(axis=0) + (ranks - speak) * others
        np.testing.assert_array_equal(digits.unpack(total, count), expected)
        alike(digits.unpack(total, count), digits.unpack(torch.from_numpy(total), count))
    for own in each[:2]:
        alike(digits.pack(own), digits.pack(torch.from_numpy(own)))


def test_more_ranks_than_digits_can_sum_are_refused():
    with pytest.raises(CompressError, match="expected 1 to 2047"):
        Digits.of(MAX_RANKS + 1)


@pytest.mark.parametrize("peak", [0.0, 1e-45, 1e-38, 2.0**-64, 1.0, 1.5, 2.0**63, 3e38, np.inf])
def test_scales_cover_peaks(peak):
    peaks = np.array([peak], np.float32)
    found, some = fixed_point.covering(peaks)
    exponent = int(found[0])
    assert some[0] == (peak > 0)
    assert fixed_point.LOWEST <= exponent <= fixed_point.HIGHEST
    if 2.0**-64 <= peak <= 2.0**63:
        # A quarter of an octave is rounded to float32 once.
        assert 2.0 ** (exponent / 4) >= peak * (1 - 2**-24)
        assert 2.0 ** ((exponent - 1) / 4) < peak
    alike((found, some), fixed_point.covering(torch.asarray(peaks)))


@given(
    st.lists(st.integers(fixed_point.LOWEST, fixed_point.HIGHEST), max_size=30), st.integers(0, 2)
)
@settings(deadline=None, max_examples=100)
def test_the_mean_exponent_is_rounded_from_whole_numbers(told, at):
    columns, ranks = FixedPointColumns([(3, 2)]), MAX_RANKS
    total = np.zeros(columns.words(ranks), np.int32)
    total[at] = sum(e + 2**20 for e in told)
    before = np.full(3, 7, np.int32)
    found = columns.unpack(total, before, ranks)[2]
    expected = math.floor(sum(told) / len(told) + 0.5) if told else 7
    assert found[at] == expected
    assert (np.delete(found, at) == 7).all()
    alike(found, columns.unpack(torch.from_numpy(total), torch.from_numpy(before), ranks)[2])


@pytest.mark.parametrize("count", [2, 33, 1000, 2047, 2048, 2049, 5000])
def test_checksums_are_the_naive_sum_and_add_up(count):
    rng = np.random.default_rng(count)
    words = rng.integers(-(2**31), 2**31, (3, count)).astype(np.int32)
    for own in words:
        naive = sum((i + 1) * int(w) for i, w in enumerate(own) if i != 1) % PRIME
        assert int(word_sum(own)) == naive
        assert int(word_sum(torch.from_numpy(own))) == naive
    small = words // 4
    total = small.sum(axis=0, dtype=np.int32)
    assert (sum(int(word_sum(own)) for own in small) - int(word_sum(total))) % PRIME == 0


def test_no_word_is_out_of_the_checksum():
    places = (0, 2, PRIME // 2, PRIME - 1, PRIME, 2 * PRIME)
    for where, bit in itertools.product(places, (0, 20, 31)):
        words = np.zeros(2 * PRIME + 1, np.int32)
        words.view(np.uint32)[where] ^= np.uint32(1 << bit)
        assert word_sum(words), (where, bit)


@pytest.mark.parametrize("make", [np.asarray, torch.asarray], ids=["numpy", "torch"])
def test_what_is_remembered(make):
    rooms = (None, make(np.full(3, np.nan, np.float32)))
    for decay, out in itertools.product((0.0, 0.5, 1.0), rooms):
        memory, gradient = (make(np.full(3, v, np.float32)) for v in (2, 10))
        found = remember(memory, gradient, decay, out)
        assert (np.asarray(found) == 10 + 2 * decay).all()
        assert out is None or found is out
        assert (np.asarray(memory) == 2).all()
        assert (np.asarray(gradient) == 10).all()


@pytest.mark.parametrize(("rows", "width", "top"), [
    (1, 63, 2**15 - 1), (1, 1000, 15), (2, 64, 127), (7, 63, 15), (7, 1000, 2**15 - 1),
    (33, 63, 127), (33, 64, 2**15 - 1), (63, 63, 2**15 - 1), (64, 64, 15), (64, 1000, 127),
])  # fmt: skip
def test_rows_become_orthonormal_in_their_own_span(rows, width, top):
    rng = np.random.default_rng(rows)
    # Nearly alike, as directions of one gradient are.
    drawn = rng.standard_normal(width) + 0.3 * rng.standard_normal((rows, width))
    whole = np.rint(drawn / np.abs(drawn).max() * top)
    found = orthonormal(whole)
    assert found.dtype == np.float32
    gram = found.astype(np.float64) @ found.T
    alive = np.diagonal(gram) > 0.5
    if width > rows or rows == 1:
        assert alive.all()
    # Rounded to float32, and each of `rows` terms of the transform to 2**-30 of the largest.
    bound = 2.0**-22 + 2.0**-30 * rows * np.linalg.cond(whole)
    assert np.abs(gram - np.diag(alive)).max() < bound
    left = whole - (whole @ found.T) @ found
    assert np.abs(left).max() <= 1 + 1e-4 * top


@pytest.mark.parametrize("top", [15, 2**15 - 1])
def test_orthonormal_rows_have_the_same_bits_in_any_order_of_sums(top):
    rng = np.random.default_rng(top)
    whole = rng.integers(-top, top, (12, 500)).astype(np.float64)
    # Numbers far apart in size, where the order of sums shows first.
    steep = np.where(rng.random((12, 500)) < 0.01, whole, np.sign(whole))
    order = rng.permutation(500)
    for each in (whole, steep):
        expected = orthonormal(each)
        alike(expected, orthonormal(torch.from_numpy(each)))
        np.testing.assert_array_equal(orthonormal(each[:, order]), expected[:, order])


def test_rows_that_depend_on_others_are_zero_or_what_is_put_there():
    whole = np.array([[3, 0, 4], [6, 0, 8], [0, 2, 0], [0, 0, 0]], np.float64)
    expected = np.array([[0.6, 0, 0.8], [0, 0, 0], [0, 1, 0], [0, 0, 0]], np.float32)
    np.testing.assert_allclose(orthonormal(whole), expected, atol=1e-7)
    instead = np.arange(12, dtype=np.float32).reshape(4, 3)
    assert (orthonormal(whole, instead)[[1, 3]] == instead[[1, 3]]).all()


@pytest.mark.parametrize("shapes", [
    [(3, 40), (3, 40)],
    [(3, 40), (5, 20), (1, 7), (2, 2), (3, 33), (1, 1), (2, 40)],
    [(2, 9), (2, 1000), (2, 9)],
], ids=str)  # fmt: skip
def test_matrices_together_are_as_each_alone(shapes):
    rng = np.random.default_rng(3)
    each = [rng.integers(-99, 99, shape).astype(np.int32) for shape in shapes]
    flat = np.concatenate([it.reshape(-1) for it in each])
    found = Orthonormal(shapes)(flat)
    expected = np.concatenate([orthonormal(it).reshape(-1) for it in each])
    np.testing.assert_array_equal(found, expected)
    alike(found, Orthonormal(shapes)(torch.from_numpy(flat)))


def test_sums_stay_exact_however_wide_a_row_is():
    for width in (1, 1000, 2**22, 2**24, 2**30):
        assert most(width) ** 2 * width <= 2**53
        assert 1 <= most(width) <= 2**15
