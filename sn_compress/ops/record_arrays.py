"""Records of blocks over any array library, bit-identical to csrc/compress/record.cpp.

No branch depends on a value: which bins are kept is decided by sorting, corruption is a flag. See
record.py for the format of a record, quantize.py for which bins are kept and for the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ..arrays import (
    Array,
    Constant,
    add_at,
    bits_of,
    clipped,
    floats_of,
    namespace,
    put,
    take,
)
from ..arrays import shifted_right as shifted
from ..arrays import top as largest_of_rows
from . import bits as bit_fields
from . import quantize
from .bits import Fields, counted, low_bits, upper_bits
from .quantize import MAGNITUDE, MAX_FINITE, NON_FINITE, Layout

_ZERO = Constant(np.zeros((), np.float32))
_FIXED_BITS = 22  # of a fixed-point magnitude, below 2**24: sums of 2**39 of them fit int64
_UNIT = 127 + _FIXED_BITS  # a fixed-point magnitude of exponent e is in units of 2**(e - _UNIT)
_SUBNORMAL = 24  # magnitudes of lower exponents may be below the least normal float32
# Exponent bias of float32 minus that of half precision, in codes of the latter.
_HALF_BIAS = 112 << 10
_LEAST_HALF = 0x38800000  # 2**-14, the least normal number of half precision, as a float32
_POSITION = 2**32 - 1  # position field in the low bits of a sort key
_FOURS = Constant(4.0 ** (np.arange(254) - 127))  # unit of a scaled square, by exponent


@dataclass(frozen=True)
class Encoded:
    """The encoded blocks; each attribute has a row per block.

    words : [rows, layout.words] int64, 0 to 2**32 - 1
    residual : [rows, bins * parts] float32, what was not encoded; the old memory if a block is not
        finite. None without a memory
    saturated : [rows] int64, number of values beyond the end of a fixed range
    energy, error : [rows] float64, the squared norm of what was encoded and of what was lost, 0 if
        a block is not finite; None without `tally`
    """

    words: Array
    residual: Array | None
    saturated: Array
    energy: Array | None
    error: Array | None


@dataclass(frozen=True)
class Decoded:
    """The decoded records; each attribute has a row per record.

    at : [rows, k] int64, its bins, ascending; arbitrary ones below `bins` if it is corrupt
    values : [rows, k * parts] float32; arbitrary if it is corrupt
    missing : [rows] bool, whether the block is NaN: it was not finite, or the record is corrupt
    damaged : [rows] bool
    down : [rows / ranks, 1] float32, the factor applied to values, from quantize.LARGE_DOWN
    """

    at: Array
    values: Array
    missing: Array
    damaged: Array
    down: Array


class Records:
    """Encodes and decodes records of one layout, with precomputed tables.

    clear_edges : whether imaginary parts of the edge bins may be nonzero, as in an array library's
        FFT, and are treated as zero. FFTs on the host leave zeros there
    """

    def __init__(self, layout: Layout, clear_edges: bool = True) -> None:
        self.layout, self._clear_edges = layout, clear_edges
        kept, bins, parts, bits = layout.kept, layout.bins, layout.parts, layout.code_bits
        self._inner = None
        if parts == 2:  # imaginary parts of the edge bins are meaningless for a real vector
            inner = np.ones(2 * bins, bool)
            inner[1] = False
            inner[-1] = layout.block % 2 == 1
            self._inner = Constant(inner)
        lost = np.zeros(layout.words, np.int64)
        lost[0] = NON_FINITE
        self._lost = Constant(lost)
        mark = np.array([[quantize.LARGE_BIT, 0][: layout.head_bits // 16]], np.int64)
        self._mark, self._unmarked = Constant(mark), Constant(0xFFFF - mark)
        low = low_bits(kept, bins) if kept < bins and layout.positions == "elias-fano" else 0
        codes = layout.head_bits + bits * np.arange(kept * parts)
        lows = layout.positions_at + low * np.arange(kept if low else 0)
        heads = np.arange(0, layout.head_bits, 16)
        offsets = np.concatenate([heads, codes, lows])
        widths = np.concatenate(
            [np.full(heads.size, 16), np.full(codes.size, bits), np.full(lows.size, low)]
        )
        self._offsets = Constant(offsets.astype(np.int64)[None, :])
        self._read = Fields(offsets, widths, layout.words)
        self._map_at = layout.positions_at + low * kept
        length = 0
        if kept < bins:
            length = bins if layout.positions == "bitmap" else upper_bits(kept, bins)
        self._map_bits = length

    def encode(
        self,
        coefficients: Array,
        memory: Array | None,
        factor: Any = 1.0,
        top: int | None = None,
        tally: bool = False,
        is_large: Array | None = None,
        down: Array | None = None,
    ) -> Encoded:
        """Encode blocks to records; see record.encode_records.

        coefficients : [rows, bins * parts] float32, which may be overwritten
        memory : the same shape or None; times `factor` it is added before encoding
        factor : a number, or [rows, 1] float32
        top : end of the range (upper half of a float32) if blocks do not have their own
        tally : whether to compute energy and error
        is_large, down : [rows] int64, 1 where coefficients are divided by 2**LARGE_SHIFT (and the
            memory as well, by `factor`), else 0; and their factor, [rows, 1]
        """
        xp, layout = namespace(coefficients), self.layout
        rows, bins, parts, kept = coefficients.shape[0], layout.bins, layout.parts, layout.kept
        if memory is not None:
            exact = isinstance(factor, float) and factor == 1
            coefficients = coefficients + (memory if exact else memory * factor)
        peaks = quantize.peak_bits(coefficients)  # [rows] int32
        finite = (peaks <= MAX_FINITE)[:, None]
        kept_parts = finite
        if self._clear_edges and self._inner is not None:
            kept_parts = finite & self._inner.on(coefficients)[None, :]
        coefficients = xp.where(kept_parts, coefficients, _ZERO.on(coefficients))
        at = _positions(coefficients, peaks, layout)  # [rows, k] int64
        first = xp.reshape(counted(xp, rows, at), (rows, 1)) * bins
        flat = xp.reshape(first + at, (-1,))
        pairs = xp.reshape(coefficients, (rows * bins, parts))
        values = xp.reshape(take(pairs, flat), (rows, kept * parts))
        end: Any = top
        if is_large is not None and top is not None:
            end = top - is_large[:, None] * (top - quantize.lower_top(top))
        heads, scale, codes, saturated = encode_values(values, peaks, layout, end)
        if is_large is not None:
            heads = heads + is_large[:, None] * self._mark.on(heads)
        words = bit_fields.write_fields(*self._fields(heads, codes, at), layout.words)
        lost = self._lost.on(words)[None, :]  # the record of a block that is not finite
        words = xp.where(finite, words, lost)
        residual = energy = error = None
        if tally:
            energy = _energy(coefficients, peaks, layout)
        if memory is not None or tally:
            lost_part = values - decode_values(codes, scale, layout)
            lost_part = xp.reshape(lost_part, (rows * kept, parts))
            residual = xp.reshape(put(pairs, flat, lost_part), (rows, bins * parts))
            if self._inner is not None and layout.values in ("sign", "2bit"):
                # These formats have no zero, so the edges' imaginary parts got a nonzero value.
                inner = self._inner.on(residual)[None, :]
                residual = xp.where(inner, residual, xp.zeros_like(residual))
        if tally:
            error = _energy(residual, peaks, layout)
        if down is not None and residual is not None:
            residual = quantize.restored(residual, down, quantize.MOST_MEMORY)
        if down is not None and tally:
            squares = xp.astype(down * down, xp.float64)[:, 0]
            energy, error = energy / squares, error / squares
        residual = None if memory is None else xp.where(finite, residual, memory)
        return Encoded(words, residual, saturated, energy, error)

    def decode(self, words: Array, *, ranks: int = 1) -> Decoded:
        """Decode records; those of the same block to the same unit.

        words : [ranks * blocks, layout.words] int64, 0 to 2**32 - 1
        """
        xp, layout = namespace(words), self.layout
        rows, kept, bins = words.shape[0], layout.kept, layout.bins
        fields = self._read.read(words)
        first = layout.head_bits // 16
        heads, codes = fields[:, :first], fields[:, first : first + kept * layout.parts]
        marked = shifted(heads[:, 0], 15)  # see quantize.LARGE_BIT
        is_large = xp.max(xp.reshape(marked, (ranks, -1)), axis=0)
        # Remove the mark, which is not part of the range, before checking the head.
        heads = heads & self._unmarked.on(heads)
        lost = heads[:, 0] == NON_FINITE
        damaged = heads[:, 0] > MAX_FINITE >> 16
        for second in range(1, first):
            damaged = damaged | (heads[:, second] > MAX_FINITE >> 16)
        down = take(quantize.LARGE_DOWN.on(words), is_large)[:, None]
        lower = xp.reshape(is_large[None, :] - xp.reshape(marked, (ranks, -1)), (-1, 1))
        heads = clipped(heads - lower * quantize.LARGE_OCTAVES, 0, quantize.LARGE_BIT)
        count = counted(xp, kept, words)[None, :]
        if kept == bins:
            at = xp.broadcast_to(count, (rows, kept))
        else:
            # Without a table, which for a whole vector would be many times as large as the vector.
            marks = bit_fields.one_by_one(words, self._map_at, self._map_bits)
            place = counted(xp, self._map_bits, words)[None, :]
            nowhere = xp.full_like(marks, self._map_bits)
            at = xp.sort(xp.where(marks == 1, place, nowhere), axis=1)[:, :kept]
            damaged = damaged | (xp.sum(marks, axis=1) != kept)
            if layout.positions == "elias-fano":
                at = (at - count) * 2 ** low_bits(kept, bins)
                if low_bits(kept, bins):
                    at = at + fields[:, fields.shape[1] - kept :]
                damaged = damaged | xp.any(at[:, 1:] <= at[:, :-1], axis=1) | (at[:, -1] >= bins)
            # Keep corrupt positions inside the arrays; their sums are replaced by NaN.
            at = clipped(at, 0, bins - 1)
        missing = damaged  # includes those marked as lost
        values = decode_values(codes, _scale_of(heads, layout), layout)
        return Decoded(at, values, missing, damaged ^ lost, down)

    def add(self, target: Array, decoded: Decoded, weight: float) -> Array:
        """Add weighted records to [rows * bins, parts] float32, in rank order.

        decoded : of [ranks * rows] records
        """
        xp, layout = namespace(target), self.layout
        blocks = target.shape[0] // layout.bins
        ranks = decoded.at.shape[0] // blocks
        first = xp.reshape(counted(xp, blocks, decoded.at), (1, blocks, 1)) * layout.bins
        at = xp.reshape(decoded.at, (ranks, blocks, layout.kept)) + first
        at = xp.reshape(at, (ranks, -1))
        values = xp.reshape(decoded.values * weight, (ranks, blocks * layout.kept, layout.parts))
        # Rank by rank, for a fixed order of float sums. Within a rank no bin repeats, as `add_at`
        # requires.
        for rank in range(ranks):
            target = add_at(target, at[rank], values[rank])
        return target

    def _fields(self, heads: Array, codes: Array, at: Array) -> tuple[Array, Array]:
        """Return offsets and values of all fields, [rows, m] int64."""
        xp, layout = namespace(codes), self.layout
        rows, kept, bins = at.shape[0], layout.kept, layout.bins
        numbers, ones = [heads, codes], at
        if kept < bins and layout.positions == "elias-fano":
            low = low_bits(kept, bins)
            if low:
                numbers.append(at & (2**low - 1))
            ones = shifted(at, low) + counted(xp, kept, at)[None, :]
        offsets = self._offsets.on(codes)
        places = [xp.broadcast_to(offsets, (rows, offsets.shape[1]))]
        if kept < bins:
            numbers.append(xp.ones_like(at))
            places.append(ones + self._map_at)
        return xp.concat(places, axis=1), xp.concat(numbers, axis=1)


def _positions(coefficients: Array, peaks: Array, layout: Layout) -> Array:
    """Return the k largest bins of each row, ascending, ties to the lower; [rows, k] int64."""
    xp = namespace(coefficients)
    rows, kept, bins = coefficients.shape[0], layout.kept, layout.bins
    count = counted(xp, bins, peaks)
    if kept == bins:
        return xp.broadcast_to(count[None, :], (rows, bins))
    if layout.parts == 1:
        order = bits_of(coefficients) & MAGNITUDE
    else:
        order = bits_of(_squares(coefficients, peaks, layout))
    # Magnitude in the high bits, reversed position in the low bits: keys are unique, so all
    # libraries' top-k agree, and ties go to the lower position.
    keys = xp.astype(order, xp.int64) * (_POSITION + 1) + (_POSITION - count)[None, :]
    return xp.sort(_POSITION - (largest_of_rows(keys, kept) & _POSITION), axis=1)


def _squares(coefficients: Array, peaks: Array, layout: Layout) -> Array:
    """Return squared magnitudes, [rows, bins] float32, of blocks scaled as in quantize.py."""
    scaled = coefficients * floats_of((254 - _exponents(peaks)) * 2**23)[:, None]
    squares = scaled * scaled
    if layout.parts == 1:
        return squares
    pairs = namespace(squares).reshape(squares, (squares.shape[0], layout.bins, 2))
    return pairs[:, :, 0] + pairs[:, :, 1]


def _energy(coefficients: Array, peaks: Array, layout: Layout) -> Array:
    """Return the squared norm of the blocks, [rows] float64, summed in float32 at their scale."""
    # Inner bins represent a conjugate pair, so count twice; the edge bins only once.
    xp = namespace(coefficients)
    squares = _squares(coefficients, peaks, layout)
    total = xp.sum(squares, axis=1)
    if layout.parts == 2:
        total = 2 * total - squares[:, 0]
        if layout.block % 2 == 0:
            total = total - squares[:, -1]
    units = _FOURS.on(peaks)
    return xp.astype(total, xp.float64) * take(units, xp.astype(_exponents(peaks), xp.int64))


def encode_values(
    values: Array, peaks: Array, layout: Layout, top: Any
) -> tuple[Array, Array, Array, Array]:
    """Return heads [rows, h] int64, their scale, codes [rows, m], and saturated [rows].

    values : [rows, m] float32, the kept ones
    peaks : [rows] int32, bits of each block's largest magnitude
    top : end of the range (upper half of a float32) if blocks do not have their own; a number, or
        [rows, 1] int64
    """
    if layout.values != "range":
        of = {"fp16": _halves, "sign": _one_level, "2bit": _two_levels}[layout.values]
        heads, codes = of(values, peaks)
        none = namespace(peaks).astype(peaks, heads.dtype) * 0
        return heads, _scale_of(heads, layout), codes, none
    heads = quantize.window_top(peaks, layout.mantissa)[:, None]
    if top is not None:
        heads = heads * 0 + top
    base = _scale_of(heads, layout)
    codes, is_over = quantize.encode_window(values, base, layout.bits, layout.mantissa)
    xp = namespace(values)
    return heads, base, codes, xp.sum(xp.astype(is_over, xp.int64), axis=1)


def _scale_of(heads: Array, layout: Layout) -> Array:
    """Return the scale of the codes, [rows, 1 or 2].

    The lowest rung of each range, or the levels, int64; for half precision a power of two, float32.
    """
    if layout.values in ("sign", "2bit"):
        return heads
    if layout.values == "fp16":
        return _half_scale(heads)
    return quantize.window_base(heads, layout.bits, layout.mantissa)


def decode_values(codes: Array, scale: Array, layout: Layout) -> Array:
    """Decode [rows, m] int64 codes with their scale to [rows, m] float32."""
    xp = namespace(codes)
    if layout.values == "fp16":
        return _of_halves(codes) / scale  # a power of two, so exact
    if layout.values == "range":
        return quantize.decode_window(codes, scale, layout.bits, layout.mantissa)
    level = xp.where(codes >= 2, scale[:, -1:], scale[:, :1])
    return quantize.signed(level * 2**16, codes & 1)


def _exponents(peaks: Array) -> Array:
    """Return the exponent of each block's binade, [rows] int32 from 0 to 253."""
    return clipped(shifted(peaks, 23), 0, 253)


def _halves(values: Array, peaks: Array) -> tuple[Array, Array]:
    """Return heads and codes of half precision, rounded to nearest, ties to even."""
    xp = namespace(values)
    heads = shifted(xp.astype(peaks, xp.int64), 23)[:, None] * 2**7
    scaled = values * _half_scale(heads)
    words = xp.astype(bits_of(scaled), xp.int64)
    size = words & MAGNITUDE
    normal = shifted(size + 0xFFF + (shifted(size, 13) & 1), 13) - _HALF_BIAS
    is_small = size < _LEAST_HALF
    steps = xp.where(is_small, xp.abs(scaled), xp.zeros_like(scaled)) * 2.0**24  # exact
    code = xp.where(is_small, xp.astype(xp.round(steps), xp.int64), normal)
    # In the topmost binade 0x7800 would be 2**128, so round down instead.
    code = xp.where(heads >= 0x7F00, clipped(code, 0, 0x77FF), code)
    return heads, code + xp.astype(words < 0, xp.int64) * 2**15


def _half_scale(heads: Array) -> Array:
    """Return the power of two that scales a block's peak to [2**14, 2**15), for half precision."""
    xp = namespace(heads)
    return floats_of(xp.astype((268 - clipped(shifted(heads, 7), 15, 255)) * 2**23, xp.int32))


def _of_halves(codes: Array) -> Array:
    """Convert half-precision bits, int64, to [rows, m] float32."""
    xp = namespace(codes)
    size, exponent = codes & 0x7FFF, shifted(codes, 10) & 31
    # Infinity and NaN, possible in a corrupt payload, have the largest exponent in both formats.
    bias = _HALF_BIAS + xp.astype(exponent == 31, xp.int64) * _HALF_BIAS
    small = bits_of(xp.astype(size, xp.float32) * 2.0**-24)  # exact
    words = xp.where(exponent == 0, xp.astype(small, xp.int64), (size + bias) * 2**13)
    return floats_of(xp.astype(words - shifted(codes, 15) * 2**31, xp.int32))


def _fixed(values: Array, exponent: Array) -> Array:
    """Return magnitudes in fixed point, [rows, m] int64, truncated, below 2**24."""
    xp = namespace(values)
    scaled = values * floats_of((254 - exponent) * 2**23)[:, None]
    return xp.astype(xp.abs(scaled) * 2.0**_FIXED_BITS, xp.int64)


def _one_level(values: Array, peaks: Array) -> tuple[Array, Array]:
    """Return heads and codes: the mean magnitude, and signs."""
    xp = namespace(values)
    exponent = _exponents(peaks)
    mean = xp.sum(_fixed(values, exponent), axis=1) // int(values.shape[1])
    head = _bfloat(mean, xp.astype(exponent, xp.int64))[:, None]
    return head, xp.astype(bits_of(values) < 0, xp.int64)


def _two_levels(values: Array, peaks: Array) -> tuple[Array, Array]:
    """Return heads and codes: two levels; signs, and whether above the overall mean."""
    xp = namespace(values)
    exponent = _exponents(peaks)
    fixed = _fixed(values, exponent)
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
    """Convert fixed-point magnitudes to upper halves of float32, to nearest; [rows] int64.

    Assembled from bits, as a product would lose subnormals that a device flushes to zero.
    """
    xp = namespace(fixed)
    bits_of_fixed = xp.astype(bits_of(xp.astype(fixed, xp.float32)), xp.int64)  # exact, below 2**24
    normal = bits_of_fixed + (exponent - _UNIT) * 2**23
    places = clipped(exponent, 0, _SUBNORMAL)
    subnormal = xp.bitwise_left_shift(fixed, places)
    is_small = (fixed == 0) | (subnormal < 2**23)
    bits = xp.where(is_small, subnormal, normal)
    return clipped(shifted(bits + 0x8000, 16), 0, MAX_FINITE >> 16)
