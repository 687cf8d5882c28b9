"""Low rank over two all-reduces of low-bit digits.

PowerSGD (Vogels, Karimireddy, Jaggi 2019, algorithm 1) sums P = M Q over the ranks, makes it
orthonormal, sums Q = M^T P, and takes P Q^T: the best approximation in the columns of P, which
one power iteration from the last step's Q has turned towards this step's gradient. It sends
float32. The first sum only has to find directions, and what rounding takes from the second
stays in the memory: with 8 ranks both travel in 8 bits, so the same bytes hold four times the rank.

Factors are stored transposed, a column's numbers side by side: the products then read the matrix in
the order in which it lies, which is half again as fast (docs/decisions/0023).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..arrays import device_of, like_of, namespace, product, subtract_product
from ..errors import CompressError
from ..ops.orthonormal import orthonormal
from ..ops.scales import shifted
from .base import Array, Outcome, Part, Send, State, Step, Summed, cut_up, joined
from .columns import Columns

_BITS = 15  # of a mean gradient's numbers, where directions are sought in integers
_ITERATIONS = 2  # Halko, Martinsson, Tropp 2011, algorithm 4.4


class LowRank(Part):
    """The best approximation of each tensor's mean gradient by a few directions.

    Parameters
    ----------
    shapes : (rows, columns) of each tensor
    sizes : directions of each, 1 to its smaller side
    """

    rounds = 2

    def __init__(self, shapes: Sequence[tuple[int, int]], sizes: Sequence[int]) -> None:
        for (rows, columns), size in zip(shapes, sizes, strict=True):
            if not 1 <= size <= min(rows, columns):
                raise CompressError(
                    f"LowRank: {size!r} directions of a {rows} x {columns} matrix; expected 1 to "
                    f"{min(rows, columns)}"
                )
        self.shapes, self.sizes = tuple(shapes), tuple(sizes)
        pairs = list(zip(shapes, sizes, strict=True))
        self._left = Columns([(size, rows) for (rows, _), size in pairs])
        self._right = Columns([(size, columns) for (_, columns), size in pairs])

    @classmethod
    def together(cls, parts: Sequence[Part]) -> list[Part]:
        lows = [part for part in parts if isinstance(part, cls)]
        shapes = [shape for part in lows for shape in part.shapes]
        return [cls(shapes, [size for part in lows for size in part.sizes])]

    def split(self, state: State) -> list[State]:
        basis = [count * side for count, side in self._right.shapes]
        return cut_up(state, {"basis": basis, "left": self.sizes, "right": self.sizes})

    def join(self, states: Sequence[State]) -> State:
        return joined(states)

    def words(self, ranks: int) -> list[int]:
        return [self._left.words(ranks), self._right.words(ranks)]

    def new_state(self, like: Array) -> State:
        xp = namespace(like)
        zeros = xp.zeros(self._left.count, dtype=xp.int32, device=device_of(like))
        return {"basis": self._start(like), "left": zeros, "right": zeros}

    def _start(self, like: Array) -> Array:
        """Any orthonormal directions; the same on every rank."""
        factors = []
        for (_, columns), size in zip(self.shapes, self.sizes, strict=True):
            chance = np.random.default_rng(columns).integers(-127, 128, (size, columns))
            factors.append(chance.astype(np.int32))
        return like_of(self._right.join(orthonormal(factors)), like)

    def begin(self, state: State, means: Sequence[Array]) -> State:
        # Integers all the way, so that no library's order of sums shows in the directions.
        xp = namespace(state["basis"])
        wholes, steps = zip(*(_whole(it) for it in means), strict=True)
        basis = self._right.split(state["basis"])
        for _ in range(_ITERATIONS + 1):
            p = [_grid_product(q, m.T) for q, m in zip(basis, wholes, strict=True)]
            left = orthonormal([_rounded(it) for it in p])
            q = [_grid_product(a, m) for a, m in zip(left, wholes, strict=True)]
            basis = _kept(orthonormal([_rounded(it) for it in q]), basis)
        p = [_grid_product(q, m.T) * step for q, m, step in zip(basis, wholes, steps, strict=True)]
        q = [it * step for it, step in zip(q, steps, strict=True)]
        return {
            "basis": self._right.join(basis),
            "left": self._left.expected(_single(xp, p), state["left"]),
            "right": self._right.expected(_single(xp, q), state["right"]),
        }

    def rescale(self, state: State, quarters: int) -> State:
        return state | {name: shifted(state[name], quarters) for name in ("left", "right")}

    def step(
        self,
        state: State,
        matrices: Sequence[Array],
        *,
        ranks: int,
        rank: int | None,
        exact: bool = False,
        outs: Sequence[Array] | None = None,
    ) -> Step:
        xp = namespace(matrices[0])
        basis = self._right.split(state["basis"])
        p, finite = numbers(self._left, [q @ m.T for q, m in zip(basis, matrices, strict=True)])
        words, _ = self._left.pack(p, state["left"], ranks)
        found: Summed = yield Send(words, finite)
        sums, _, left_exponents = self._left.unpack(found.words, state["left"], ranks)
        p = orthonormal(self._left.split(sums))
        q, finite = numbers(self._right, [a @ m for a, m in zip(p, matrices, strict=True)])
        words, own = self._right.pack(q, state["right"], ranks)
        found = yield Send(words, finite)
        sums, unit, right_exponents = self._right.unpack(found.words, state["right"], ranks)
        mean = self._right.split(xp.astype(sums, xp.float32) * (unit * found.poison))
        new = orthonormal(self._right.split(sums))
        owns = self._right.split(own)
        left = [subtract_product(m, a.T, b) for m, a, b in zip(matrices, p, owns, strict=True)]
        into = outs or [None] * len(p)
        multiply = _exact_product if exact else product
        means = [multiply(a.T, b, out) for a, b, out in zip(p, mean, into, strict=True)]
        # P is orthonormal: the norm of what is left follows from the factors.
        sent = xp.sum(own * (2 * self._right.join(q) - own))
        state = {
            "basis": self._right.join(_kept(new, basis)),
            "left": left_exponents,
            "right": right_exponents,
        }
        return Outcome(left, means, state, sent)


def numbers(columns: Columns, factors: Sequence[Array]) -> tuple[list[Array], Array]:
    """The factors, zeros where any of them is not finite, and whether all are (0-d bool)."""
    xp = namespace(factors[0])
    flat = columns.join(factors)
    finite = xp.all(xp.isfinite(flat))
    return columns.split(xp.where(finite, flat, xp.zeros_like(flat))), finite


def _kept(new: Sequence[Array], old: Sequence[Array]) -> list[Array]:
    """The new directions; where there is none (the gradient had fewer), the old one waits."""
    found = []
    for one, other in zip(new, old, strict=True):
        xp = namespace(one)
        found.append(xp.where(xp.any(one != 0, axis=-1)[:, None], one, other))
    return found


def _whole(mean: Array) -> tuple[Array, Array]:
    """A matrix as integers of 15 bits in float64, and what one stands for; zeros if not finite."""
    xp = namespace(mean)
    wide = xp.astype(mean, xp.float64)
    peak = xp.max(xp.abs(wide))
    some = xp.isfinite(peak) & (peak > 0)
    one = xp.ones_like(peak)
    step = xp.where(some, peak, one) / (2**_BITS - 1)
    return xp.round(xp.where(some, wide, xp.zeros_like(wide)) / step), step


def _grid_product(factor: Array, whole: Array) -> Array:
    """Factor @ whole, the factor on a grid of 2**-15: exact in float64, in any order of sums."""
    xp = namespace(whole)
    return xp.round(xp.astype(factor, xp.float64) * 2.0**_BITS) @ whole * 2.0**-_BITS


def _rounded(product: Array) -> Array:
    """Its directions as integers of 15 bits."""
    xp = namespace(product)
    peak = xp.max(xp.abs(product))
    peak = xp.where(peak > 0, peak, xp.ones_like(peak))
    return xp.round(product * ((2**_BITS - 1) / peak))


def _single(xp: Array, factors: Sequence[Array]) -> list[Array]:
    return [xp.astype(it, xp.float32) for it in factors]


def _exact_product(left: Array, right: Array, out: Array | None) -> Array:
    """Left @ right with one order of sums and one rounding, for ranks of unlike hardware."""
    xp = namespace(left)
    left, right = xp.astype(left, xp.float64), xp.astype(right, xp.float64)
    total = left[:, :1] * right[:1, :]
    for place in range(1, right.shape[0]):
        total = total + left[:, place : place + 1] * right[place : place + 1, :]
    total = xp.astype(total, xp.float32)
    if out is None:
        return total
    out[...] = total
    return out
