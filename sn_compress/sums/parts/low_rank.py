"""Low rank over two all-reduces of low-bit digits.

PowerSGD (Vogels, Karimireddy, Jaggi 2019, algorithm 1) sums P = M Q over the ranks, makes it
orthonormal, sums Q = M^T P, and takes P Q^T: the best approximation in the columns of P, which
one power iteration from the last step's Q has turned towards this step's gradient. It sends
float32. The first sum only has to find directions, and what rounding takes from the second
stays in the memory: with 8 ranks both travel in 8 bits, so the same bytes hold four times the rank.

Factors are stored transposed, a column's numbers side by side: the products then read the matrix in
the order in which it lies, which is half again as fast (docs/decisions/0024).
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...base.errors import CompressError
from ...devices.arrays import device_of, join, like_of, namespace, turned
from ...ops.linear.orthonormal import Orthonormal, most
from ...ops.linear.products import exact_outer, outer, subtract_outer, times_columns, times_rows
from ...ops.words.scales import integers, shifted
from .base import Array, Outcome, Part, Send, State, Step, Summed, cut_up, joined
from .columns import Columns, numbers

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
        left = [(size, rows) for (rows, _), size in pairs]
        right = [(size, columns) for (_, columns), size in pairs]
        self.left, self.right = (
            Columns(each, most=most(max(side for _, side in each))) for each in (left, right)
        )
        self.left_rows, self.right_rows = Orthonormal(left), Orthonormal(right)

    @classmethod
    def together(cls, parts: Sequence[Part]) -> list[Part]:
        lows = [part for part in parts if isinstance(part, cls)]
        shapes = [shape for part in lows for shape in part.shapes]
        return [cls(shapes, [size for part in lows for size in part.sizes])]

    def split(self, state: State) -> list[State]:
        basis = [count * side for count, side in self.right.shapes]
        return cut_up(state, {"basis": basis, "left": self.sizes, "right": self.sizes})

    def join(self, states: Sequence[State]) -> State:
        return joined(states)

    def words(self, ranks: int) -> list[int]:
        return [self.left.words(ranks), self.right.words(ranks)]

    def new_state(self, like: Array) -> State:
        xp = namespace(like)
        zeros = xp.zeros(self.left.count, dtype=xp.int32, device=device_of(like))
        return {"basis": self._start(like), "left": zeros, "right": zeros}

    def _start(self, like: Array) -> Array:
        """Any orthonormal directions; the same on every rank."""
        factors = []
        for (_, columns), size in zip(self.shapes, self.sizes, strict=True):
            chance = np.random.default_rng(columns).integers(-127, 128, (size, columns))
            factors.append(chance.astype(np.int32))
        return like_of(self.right_rows(self.right.join(factors)), like)

    def begin(self, state: State, means: Sequence[Array]) -> State:
        xp = namespace(state["basis"])
        wholes, steps = zip(*(whole_of(it) for it in means), strict=True)
        flat, p, q = self.sought(state["basis"], wholes)
        left, right = (
            columns.expected(
                columns.peaks(
                    xp.astype(
                        columns.join([it * step for it, step in zip(each, steps, strict=True)]),
                        xp.float32,
                    )
                ),
                state[name],
            )
            for columns, each, name in ((self.left, p, "left"), (self.right, q, "right"))
        )
        return {"basis": flat, "left": left, "right": right}

    def sought(
        self, flat: Array, wholes: Sequence[Array]
    ) -> tuple[Array, list[Array], list[Array]]:
        """Directions of whole matrices, [n] float32, and both products of a step with them.

        Integers all the way, so that no library's order of sums shows in the directions.

        flat : directions to begin with
        wholes : whole numbers of 15 bits at most, float64
        """
        bits = most(max(max(it) for it in self.shapes)).bit_length() - 1
        for _ in range(_ITERATIONS + 1):
            p = _turned(self.right.split(flat), [turned(it) for it in wholes])
            q = _turned(self.left.split(self.left_rows(_rounded(p, bits))), wholes)
            flat = self.right_rows(_rounded(q, bits), flat)
        return flat, _turned(self.right.split(flat), [turned(it) for it in wholes]), q

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
        words, finite = self.first(state, matrices, ranks)
        found: Summed = yield Send(words, finite)
        words, finite, seen = self.second(state, matrices, found, ranks)
        found = yield Send(words, finite)
        return self.last(state, matrices, seen, found, ranks, exact=exact, outs=outs)

    def first(self, state: State, matrices: Sequence[Array], ranks: int) -> tuple[Array, Array]:
        """The words of P = M Q, and whether there are numbers."""
        basis = self.right.split(state["basis"])
        p, finite = numbers(times_rows(basis, matrices))
        return self.left.pack(p, state["left"], ranks)[0], finite

    def second(
        self, state: State, matrices: Sequence[Array], found: Summed, ranks: int
    ) -> tuple[Array, Array, State]:
        """The words of Q = M^T P, whether there are numbers, and what `last` needs."""
        sums, _, exponents = self.left.unpack(found.words, state["left"], ranks)
        p = self.left_rows(sums)
        q, finite = numbers(times_columns(self.left.split(p), matrices))
        words, own = self.right.pack(q, state["right"], ranks)
        return words, finite, {"p": p, "q": q, "own": own, "left": exponents}

    def last(
        self,
        state: State,
        matrices: Sequence[Array],
        seen: State,
        found: Summed,
        ranks: int,
        *,
        exact: bool,
        outs: Sequence[Array] | None,
    ) -> Outcome:
        """What the step leads to; what was sent is subtracted from the matrices."""
        xp, own = namespace(matrices[0]), seen["own"]
        sums, unit, exponents = self.right.unpack(found.words, state["right"], ranks)
        mean = self.right.split(xp.astype(sums, xp.float32) * (unit * found.poison))
        p, owns = self.left.split(seen["p"]), self.right.split(own)
        left = subtract_outer(matrices, p, owns)
        means = exact_outer(p, mean, outs) if exact else outer(p, mean, outs)
        new = {
            # The new directions; where there is none (the gradient had fewer), the old one waits.
            "basis": self.right_rows(sums, state["basis"]),
            "left": seen["left"],
            "right": exponents,
        }
        # P is orthonormal: the norm of what is left follows from the factors.
        return Outcome(left, means, new, xp.sum(own * (2 * seen["q"] - own)))


def whole_of(mean: Array) -> tuple[Array, Array]:
    """A matrix as integers of 15 bits in float64, and what one stands for; zeros if not finite."""
    xp = namespace(mean)
    finite = xp.all(xp.isfinite(mean))
    wide = xp.astype(xp.where(finite, mean, xp.zeros_like(mean)), xp.float64)
    whole, unit = integers(xp.reshape(wide, (1, -1)), _BITS)
    return xp.reshape(whole, wide.shape), xp.reshape(unit, ())


def _turned(factors: Sequence[Array], wholes: Sequence[Array]) -> list[Array]:
    """Factor @ whole, the factors on a grid of 2**-15: exact in float64, in any order of sums."""
    xp = namespace(wholes[0])
    return [
        xp.round(xp.astype(it, xp.float64) * 2.0**_BITS) @ whole * 2.0**-_BITS
        for it, whole in zip(factors, wholes, strict=True)
    ]


def _rounded(factors: Sequence[Array], bits: int) -> Array:
    """[size]: their directions as integers."""
    xp = namespace(factors[0])
    return join([xp.reshape(integers(it, bits)[0], (-1,)) for it in factors])
