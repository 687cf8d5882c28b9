"""What codecs share: codes and trits in bytes, vectors in rows, chance that can be drawn again."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sn_compress import PayloadError
from sn_compress.ops import codes

WIDTHS = [1, 2, 3, 4, 5, 7, 8, 9, 12, 15, 16, 31, 32]
SIZES = [(bits, n) for bits in WIDTHS for n in (0, 1, 7, 8, 9, 33, 1000)]


# Two rows are longer than what is worked on at a time.
@pytest.mark.parametrize(("bits", "n"), [*SIZES, (1, 2**18 + 5), (12, 2**18 + 5)])
def test_codes_come_back(bits, n):
    values = np.random.default_rng(0).integers(0, 2**bits, n, dtype=np.uint32)
    packed = codes.pack_codes(values, bits)
    assert packed.size == codes.packed_bytes(n, bits) == -(-n * bits // 8)
    assert np.array_equal(codes.unpack_codes(packed, n, bits), values)


def test_codes_lie_lowest_bit_first():
    packed = codes.pack_codes(np.array([0xABC, 0x123]), 12)
    assert packed.tobytes() == (0xABC | 0x123 << 12).to_bytes(3, "little")


@pytest.mark.parametrize("n", [0, 1, 4, 5, 6, 1000])
def test_trits_come_back(n):
    trits = np.random.default_rng(0).integers(0, 3, n).astype(np.uint8)
    packed = codes.pack_trits(trits)
    assert packed.size == -(-n // 5)
    assert np.array_equal(codes.unpack_trits(packed, n), trits)


def test_bytes_that_are_no_trits_are_refused():
    with pytest.raises(PayloadError, match="at most 242"):
        codes.unpack_trits(np.array([242, 243], np.uint8), 10)


def test_buckets_keep_their_order_and_the_last_is_short():
    x = np.arange(7, dtype=np.float32)
    assert codes.bucket_rows(x, 3).tolist() == [[0, 1, 2], [3, 4, 5], [6, 0, 0]]
    assert codes.bucket_lengths(7, 3).tolist() == [3, 3, 1]
    spread = codes.bucket_spread(np.array([1, 2, 3], np.float32), 7, 3)
    assert spread.tolist() == [1, 1, 1, 2, 2, 2, 3]
    assert codes.bucket_count(0, None) == codes.bucket_count(0, 3) == 0


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
