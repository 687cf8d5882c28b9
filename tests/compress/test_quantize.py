"""Range floats against a ladder built in exact arithmetic, over all codes."""

import math
import warnings

import numpy as np
import pytest
from samples import TINY, for_each

from sn_compress import CompressError, RangeFloat, SaturationWarning
from sn_compress.ops import quantize
from sn_compress.ops.quantize import MAX_FINITE

FORMATS = [(n, m) for n in (4, 5, 7, 8, 10, 12) for m in range(max(0, n - 7), n)]


def ladder(high: float, m: int, count: int) -> list[float]:
    """The `count` largest floats <= high with m mantissa bits, ascending. `high` is one of them."""
    fraction, exponent = math.frexp(high)
    q = int(fraction * 2 ** (m + 1))  # in [2**m, 2**(m + 1))
    assert q == fraction * 2 ** (m + 1)
    steps = []
    for _ in range(count):
        steps.append(math.ldexp(q, exponent - m - 1))
        q -= 1
        if q < 2**m:
            q, exponent = 2 ** (m + 1) - 1, exponent - 1
    return steps[::-1]


def all_values(fmt: RangeFloat) -> np.ndarray:
    return fmt.decode(np.arange(1 << fmt.bits, dtype=np.uint16)).astype(np.float64)


def between(values: np.ndarray) -> np.ndarray:
    """Float32 points in and around the gaps of sorted float32 `values`, ascending."""
    low, high = values[:-1], values[1:]
    middle = ((low + high) / 2).astype(np.float32)
    edge = np.float32(np.inf)
    points = [low, high, middle, np.nextafter(middle, edge), np.nextafter(middle, -edge)]
    points += [np.nextafter(low.astype(np.float32), edge)]
    points += [np.nextafter(high.astype(np.float32), -edge)]
    points += [(low + (high - low) * t) for t in (0.1, 0.3, 0.7, 0.9)]
    return np.sort(np.concatenate(points).astype(np.float32)).clip(values[0], values[-1])


@for_each("high", (1.0, 0.37, 3e20))
@pytest.mark.parametrize(("bits", "m"), FORMATS)
def test_all_codes(bits, m, high):
    fmt = RangeFloat(bits=bits, mantissa=m, high=high)
    positive = 1 << (bits - 1)
    values = all_values(fmt)
    steps = ladder(fmt.high, m, positive)
    assert values[0] == 0
    assert not np.signbit(values[0])
    assert values[1 : positive + 1].tolist() == steps
    assert values[positive + 1 :].tolist() == [-step for step in steps[1:]]
    assert (fmt.low, fmt.high) == (steps[0], steps[-1])
    # `high` is rounded to m bits; half a step of its octave at most.
    assert abs(fmt.high - high) <= high * 2.0 ** -(m + 1)
    # Decode then encode is the identity. No warning: nothing saturates.
    codes = fmt.encode(values)
    assert codes.dtype == (np.uint8 if bits <= 8 else np.uint16)
    np.testing.assert_array_equal(codes, np.arange(1 << bits))


@pytest.mark.parametrize(("bits", "m"), [*FORMATS, (14, 8), (16, 9), (16, 15)])
def test_nearest_value_in_order_and_within_the_relative_error(bits, m):
    fmt = RangeFloat(bits=bits, mantissa=m, high=1.7)
    values = np.sort(all_values(fmt))
    x = between(values)
    got = fmt.decode(fmt.encode(x)).astype(np.float64)
    # Differences of neighbouring float32 are exact in float64, so there is no tolerance here.
    after = np.searchsorted(values, x).clip(1, len(values) - 1)
    nearest = np.minimum(abs(values[after] - x), abs(values[after - 1] - x))
    np.testing.assert_array_equal(abs(got - x), nearest)
    assert (np.diff(got) >= 0).all()
    inside = (x >= fmt.low) | (x <= -np.partition(abs(values), 3)[3])  # one rung less below zero
    assert inside.sum() > len(x) / 2
    assert (abs(got - x) <= abs(x.astype(np.float64)) * 2.0 ** -(m + 1))[inside].all()

    # Below the window the nearer of zero and the lowest.
    zero = int(np.searchsorted(values, 0))
    for lowest in (values[zero + 1], values[zero - 1]):
        half = np.float32(lowest / 2)
        x = np.array([half, np.nextafter(half, 0), np.nextafter(half, 2 * half)], np.float32)
        assert fmt.decode(fmt.encode(x)).tolist() == [0, 0, lowest]  # the tie goes to zero
    zeros = np.array([0.0, -0.0, TINY, -TINY, 1e-40, -1e-40], np.float32)
    assert fmt.encode(zeros).tolist() == [0] * 6


@pytest.mark.parametrize("m", [1, 3, 7])
def test_saturation_is_clipped_and_warned_of(m):
    fmt = RangeFloat(bits=8, mantissa=m, high=1.0)
    half_step = 2.0 ** -(m + 1)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        np.testing.assert_array_equal(
            fmt.decode(fmt.encode([np.nextafter(np.float32(1 + half_step), 0), -1.0])), [1, -1]
        )
    with pytest.warns(SaturationWarning, match=r"3 of 4 values lie beyond \+-1 "):
        codes = fmt.encode([1 + half_step, -3e38, 3e38, 0.75])
    assert fmt.decode(codes).tolist() == [1, -1, 1, 0.75]


def test_what_is_no_finite_float32_is_refused():
    for bad in (np.nan, np.inf, -np.inf):
        with pytest.raises(CompressError, match=r"1 of 3 values are NaN, Inf.*Mask them"):
            RangeFloat().encode([0.5, bad, 0.1])
    with pytest.raises(CompressError, match="beyond float32"):
        RangeFloat().encode([1e39])


def test_any_shape():
    for shape in ((), (0,), (7,), (2, 3), (2, 0, 3)):
        codes = RangeFloat().encode(np.full(shape, 0.5))
        assert codes.shape == RangeFloat().decode(codes).shape == shape


@pytest.mark.parametrize(("settings", "message"), [
    ({"bits": 3}, "bits=3.*4 to 16"),
    ({"bits": 8.0}, "bits=8.0.*4 to 16"),
    ({"bits": 8, "mantissa": 0}, "mantissa=0 with bits=8: legal are 1 to 7"),
    ({"bits": 8, "mantissa": 8}, "mantissa=8 with bits=8: legal are 1 to 7"),
    ({"bits": 16, "mantissa": 8}, "legal are 9 to 15"),
    ({"high": 0}, "high=0: expected a finite float32 above zero"),
    ({"high": -1.0}, "above zero"),
    ({"high": math.nan}, "finite float32"),
    ({"high": 3.4e38}, "high=3.4e\\+38: expected a finite float32"),
    ({"high": 1e39}, "finite float32"),
    ({"high": 1e-38, "mantissa": 3}, "room for 128 values"),
])  # fmt: skip
def test_illegal_settings_name_the_legal_ones(settings, message):
    with pytest.raises(CompressError, match=message):
        RangeFloat(**settings)


def test_codes_that_are_none():
    for codes in ([16], [-1], [1.0], [70000]):
        with pytest.raises(CompressError, match=r"outside 0\.\.15"):
            RangeFloat(bits=4, mantissa=1).decode(codes)


def test_repr_evaluates():
    fmt = RangeFloat(bits=7, mantissa=2, high=0.3)
    again = eval(repr(fmt))
    assert (repr(again), again.low, again.high) == (repr(fmt), fmt.low, fmt.high)


@for_each("m", range(16))
def test_the_range_that_travels_holds_the_peak(m):
    rng = np.random.default_rng(m)
    peaks = rng.integers(1 << 23, MAX_FINITE, 20_000, dtype=np.uint32)  # normal floats
    tops = quantize.window_top(peaks, m).astype(np.uint32) << 16
    rounded = (quantize.rungs(peaks.astype(np.int64), m) << (23 - m)).clip(max=0x7F7F0000)
    assert (tops >= rounded).all()
    ends, needed = tops.view(np.float32), rounded.astype(np.uint32).view(np.float32)
    assert (
        (ends == needed).all() if m <= 7 else (ends < needed.astype(np.float64) * (1 + 2**-7)).all()
    )
