"""Value coders: the kept coefficients of a block as codes, and the scales they need.

Each takes values [nb, m] float32 and the bits of each block's peak and gives heads [nb, h]
uint16 (upper halves of float32 scales), codes [nb, m] uint16 and how many values saturated.

"range"  range-based floats, see quantize.py; zero is a code
"fp16"   half precision, scaled per block by a power of two so that its peak fits
"sign"   one bit, and the mean magnitude of the block's kept values; no code for zero
"2bit"   sign and level; the levels are the mean magnitudes below and above the overall mean

Means are summed in fixed point: integers add up to the same in any order, on any back end.
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from . import quantize
from .layout import Layout
from .select import MAX_FINITE

Heads = npt.NDArray[np.uint16]
Floats = npt.NDArray[np.float32]
Ints = npt.NDArray[np.int64]

FIXED_BITS = 22


def encode_values(
    kept: Floats, peaks: npt.NDArray[np.uint32], layout: Layout, top: int | None
) -> tuple[Heads, quantize.Codes, int]:
    """Heads, codes and the number of saturated values; `top` replaces each block's own range."""
    if layout.values == "fp16":
        heads = np.asarray((peaks >> 23) << 7, np.uint16)[:, None]
        halves = np.asarray(kept * _half_scale(heads), np.float16).view(np.uint16)
        # In the topmost binade 0x7800 stands for 2**128, so what rounds to it goes down.
        over = (heads >= 0x7F00) & (halves & 0x7FFF >= 0x7800)
        return heads, np.where(over, halves & 0x8000 | 0x77FF, halves).astype(np.uint16), 0
    if layout.values == "range":
        heads = quantize.window_top(peaks, layout.mantissa)[:, None]
        if top is not None:
            heads = np.full_like(heads, top)
        base = quantize.window_base(heads, layout.bits, layout.mantissa)
        codes, saturated = quantize.encode_window(kept, base, layout.bits, layout.mantissa)
        return heads, codes, saturated
    exponent = np.minimum(peaks >> 23, 253).astype(np.int64)
    fixed = to_fixed(kept, exponent)  # [nb, m]
    negative = np.asarray(np.signbit(kept), np.uint16)
    everything = np.ones_like(fixed, bool)
    mean = _mean(fixed, everything)
    if layout.values == "sign":
        return _bfloat(mean, exponent)[:, None], negative, 0
    upper = fixed > mean[:, None]
    low, high = _mean(fixed, ~upper), _mean(fixed, upper)
    high = np.where(upper.any(axis=1), high, low)
    heads = np.stack([_bfloat(low, exponent), _bfloat(high, exponent)], axis=1)
    codes = np.asarray(negative + 2 * upper, np.uint16)
    return heads, codes, 0


def decode_values(codes: quantize.Codes, heads: Heads, layout: Layout) -> Floats:
    """[nb, m] codes and [nb, h] heads -> [nb, m] float32."""
    if layout.values == "fp16":
        halves: npt.NDArray[np.float16] = codes.view(np.float16)
        # Dividing by a power of two is exact.
        with np.errstate(over="ignore"):  # a damaged payload may hold infinities
            return np.asarray(halves.astype(np.float32) / _half_scale(heads), np.float32)
    if layout.values == "range":
        base = quantize.window_base(heads, layout.bits, layout.mantissa)
        return quantize.decode_window(codes, base, layout.bits, layout.mantissa)
    levels = np.take_along_axis(heads, codes.astype(np.int64) >> 1, axis=1).astype(np.uint32)
    return (levels << 16 | (codes.astype(np.uint32) & 1) << 31).view(np.float32)


def to_fixed(values: Floats, exponent: Ints) -> Ints:
    """|values| in units of 2**-22 of their block's binade, truncated, [nb, m] int64 < 2**24."""
    scale = np.asarray((254 - exponent) << 23, np.uint32).view(np.float32)[:, None]
    return (np.abs(values) * scale * np.float32(1 << FIXED_BITS)).astype(np.int64)


def _mean(fixed: Ints, where: npt.NDArray[np.bool_]) -> Ints:
    count = where.sum(axis=1)
    return np.asarray((fixed * where).sum(axis=1) // np.maximum(count, 1), np.int64)


def _bfloat(fixed: Ints, exponent: Ints) -> Heads:
    """Fixed-point magnitudes as upper halves of float32, to nearest; [nb] uint16."""
    power = (exponent - 127 - FIXED_BITS).astype(np.int32)
    bits = np.ldexp(fixed.astype(np.float32), power).view(np.uint32).astype(np.int64)
    return np.asarray(np.minimum((bits + 0x8000) >> 16, MAX_FINITE >> 16), np.uint16)


def _half_scale(heads: Heads) -> Floats:
    """The power of two that takes a block's peak to [2**14, 2**15), inside half precision."""
    exponent = np.maximum(heads.astype(np.uint32) >> 7, 15)
    return np.asarray((268 - exponent) << 23, np.uint32).view(np.float32)
