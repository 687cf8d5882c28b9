"""Codes of any width, and trits, go into bytes and come back."""

from __future__ import annotations

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
