"""Value coders: scales from sums of integers, levels, and the ends of what a float can hold."""

import math
from fractions import Fraction

import numpy as np
import pytest
import record_bits
from hypothesis import given
from hypothesis import strategies as st
from samples import TINY, examples, specials

from sn_compress.ops.quantize import Layout
from sn_compress.ops.record import decode_records, encode_records

LARGEST = float(np.finfo(np.float32).max)


def layout(kind: str, m: int) -> Layout:
    """All of m real coefficients travel: the kept values are known without a selection."""
    return Layout(m, m, kind, 8, 3, "bitmap", 1)


def coded(row: np.ndarray, kind: str) -> tuple[list[int], list[int], np.ndarray]:
    """Heads, codes and decoded values of one block, through the current back end."""
    form = layout(kind, row.size)
    words = np.empty((1, form.words), np.uint32)
    encode_records(row[None].copy(), None, words, form)
    accum = np.zeros((1, row.size), np.float32)
    decode_records(words, accum, form, 1.0)
    stream = record_bits.words_to_bits(words)
    heads = record_bits.bits_to_codes(stream[:, : form.head_bits], 16)[0].tolist()
    codes = record_bits.bits_to_codes(stream[:, form.head_bits : form.positions_at], form.code_bits)
    return heads, codes[0].tolist(), accum[0]


def unit(row: np.ndarray) -> Fraction:
    """2**-22 of the binade of the largest magnitude; denormals share the smallest one, and the
    two topmost binades one."""
    peak = float(abs(row).max())
    exponent = min(max(math.frexp(peak)[1] - 1, -127), 126) if peak else -127
    exponent = -127 if peak < 2.0**-126 else exponent
    return Fraction(2) ** (exponent - 22)


def bfloat(magnitude: Fraction) -> int:
    """The upper half of the nearest float32, halves rounded up, at most the largest finite."""
    single = np.float32(float(magnitude))  # exact but for denormals, which round to nearest
    return min((int(single.view(np.uint32)) + 0x8000) >> 16, 0x7F7F)


def expected(row: np.ndarray, kind: str) -> tuple[list[int], list[int]]:
    """Heads and codes in exact arithmetic, as docs and module say."""
    u = unit(row)
    fixed = [Fraction(abs(float(v))) // u for v in row]
    negative = [int(bit) for bit in np.signbit(row)]
    mean = sum(fixed) // len(fixed)
    if kind == "sign":
        return [bfloat(mean * u)], negative
    lower, upper = [f for f in fixed if f <= mean], [f for f in fixed if f > mean]
    low = sum(lower) // len(lower) if lower else 0
    high = sum(upper) // len(upper) if upper else low
    codes = [n + 2 * (f > mean) for n, f in zip(negative, fixed, strict=True)]
    return [bfloat(low * u), bfloat(high * u)], codes


def rows() -> st.SearchStrategy[np.ndarray]:
    """32 or more finite floats, often of one scale."""
    whole = st.floats(-LARGEST, LARGEST, width=32)
    near = st.builds(
        lambda numbers, power: np.ldexp(np.array(numbers, np.float64), power),
        st.lists(st.integers(-100, 100), min_size=32, max_size=80),
        st.integers(-149, 121),
    )
    free = st.lists(whole, min_size=32, max_size=80).map(np.array)
    return (free | near).map(lambda row: row.astype(np.float32))


@pytest.mark.parametrize("kind", ["sign", "2bit"])
@examples
@given(rows())
def test_heads_and_codes_are_those_of_exact_arithmetic(backend, kind, row):
    heads, codes, decoded = coded(row, kind)
    assert (heads, codes) == expected(row, kind)
    # Decoding is the level with the sign; nothing is rounded.
    levels = (np.array(heads, np.uint32) << 16).view(np.float32)
    want = np.where(np.array(codes) & 1, -1.0, 1.0) * levels[np.array(codes) >> 1]
    np.testing.assert_array_equal(decoded, want.astype(np.float32))


def test_special_rows_and_heads_that_saturate_at_the_largest_finite(backend):
    for row in specials(45).values():
        for kind in ("sign", "2bit"):
            heads, codes, _ = coded(row, kind)
            assert (heads, codes) == expected(row, kind)
    row = np.full(40, LARGEST, np.float32)  # its nearest bfloat16 would be infinite
    row[::2] *= -1
    for kind in ("sign", "2bit", "range", "fp16"):
        heads, _, decoded = coded(row, kind)
        assert heads[0] <= 0x7F7F
        assert np.isfinite(decoded).all()
        assert (np.sign(decoded) == np.sign(row)).all()
        # One step of bfloat16, or of 3 mantissa bits.
        assert (abs(decoded) >= LARGEST * (1 - 2.0**-7 if kind != "range" else 1 - 2.0**-3)).all()


@pytest.mark.parametrize("kind", ["range", "fp16", "sign", "2bit"])
def test_denormals(backend, kind):
    """What is below half a step of the head's bfloat16, 2**-133, is zero; nothing else is lost."""
    for size in (1, 1000, 2**15 - 1, 2**16, 2**20):
        row = np.full(33, TINY * size, np.float32)
        row[1::2] *= -1
        decoded = coded(row, kind)[2].astype(np.float64)
        if kind in ("sign", "2bit"):
            step = 2.0**-133
            want = math.floor(size * TINY / step + 0.5) * step
            np.testing.assert_array_equal(decoded, np.where(row > 0, want, -want))
        elif kind == "fp16":  # in steps of the smallest half, 2**-24 * 2**(15 - 141) = 2**-150
            limit = 0 if size != 2**15 - 1 else 2.0**-11 * size * TINY  # has more than 11 bits
            assert (abs(decoded - row) <= limit).all()
        else:  # a rung of 3 mantissa bits of denormals is 2**20 TINY; minus one rung is no code
            assert (abs(decoded - row)[::2] <= 2.0**19 * TINY).all()
            assert (abs(decoded - row) <= 2.0**20 * TINY).all()
