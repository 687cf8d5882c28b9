"""Numbers as digits that an int32 all-reduce can sum, on scales shared by all ranks.

**Scales** are quarter octaves from a table: an exponent e represents 2**(e / 4). No logarithm or
power of an array is computed, as libraries differ in the last bit. Nor is an array divided by a
number, as some devices multiply by the inverse. The scale of a column in a step comes from the
ranks' mean peak in the previous step, which is sent in a word per column: an exponent, and in the
high bits the number of ranks that had one.

**Digits** are low-bit integers, several per word. Horovod's torch all-reduce supports no integer
type below int32. Four digits d of base 256, or two of base 65536, form a word, sum d_i * base**i.
As long as the sum over the ranks of each digit stays within half a base, words can be added without
a carry that matters, and a rank that adds zero words (one that has joined) contributes nothing.
With 8 ranks a digit of base 256 has 15 levels on each side.

Digits at the same place are contiguous: word i of w contains digits i, i + w, i + 2 w, i + 3 w. So
every place is a contiguous range of memory. No sum of words overflows int32, nor does any
intermediate result: 127 * (1 + 2**8 + 2**16 + 2**24) + 2**23 + 2**15 + 2**7 is 2**31 - 1.

**The checksum** of words is linear in them, so the sum of the ranks' must be that of the sum.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import reduce

import numpy as np

from .. import _native
from ..arrays import (
    INT32,
    Array,
    Constant,
    clipped,
    device_of,
    host_view,
    is_fixed,
    join,
    largest_of,
    namespace,
    on_host,
    rounded,
    runs_of,
    shifted_right,
    split,
    spread,
    take,
    to_host,
)
from ..errors import CompressError

PER_OCTAVE = 4
LOWEST, HIGHEST = -256, 255  # scales from 2**-64 to nearly 2**64
# Range of exponents of a mean's peak: 2**40 squared and summed over 2**30 elements is 2**110; the
# table ends 14 octaves below 2**-50, and factors may be smaller than the peak.
ORDINARY = -50, 40
MOST_EXPONENT = 149  # the least float32 is 2**-149
_MARGIN = 1  # quarters of an octave between the ranks' mean peak and the largest digit

_EXPONENTS = np.arange(LOWEST, HIGHEST + _MARGIN + 1)
# Literals, as hosts' exp2 may differ as well; a power of two is exact.
_QUARTERS = np.array(
    [1.0, 1.1892071150027210667, 1.4142135623730950488, 1.6817928305074290861], np.float32
)
_SCALES = np.ldexp(_QUARTERS[_EXPONENTS % PER_OCTAVE], _EXPONENTS // PER_OCTAVE)
COVERED = Constant(_SCALES[:-_MARGIN])  # largest magnitude covered by each exponent
_units: dict[tuple[int, int], Constant] = {}

_LOW, _HIGH = -300, 300  # powers of two: the range of float32, and of sums in float64
_POWERS = Constant(np.ldexp(1.0, np.arange(_LOW, _HIGH + 1)))


def exponent_of(mean: Array) -> int:
    """Return the exponent of the power of two to divide gradients like a mean by before computing.

    0 in the ordinary range, where squares, their sums, products with directions and the scales of
    this table are far from the limits of float32; also if the mean, [n] float32, is not finite or
    all zeros.
    """
    xp = namespace(mean)
    peak = float(xp.max(xp.abs(mean))) if mean.shape[0] else 0.0
    if not math.isfinite(peak) or not peak:
        return 0
    exponent = math.frexp(peak)[1]
    return 0 if ORDINARY[0] <= exponent <= ORDINARY[1] else exponent


def times_power(values: Array, exponent: int) -> Array:
    """Return values * 2**exponent, in two products, as a single power may exceed float32."""
    if not exponent:
        return values
    half = exponent // 2  # 2**149, needed for the least float32, exceeds float32
    return values * 2.0**half * 2.0 ** (exponent - half)


def covering(peaks: Array) -> tuple[Array, Array]:
    """Return the lowest exponents that cover magnitudes, int32, and which are above 0; [n] each.

    peaks : [n] float32, not negative, finite; clipped to the table
    """
    xp = namespace(peaks)
    # A table search rather than a logarithm: exact, and so the same on all ranks.
    exponents = clipped(xp.searchsorted(COVERED.on(peaks), peaks), 0, HIGHEST - LOWEST)
    return xp.astype(exponents, xp.int32) + LOWEST, peaks > 0


def units(exponents: Array, limit: int = 1, ranks: int = 1) -> Array:
    """Return the unit of a digit of at most `limit` in a mean over ranks, [n] float32.

    The digit `limit` of one rank is the largest magnitude it can send, including a margin.

    exponents : [n] int32, LOWEST to HIGHEST
    """
    return take(unit_table(limit, ranks).on(exponents), exponents - LOWEST)


def unit_table(limit: int = 1, ranks: int = 1) -> Constant:
    """Return the units of all exponents, [HIGHEST - LOWEST + 1] float32."""
    if (limit, ranks) not in _units:
        table = _SCALES[_MARGIN:] / np.float32(limit) / np.float32(ranks)
        _units[limit, ranks] = Constant(table)
    return _units[limit, ranks]


def shifted(exponents: Array, quarters: int) -> Array:
    """Return exponents for numbers 2**(quarters / 4) times as large, clipped to the table."""
    return clipped(exponents + quarters, LOWEST, HIGHEST)


def integers(values: Array, bits: int) -> tuple[Array, Array]:
    """Convert rows [..., m] float64 to integers of at most 2**bits, and their units [..., 1].

    Units are powers of two, so that only the rounding to integers is inexact.
    """
    xp = namespace(values)
    peaks = xp.max(xp.abs(values), axis=-1, keepdims=True)
    table = _POWERS.on(values)
    at = clipped(xp.searchsorted(table, xp.reshape(peaks, (-1,))), bits, _HIGH - _LOW)
    up = xp.reshape(take(table, bits - at - 2 * _LOW), peaks.shape)
    down = xp.reshape(take(table, at - bits), peaks.shape)
    return xp.round(values * up), down


MAX_RANKS = 2047
_COARSEST = 3  # fewer levels on each side than this are not worth their byte


@dataclass(frozen=True)
class Digits:
    """The format of digits.

    Attributes
    ----------
    bits : 8 or 16
    limit : largest magnitude of one rank's digit
    """

    bits: int
    limit: int

    @classmethod
    def of(cls, ranks: int, *, fine: bool = False, most: int = 2**15 - 1) -> Digits:
        """Return the narrowest digits that `ranks` ranks can sum; with `fine`, at least 16 bits.

        most : maximum magnitude of a sum
        """
        if not 1 <= ranks <= MAX_RANKS:
            raise CompressError(
                f"a sum over {ranks} ranks; expected 1 to {MAX_RANKS}. Use FFTCompression, or "
                "no compression."
            )
        # A sum of `ranks` digits has to stay within half a base, so each rank's share of the levels
        # shrinks with their number: beyond 42 ranks 8 bits have too few left.
        for bits in (16,) if fine else (8, 16):
            limit = min(2 ** (bits - 1) - 1, most) // ranks
            if limit >= _COARSEST:
                break
        return cls(bits, limit)

    def words(self, count: int) -> int:
        """Return the number of words for `count` digits."""
        return -(-count * self.bits // 32)

    def pack(self, digits: Array) -> Array:
        """Pack [count] int32 digits of at most `limit` to [words(count)] int32."""
        xp = namespace(digits)
        count, per = digits.shape[0], 32 // self.bits
        if not count:
            return digits
        words = self.words(count)
        if words * per > count:
            missing = (words * per - count,)
            padding = xp.zeros(missing, dtype=xp.int32, device=digits.device)
            digits = xp.concat([digits, padding])
        # Sums and products rather than shifts and ors: digits are signed, and the sum of words must
        # be the word of the sums.
        places = [digits[at * words : (at + 1) * words] for at in range(per)]
        return reduce(lambda high, low: high * 2**self.bits + low, reversed(places))

    def unpack(self, words: Array, count: int) -> Array:
        """Unpack the summed words to [count] int32 sums of digits."""
        xp = namespace(words)
        half, mask = 2 ** (self.bits - 1), 2**self.bits - 1
        shifts = range(0, 32, self.bits)
        # Adding half a base to every digit but the highest makes them positive, so that none
        # borrows from the next. The highest keeps the sign of the word.
        biased = words + sum(half << shift for shift in shifts[:-1])
        places = [(shifted_right(biased, shift) & mask) - half for shift in shifts[:-1]]
        return xp.concat([*places, shifted_right(biased, shifts[-1])])[:count]


_COUNT = 2**20  # unit of the rank count in a column's word, above the exponents' sum
_SPREAD = 2  # assumed ratio of a rank's peak to that of the mean, initially
_FEW = 8  # launches up to which `peaks` on a device handles each run separately


class FixedPointColumns:
    """The columns of many tensors, concatenated in one vector.

    shapes : (columns, numbers in each) of each tensor's factor, stored column by column
    fine : use digits of at least 16 bits
    most : maximum magnitude of a sum of digits
    """

    def __init__(
        self, shapes: Sequence[tuple[int, int]], *, fine: bool = False, most: int = 2**15 - 1
    ) -> None:
        self.shapes, self.fine, self._most = tuple(shapes), fine, most
        sides = [side for count, side in self.shapes for _ in range(count)]
        self.count, self.size = len(sides), sum(sides)
        self._sizes = [count * side for count, side in self.shapes]
        self._column_of = Constant(np.repeat(np.arange(self.count), sides))
        self._starts = np.cumsum([0, *sides[:-1]])
        self.sides = np.array(sides, np.int64)
        # Runs of adjacent columns of equal length, and numbers in each.
        self._runs = runs_of(sides)

    def words(self, ranks: int) -> int:
        """Return the number of words sent: a scale per column, and the digits."""
        return self.count + self.digits(ranks).words(self.size)

    def digits(self, ranks: int) -> Digits:
        """Return the format of the digits."""
        return Digits.of(ranks, fine=self.fine, most=self._most)

    def split(self, flat: Array) -> list[Array]:
        """Split [size] into [columns, numbers] for each tensor."""
        pieces = zip(split(flat, self._sizes), self.shapes, strict=True)
        return [namespace(piece).reshape(piece, shape) for piece, shape in pieces]

    def join(self, factors: Sequence[Array]) -> Array:
        """Invert `split`: join to one vector, [size]."""
        xp = namespace(factors[0])
        return join([xp.reshape(factor, (-1,)) for factor in factors])

    def peaks(self, flat: Array) -> Array:
        """Return the largest magnitude in each column of [size], [count]."""
        xp = namespace(flat)
        sizes = abs(flat)
        if isinstance(sizes, np.ndarray):
            return np.maximum.reduceat(sizes, self._starts)
        # On a device one launch for all columns; else a maximum for each run of columns of equal
        # length, which needs no index per number.
        if len(self._runs) > _FEW and not on_host(flat) and not is_fixed(flat):
            return largest_of(sizes, self._column_of.on(flat), self.count)
        pieces = split(sizes, [count * side for count, side in self._runs])
        return join(
            [
                xp.max(xp.reshape(piece, run), axis=1)
                for piece, run in zip(pieces, self._runs, strict=True)
            ]
        )

    def expected(self, peaks: Array, exponents: Array) -> Array:
        """Return initial exponents for columns of these peaks, [count]; zeros are ignored."""
        xp = namespace(exponents)
        covered, some = covering(_SPREAD * peaks)
        return xp.where(some, covered, exponents)

    def pack(self, flat: Array, exponents: Array, ranks: int) -> tuple[Array, Array]:
        """Pack finite numbers [size] to [words] int32; return these and the quantized numbers."""
        xp = namespace(exponents)
        digits = self.digits(ranks)
        if packed := self._packed(flat, exponents, digits):
            return packed
        logs, some = covering(self.peaks(flat))
        head = xp.where(some, logs + _COUNT, xp.zeros_like(logs))
        unit = self._spread(units(exponents, digits.limit))
        scaled = rounded(flat / unit, digits.limit)
        words = xp.concat([head, digits.pack(xp.astype(scaled, xp.int32))])
        scaled *= unit  # in place: `rounded` has returned a new array
        return words, scaled

    def unpack(self, total: Array, exponents: Array, ranks: int) -> tuple[Array, Array, Array]:
        """Return sums of digits [size] int32, their units in the mean [size], next exponents."""
        xp = namespace(total)
        digits = self.digits(ranks)
        head = total[: self.count]
        counts = shifted_right(head + _COUNT // 2, 20)
        some = counts > 0
        # At least one, to avoid division by zero if no rank had a number in the column.
        ranked = clipped(counts, 1, MAX_RANKS)
        logs = head - counts * _COUNT
        # The mean, rounded half up in integers: the same wherever it is computed.
        known = (2 * logs + ranked) // (2 * ranked)
        unpacked = self._unpacked(total[self.count :], exponents, digits, ranks)
        if unpacked is None:
            sums = digits.unpack(total[self.count :], self.size)
            unpacked = sums, self._spread(units(exponents, digits.limit, ranks))
        return *unpacked, xp.where(some, clipped(known, LOWEST, HIGHEST), exponents)

    def _packed(self, flat: Array, exponents: Array, digits: Digits) -> tuple[Array, Array] | None:
        """Run `pack` in the extension, bit-identically in two passes; None if not possible."""
        xp, views = namespace(flat), (host_view(flat), host_view(exponents, INT32))
        if views[0] is None or views[1] is None or (core := _native.core()) is None:
            return None
        at = device_of(flat)
        words = xp.empty(self.count + digits.words(self.size), dtype=xp.int32, device=at)
        quantized = xp.empty(self.size, dtype=xp.float32, device=at)
        core.pack_columns(
            views[0], self.sides, views[1], COVERED.host, unit_table(digits.limit).host, LOWEST,
            digits.bits, float(digits.limit), _COUNT, to_host(words), to_host(quantized),
        )  # fmt: skip
        return words, quantized

    def _unpacked(
        self, words: Array, exponents: Array, digits: Digits, ranks: int
    ) -> tuple[Array, Array] | None:
        """Return sums of digits and their units from the extension; None if not possible."""
        xp, views = namespace(words), (host_view(words, INT32), host_view(exponents, INT32))
        if views[0] is None or views[1] is None or (core := _native.core()) is None:
            return None
        at = device_of(words)
        sums = xp.empty(self.size, dtype=xp.int32, device=at)
        unit = xp.empty(self.size, dtype=xp.float32, device=at)
        core.unpack_columns(
            views[0], self.sides, views[1], unit_table(digits.limit, ranks).host, LOWEST,
            digits.bits, to_host(sums), to_host(unit),
        )  # fmt: skip
        return sums, unit

    def _spread(self, values: Array) -> Array:
        """Repeat each column's value for all its numbers, [count] to [size]."""
        if is_fixed(values):
            return spread(values, self._runs)  # in a graph `take` would copy number by number
        return take(values, self._column_of.on(values))


def numbers(flat: Array) -> tuple[Array, Array]:
    """Return [size] float32, all zeros unless all are finite, and whether they are (0-d bool)."""
    xp, view = namespace(flat), host_view(flat)
    if view is not None and (core := _native.core()) is not None:
        all_are = core.all_finite(view)
        return (flat if all_are else xp.zeros_like(flat)), xp.asarray(all_are)
    finite = xp.all(xp.isfinite(flat))
    return xp.where(finite, flat, xp.zeros_like(flat)), finite


PRIME = 2**20 - 3  # the sum of 2047 checksums fits a word
_BLOCK = 2**11  # products below 2**51 whose sum fits int64

_factors: dict[int, Constant] = {}


def factors(words: int) -> Constant:
    """Return the factor of each word, [words] int64: 1, 0, 3, 4, ..., PRIME - 1, 1, 2, ..."""
    if words not in _factors:
        table = 1 + np.arange(words, dtype=np.int64) % (PRIME - 1)
        table[1] = 0
        _factors[words] = Constant(table)
    return _factors[words]


def word_sum(words: Array) -> Array:
    """Return the sum of factor_i * word_i modulo a prime, 0-d int64, skipping word 1, its own.

    No factor is a multiple of the prime, so a change of any single bit is detected. Factors count
    up from 1 and start again below the prime. words : [n] int32, 2 or more
    """
    xp, count = namespace(words), words.shape[0]
    if (host := host_view(words, INT32)) is not None and (core := _native.core()) is not None:
        return xp.asarray(core.word_sum(host), dtype=xp.int64)
    terms = xp.multiply(words, factors(count).on(words))
    blocked = count // _BLOCK * _BLOCK
    # Summed in blocks before the modulo, which costs as much as many products.
    total = xp.sum(terms[blocked:])
    if blocked:
        blocks = xp.sum(xp.reshape(terms[:blocked], (-1, _BLOCK)), axis=1)
        total = total + xp.sum(blocks % PRIME)
    return total % PRIME
