"""Codes and positions survive packing, take the promised bits, and damage is noticed."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import examples, for_each

from sn_compress import PayloadError
from sn_compress.ops import bits as elias_fano
from sn_compress.ops import record as pack
from sn_compress.ops.quantize import Layout
from sn_compress.ops.record import decode_records


def as_integer(bits: np.ndarray) -> int:
    """The stream as one big number, first bit lowest: an oracle without NumPy's packbits."""
    return sum(1 << i for i, bit in enumerate(bits.tolist()) if bit)


@for_each("bits", range(1, 17))
@for_each("count", (0, 1, 31, 32, 33, 63, 1000))
def test_codes_round_trip(bits, count):
    codes = np.random.default_rng(count).integers(0, 1 << bits, (3, count), dtype=np.uint16)
    codes[0], codes[1] = 0, (1 << bits) - 1
    stream = pack.codes_to_bits(codes, bits)
    assert stream.shape == (3, count * bits)
    np.testing.assert_array_equal(pack.bits_to_codes(stream, bits), codes)
    packed = sum(int(code) << (i * bits) for i, code in enumerate(codes[2]))
    assert as_integer(stream[2]) == packed
    words = pack.bits_to_words(stream)
    assert words.shape == (3, -(-count * bits // 32))
    assert int.from_bytes(words[2].astype("<u4").tobytes(), "little") == packed  # zeros behind
    np.testing.assert_array_equal(pack.words_to_bits(words)[:, : count * bits], stream)


def check_support(positions: np.ndarray, f: int) -> None:
    k = positions.shape[1]
    lows, uppers = pack.elias_fano(positions, f)
    assert lows.shape[1] == k * elias_fano.low_bits(k, f)
    assert uppers.shape[1] == elias_fano.upper_bits(k, f)
    np.testing.assert_array_equal(pack.read_elias_fano(lows, uppers, k, f), positions)
    bitmap = pack.bitmap(positions, f)
    assert bitmap.shape[1] == f
    np.testing.assert_array_equal(pack.read_bitmap(bitmap, k), positions)


@pytest.mark.parametrize("f", range(1, 11))
def test_every_support_of_few_bins(f):
    for k in range(1, f + 1):
        every = np.array(list(itertools.combinations(range(f), k)), np.uint32)
        check_support(every, f)


@examples
@given(st.integers(1, 5000), st.data())
def test_any_support(f, data):
    k = data.draw(st.integers(1, f))
    rng = np.random.default_rng(data.draw(st.integers(0, 2**32 - 1)))
    drawn = np.array([np.sort(rng.permutation(f)[:k]) for _ in range(2)], np.uint32)
    first, last = np.arange(k, dtype=np.uint32), np.arange(f - k, f, dtype=np.uint32)
    check_support(np.stack([*drawn, first, last]), f)


@examples
@given(st.integers(1, 2**40), st.data())
def test_size_of_elias_fano(f, data):
    k = data.draw(st.integers(1, min(f, 2**30)))
    low = elias_fano.low_bits(k, f)
    assert low == math.floor(math.log2(f // k)) or f // k >= 2**48  # log2 is exact enough below
    # 2**low <= f / k < 2**(low + 1), so the map has k ones and fewer than 2 k + 1 zeros.
    assert elias_fano.upper_bits(k, f) == k + ((f - 1) // 2**low) + 1 <= 3 * k + 1


def test_promised_bits_a_position():
    bits = 41 * elias_fano.low_bits(41, 2049) + elias_fano.upper_bits(41, 2049)
    assert round(bits / 41, 1) == 7.6


def word_rows(*streams: list[int] | np.ndarray) -> np.ndarray:
    return pack.bits_to_words(np.array(streams, np.uint8))


def record(layout: Layout, positions: np.ndarray) -> np.ndarray:
    """Words of a record with a sound range, codes of one, and these bits as its positions."""
    code = [1, *[0] * (layout.code_bits - 1)]
    head = [0] * layout.head_bits + code * (layout.parts * layout.kept)
    return word_rows(head + list(positions))


REAL_AND_COMPLEX = pytest.mark.parametrize("parts", [2, 1])


@REAL_AND_COMPLEX
@pytest.mark.parametrize("change", ["one more", "one less", "all", "none"])
def test_damaged_bitmap(backend, parts, change):
    layout = Layout(64 if parts == 2 else 33, 5, "range", 8, 3, "bitmap", parts)
    bits = pack.bitmap(np.array([[0, 7, 20, 31, 32]]), 33)[0]
    accum = np.zeros((1, 33 * parts), np.float32)
    decode_records(record(layout, bits), accum, layout, 1.0)  # sound as it is
    bits = {
        "one more": lambda: bits | (np.arange(33) == 3),
        "one less": lambda: bits & (np.arange(33) != 7),
        "all": lambda: np.ones(33, np.uint8),
        "none": lambda: np.zeros(33, np.uint8),
    }[change]()
    with pytest.raises(PayloadError, match=r"positions"):
        decode_records(record(layout, bits), accum, layout, 1.0)


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


@REAL_AND_COMPLEX
@pytest.mark.parametrize("positions", ["bitmap", "elias-fano"])
def test_where_all_travel_no_positions_do(backend, positions, parts):
    layout = Layout(64, 33 if parts == 2 else 64, "range", 8, 3, positions, parts)
    accum = np.zeros((1, layout.bins * parts), np.float32)
    decode_records(record(layout, np.zeros(0)), accum, layout, 1.0)
    assert accum.all()
