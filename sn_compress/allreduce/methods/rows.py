"""Rows: all ranks send the same rows of a matrix, agreed on one step ahead.

The gradient of an embedding has few nonzero rows, which differ in every step: it has no low rank,
and ranks would pick different rows. But a sum can carry positions: each rank writes its picks to a
slot of the words that the others leave at zero. The picks apply to the next step, which does no
harm, as rows are picked by their residual in the memory. Remaining capacity goes to rows that were
large in past means, and to those that have waited longest.

Which rows are sent follows from shared state, by operations that all libraries round alike: maxima,
and float64 roots, products and quotients. The moving average of past means has weights of few bits,
so that its products are exact, and a fused multiply-add rounds like two operations.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from ...arrays import device_of, filled, namespace, put
from ...errors import CompressError
from ...ops.bits import agreed_rows, own_slot, read_positions, slot_words
from ...ops.fixed_point import FixedPointColumns, shifted
from .base import Array, Method, Outcome, Send, State, Step, StepOptions, Summed

_NEWS = 5 / 16  # weight of the last mean in the moving average; has three bits, so exact
_TINY = 2.0**-126  # the smallest normal float32
_MOST = 2**31 - 2  # rows


class Rows(Method):
    """Sends ranks * size rows of each tensor's mean gradient.

    Parameters
    ----------
    shapes : (rows, columns) of each tensor; with one column, single values are sent
    sizes : number of rows of each that a rank names per step, 1 to all
    """

    rounds = 1

    def __init__(self, shapes: Sequence[tuple[int, int]], sizes: Sequence[int]) -> None:
        for (rows, columns), size in zip(shapes, sizes, strict=True):
            if not 1 <= size <= rows <= _MOST or columns < 1:
                raise CompressError(
                    f"Rows: {size!r} rows of a {rows} x {columns} matrix; expected 1 to {rows}"
                )
        self.shapes = tuple((rows, columns) for rows, columns in shapes)
        self.sizes = tuple(sizes)
        ends = accumulate((rows for rows, _ in self.shapes), initial=0)
        self._of = [slice(*pair) for pair in pairwise(ends)]  # a tensor's rows in the state

    def lengths(self) -> dict[str, Sequence[int]]:
        rows = [rows for rows, _ in self.shapes]
        return {"exponents": [1] * len(rows), "spread": rows, "age": rows, "named": rows}

    def words(self, ranks: int) -> list[int]:
        pairs = zip(self.shapes, self.sizes, strict=True)
        slots = sum(ranks * slot_words(size, rows) for (rows, _), size in pairs)
        return [_columns(self.shapes, self.sizes, ranks).words(ranks) + slots]

    def new_state(self, like: Array) -> State:
        """Return an int32 exponent per tensor; per row spread and age, float32, and named, bool."""
        xp, rows, at = namespace(like), sum(rows for rows, _ in self.shapes), device_of(like)
        return {
            "exponents": xp.zeros(len(self.shapes), dtype=xp.int32, device=at),
            "spread": xp.zeros(rows, dtype=xp.float32, device=at),
            "age": xp.ones(rows, dtype=xp.float32, device=at),
            "named": xp.zeros(rows, dtype=xp.bool, device=at),
        }

    def begin(self, state: State, means: Sequence[Array]) -> State:
        # A tensor's numbers share one scale: the largest of its rows' peaks.
        scales = FixedPointColumns([(1, rows) for rows, _ in self.shapes])
        peaks = scales.join([_finite_or_zeros(_peaks(mean)) for mean in means])
        exponents = scales.expected(scales.peaks(peaks), state["exponents"])
        return state | {"spread": peaks, "exponents": exponents}

    def rescale(self, state: State, quarters: int) -> State:
        spread = state["spread"] * float(np.float32(2.0 ** (quarters / 4)))
        return state | {"spread": spread, "exponents": shifted(state["exponents"], quarters)}

    def step(
        self,
        state: State,
        matrices: Sequence[Array],
        options: StepOptions,
        outs: Sequence[Array] | None = None,
    ) -> Step:
        ranks, rank = options.ranks, options.rank
        if rank is None or not 0 <= rank < ranks:
            raise CompressError(
                f"rank={rank!r} of {ranks}; expected the number of this rank, which has its own "
                "slot in the sum. Pass rank= to the exchange."
            )
        xp = namespace(matrices[0])
        columns = _columns(self.shapes, self.sizes, ranks)
        # The rows of this step follow from shared state: the same on all ranks, in the same order.
        at = []
        for piece, shape, size in zip(self._of, self.shapes, self.sizes, strict=True):
            spread, age, named = (state[name][piece] for name in ("spread", "age", "named"))
            at.append(agreed_rows(spread, age, named, _count(shape, size, ranks)))
        owed = [xp.vecdot(matrix, matrix) for matrix in matrices]
        finite = xp.all(xp.isfinite(xp.stack([xp.sum(norms) for norms in owed])))
        held = [xp.take(matrix, rows, axis=0) for matrix, rows in zip(matrices, at, strict=True)]
        flat = columns.join(held)
        flat = xp.where(finite, flat, xp.zeros_like(flat))
        words, quantized = columns.pack(flat, state["exponents"], ranks)
        rounding = columns.split(flat - quantized)
        # What remains in the matrices is the residual, by which each rank picks its largest rows
        # for the next step.
        slots, residuals = [], []
        for place, (matrix, rows) in enumerate(zip(matrices, at, strict=True)):
            unsent = xp.reshape(rounding[place], (-1, matrix.shape[1]))
            residuals.append(put(matrix, rows, unsent))
            owes = put(owed[place], rows, xp.vecdot(unsent, unsent))
            slots.append(own_slot(_finite_or_zeros(owes), self.sizes[place], ranks, rank))
        received: Summed = yield Send(xp.concat([words, *slots]), finite)
        counts = received.words[: words.shape[0]]
        sums, unit, exponents = columns.unpack(counts, state["exponents"], ranks)
        mean = columns.split(xp.astype(sums, xp.float32) * (unit * received.poison))
        new, means, start = [], [], words.shape[0]
        for place, (matrix, rows) in enumerate(zip(matrices, at, strict=True)):
            out = xp.empty_like(matrix) if outs is None else outs[place]
            out = filled(out, 0 * received.poison)
            values = xp.reshape(mean[place], (-1, matrix.shape[1]))
            means.append(put(out, rows, values))
            end = start + slots[place].shape[0]
            slots_of = xp.reshape(received.words[start:end], (ranks, -1))
            # The slot of a joined rank is all zeros, and names no rows.
            named = read_positions(slots_of, self.sizes[place], matrix.shape[0])
            new.append({**self._learned(state, place, rows, values), "named": named})
            start = end
        following = {name: xp.concat([state[name] for state in new]) for name in new[0]}
        sent = xp.sum(quantized * (2 * flat - quantized))
        return Outcome(residuals, means, {"exponents": exponents, **following}, sent)

    def _learned(self, state: State, place: int, at: Array, values: Array) -> State:
        """Return spread and age of a tensor's rows after the means `values` of some were sent."""
        xp = namespace(values)
        spread, age = state["spread"][self._of[place]], state["age"][self._of[place]]
        # A row that has waited t steps is the sum of t gradients: for noise, its expected magnitude
        # is sqrt(t) times that of one.
        waited = xp.astype(xp.take(age, at, axis=0), xp.float64)
        news = xp.astype(xp.astype(_peaks(values), xp.float64) / xp.sqrt(waited), xp.float32)
        past = xp.astype(xp.take(spread, at, axis=0), xp.float64) * (1 - _NEWS)
        average = past + xp.astype(news, xp.float64) * _NEWS
        spread, age = xp.asarray(spread, copy=True), age + 1
        # A row that stays small would become subnormal, which some processors flush to zero.
        some = average >= _TINY
        news = xp.astype(xp.where(some, average, xp.zeros_like(average)), xp.float32)
        return {
            "spread": put(spread, at, news),
            "age": put(age, at, xp.ones_like(age[: at.shape[0]])),
        }


@lru_cache(maxsize=256)
def _columns(
    shapes: tuple[tuple[int, int], ...], sizes: tuple[int, ...], ranks: int
) -> FixedPointColumns:
    """Return the fixed-point format of the rows: one scale per tensor."""
    pairs = zip(shapes, sizes, strict=True)
    return FixedPointColumns([(1, _count(shape, size, ranks) * shape[1]) for shape, size in pairs])


def _count(shape: tuple[int, int], size: int, ranks: int) -> int:
    return min(size * ranks, shape[0])


def _peaks(matrix: Array) -> Array:
    """Return the largest magnitude of each row: unlike a norm, the same on every machine."""
    xp = namespace(matrix)
    return xp.max(xp.abs(matrix), axis=1)


def _finite_or_zeros(values: Array) -> Array:
    xp = namespace(values)
    return xp.where(xp.all(xp.isfinite(values)), values, xp.zeros_like(values))
