"""Exactly the k largest by magnitude, ties to the lower position; on both back ends."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import examples, for_each, read_support

from sn_compress.ops.quantize import Layout
from sn_compress.ops.record import encode_records


def chosen(bins: np.ndarray, k: int) -> np.ndarray:
    """Positions the current back end keeps of complex or real bins, [rows, k]."""
    rows, f = bins.shape
    parts = 2 if bins.dtype.kind == "c" else 1
    layout = Layout(2 * (f - 1) if parts == 2 else f, k, "range", 8, 3, "bitmap", parts)
    words = np.empty((rows, layout.words), np.uint32)
    encode_records(bins.view(np.float32).copy(), None, words, layout)
    return read_support(words, layout)


def order(row: np.ndarray) -> list[int]:
    """All positions, sorted by exact squared magnitude, then by position."""
    squares = [Fraction(float(c.real)) ** 2 + Fraction(float(c.imag)) ** 2 for c in row]
    return sorted(range(len(row)), key=lambda i: (-squares[i], i))


def real_part(bins: np.ndarray) -> np.ndarray:
    return np.ascontiguousarray(bins.real)


KINDS = pytest.mark.parametrize("kind", [np.asarray, real_part], ids=["complex", "real"])


def oracle(row: np.ndarray, k: int) -> list[int]:
    return sorted(order(row)[:k])


def whole_numbers(rows: int, f: int, seed: int, top: int = 4) -> np.ndarray:
    """Complex integers: squares are exact in float32 and full of ties."""
    rng = np.random.default_rng(seed)
    parts = rng.integers(-top, top + 1, (rows, f, 2)).astype(np.float32)
    return parts.view(np.complex64)[..., 0]


@KINDS
@pytest.mark.parametrize("f", [17, 33, 500, 2049])
def test_k_largest_of_well_separated(backend, kind, f):
    # Squares are rounded three times in float32, each within 2**-24; these lie 2**-9 apart.
    rng = np.random.default_rng(f)
    magnitude = np.exp(np.arange(f) * 2.0**-10) * 1e-3
    spectrum = np.array([rng.permutation(magnitude) for _ in range(3)])
    turned = kind(spectrum * np.exp(1j * rng.uniform(0, 7, spectrum.shape)))
    # Real bins are compared by their bits, so need no separation.
    spectrum = turned.astype(np.float32 if turned.dtype == float else np.complex64)
    orders = [order(row) for row in spectrum]
    for k in sorted({1, 2, f // 50 + 1, f // 10, f // 2, f - 1, f}):
        assert chosen(spectrum, k).tolist() == [sorted(positions[:k]) for positions in orders]


@examples
@given(st.integers(17, 200), st.data())
def test_ties_go_to_the_lower_position(backend, f, data):
    k = data.draw(st.integers(1, f))
    spectrum = whole_numbers(2, f, data.draw(st.integers(0, 1000)), data.draw(st.integers(0, 5)))
    spectrum = data.draw(st.sampled_from([np.asarray, real_part]))(spectrum)
    assert chosen(spectrum, k).tolist() == [oracle(row, k) for row in spectrum]


# Whole numbers up to 4 stay exact from 2**-149, the smallest denormal, up to 2**125.
@for_each("power", (-149, -148, -126, -63, 60, 125))
@KINDS
def test_scaling_by_a_power_of_two_changes_nothing(backend, kind, power):
    spectrum = kind(whole_numbers(5, 300, seed=1))
    scaled = np.ldexp(spectrum.view(np.float32), power).astype(np.float32).view(spectrum.dtype)
    for k in (1, 30, 299):
        assert chosen(scaled, k).tolist() == chosen(spectrum, k).tolist()


@examples
@given(st.lists(st.floats(width=32, allow_nan=False), min_size=32, max_size=99), st.data())
def test_any_real_bins_by_their_exact_magnitude(backend, values, data):
    """From the smallest denormal to the largest float: bits of |c| are compared, nothing is
    squared."""
    row = np.array(values, np.float32)
    row[np.isinf(row)] = np.finfo(np.float32).max
    k = data.draw(st.integers(1, row.size))
    assert chosen(row[None], k).tolist() == [oracle(row, k)]
