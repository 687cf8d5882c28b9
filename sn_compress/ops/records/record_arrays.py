"""Records of blocks over any array library: what record.py does on a host, bit for bit.

Nothing hangs on a value: which bins travel is found by sorting, damage is a flag. See record.py for
the bits of a record, select.py for which bins stay, value_arrays.py for the codes.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from ...devices.arrays import (
    Array,
    Constant,
    add_at,
    bits_of,
    clipped,
    device_of,
    floats_of,
    namespace,
    put,
    take,
)
from ...devices.arrays import shifted_right as shifted
from ...devices.arrays import top as largest_of_rows
from ..words import bit_fields
from ..words.bit_fields import Fields
from ..words.elias_fano import low_bits, upper_bits
from . import large, value_arrays
from .layout import NON_FINITE, Layout
from .select import MAX_FINITE

_ZERO = Constant(np.zeros((), np.float32))
_POSITION = 2**32 - 1  # room for a position below what it is sorted by
_FOURS = Constant(4.0 ** (np.arange(254) - 127))  # what a scaled square is worth, by exponent


@dataclass(frozen=True)
class Encoded:
    """Of each block.

    words : [rows, layout.words] int64, 0 to 2**32 - 1
    left : [rows, bins * parts] float32, what did not travel; the old memory where a block is not
        finite. None without a memory
    saturated : [rows] int64, values beyond the end of a fixed range
    energy, error : [rows] float64, the squared norm of what was encoded and of what was lost, 0 of
        a block that is not finite; None where they were not asked for
    """

    words: Array
    left: Array | None
    saturated: Array
    energy: Array | None
    error: Array | None


@dataclass(frozen=True)
class Decoded:
    """Of each record.

    at : [rows, k] int64, the bins that it names, ascending; of a damaged one any below `bins`
    values : [rows, k * parts] float32; of a damaged one anything
    missing : [rows] bool, whether the block is NaN: it was, or the record is damaged
    damaged : [rows] bool
    down : [rows / ranks, 1] float32, what values were multiplied by, of large.DOWN
    """

    at: Array
    values: Array
    missing: Array
    damaged: Array
    down: Array


class Records:
    """Those of one layout, and what follows from it.

    Raises CompressError for values that there is no array code for.
    """

    def __init__(self, layout: Layout) -> None:
        value_arrays.check(layout)
        self.layout = layout
        kept, bins, parts, bits = layout.kept, layout.bins, layout.parts, layout.code_bits
        self._inner = None
        if parts == 2:  # imaginary parts of the edges say nothing of a real vector
            inner = np.ones(2 * bins, bool)
            inner[1] = False
            inner[-1] = layout.block % 2 == 1
            self._inner = Constant(inner)
        lost = np.zeros(layout.words, np.int64)
        lost[0] = NON_FINITE
        self._lost = Constant(lost)
        mark = np.array([[large.LARGE, 0][: layout.head_bits // 16]], np.int64)
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
        self._marks = Fields(self._map_at + np.arange(length), np.ones(length), layout.words)

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
        """Records of blocks; see record.encode_records.

        coefficients : [rows, bins * parts] float32, which may be overwritten
        memory : the same shape or None; times `factor` it is added before
        factor : a number, or [rows, 1] float32
        top : the range's end (upper half of a float32) if it is not each block's own
        tally : whether energy and error are asked for
        is_large, down : [rows] int64, 1 where coefficients are over 2**large.SHIFT, and `factor`
            makes the memory be so, too; else 0. And what they were multiplied by, [rows, 1]
        """
        xp, layout = namespace(coefficients), self.layout
        rows, bins, parts, kept = coefficients.shape[0], layout.bins, layout.parts, layout.kept
        if memory is not None:
            exact = isinstance(factor, float) and factor == 1
            coefficients = coefficients + (memory if exact else memory * factor)
        peaks = xp.max(bits_of(coefficients) & value_arrays.SIGN, axis=1)  # [rows] int32
        finite = (peaks <= MAX_FINITE)[:, None]
        spoken = finite if self._inner is None else finite & self._inner.on(coefficients)[None, :]
        coefficients = xp.where(spoken, coefficients, _ZERO.on(coefficients))
        at = _positions(coefficients, peaks, layout)  # [rows, k] int64
        first = xp.reshape(_counted(xp, rows, at), (rows, 1)) * bins
        flat = xp.reshape(first + at, (-1,))
        pairs = xp.reshape(coefficients, (rows * bins, parts))
        values = xp.reshape(take(pairs, flat), (rows, kept * parts))
        end: Any = top
        if is_large is not None and top is not None:
            end = top - is_large[:, None] * (top - large.lower_top(top))
        heads, scale, codes, saturated = value_arrays.encode(values, peaks, layout, end)
        if is_large is not None:
            heads = heads + is_large[:, None] * self._mark.on(heads)
        words = bit_fields.write(*self._fields(heads, codes, at), layout.words)
        lost = self._lost.on(words)[None, :]  # the record of a block that is not finite
        words = xp.where(finite, words, lost)
        left = energy = error = None
        if tally:
            energy = _energy(coefficients, peaks, layout)
        if memory is not None or tally:
            rest = values - value_arrays.decode(codes, scale, layout)
            rest = xp.reshape(rest, (rows * kept, parts))
            left = xp.reshape(put(pairs, flat, rest), (rows, bins * parts))
            if self._inner is not None and layout.values == "2bit":
                # Without a zero the edges' imaginary parts got a value all the same.
                left = xp.where(self._inner.on(left)[None, :], left, xp.zeros_like(left))
        if tally:
            error = _energy(left, peaks, layout)
        if down is not None and left is not None:
            left = large.restored(left, down, large.MEMORY)
        if down is not None and tally:
            squares = xp.astype(down * down, xp.float64)[:, 0]
            energy, error = energy / squares, error / squares
        left = None if memory is None else xp.where(finite, left, memory)
        return Encoded(words, left, saturated, energy, error)

    def decode(self, words: Array, *, ranks: int = 1) -> Decoded:
        """What records name and hold; those of one block in the same unit.

        words : [ranks * blocks, layout.words] int64, 0 to 2**32 - 1
        """
        xp, layout = namespace(words), self.layout
        rows, kept, bins = words.shape[0], layout.kept, layout.bins
        fields = self._read.read(words)
        first = layout.head_bits // 16
        heads, codes = fields[:, :first], fields[:, first : first + kept * layout.parts]
        marked = shifted(heads[:, 0], 15)  # see large.LARGE
        is_large = xp.max(xp.reshape(marked, (ranks, -1)), axis=0)
        heads = heads & self._unmarked.on(heads)
        lost = heads[:, 0] == NON_FINITE
        damaged = heads[:, 0] > MAX_FINITE >> 16
        for second in range(1, first):
            damaged = damaged | (heads[:, second] > MAX_FINITE >> 16)
        down = take(large.DOWN.on(words), is_large)[:, None]
        lower = xp.reshape(is_large[None, :] - xp.reshape(marked, (ranks, -1)), (-1, 1))
        heads = clipped(heads - lower * large.OCTAVES, 0, large.LARGE)
        count = _counted(xp, kept, words)[None, :]
        if kept == bins:
            at = xp.broadcast_to(count, (rows, kept))
        else:
            marks = self._marks.read(words)
            place = _counted(xp, self._marks.count, words)[None, :]
            nowhere = xp.full_like(marks, self._marks.count)
            at = xp.sort(xp.where(marks == 1, place, nowhere), axis=1)[:, :kept]
            damaged = damaged | (xp.sum(marks, axis=1) != kept)
            if layout.positions == "elias-fano":
                at = (at - count) * 2 ** low_bits(kept, bins)
                if low_bits(kept, bins):
                    at = at + fields[:, fields.shape[1] - kept :]
                damaged = damaged | xp.any(at[:, 1:] <= at[:, :-1], axis=1) | (at[:, -1] >= bins)
            at = clipped(at, 0, bins - 1)
        missing = damaged  # those marked as lost are among them
        values = value_arrays.decode(codes, value_arrays.scale_of(heads, layout), layout)
        return Decoded(at, values, missing, damaged ^ lost, down)

    def add(self, target: Array, decoded: Decoded, weight: float) -> Array:
        """[rows * bins, parts] float32 with weighted records added, rank by rank in their order.

        decoded : of [ranks * rows] records
        """
        xp, layout = namespace(target), self.layout
        blocks = target.shape[0] // layout.bins
        ranks = decoded.at.shape[0] // blocks
        first = xp.reshape(_counted(xp, blocks, decoded.at), (1, blocks, 1)) * layout.bins
        at = xp.reshape(decoded.at, (ranks, blocks, layout.kept)) + first
        at = xp.reshape(at, (ranks, -1))
        values = xp.reshape(decoded.values * weight, (ranks, blocks * layout.kept, layout.parts))
        for rank in range(ranks):
            target = add_at(target, at[rank], values[rank])
        return target

    def _fields(self, heads: Array, codes: Array, at: Array) -> tuple[Array, Array]:
        """Offsets and numbers of all fields, [rows, m] int64."""
        xp, layout = namespace(codes), self.layout
        rows, kept, bins = at.shape[0], layout.kept, layout.bins
        numbers, ones = [heads, codes], at
        if kept < bins and layout.positions == "elias-fano":
            low = low_bits(kept, bins)
            if low:
                numbers.append(at & (2**low - 1))
            ones = shifted(at, low) + _counted(xp, kept, at)[None, :]
        offsets = self._offsets.on(codes)
        places = [xp.broadcast_to(offsets, (rows, offsets.shape[1]))]
        if kept < bins:
            numbers.append(xp.ones_like(at))
            places.append(ones + self._map_at)
        return xp.concat(places, axis=1), xp.concat(numbers, axis=1)


def _positions(coefficients: Array, peaks: Array, layout: Layout) -> Array:
    """The k largest bins of each row, ascending, ties to the lower; [rows, k] int64."""
    xp = namespace(coefficients)
    rows, kept, bins = coefficients.shape[0], layout.kept, layout.bins
    count = _counted(xp, bins, peaks)
    if kept == bins:
        return xp.broadcast_to(count[None, :], (rows, bins))
    if layout.parts == 1:
        order = bits_of(coefficients) & value_arrays.SIGN
    else:
        order = bits_of(_squares(coefficients, peaks, layout))
    keys = xp.astype(order, xp.int64) * (_POSITION + 1) + (_POSITION - count)[None, :]
    return xp.sort(_POSITION - (largest_of_rows(keys, kept) & _POSITION), axis=1)


def _squares(coefficients: Array, peaks: Array, layout: Layout) -> Array:
    """[rows, bins] float32: magnitudes squared, of blocks scaled as in select.magnitude_keys."""
    scaled = coefficients * floats_of((254 - value_arrays.exponents(peaks)) * 2**23)[:, None]
    squares = scaled * scaled
    if layout.parts == 1:
        return squares
    pairs = namespace(squares).reshape(squares, (squares.shape[0], layout.bins, 2))
    return pairs[:, :, 0] + pairs[:, :, 1]


def _energy(coefficients: Array, peaks: Array, layout: Layout) -> Array:
    """[rows] float64: the squared norm of the blocks, as spectrum.energy."""
    xp = namespace(coefficients)
    squares = _squares(coefficients, peaks, layout)
    total = xp.sum(squares, axis=1)
    if layout.parts == 2:
        total = 2 * total - squares[:, 0]
        if layout.block % 2 == 0:
            total = total - squares[:, -1]
    units = _FOURS.on(peaks)
    return xp.astype(total, xp.float64) * take(
        units, xp.astype(value_arrays.exponents(peaks), xp.int64)
    )


def _counted(xp: Any, count: int, like: Array) -> Array:
    """0, 1, 2, ... [count] int64, where `like` is."""
    return xp.arange(count, dtype=xp.int64, device=device_of(like))
