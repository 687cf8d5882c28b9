"""Numbers as digits that an int32 all-reduce can sum, on scales that all ranks share.

**Scales** are quarters of an octave from a table: an exponent e stands for 2**(e / 4). No logarithm
and no power is taken of an array: libraries differ in their last bit. Nor is an array divided by a
number: some devices multiply by its inverse. The scale of a column in a step comes from the ranks'
mean peak in the step before, which travels in a word for each column: an exponent, and above it a
count of the ranks that had one.

**Digits** are low-bit integers, several of them in one word. Horovod's torch all-reduce takes no
type below int32. Four digits d of base 256, or two of base 65536, make one word, sum d_i * base**i.
As long as the sum over the ranks of each digit stays inside half a base, words add up without a
carry that matters, and a rank that adds zero words (one that has joined) adds nothing. With 8 ranks
a digit of base 256 has 15 levels on each side.

Digits of one place lie together: word i of w holds digits i, i + w, i + 2 w, i + 3 w. So every
place is one stretch of memory. No sum of words leaves int32, nor does any step on the way there
and back: 127 * (1 + 2**8 + 2**16 + 2**24) + 2**23 + 2**15 + 2**7 is 2**31 - 1.

**The checksum** of words is linear in them, so that the sum of the ranks' must be that of the sum.
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
# Of exponents of a mean's peak: 2**40 squared and summed over 2**30 elements is 2**110; below
# 2**-50 the table ends 14 octaves lower, and there are factors smaller than the peak.
ORDINARY = -50, 40
MOST_EXPONENT = 149  # the least float32 is 2**-149
_MARGIN = 1  # quarters of an octave between the ranks' mean peak and the largest digit

_EXPONENTS = np.arange(LOWEST, HIGHEST + _MARGIN + 1)
# Written down, as hosts' exp2 may differ too; a power of two is exact.
_QUARTERS = np.array(
    [1.0, 1.1892071150027210667, 1.4142135623730950488, 1.6817928305074290861], np.float32
)
_SCALES = np.ldexp(_QUARTERS[_EXPONENTS % PER_OCTAVE], _EXPONENTS // PER_OCTAVE)
COVERED = Constant(_SCALES[:-_MARGIN])  # by each exponent
_units: dict[tuple[int, int], Constant] = {}

_LOW, _HIGH = -300, 300  # of powers of two: those of float32, and of sums in float64
_POWERS = Constant(np.ldexp(1.0, np.arange(_LOW, _HIGH + 1)))


def exponent_of(mean: Array) -> int:
    """The power of two that gradients like a mean are divided by before anything is computed.

    0 in the ordinary range, where squares, their sums, products with directions and the scales of
    this table are far from the ends of float32. mean : [n] float32; one that is not finite, or 0
    everywhere, says nothing
    """
    xp = namespace(mean)
    peak = float(xp.max(xp.abs(mean))) if mean.shape[0] else 0.0
    if not math.isfinite(peak) or not peak:
        return 0
    exponent = math.frexp(peak)[1]
    return 0 if ORDINARY[0] <= exponent <= ORDINARY[1] else exponent


def times_power(values: Array, exponent: int) -> Array:
    """Numbers times 2**exponent; in two products, as one power may be beyond float32."""
    if not exponent:
        return values
    half = exponent // 2  # 2**149, which the least float32 takes, is no float32
    return values * 2.0**half * 2.0 ** (exponent - half)


def covering(peaks: Array) -> tuple[Array, Array]:
    """Return the lowest exponents that cover magnitudes, int32, and which are above 0; [n] each.

    peaks : [n] float32, not negative, finite; clipped to the table
    """
    xp = namespace(peaks)
    # A search in a table where others take a logarithm: exact, and so the same on all ranks.
    exponents = clipped(xp.searchsorted(COVERED.on(peaks), peaks), 0, HIGHEST - LOWEST)
    return xp.astype(exponents, xp.int32) + LOWEST, peaks > 0


def units(exponents: Array, limit: int = 1, ranks: int = 1) -> Array:
    """[n] float32: what a digit of at most `limit` stands for in a mean over ranks.

    The digit `limit` of one rank is the largest magnitude it can send, a margin included.

    exponents : [n] int32, LOWEST to HIGHEST
    """
    return take(unit_table(limit, ranks).on(exponents), exponents - LOWEST)


def unit_table(limit: int = 1, ranks: int = 1) -> Constant:
    """[HIGHEST - LOWEST + 1] float32: the units of all exponents."""
    if (limit, ranks) not in _units:
        table = _SCALES[_MARGIN:] / np.float32(limit) / np.float32(ranks)
        _units[limit, ranks] = Constant(table)
    return _units[limit, ranks]


def shifted(exponents: Array, quarters: int) -> Array:
    """Exponents for numbers 2**(quarters / 4) times as large, within the table's."""
    return clipped(exponents + quarters, LOWEST, HIGHEST)


def integers(values: Array, bits: int) -> tuple[Array, Array]:
    """Rows [..., m] float64 as whole numbers of at most 2**bits, and their units [..., 1].

    Units are powers of two, so that nothing but the rounding to whole numbers is inexact.
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
    """How many bits a digit has, and how large one rank's digit may be.

    Attributes
    ----------
    bits : 8 or 16
    limit : largest magnitude of one rank's digit
    """

    bits: int
    limit: int

    @classmethod
    def of(cls, ranks: int, *, fine: bool = False, most: int = 2**15 - 1) -> Digits:
        """The narrowest digits `ranks` ranks can sum; 16 bits at least with `fine`.

        most : that the magnitude of a sum may not exceed
        """
        if not 1 <= ranks <= MAX_RANKS:
            raise CompressError(
                f"a sum over {ranks} ranks; expected 1 to {MAX_RANKS}. Use FFTCompression, or "
                "no compression."
            )
        # A sum of `ranks` digits has to stay inside half a base, so each rank's share of the levels
        # shrinks with their number: beyond 42 ranks 8 bits have none left.
        for bits in (16,) if fine else (8, 16):
            limit = min(2 ** (bits - 1) - 1, most) // ranks
            if limit >= _COARSEST:
                break
        return cls(bits, limit)

    def words(self, count: int) -> int:
        """Words that hold `count` digits."""
        return -(-count * self.bits // 32)

    def pack(self, digits: Array) -> Array:
        """[words(count)] int32 from [count] int32 digits of at most `limit`."""
        xp = namespace(digits)
        count, per = digits.shape[0], 32 // self.bits
        if not count:
            return digits
        words = self.words(count)
        if words * per > count:
            missing = (words * per - count,)
            padding = xp.zeros(missing, dtype=xp.int32, device=digits.device)
            digits = xp.concat([digits, padding])
        # Sums and products, no shifts and ors: digits are signed, and a sum of words has to be the
        # word of the sums.
        places = [digits[at * words : (at + 1) * words] for at in range(per)]
        return reduce(lambda high, low: high * 2**self.bits + low, reversed(places))

    def unpack(self, words: Array, count: int) -> Array:
        """[count] int32 sums of digits from the summed words."""
        xp = namespace(words)
        half, mask = 2 ** (self.bits - 1), 2**self.bits - 1
        shifts = range(0, 32, self.bits)
        # Half a base on every digit but the highest makes them all positive: none borrows from the
        # next. The highest keeps the sign of the word.
        biased = words + sum(half << shift for shift in shifts[:-1])
        places = [(shifted_right(biased, shift) & mask) - half for shift in shifts[:-1]]
        return xp.concat([*places, shifted_right(biased, shifts[-1])])[:count]


_COUNT = 2**20  # in a column's word, above the exponents' sum
_SPREAD = 2  # a rank's peak over that of the mean, for a first guess
_FEW = 8  # launches for which a device need not be asked in another way


class FixedPointColumns:
    """The columns of many tensors, one behind the other in one vector.

    shapes : (columns, numbers in each) of each tensor's factor, stored column after column
    fine : digits of 16 bits at least
    most : that a sum of digits may not exceed in magnitude
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
        # Columns of equal length side by side: runs, and numbers in each.
        self._runs = runs_of(sides)

    def words(self, ranks: int) -> int:
        """Words that travel: a scale for each column, and the digits."""
        return self.count + self.digits(ranks).words(self.size)

    def digits(self, ranks: int) -> Digits:
        """How wide a digit is, and how large a rank's may be."""
        return Digits.of(ranks, fine=self.fine, most=self._most)

    def split(self, flat: Array) -> list[Array]:
        """[size] as one [columns, numbers] for each tensor."""
        pieces = zip(split(flat, self._sizes), self.shapes, strict=True)
        return [namespace(piece).reshape(piece, shape) for piece, shape in pieces]

    def join(self, factors: Sequence[Array]) -> Array:
        """Back to one vector, [size]."""
        xp = namespace(factors[0])
        return join([xp.reshape(factor, (-1,)) for factor in factors])

    def peaks(self, flat: Array) -> Array:
        """The largest magnitude in each column, [count], of [size]."""
        xp = namespace(flat)
        sizes = abs(flat)
        if isinstance(sizes, np.ndarray):
            return np.maximum.reduceat(sizes, self._starts)
        # On a device one launch for all columns; else a maximum for each run of columns of one
        # length, which needs no index for each number.
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
        """[words] int32 of finite numbers [size], and what they will be read as, [size] float32."""
        xp = namespace(exponents)
        digits = self.digits(ranks)
        if packed := self._packed(flat, exponents, digits):
            return packed
        logs, some = covering(self.peaks(flat))
        head = xp.where(some, logs + _COUNT, xp.zeros_like(logs))
        unit = self._spread(units(exponents, digits.limit))
        scaled = rounded(flat / unit, digits.limit)
        words = xp.concat([head, digits.pack(xp.astype(scaled, xp.int32))])
        scaled *= unit  # in place: `rounded` has made an array that nobody else has
        return words, scaled

    def unpack(self, total: Array, exponents: Array, ranks: int) -> tuple[Array, Array, Array]:
        """Sums of digits [size] int32, what one of the mean stands for [size], next exponents."""
        xp = namespace(total)
        digits = self.digits(ranks)
        head = total[: self.count]
        counts = shifted_right(head + _COUNT // 2, 20)
        some = counts > 0
        # At least one: where no rank had a number in the column, nothing may be divided by zero.
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
        """Return what `pack` does, by the extension: the same bits in two passes."""
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
        """Sums of digits and their units, by the extension."""
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
        """[count] to [size]: each column's value for all its numbers."""
        if is_fixed(values):
            return spread(values, self._runs)  # a graph would copy number by number
        return take(values, self._column_of.on(values))


def numbers(flat: Array) -> tuple[Array, Array]:
    """[size] float32, zeros where any is not finite, and whether all are (0-d bool)."""
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
    """What each word is multiplied with, [words] int64: 1, 0, 3, 4, ..., PRIME - 1, 1, 2, ..."""
    if words not in _factors:
        table = 1 + np.arange(words, dtype=np.int64) % (PRIME - 1)
        table[1] = 0
        _factors[words] = Constant(table)
    return _factors[words]


def word_sum(words: Array) -> Array:
    """0-d int64: the sum of factor_i * word_i modulo a prime, word 1, its own place, left out.

    A prime, and no factor a multiple of it, so that no change of a single bit goes unseen, wherever
    it is. Factors count up from 1 and begin again below the prime. words : [n] int32, 2 or more
    """
    xp, count = namespace(words), words.shape[0]
    if (host := host_view(words, INT32)) is not None and (core := _native.core()) is not None:
        return xp.asarray(core.word_sum(host), dtype=xp.int64)
    terms = xp.multiply(words, factors(count).on(words))
    blocked = count // _BLOCK * _BLOCK
    # Summed in blocks before it is divided: a division costs as much as many products.
    total = xp.sum(terms[blocked:])
    if blocked:
        blocks = xp.sum(xp.reshape(terms[:blocked], (-1, _BLOCK)), axis=1)
        total = total + xp.sum(blocks % PRIME)
    return total % PRIME
