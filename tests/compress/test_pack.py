"""Damage to positions is noticed, or harmless."""

import numpy as np
import pytest

from sn_compress import PayloadError
from sn_compress.ops import bits as elias_fano
from sn_compress.ops import record as pack
from sn_compress.ops.quantize import Layout
from sn_compress.ops.record import decode_records


def record(layout: Layout, positions: np.ndarray) -> np.ndarray:
    """Words of a record with a sound range, codes of one, and these bits as its positions."""
    code = [1, *[0] * (layout.code_bits - 1)]
    head = [0] * layout.head_bits + code * (layout.parts * layout.kept)
    return pack.bits_to_words(np.array([head + list(positions)], np.uint8))


REAL_AND_COMPLEX = pytest.mark.parametrize("parts", [2, 1])


@REAL_AND_COMPLEX
def test_damaged_bitmap(backend, parts):
    layout = Layout(64 if parts == 2 else 33, 5, "range", 8, 3, "bitmap", parts)
    bits = pack.bitmap(np.array([[0, 7, 20, 31, 32]]), 33)[0]
    accum = np.zeros((1, 33 * parts), np.float32)
    decode_records(record(layout, bits), accum, layout, 1.0)  # sound as it is
    one_more, one_less = bits | (np.arange(33) == 3), bits & (np.arange(33) != 7)
    for damaged in (one_more, one_less, np.ones(33, np.uint8), np.zeros(33, np.uint8)):
        with pytest.raises(PayloadError, match="positions"):
            decode_records(record(layout, damaged), accum, layout, 1.0)


@REAL_AND_COMPLEX
def test_every_single_damage_to_elias_fano_is_seen_or_harmless(backend, parts):
    # 3 of 33 bins: 3 low bits each, a map of 8 bits. Any map is tried with any low bits.
    layout = Layout(64 if parts == 2 else 33, 3, "range", 8, 3, "elias-fano", parts)
    lows, uppers = elias_fano.low_bits(3, 33), elias_fano.upper_bits(3, 33)
    assert (lows, uppers) == (3, 8)
    for upper in range(1 << uppers):
        ones = [i for i in range(uppers) if upper >> i & 1]
        for low in (0, 0o111, 0o012, 0o210, 0o777, 0o707, 0o001, 0o100):
            thirds = [low >> 3 * i & 7 for i in range(3)]
            bits = [low >> i & 1 for i in range(9)] + [upper >> i & 1 for i in range(uppers)]
            places = [(one - i) << 3 | thirds[i] for i, one in enumerate(ones[:3])]
            sound = len(ones) == 3 and places == sorted(set(places)) and places[-1] < 33
            accum = np.zeros((1, 33 * parts), np.float32)
            if sound:
                decode_records(record(layout, bits), accum, layout, 1.0)
                assert np.flatnonzero(accum.reshape(33, parts).any(axis=1)).tolist() == places
            else:
                with pytest.raises(PayloadError, match="positions"):
                    decode_records(record(layout, bits), accum, layout, 1.0)
