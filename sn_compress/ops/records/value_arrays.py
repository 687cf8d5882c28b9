"""Value coders over any array library: what values.py does on a host, bit for bit.

    heads, scale, codes, saturated = encode(values, peaks, layout, top)
    values = decode(codes, scale, layout)      where scale = scale_of(heads, layout)

"range" and "2bit"; others raise CompressError. All of it is arithmetic on integers, the bits of
floats and fixed-point magnitudes, so every library and device gives the same codes.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ...base.errors import CompressError
from ...devices.arrays import Array, Constant, bits_of, clipped, floats_of, namespace
from ...devices.arrays import shifted_right as shifted
from .layout import Layout
from .select import MAX_FINITE
from .values import FIXED_BITS

SERVED = ("range", "2bit")
_ZERO = Constant(np.zeros((), np.int64))
SIGN = 2**31 - 1
_UNIT = 127 + FIXED_BITS  # a fixed-point magnitude of exponent e counts in 2**(e - _UNIT)
_SUBNORMAL = 24  # magnitudes of lower exponents may be below the least normal float32


def check(layout: Layout) -> None:
    """Raise CompressError for values that there is no array code for."""
    if layout.values not in SERVED:
        raise CompressError(
            f"values={layout.values!r} as array code; expected {' or '.join(map(repr, SERVED))}. "
            "Other values need tensors on the CPU, or CuPy: the extra [cuda]."
        )


def encode(
    values: Array, peaks: Array, layout: Layout, top: Any
) -> tuple[Array, Array, Array, Array]:
    """Of kept values: heads [rows, h] int64, their scale, codes [rows, m], saturated [rows].

    values : [rows, m] float32; peaks : [rows] int32, bits of each block's largest magnitude
    top : the range's end (upper half of a float32) if it is not each block's own; a number, or
        [rows, 1] int64
    """
    if layout.values == "2bit":
        heads, codes = _two_levels(values, peaks)
        return heads, heads, codes, namespace(peaks).astype(peaks, heads.dtype) * 0
    heads = _window_top(peaks, layout.mantissa)[:, None]
    if top is not None:
        heads = heads * 0 + top
    base = scale_of(heads, layout)
    codes, saturated = _codes(values, base, layout)
    return heads, base, codes, saturated


def scale_of(heads: Array, layout: Layout) -> Array:
    """What codes count in: the lowest rung of each range, [rows, 1] int64, or the two levels."""
    if layout.values == "2bit":
        return heads
    ends = shifted(heads * 2**16, 23 - layout.mantissa)
    return clipped(ends - 2 ** (layout.bits - 1) + 1, 1, 2**31)


def decode(codes: Array, scale: Array, layout: Layout) -> Array:
    """[rows, m] codes, int64, and their scale to [rows, m] float32."""
    xp = namespace(codes)
    if layout.values == "2bit":
        words = xp.where(codes >= 2, scale[:, 1:2], scale[:, :1]) * 2**16
        negative = codes & 1
    else:
        half = 2 ** (layout.bits - 1)
        negative = xp.astype(codes > half, xp.int64)
        rung = codes - 1 + scale - negative * (half - 1)
        words = xp.where(codes == 0, _ZERO.on(codes), rung * 2 ** (23 - layout.mantissa))
    # A damaged head may ask for more than 31 bits.
    return floats_of(xp.astype((words & SIGN) - negative * 2**31, xp.int32))


def exponents(peaks: Array) -> Array:
    """Of each block's binade, [rows] int32 from 0 to 253."""
    return clipped(shifted(peaks, 23), 0, 253)


def _rungs(magnitudes: Array, mantissa: int) -> Array:
    return shifted(magnitudes + 2 ** (22 - mantissa), 23 - mantissa)


def _window_top(peaks: Array, mantissa: int) -> Array:
    xp = namespace(peaks)
    ends = _rungs(xp.astype(peaks, xp.int64), mantissa) * 2 ** (23 - mantissa)
    return clipped(shifted(ends + 0xFFFF, 16), 0, MAX_FINITE >> 16)


def _codes(values: Array, base: Array, layout: Layout) -> tuple[Array, Array]:
    """quantize.encode_window; codes [rows, m] int64, saturated [rows] int64."""
    xp, step = namespace(values), 23 - layout.mantissa
    words = xp.astype(bits_of(values), xp.int64)
    negative = xp.astype(words < 0, xp.int64)
    magnitude = words & SIGN
    half = 2 ** (layout.bits - 1)
    end = base + half - 1
    rung = _rungs(magnitude, layout.mantissa)
    saturated = xp.sum(xp.astype(rung > end, xp.int64), axis=1)
    rung = xp.minimum(rung, end)
    lowest = base + negative  # the negative side has one code fewer
    low = lowest * 2**step
    halfway = xp.where(low >= 2 * 2**23, low - 2**23, shifted(low, 1))
    rung = xp.where((rung < lowest) & (magnitude > halfway), lowest, rung)
    code = rung - base + 1 + negative * (half - 1)
    return xp.where(rung < lowest, _ZERO.on(code), code), saturated


def _two_levels(values: Array, peaks: Array) -> tuple[Array, Array]:
    """Heads and codes as of values.encode_values: sign, and whether above the mean of all."""
    xp = namespace(values)
    exponent = exponents(peaks)
    scaled = values * floats_of((254 - exponent) * 2**23)[:, None]
    fixed = xp.astype(xp.abs(scaled) * 2.0**FIXED_BITS, xp.int64)
    total, count = xp.sum(fixed, axis=1), int(values.shape[1])
    upper = fixed > (total // count)[:, None]
    above = xp.sum(xp.where(upper, fixed, xp.zeros_like(fixed)), axis=1)
    many = xp.sum(xp.astype(upper, xp.int64), axis=1)
    low = (total - above) // (count - many)  # the least is never above the mean
    high = xp.where(many > 0, above // xp.where(many > 0, many, many + 1), low)
    wide = xp.astype(exponent, xp.int64)
    heads = xp.stack([_bfloat(low, wide), _bfloat(high, wide)], axis=1)
    negative = xp.astype(bits_of(values) < 0, xp.int64)
    return heads, negative + 2 * xp.astype(upper, xp.int64)


def _bfloat(fixed: Array, exponent: Array) -> Array:
    """Fixed-point magnitudes as upper halves of float32, to nearest; [rows] int64.

    Put together from bits, as a product would lose what a device takes for zero.
    """
    xp = namespace(fixed)
    own = xp.astype(bits_of(xp.astype(fixed, xp.float32)), xp.int64)  # exact, below 2**24
    normal = own + (exponent - _UNIT) * 2**23
    places = clipped(exponent, 0, _SUBNORMAL)
    subnormal = xp.bitwise_left_shift(fixed, places)
    is_small = (fixed == 0) | (subnormal < 2**23)
    bits = xp.where(is_small, subnormal, normal)
    return clipped(shifted(bits + 0x8000, 16), 0, MAX_FINITE >> 16)
