"""Low rank over two all-reduces of low-bit digits.

PowerSGD (Vogels, Karimireddy, Jaggi 2019, algorithm 1) sums P = M Q over the ranks, makes it
orthonormal, sums Q = M^T P, and uses P Q^T: the best approximation in the column space of P, which
one power iteration from the last step's Q has rotated towards this step's gradient. It sends
float32. Here both sums are of digits, of 8 bits with 8 ranks, so the same bytes allow four times
the rank: the first sum only has to find directions, and rounding errors of the second stay in the
memory.

Factors are stored transposed, with each column contiguous: the products then read the matrix in
memory order, which is half again as fast (docs/decisions/0036).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from ... import _native
from ...arrays import asarray_like, device_of, join, matrix_transpose, namespace, to_host
from ...errors import CompressError
from ...ops.fixed_point import (
    COVERED,
    LOWEST,
    FixedPointColumns,
    integers,
    numbers,
    shifted,
    unit_table,
)
from ...ops.orthonormal import Orthonormal, most
from ...ops.products import exact_outer, kernel, outer, subtract_outer, times_columns, times_rows
from .base import Array, Method, Outcome, Send, State, Step, StepOptions, Summed

# Bits of a mean gradient's numbers when directions are computed in integers: a product of two has
# 30 bits, and float64 sums 2**23 of these exactly.
_BITS = 15
_ITERATIONS = 2  # Halko, Martinsson, Tropp 2011, algorithm 4.4


class LowRank(Method):
    """Sends the best approximation of each tensor's mean gradient by a few directions.

    Parameters
    ----------
    shapes : (rows, columns) of each tensor
    sizes : number of directions of each, 1 to its smaller side
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
            FixedPointColumns(factors, most=most(max(side for _, side in factors)))
            for factors in (left, right)
        )
        self.left_rows, self.right_rows = Orthonormal(left), Orthonormal(right)
        self._tables: dict[int, _Tables] = {}

    def lengths(self) -> dict[str, Sequence[int]]:
        basis = [count * side for count, side in self.right.shapes]
        return {"basis": basis, "left": self.sizes, "right": self.sizes}

    def words(self, ranks: int) -> list[int]:
        return [self.left.words(ranks), self.right.words(ranks)]

    def new_state(self, like: Array) -> State:
        xp = namespace(like)
        zeros = xp.zeros(self.left.count, dtype=xp.int32, device=device_of(like))
        # Any directions will do that are the same on all ranks and do not depend on the bucket.
        factors = [
            np.random.default_rng(columns).integers(-127, 128, (size, columns)).astype(np.int32)
            for (_, columns), size in zip(self.shapes, self.sizes, strict=True)
        ]
        basis = asarray_like(self.right_rows(self.right.join(factors)), like)
        return {"basis": basis, "left": zeros, "right": zeros}

    def begin(self, state: State, means: Sequence[Array]) -> State:
        xp = namespace(state["basis"])
        matrices, units = zip(*(as_integers(mean) for mean in means), strict=True)
        flat, p, q = self.find_directions(state["basis"], matrices)
        new = {"basis": flat}
        # The first step's scales are those of the factors of these means.
        for columns, products, name in ((self.left, p, "left"), (self.right, q, "right")):
            factors = [product * unit for product, unit in zip(products, units, strict=True)]
            peaks = columns.peaks(xp.astype(columns.join(factors), xp.float32))
            new[name] = columns.expected(peaks, state[name])
        return new

    def find_directions(
        self, flat: Array, matrices: Sequence[Array]
    ) -> tuple[Array, list[Array], list[Array]]:
        """Return directions of integer matrices, [n] float32, and both products of a step.

        All arithmetic is on integers, so the directions do not depend on a library's summation
        order.

        flat : initial directions
        matrices : integers of at most 15 bits, float64
        """
        # The most bits with which `Orthonormal` is exact on the longest column.
        bits = most(max(max(shape) for shape in self.shapes)).bit_length() - 1
        for _ in range(_ITERATIONS + 1):
            p = _exact_products(self.right.split(flat), [matrix_transpose(m) for m in matrices])
            q = _exact_products(self.left.split(self.left_rows(_rounded(p, bits))), matrices)
            flat = self.right_rows(_rounded(q, bits), flat)
        return (
            flat,
            _exact_products(self.right.split(flat), [matrix_transpose(m) for m in matrices]),
            q,
        )

    def rescale(self, state: State, quarters: int) -> State:
        return state | {name: shifted(state[name], quarters) for name in ("left", "right")}

    def step(
        self,
        state: State,
        matrices: Sequence[Array],
        options: StepOptions,
        outs: Sequence[Array] | None = None,
    ) -> Step:
        xp, ranks = namespace(matrices[0]), options.ranks
        # P = M Q. Its rounding error is not remembered: it only rotates the directions a little.
        p, finite = numbers(times_rows(self.right.split(state["basis"]), matrices))
        received: Summed = yield Send(self.left.pack(p, state["left"], ranks)[0], finite)
        sums, _, left_exponents = self.left.unpack(received.words, state["left"], ranks)
        p_of = self.left.split(self.left_rows(sums))
        # Q = M^T P. All ranks have the same P, so the sum of their Q is that of the mean.
        q, finite = numbers(times_columns(p_of, matrices))
        words, sent = self.right.pack(q, state["right"], ranks)
        received = yield Send(words, finite)
        sums, unit, right_exponents = self.right.unpack(received.words, state["right"], ranks)
        mean = self.right.split(xp.astype(sums, xp.float32) * (unit * received.poison))
        # Subtract what was sent of Q rather than Q, so that its rounding error stays in the memory.
        residuals = subtract_outer(matrices, p_of, self.right.split(sent))
        means = exact_outer(p_of, mean, outs) if options.exact else outer(p_of, mean, outs)
        new = {
            # The old directions replace missing ones, if the gradient has lower rank.
            "basis": self.right_rows(sums, state["basis"]),
            "left": left_exponents,
            "right": right_exponents,
        }
        # P is orthonormal: |M|^2 - |M - P sent^T|^2 follows from factors, without a pass over M.
        return Outcome(residuals, means, new, xp.sum(sent * (2 * q - sent)))

    def compiled_step(
        self,
        state: State,
        gradients: Sequence[Array],
        memories: Sequence[Array],
        options: StepOptions,
        added: Sequence[Array | None] | None,
        outs: Sequence[Array] | None,
    ) -> Step:
        """Run the step in the extension, which must have kernels; bit-identical to `step`.

        Unlike `step` it adds the memories itself. For NumPy arrays, [n] float32; see Bucket.step.
        """
        # Besides its products a step has some hundred operations on small arrays, and in a small
        # net the call overhead dominates: 3 ms in a step whose products take 0.5.
        core, left, right, basis = _native.core(), state["left"], state["right"], state["basis"]
        fastest, ranks = kernel(core), options.ranks
        tables = self._tables.get(ranks) or self._tables.setdefault(ranks, _Tables(self, ranks))
        means = [np.empty_like(gradient) for gradient in gradients] if outs is None else list(outs)
        matrices = tuple(
            np.empty_like(memory) if out is None else out
            for memory, out in zip(memories, added or [None] * len(memories), strict=True)
        )
        transform, words = self.left_rows.bits, np.empty(tables.left_words, np.int32)
        energy, finite = core.low_rank_first(
            tables.shapes, tuple(memories), tuple(gradients), matrices, options.decay, basis,
            tables.left, left, fastest, words,
        )  # fmt: skip
        received: Summed = yield Send(words, np.bool_(finite), np.float64(energy))
        p, quantized = np.empty(self.left.size, np.float32), np.empty(self.right.size, np.float32)
        exponents = np.empty(left.size, np.int32), np.empty(right.size, np.int32)
        words = np.empty(tables.right_words, np.int32)
        finite, sent = core.low_rank_second(
            tables.shapes, matrices, _words(received), tables.left, left, tables.right, right,
            transform, fastest, p, quantized, exponents[0], words,
        )  # fmt: skip
        received = yield Send(words, np.bool_(finite))
        directions = np.empty(self.right.size, np.float32)
        core.low_rank_last(
            tables.shapes, matrices, tuple(means), _words(received), float(received.poison), p,
            quantized, tables.mean, right, transform, fastest, basis, directions, exponents[1],
        )  # fmt: skip
        new = {"basis": directions, "left": exponents[0], "right": exponents[1]}
        return Outcome(list(matrices), means, new, np.float64(sent))


class _Tables:
    """Arguments of the extension's calls that depend only on the tensors and number of ranks."""

    def __init__(self, method: LowRank, ranks: int) -> None:
        pairs = zip(method.shapes, method.sizes, strict=True)
        self.shapes = np.array([(*shape, size) for shape, size in pairs], np.int64)
        self.left_words, self.right_words = method.words(ranks)
        self.left, self.right = _side(method.left, ranks, 1), _side(method.right, ranks, 1)
        self.mean = _side(method.right, ranks, ranks)


def _side(columns: FixedPointColumns, ranks: int, over: int) -> tuple[Any, ...]:
    """Return one side's tables for the extension; a digit's unit is divided by `over` ranks."""
    digits = columns.digits(ranks)
    units = unit_table(digits.limit, over).host
    return columns.sides, COVERED.host, units, LOWEST, digits.bits, float(digits.limit)


def _words(total: Summed) -> Array:
    """Convert the sum for the extension; a rim may pass another kind of host array."""
    return np.ascontiguousarray(to_host(total.words), np.int32)


def as_integers(mean: Array) -> tuple[Array, Array]:
    """Return a matrix as 15-bit integers in float64, and their unit; zeros if not finite."""
    xp = namespace(mean)
    finite = xp.all(xp.isfinite(mean))
    wide = xp.astype(xp.where(finite, mean, xp.zeros_like(mean)), xp.float64)
    values, unit = integers(xp.reshape(wide, (1, -1)), _BITS)
    return xp.reshape(values, wide.shape), xp.reshape(unit, ())


def _exact_products(factors: Sequence[Array], matrices: Sequence[Array]) -> list[Array]:
    """Return factor @ matrix, factors rounded to 2**-15: exact in float64, in any order of sums."""
    xp = namespace(matrices[0])
    return [
        xp.round(xp.astype(factor, xp.float64) * 2.0**_BITS) @ matrix * 2.0**-_BITS
        for factor, matrix in zip(factors, matrices, strict=True)
    ]


def _rounded(factors: Sequence[Array], bits: int) -> Array:
    """Round directions to integers of `bits` bits, [size], with a scale per row."""
    xp = namespace(factors[0])
    return join([xp.reshape(integers(factor, bits)[0], (-1,)) for factor in factors])
