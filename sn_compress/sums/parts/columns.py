"""Columns of numbers as digits in words, each column on a scale that all ranks share.

The scale of a step comes from the ranks' mean peak in the step before, which travels in a word for
each column: an exponent, and above it a count of the ranks that had one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...devices import _native
from ...devices.arrays import (
    INT32,
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
from ...ops.words.digits import MAX_RANKS, Digits
from ...ops.words.scales import COVERED, HIGHEST, LOWEST, covering, unit_table, units
from .base import Array

_COUNT = 2**20  # in a column's word, above the exponents' sum
_SPREAD = 2  # a rank's peak over that of the mean, for a first guess
_FEW = 8  # launches for which a device need not be asked in another way


class Columns:
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
        return join([xp.reshape(it, (-1,)) for it in factors])

    def peaks(self, flat: Array) -> Array:
        """The largest magnitude in each column, [count], of [size]."""
        xp = namespace(flat)
        sizes = abs(flat)
        if isinstance(sizes, np.ndarray):
            return np.maximum.reduceat(sizes, self._starts)
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
        """Exponents to begin with for columns of these peaks, [count]; zeros say nothing."""
        xp = namespace(exponents)
        found, some = covering(_SPREAD * peaks)
        return xp.where(some, found, exponents)

    def pack(self, flat: Array, exponents: Array, ranks: int) -> tuple[Array, Array]:
        """[words] int32 of finite numbers [size], and what they will be read as, [size] float32."""
        xp = namespace(exponents)
        digits = self.digits(ranks)
        if packed := self._packed(flat, exponents, digits):
            return packed
        logs, some = covering(self.peaks(flat))
        head = xp.where(some, logs + _COUNT, xp.zeros_like(logs))
        unit = self._spread(units(exponents, digits.limit))
        whole = rounded(flat / unit, digits.limit)
        words = xp.concat([head, digits.pack(xp.astype(whole, xp.int32))])
        whole *= unit
        return words, whole

    def unpack(self, total: Array, exponents: Array, ranks: int) -> tuple[Array, Array, Array]:
        """Sums of digits [size] int32, what one of the mean stands for [size], next exponents."""
        xp = namespace(total)
        digits = self.digits(ranks)
        head = total[: self.count]
        counts = shifted_right(head + _COUNT // 2, 20)
        some = counts > 0
        ranked = clipped(counts, 1, MAX_RANKS)
        logs = head - counts * _COUNT
        # The mean, rounded half up in integers: the same wherever it is computed.
        known = (2 * logs + ranked) // (2 * ranked)
        found = self._unpacked(total[self.count :], exponents, digits, ranks)
        if found is None:
            sums = digits.unpack(total[self.count :], self.size)
            found = sums, self._spread(units(exponents, digits.limit, ranks))
        return *found, xp.where(some, clipped(known, LOWEST, HIGHEST), exponents)

    def _packed(self, flat: Array, exponents: Array, digits: Digits) -> tuple[Array, Array] | None:
        """What `pack` returns, by the extension: the same bits in two passes."""
        xp, views = namespace(flat), (host_view(flat), host_view(exponents, INT32))
        if views[0] is None or views[1] is None or (core := _native.core()) is None:
            return None
        at = device_of(flat)
        words = xp.empty(self.count + digits.words(self.size), dtype=xp.int32, device=at)
        own = xp.empty(self.size, dtype=xp.float32, device=at)
        core.pack_columns(
            views[0], self.sides, views[1], COVERED.host, unit_table(digits.limit).host, LOWEST,
            digits.bits, float(digits.limit), _COUNT, to_host(words), to_host(own),
        )  # fmt: skip
        return words, own

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
