"""Rows: those of a matrix that all ranks send, agreed a step ahead.

The gradient of an embedding has few rows that are not zero, others at every step: it has no low
rank, and what one rank would pick is not what another has. But positions can be told in a sum: each
rank writes its picks into a slot of the words that the others leave at zero. A step late does
not matter, as a row is named for what of it has not been sent. What the picks leave free
goes to rows that past means show to be large, and to those that waited longest.

Which rows are sent follows from what all ranks share. That is kept by operations that every library
rounds alike: maxima, and roots, products and quotients of float64; the average of past changes has
weights of few bits, so that its products are exact and it does not matter who adds before rounding.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache
from itertools import accumulate, pairwise

import numpy as np

from ...base.errors import CompressError
from ...devices.arrays import device_of, filled, namespace, put
from ...ops.words.positions import FIRST, falling, largest, orders, slot_words, told, write
from ...ops.words.scales import shifted
from .base import Array, Outcome, Part, Send, State, Step, Summed, cut_up, joined
from .columns import Columns

_WAITED = 5  # one in so many of the free places goes to what waited longest
_NEWS = 5 / 16  # weight of the last mean in the average of past ones
_TINY, _HUGE = 2.0**-126, 2.0**127  # of float32, what a row is expected to change by
_MOST = 2**31 - 2  # rows


class Rows(Part):
    """As many rows of each tensor's mean gradient as ranks times the tensor's size.

    Parameters
    ----------
    shapes : (rows, columns) of each tensor; with one column, single values are sent
    sizes : rows of each that a rank names in a step, 1 to all
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

    @classmethod
    def together(cls, parts: Sequence[Part]) -> list[Part]:
        mine = [part for part in parts if isinstance(part, cls)]
        shapes = [shape for part in mine for shape in part.shapes]
        return [cls(shapes, [size for part in mine for size in part.sizes])]

    def split(self, state: State) -> list[State]:
        rows = [rows for rows, _ in self.shapes]
        return cut_up(
            state, {"exponents": [1] * len(rows), "spread": rows, "age": rows, "named": rows}
        )

    def join(self, states: Sequence[State]) -> State:
        return joined(states)

    def words(self, ranks: int) -> list[int]:
        pairs = zip(self.shapes, self.sizes, strict=True)
        slots = sum(ranks * slot_words(size, rows) for (rows, _), size in pairs)
        return [_columns(self.shapes, self.sizes, ranks).words(ranks) + slots]

    def new_state(self, like: Array) -> State:
        """An exponent for each tensor, int32; for each row spread, age float32, named bool."""
        xp, rows, at = namespace(like), sum(rows for rows, _ in self.shapes), device_of(like)
        return {
            "exponents": xp.zeros(len(self.shapes), dtype=xp.int32, device=at),
            "spread": xp.zeros(rows, dtype=xp.float32, device=at),
            "age": xp.ones(rows, dtype=xp.float32, device=at),
            "named": xp.zeros(rows, dtype=xp.bool, device=at),
        }

    def begin(self, state: State, means: Sequence[Array]) -> State:
        # A tensor's numbers share one scale: the peaks of its rows have the peak of all.
        scales = Columns([(1, rows) for rows, _ in self.shapes])
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
        *,
        ranks: int,
        rank: int | None,
        exact: bool = False,
        outs: Sequence[Array] | None = None,
    ) -> Step:
        if rank is None or not 0 <= rank < ranks:
            raise CompressError(
                f"rank={rank!r} of {ranks}; expected the rank's own number, as it has a slot for "
                "its picks. Pass rank= to the exchange."
            )
        xp = namespace(matrices[0])
        columns = _columns(self.shapes, self.sizes, ranks)
        at = [self._agreed(state, place, ranks) for place in range(len(self.shapes))]
        owed = [xp.vecdot(matrix, matrix) for matrix in matrices]
        finite = xp.all(xp.isfinite(xp.stack([xp.sum(it) for it in owed])))
        held = [xp.take(it, rows, axis=0) for it, rows in zip(matrices, at, strict=True)]
        flat = columns.join(held)
        flat = xp.where(finite, flat, xp.zeros_like(flat))
        words, own = columns.pack(flat, state["exponents"], ranks)
        rest = columns.split(flat - own)
        slots, kept = [], []
        for place, (matrix, rows) in enumerate(zip(matrices, at, strict=True)):
            left = xp.reshape(rest[place], (-1, matrix.shape[1]))
            kept.append(put(matrix, rows, left))
            owes = put(owed[place], rows, xp.vecdot(left, left))
            slots.append(self._name(owes, place, ranks, rank))
        found: Summed = yield Send(xp.concat([words, *slots]), finite)
        counts = found.words[: words.shape[0]]
        sums, unit, exponents = columns.unpack(counts, state["exponents"], ranks)
        mean = columns.split(xp.astype(sums, xp.float32) * (unit * found.poison))
        new, means, start = [], [], words.shape[0]
        for place, (matrix, rows) in enumerate(zip(matrices, at, strict=True)):
            out = xp.empty_like(matrix) if outs is None else outs[place]
            out = filled(out, 0 * found.poison)
            values = xp.reshape(mean[place], (-1, matrix.shape[1]))
            means.append(put(out, rows, values))
            end = start + slots[place].shape[0]
            named = self._read(found.words[start:end], place, ranks)
            new.append({**self._learned(state, place, rows, values), "named": named})
            start = end
        following = {name: xp.concat([it[name] for it in new]) for name in new[0]}
        sent = xp.sum(own * (2 * flat - own))
        return Outcome(kept, means, {"exponents": exponents, **following}, sent)

    def _agreed(self, state: State, place: int, ranks: int) -> Array:
        """The rows of a tensor to send, [size * ranks or all] int64 ascending."""
        xp = namespace(state["spread"])
        spread, age, named = (state[name][self._of[place]] for name in ("spread", "age", "named"))
        count = _count(self.shapes[place], self.sizes[place], ranks)
        free = count - xp.sum(xp.astype(named, xp.int64))
        waiting = (xp.clip(free, 0, count) + _WAITED - 1) // _WAITED
        wide = xp.astype(spread, xp.float64) * xp.sqrt(xp.astype(age, xp.float64))
        expected = orders(xp.astype(xp.clip(wide, _TINY, _HUGE), xp.float32))
        keys = falling(xp.where(named, xp.full_like(expected, FIRST), expected))
        # All that are named, and of the others those that are large: below the first that is not.
        ends = xp.concat([xp.sort(keys), xp.full_like(keys[:1], 2**62)])
        large = keys < xp.take(ends, xp.reshape(count - waiting, (1,)), axis=0)
        waited = orders(age)
        return largest(xp.where(large, xp.full_like(waited, FIRST), waited), count)

    def _name(self, owed: Array, place: int, ranks: int, rank: int) -> Array:
        """What the rank owes most, in its slot, [ranks * slot] int32."""
        xp = namespace(owed)
        picks = largest(orders(_finite_or_zeros(owed)), self.sizes[place])
        slot = write(picks, self.shapes[place][0])
        zeros = xp.zeros((ranks, slot.shape[0]), dtype=xp.int32, device=device_of(slot))
        before, after = zeros[:rank], zeros[rank + 1 :]
        return xp.reshape(xp.concat([before, slot[None, :], after]), (-1,))

    def _read(self, words: Array, place: int, ranks: int) -> Array:
        """Whether a rank has named it, for each row; one that has joined names none."""
        slots = namespace(words).reshape(words, (ranks, -1))
        return told(slots, self.sizes[place], self.shapes[place][0])

    def _learned(self, state: State, place: int, at: Array, values: Array) -> State:
        """What is known of a tensor's rows when these means have been sent of some."""
        xp = namespace(values)
        spread, age = state["spread"][self._of[place]], state["age"][self._of[place]]
        waited = xp.astype(xp.take(age, at, axis=0), xp.float64)
        news = xp.astype(xp.astype(_peaks(values), xp.float64) / xp.sqrt(waited), xp.float32)
        past = xp.astype(xp.take(spread, at, axis=0), xp.float64) * (1 - _NEWS)
        average = past + xp.astype(news, xp.float64) * _NEWS
        spread, age = xp.asarray(spread, copy=True), age + 1
        # What goes on to fall would end in numbers that some processors take for zero.
        some = average >= _TINY
        news = xp.astype(xp.where(some, average, xp.zeros_like(average)), xp.float32)
        return {
            "spread": put(spread, at, news),
            "age": put(age, at, xp.ones_like(age[: at.shape[0]])),
        }


@lru_cache(maxsize=256)
def _columns(shapes: tuple[tuple[int, int], ...], sizes: tuple[int, ...], ranks: int) -> Columns:
    """How the numbers of the rows travel: one scale for those of a tensor."""
    pairs = zip(shapes, sizes, strict=True)
    return Columns([(1, _count(shape, size, ranks) * shape[1]) for shape, size in pairs])


def _count(shape: tuple[int, int], size: int, ranks: int) -> int:
    return min(size * ranks, shape[0])


def _peaks(matrix: Array) -> Array:
    """The largest magnitude of each row: unlike a norm, the same on every machine."""
    xp = namespace(matrix)
    return xp.max(xp.abs(matrix), axis=1)


def _finite_or_zeros(values: Array) -> Array:
    xp = namespace(values)
    return xp.where(xp.all(xp.isfinite(values)), values, xp.zeros_like(values))
