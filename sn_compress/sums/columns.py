"""Columns of numbers as digits in words, each column on a scale that all ranks share.

The scale of a step comes from the ranks' mean peak in the step before, which travels in a word for
each column: an exponent, and above it a count of the ranks that had one.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import Constant, namespace, take
from ..ops.digits import Digits
from ..ops.scales import covering, units
from .base import Array

_COUNT = 2**20  # in a column's word, above the exponents' sum
_SPREAD = 2  # a rank's peak over that of the mean, for a first guess


class Columns:
    """The columns of many tensors, one behind the other in one vector.

    shapes : (columns, numbers in each) of each tensor's factor, stored column after column
    fine : digits of 16 bits at least
    """

    def __init__(self, shapes: Sequence[tuple[int, int]], *, fine: bool = False) -> None:
        self.shapes, self.fine = tuple(shapes), fine
        sides = [side for count, side in self.shapes for _ in range(count)]
        self.count, self.size = len(sides), sum(sides)
        self._ends = np.cumsum([0, *(count * side for count, side in self.shapes)]).tolist()
        self._column_of = Constant(np.repeat(np.arange(self.count), sides))

    def words(self, ranks: int) -> int:
        """Words that travel: a scale for each column, and the digits."""
        return self.count + Digits.of(ranks, fine=self.fine).words(self.size)

    def split(self, flat: Array) -> list[Array]:
        """[size] as one [columns, numbers] for each tensor."""
        pieces = zip(self._ends, self._ends[1:], self.shapes, strict=False)
        return [flat[begin:end].reshape(shape) for begin, end, shape in pieces]

    def join(self, factors: Sequence[Array]) -> Array:
        """Back to one vector, [size]."""
        xp = namespace(factors[0])
        return xp.concat([xp.reshape(it, (-1,)) for it in factors])

    def peaks(self, factors: Sequence[Array]) -> Array:
        """The largest magnitude in each column, [count]."""
        xp = namespace(factors[0])
        return xp.concat([xp.max(xp.abs(it), axis=-1) for it in factors])

    def expected(self, factors: Sequence[Array], exponents: Array) -> Array:
        """Exponents to begin with for columns like these; zeros say nothing."""
        xp = namespace(exponents)
        found, some = covering(_SPREAD * self.peaks(factors))
        return xp.where(some, found, exponents)

    def pack(self, factors: Sequence[Array], exponents: Array, ranks: int) -> tuple[Array, Array]:
        """[words] int32, and what they will be read as, [size] float32."""
        xp = namespace(exponents)
        digits = Digits.of(ranks, fine=self.fine)
        logs, some = covering(self.peaks(factors))
        head = xp.where(some, logs + _COUNT, xp.zeros_like(logs))
        unit = self._spread(units(exponents) / digits.limit)
        whole = xp.clip(xp.round(self.join(factors) / unit), -digits.limit, digits.limit)
        return xp.concat([head, digits.pack(whole)]), whole * unit

    def unpack(self, total: Array, exponents: Array, ranks: int) -> tuple[Array, Array, Array]:
        """Sums of digits [size] int32, what one of the mean stands for [size], next exponents."""
        xp = namespace(total)
        digits = Digits.of(ranks, fine=self.fine)
        head = total[: self.count]
        counts = (head + _COUNT // 2) // _COUNT
        some = counts > 0
        ranked = xp.where(some, counts, xp.ones_like(counts))
        logs = head - counts * _COUNT
        # The mean, rounded half up in integers: the same wherever it is computed.
        known = (2 * logs + ranked) // (2 * ranked)
        sums = digits.unpack(total[self.count :], self.size)
        unit = self._spread(units(exponents) / digits.limit / ranks)
        return sums, unit, xp.where(some, known, exponents)

    def _spread(self, values: Array) -> Array:
        """[count] to [size]: each column's value for all its numbers."""
        return take(values, self._column_of.on(values))
