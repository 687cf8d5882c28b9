"""Records of the extension and of the array code over NumPy, bit by bit; damage, on both."""

import numpy as np
import pytest
import record_bits
from hypothesis import given
from hypothesis import strategies as st
from samples import TINY, U, edges, examples, for_each, layouts

from sn_compress import PayloadError, _native
from sn_compress.ops import bits as elias_fano
from sn_compress.ops.quantize import NON_FINITE, Layout
from sn_compress.ops.record import decode_records, encode_records

LAYOUTS = layouts(blocks=(32, 64, 1024))
LONG = [x for x in layouts(blocks=(4096, 2**14), thetas=(0.5, 0.98)) if x.block > 1000]


def rows_of(layout: Layout, scale: float, rows: int = 6, seed: int = 0) -> np.ndarray:
    """Heavy tails; row 1 has ties, row 2 is constant, 3 holds NaN, 4 zeros of both signs, 5 Inf."""
    rng = np.random.default_rng(seed)
    shape = (rows, layout.bins, layout.parts)
    with np.errstate(over="ignore"):
        bins = (rng.standard_t(3, shape) * scale).astype(np.float32)
    bins[1] = np.round(bins[1]) if scale == 1 else bins[1]
    bins[2] = bins[2, 0]
    bins[4] = np.where(rng.random(shape[1:]) < 0.5, 0.0, -0.0)
    bins[3, rng.integers(layout.bins)] = np.nan
    bins[5, rng.integers(layout.bins), -1] = -np.inf
    values = bins.reshape(rows, -1)
    values[:, edges(layout)] = 0  # what no real vector has
    return values


def nothing(layout: Layout, rows: int = 6) -> np.ndarray:
    return np.zeros((rows, layout.bins * layout.parts), np.float32)


def bits(array: np.ndarray) -> np.ndarray:
    return array.view(np.uint32)


def on_both(core, task):
    """Results of a function of nothing with the extension and over NumPy."""
    results = []
    for extension in (core, None):
        with pytest.MonkeyPatch.context() as patch:
            patch.setattr(_native, "core", lambda extension=extension: extension)
            results.append(task())
    return results


def encode_both(core, layout, coefficients, memory, decay=1.0, top=None):
    """Encode with both back ends, hold them to each other, and return the words."""

    def encode():
        kept = None if memory is None else memory.copy()
        words = np.full((len(coefficients), layout.words), 0xFFFFFFFF, np.uint32)  # poison
        return words, kept, encode_records(coefficients.copy(), kept, words, layout, decay, top)

    (words, kept, tally), (words_2, kept_2, tally_2) = on_both(core, encode)
    np.testing.assert_array_equal(words, words_2)
    if memory is not None:
        # As integers, so that the sign of a zero and the bits of a NaN count.
        np.testing.assert_array_equal(bits(kept), bits(kept_2))
    assert tally.saturated == tally_2.saturated
    near = {"rtol": 2 * layout.bins * U, "atol": 0}  # sums of squares in float32
    np.testing.assert_allclose(tally_2[1:], tally[1:], **near)
    return words


def decode_both(core, layout, words, accum, weight=1.0):
    """Decode with both back ends; the result, or None if both found damage."""

    def decode():
        out = accum.copy()
        try:
            decode_records(words, out, layout, weight)
        except PayloadError:
            return None
        return out

    fast, slow = on_both(core, decode)
    assert (fast is None) == (slow is None)
    if fast is not None:
        np.testing.assert_array_equal(fast, slow)
    return fast


@for_each("numbered", enumerate([*LAYOUTS, *LONG]))
def test_back_ends_agree(core, numbered):
    number, layout = numbered
    scale = (1, 1e-30, 1e30, 1e-40, 0, 3e38, 1)[number % 7]
    zeros = np.repeat(rows_of(layout, 0, seed=2)[[4]], 6, axis=0)
    coefficients, memory = rows_of(layout, scale), rows_of(layout, scale * 0.1, seed=1)
    memory[~np.isfinite(memory)] = 0
    for kept, decay, weight in ((memory, 0.9, 1 / 3), (None, 1.0, 1.0)):
        words = encode_both(core, layout, coefficients, kept, decay)
        assert decode_both(core, layout, words, zeros, weight) is not None


@examples
@given(
    st.sampled_from(LAYOUTS), st.integers(0, 2**32 - 1), st.integers(0, 0x7F7F), st.floats(-45, 38)
)
def test_back_ends_agree_on_any_range(core, layout, seed, top, power):
    top = top if layout.values == "range" else None
    encode_both(core, layout, rows_of(layout, 10.0**power, seed=seed), None, top=top)


@examples
@given(st.sampled_from(LAYOUTS), st.integers(0, 2**32 - 1), st.booleans())
def test_back_ends_agree_on_damage(core, layout, seed, everywhere):
    """One flipped bit, or nothing but noise, in place of a record."""
    rng = np.random.default_rng(seed)
    words = encode_both(core, layout, rows_of(layout, 1, seed=seed), None)
    if everywhere:
        words[:] = rng.integers(0, 2**32, words.shape, dtype=np.uint32)
    else:
        words[rng.integers(6), rng.integers(layout.words)] ^= np.uint32(1) << rng.integers(
            32, dtype=np.uint32
        )
    with np.errstate(all="ignore"):  # damaged half floats may be infinite
        decode_both(core, layout, words, nothing(layout))


@pytest.mark.parametrize(("values", "parts"), [("range", 2), ("fp16", 1), ("sign", 2), ("2bit", 1)])
def test_non_finite_rows(backend, values, parts):
    layout = Layout(64, 4, values, 8, 3, "elias-fano", parts)
    words = np.full((6, layout.words), 0xFFFFFFFF, np.uint32)
    encode_records(rows_of(layout, 1), None, words, layout)
    assert words[[3, 5]].tolist() == [[NON_FINITE, *[0] * (layout.words - 1)]] * 2
    accum = np.ones((6, layout.bins * parts), np.float32)
    decode_records(words, accum, layout, 0.5)
    assert np.isnan(accum).all(axis=1).tolist() == [False, False, False, True, False, True]
    assert np.isfinite(accum[[0, 1, 2, 4]]).all()


@pytest.mark.parametrize("values", ["range", "fp16", "sign", "2bit"])
def test_a_range_that_is_not_finite_is_refused(backend, values):
    layout = Layout(32, 1, values, 8, 3, "elias-fano")
    words = np.zeros((1, layout.words), np.uint32)
    encode_records(np.ones((1, 34), np.float32), None, words, layout)
    first = int(words[0, 0])
    for end in (0x7F80, 0x7FC1, 0xFFFF, 0x8000):
        broken = [(first & 0xFFFF0000) | end]
        if values == "2bit":  # the second level likewise
            broken.append((first & 0xFFFF) | end << 16)
        for words[0, 0] in broken:
            with pytest.raises(PayloadError, match="finite"):
                decode_records(words, nothing(layout, 1), layout, 1.0)


def test_no_rows(backend):
    layout = Layout(32, 1, "range", 8, 3, "elias-fano")
    none, words = nothing(layout, 0), np.zeros((0, layout.words), np.uint32)
    assert encode_records(none, none.copy(), words, layout) == (0, 0, 0)
    decode_records(words, none, layout, 1.0)


@pytest.mark.parametrize(
    ("scale", "parts"), [(1.0, 2), (1e-30, 1), (TINY * 1000, 2), (TINY * 1000, 1), (1e38, 2)]
)
def test_half_precision_is_numpys(backend, scale, parts):
    """Scaled by a power of two near the peak, then exactly NumPy's float16."""
    layout = Layout(64 if parts == 2 else 66, 33 * (3 - parts), "fp16", 16, 0, "bitmap", parts)
    rng = np.random.default_rng(3)
    row = (rng.standard_normal((1, 66)) * np.exp2(rng.uniform(-45, 0, (1, 66))) * scale).astype(
        np.float32
    )
    words = np.empty((1, layout.words), np.uint32)
    encode_records(row.copy(), None, words, layout)
    accum = np.zeros((1, 66), np.float32)
    decode_records(words, accum, layout, 1.0)
    # frexp's exponent e has peak in [2**(e-1), 2**e); denormals count as the smallest normals.
    exponent = max(int(np.frexp(abs(row).max())[1]), -126 + 15)
    exact = row.astype(np.float64) * 2.0 ** (15 - exponent)
    want = exact.astype(np.float16).astype(np.float64) * 2.0 ** (exponent - 15)
    np.testing.assert_array_equal(accum.astype(np.float64), want)


def sealed(layout: Layout, positions: np.ndarray) -> np.ndarray:
    """Words of a record with a sound range, codes of one, and these bits as its positions."""
    code = [1, *[0] * (layout.code_bits - 1)]
    head = [0] * layout.head_bits + code * (layout.parts * layout.kept)
    return record_bits.bits_to_words(np.array([head + list(positions)], np.uint8))


REAL_AND_COMPLEX = pytest.mark.parametrize("parts", [2, 1])


@REAL_AND_COMPLEX
def test_damaged_bitmap(backend, parts):
    layout = Layout(64 if parts == 2 else 33, 5, "range", 8, 3, "bitmap", parts)
    bits = record_bits.bitmap(np.array([[0, 7, 20, 31, 32]]), 33)[0]
    accum = np.zeros((1, 33 * parts), np.float32)
    decode_records(sealed(layout, bits), accum, layout, 1.0)  # sound as it is
    one_more, one_less = bits | (np.arange(33) == 3), bits & (np.arange(33) != 7)
    for damaged in (one_more, one_less, np.ones(33, np.uint8), np.zeros(33, np.uint8)):
        with pytest.raises(PayloadError, match="positions"):
            decode_records(sealed(layout, damaged), accum, layout, 1.0)


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
                decode_records(sealed(layout, bits), accum, layout, 1.0)
                assert np.flatnonzero(accum.reshape(33, parts).any(axis=1)).tolist() == places
            else:
                with pytest.raises(PayloadError, match="positions"):
                    decode_records(sealed(layout, bits), accum, layout, 1.0)
