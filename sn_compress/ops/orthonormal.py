"""Orthonormalization of integer rows, bit-identical in every library and on every device.

LAPACK's results depend on the library, the processor and the number of threads. The rows here are
sums of digits, so sums of their products are integers below 2**53, which float64 sums exactly in
any order. What remains is the factorization of a small matrix, element by element: no sum in it
leaves its order open. The transform is rounded to integers times a power of two, so that its
product with the rows is exact as well, and the result is rounded once.

Gram-Schmidt in this form squares the condition number: tolerable, as rows of digits have few bits.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache

import numpy as np
import numpy.typing as npt

from .. import _native
from ..arrays import (
    FLOAT64,
    INT32,
    Array,
    Constant,
    device_of,
    full_fp32_matmul,
    host_threads,
    host_view,
    inverse,
    is_fixed,
    join,
    matrix_transpose,
    namespace,
    products,
    runs_of,
    split,
    spread,
    take,
    to_host,
    transposed,
)
from .fixed_point import integers

Positions = npt.NDArray[np.int64]
Bools = npt.NDArray[np.bool_]

SUM_BITS = 15  # bits of the magnitude of an integer in a row
_EXACT = 53  # bits of the integers that float64 represents
_LEAST = 0.5  # least nonzero squared norm: that of nonzero integers is at least 1
_BITS = 30  # maximum for the transform
_HUGE = 1e300  # larger than any term of an elimination


def most(width: int) -> int:
    """Return the largest magnitude for which the products of rows [width] are exact."""
    return int(min(2**SUM_BITS - 1, math.isqrt(2**_EXACT // max(width, 1))))


class Orthonormal:
    """Gram-Schmidt over many matrices at once.

    Matrices of similar size are padded with zeros and share batched products, so that the number of
    launches on a device hardly grows with the number of matrices.

    shapes : (rows, width) of each matrix
    """

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        groups: dict[tuple[int, int], list[int]] = {}
        for at, (rows, width) in enumerate(shapes):
            # Similar size: rows within a factor of four, widths within two. Padding costs
            # arithmetic; another group costs launches.
            groups.setdefault(((rows.bit_length() + 1) // 2, width.bit_length()), []).append(at)
        ends = np.cumsum([0, *(rows * width for rows, width in shapes)])
        self._table, self._ends = np.array(shapes, np.int64), ends
        n, self._rows = int(ends[-1]), max(rows for rows, _ in shapes)
        self.bits = _bits(self._rows)  # bits of the transform
        self._groups: list[tuple[int, int, int]] = []  # matrices, and rows and width of each
        places, rows_of = [], []
        some: list[Bools] = []
        for members in groups.values():
            first = len(some)
            rows, width = (max(shapes[at][axis] for at in members) for axis in (0, 1))
            self._groups.append((len(members), rows, width))
            place = np.full((len(members), rows, width), n)  # index of a zero appended to the rows
            for target, at in zip(place, members, strict=True):
                height, length = shapes[at]
                target[:height, :length] = np.arange(ends[at], ends[at + 1]).reshape(height, length)
            row = (first + np.arange(len(members)))[:, None] * self._rows + np.arange(rows)
            places.append(place.reshape(-1))
            rows_of.append(np.repeat(row.reshape(-1), width))
            some += [np.arange(self._rows) < rows] * len(members)
        self._place(np.concatenate(places), np.concatenate(rows_of), np.array(some), n)
        self._place_squares(shapes)
        self._sizes = [count * rows * width for count, rows, width in self._groups]
        self._squares = [count * rows * rows for count, rows, _ in self._groups]

    def _place(self, place: Positions, row_of: Positions, some: Bools, n: int) -> None:
        """Set the gather indices into groups and back; None where numbers are in place.

        place : the source of each number of a group, or n for padding
        row_of : the row of each, counted as if all matrices had the largest number of rows
        some : [matrices, most rows], which rows exist in a matrix's group
        """
        self._total = len(some)
        self._unit = Constant(np.eye(self._rows))
        back = np.empty(n, np.int64)
        real = np.flatnonzero(place < n)
        back[place[real]] = real
        self._row_of = Constant(row_of[back])
        self._source: Constant | None = None
        self._back: Constant | None = None
        self._square: Constant | None = None
        self._within: Constant | None = None
        if place.size != n or (place != np.arange(n)).any():
            self._source, self._back = Constant(place), Constant(back)
        if not some.all():
            square = (some[:, :, None] & some[:, None, :]).reshape(-1)
            within = np.full(square.size, square.sum())
            within[square] = np.arange(square.sum())
            self._square, self._within = Constant(within), Constant(np.flatnonzero(square))

    def _place_squares(self, shapes: Sequence[tuple[int, int]]) -> None:
        """Set the indices of the Gram matrices, and each row's index among all rows."""
        self._shapes = tuple(shapes)
        squares = [rows * rows for rows, _ in shapes]
        ends = np.cumsum([0, *squares])
        places = np.full((len(shapes), self._rows, self._rows), ends[-1])
        for target, (rows, _), start in zip(places, shapes, ends[:-1], strict=True):
            target[:rows, :rows] = np.arange(start, start + rows * rows).reshape(rows, rows)
        self._squares_at = Constant(places.reshape(-1))
        self._apart_rows = Constant(
            np.concatenate(
                [at * self._rows + np.arange(rows) for at, (rows, _) in enumerate(shapes)]
            )
        )
        self._runs = runs_of([width for rows, width in shapes for _ in range(rows)])

    def __call__(self, sums: Array, instead: Array | None = None) -> Array:
        """Return orthonormal rows with the same span, [n] float32.

        Each row is made orthogonal to those before it, and of unit length. A row that is linearly
        dependent on them becomes zeros, or is taken from `instead`, [n] float32.

        sums : [n] integers of any dtype, matrix after matrix; at most `most(width)` in magnitude
        """
        if (rows := self._compiled(sums, instead)) is not None:
            return rows
        with full_fp32_matmul(sums):  # rows of zeros cause divisions by zero, which are masked
            wide = namespace(sums).astype(sums, namespace(sums).float64)
            return (self._one_by_one if is_fixed(sums) else self._padded)(wide, instead)

    def _compiled(self, sums: Array, instead: Array | None) -> Array | None:
        """Compute the same bits in the extension, matrix by matrix; None if not possible."""
        wide = host_view(sums, FLOAT64)
        view = host_view(sums, INT32) if wide is None else wide
        other = None if instead is None else host_view(instead)
        if view is None or (instead is not None and other is None):
            return None
        if (core := _native.core()) is None:
            return None
        xp = namespace(sums)
        rows = xp.empty(sums.shape[0], dtype=xp.float32, device=device_of(sums))
        out, bits = to_host(rows), self.bits
        threads = host_threads(sums)
        # With one thread, all matrices in one call: on small arrays it costs more than the work.
        step = len(self._table) if threads == 1 else 1

        def work(firsts: Iterator[int]) -> None:
            for first in firsts:
                last = min(first + step, len(self._table))
                here = slice(int(self._ends[first]), int(self._ends[last]))
                mine = None if other is None else other[here]
                core.orthonormal(view[here], mine, self._table[first:last], bits, out[here])

        _native.parallel(work, range(0, len(self._table), step), threads)
        return rows

    def _padded(self, sums: Array, instead: Array | None) -> Array:
        xp = namespace(sums)
        if self._source is not None:
            sums = take(_with_zero(sums), self._source.on(sums))
        groups = [
            xp.reshape(piece, shape)
            for piece, shape in zip(split(sums, self._sizes), self._groups, strict=True)
        ]
        grams = join([xp.reshape(products(group, transposed(group)), (-1,)) for group in groups])
        if self._square is not None:
            grams = take(_with_zero(grams), self._square.on(grams))
        grams = xp.reshape(grams, (self._total, self._rows, self._rows))
        transform, alive = _transform(grams, self._unit.on(grams))
        integer, unit = integers(transform, self.bits)
        # A power of two: the products stay exact.
        integer = xp.reshape(integer * unit, (-1,))
        if self._within is not None:
            integer = take(integer, self._within.on(integer))
        exact = join(
            [
                xp.reshape(products(xp.reshape(piece, (-1, rows, rows)), group), (-1,))
                for (_, rows, _), group, piece in zip(
                    self._groups, groups, split(integer, self._squares), strict=True
                )
            ]
        )
        if self._back is not None:
            exact = take(exact, self._back.on(exact))
        result = xp.astype(exact, xp.float32)
        if instead is None:
            return result
        return xp.where(take(xp.reshape(alive, (-1,)), self._row_of.on(alive)), result, instead)

    def _one_by_one(self, sums: Array, instead: Array | None) -> Array:
        """Compute the same bits matrix by matrix, for a library whose indexing copies.

        A graph has no launches to save by padding matrices, and only Gram matrices are gathered.
        """
        xp, count, rows = namespace(sums), len(self._shapes), self._rows
        sizes = [height * width for height, width in self._shapes]
        matrices = [
            xp.reshape(matrix, shape)
            for matrix, shape in zip(split(sums, sizes), self._shapes, strict=True)
        ]
        grams = join(
            [xp.reshape(matrice @ matrix_transpose(matrice), (-1,)) for matrice in matrices]
        )
        grams = take(_with_zero(grams), self._squares_at.on(grams))
        transform, alive = _transform_copies(xp.reshape(grams, (count, rows, rows)))
        integer, unit = integers(transform, _bits(rows))
        integer = integer * unit
        exact = [
            integer[at, :height, :height] @ matrix
            for at, ((height, _), matrix) in enumerate(zip(self._shapes, matrices, strict=True))
        ]
        result = xp.astype(join([xp.reshape(matrix, (-1,)) for matrix in exact]), xp.float32)
        if instead is None:
            return result
        alive = take(xp.reshape(alive, (-1,)), self._apart_rows.on(alive))
        return xp.where(spread(alive, self._runs), result, instead)


def orthonormal(matrix: Array, instead: Array | None = None) -> Array:
    """Orthonormalize one integer matrix [rows, width]; returns float32; see Orthonormal."""
    xp = namespace(matrix)
    flat = None if instead is None else xp.reshape(instead, (-1,))
    rows = Orthonormal([tuple(matrix.shape)])(xp.reshape(matrix, (-1,)), flat)
    return xp.reshape(rows, matrix.shape)


def _with_zero(values: Array) -> Array:
    xp = namespace(values)
    return xp.concat([values, xp.zeros_like(values[:1])])


def _bits(rows: int) -> int:
    """Return the bits of the transform with which sums of `rows` products are exact."""
    return min(_BITS, _EXACT - 1 - SUM_BITS - (rows - 1).bit_length())


def _transform(gram: Array, unit: Array) -> tuple[Array, Array]:
    """Return lower triangular L**-1 for gram = L L**T, [k, r, r], and nonzero rows, [k, r] bool.

    Gaussian elimination of [gram, unit], row by row. Step j changes r adjacent columns only: those
    of the Gram matrix after j, and those of the transform up to j.

    unit : [r, r]
    """
    xp = namespace(gram)
    rows = gram.shape[1]
    both = xp.concat([gram, xp.broadcast_to(unit, gram.shape)], axis=2)
    nothing = xp.zeros_like(gram[:, 0, 0])
    inverses = []
    for j in range(rows):
        # Nothing remains of a row that depends on those before: its scale is zero, not infinite.
        pivot = both[:, j, j]
        scale = xp.where(pivot >= _LEAST, inverse(pivot), nothing)
        inverses.append(scale)
        if j + 1 < rows:
            below = both[:, j + 1 :, j] * scale[:, None]
            # Two operations, which must not be fused: that would round once less.
            terms = below[:, :, None] * both[:, j : j + 1, j + 1 : j + 1 + rows]
            trailing = both[:, j + 1 :, j + 1 : j + 1 + rows]
            trailing -= terms
    scales = xp.stack(inverses, axis=1)
    return both[:, :, rows:] * xp.sqrt(scales)[:, :, None], scales > 0


def _transform_copies(gram: Array) -> tuple[Array, Array]:
    """Compute the same without changing arrays in place: each step creates the columns anew.

    There are r of them; a step drops the first and appends one of the transform: what is subtracted
    from a zero column of `unit`. The end of the top row is its row of the transform.
    """
    xp = namespace(gram)
    total, rows = gram.shape[0], gram.shape[1]
    window = gram  # [k, rows - j, rows]
    nothing = xp.zeros_like(gram[:, :1, :1])
    inverses, tops = [], []
    for j in range(rows):
        top, lower = xp.split(window, [1, rows - j - 1], axis=1)
        tops.append(top)
        pivot, tail = xp.split(top, [1, rows - 1], axis=2)
        scale = xp.where(pivot >= _LEAST, inverse(pivot), nothing)
        inverses.append(scale)
        if j + 1 < rows:
            column, body = xp.split(lower, [1, rows - 1], axis=2)
            below = column * scale
            # Has no effect, but is an operation between the two: else XLA would fuse them.
            terms = xp.maximum(below * tail, -_HUGE)
            window = xp.concat([body - terms, 0 - below], axis=2)
    scales = xp.concat(inverses, axis=1)
    zeros = xp.zeros_like(scales[:, :1])
    flat = xp.concat(
        [xp.reshape(xp.concat(tops, axis=1), (total, -1)), zeros[:, :, 0], 1 + zeros[:, :, 0]],
        axis=1,
    )
    transform = xp.reshape(xp.take(flat, _sheared(rows).on(gram), axis=1), gram.shape)
    return transform * xp.sqrt(scales), xp.reshape(scales > 0, (total, rows))


@cache
def _sheared(rows: int) -> Constant:
    """Return the indices of the transform's numbers: ends of rows, then a zero, and a one."""
    row, column = np.indices((rows, rows))
    place = np.where(column < row, row * rows + rows - row + column, rows * rows)
    return Constant(np.where(column == row, rows * rows + 1, place).reshape(-1))
