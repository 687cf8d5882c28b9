"""Frequencies: low-rank factors of a convolution's frequencies, of those that owe most in a step.

Under a DCT over the axes of its kernels a gradient of shape (out, in, height, width) becomes
height * width matrices [out, in], one for each frequency, and few of them hold most of its energy.
A direction of one of these has out + in numbers; one of the whole tensor, as low rank has it, has
out + in * height * width. So several times as many of them travel in the same words.

Which ones, all ranks know without a word: of each direction they remember how much it brought for
each step that it had waited, and how long it has waited. What is sent is the largest of one times
the other; what has been silent counts as a thirty-second of the loudest, so that everything is sent
in the end. Norms are of whole numbers, and products and roots those that all libraries round alike.

The two rounds are those of low rank (`low_rank.py`); directions of two frequencies are orthogonal.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ...base.errors import CompressError
from ...devices.arrays import Array, device_of, join, namespace, split
from ...ops.linear.kernels import Kernels, waves
from ...ops.linear.orthonormal import Orthonormal, most
from ...ops.words.positions import largest, orders
from ...ops.words.scales import integers
from .base import Outcome, Part, Send, State, Step, Summed, cut_up, joined
from .columns import Columns, numbers
from .low_rank import LowRank, whole_of
from .visited import Visited

_KEPT = 8  # directions that a frequency keeps at least; few of all travel in a step
_SILENT = 2.0**-5  # of the largest: what each direction is thought to bring at least
_TINY, _HUGE = 2.0**-126, 2.0**127  # of float32
_BITS = 15  # of a mean gradient's frequencies, where directions are sought in integers


class Frequencies(Part):
    """The strongest directions of each tensor's mean gradient, each of one frequency.

    Parameters
    ----------
    kernels : how each tensor lies
    sizes : directions of each that travel in a step, 1 to frequencies times the fewer channels
    """

    rounds = 2

    def __init__(self, kernels: Sequence[Kernels], sizes: Sequence[int]) -> None:
        for it, size in zip(kernels, sizes, strict=True):
            high = it.count * min(it.across, it.beside)
            if not 1 <= size <= high:
                raise CompressError(
                    f"Frequencies: {size!r} directions of {it}; expected 1 to {high}"
                )
        self.kernels, self.sizes = tuple(kernels), tuple(sizes)
        self.shapes = tuple(it.shape for it in kernels)
        pairs = list(zip(self.kernels, self.sizes, strict=True))
        left = [(size, it.across) for it, size in pairs]
        right = [(size, it.beside) for it, size in pairs]
        # Numbers are told in parts of what is expected: one scale for a tensor.
        self._left, self._right = (
            Columns(
                [(1, size * side) for size, side in each],
                most=most(max(side for _, side in each)),
            )
            for each in (left, right)
        )
        # With zeros in place of other frequencies; see Visited.apart.
        self._left_rows, self._right_rows = (
            Orthonormal(
                [(size, it.count * side) for it, (size, side) in zip(kernels, each, strict=True)]
            )
            for each in (left, right)
        )
        self._each = [
            min(it.across, it.beside, max(_KEPT, -(-2 * size // it.count))) for it, size in pairs
        ]
        self._all = [it.count * each for it, each in zip(kernels, self._each, strict=True)]
        # Each frequency as a tensor of its own, for the first directions.
        self._first = LowRank(
            [(it.across, it.beside) for it in kernels for _ in range(it.count)],
            [each for it, each in zip(kernels, self._each, strict=True) for _ in range(it.count)],
        )

    @classmethod
    def together(cls, parts: Sequence[Part]) -> list[Part]:
        mine = [part for part in parts if isinstance(part, cls)]
        kernels = [it for part in mine for it in part.kernels]
        return [cls(kernels, [size for part in mine for size in part.sizes])]

    def split(self, state: State) -> list[State]:
        one = [1] * len(self.sizes)
        basis = [count * it.beside for count, it in zip(self._all, self.kernels, strict=True)]
        each = self._all
        return cut_up(
            state, {"basis": basis, "spread": each, "age": each, "left": one, "right": one}
        )

    def join(self, states: Sequence[State]) -> State:
        return joined(states)

    def words(self, ranks: int) -> list[int]:
        return [self._left.words(ranks), self._right.words(ranks)]

    def new_state(self, like: Array) -> State:
        """Directions [n] float32; of each spread, age float32; of each tensor two exponents."""
        xp, at = namespace(like), device_of(like)
        zeros = xp.zeros(len(self.sizes), dtype=xp.int32, device=at)
        ones = xp.ones(sum(self._all), dtype=xp.float32, device=at)
        basis = self._first.new_state(like)["basis"]
        return {"basis": basis, "spread": ones, "age": 1 * ones, "left": zeros, "right": 1 * zeros}

    def begin(self, state: State, means: Sequence[Array]) -> State:
        xp = namespace(state["basis"])
        wholes, unit_of, known = [], [], []
        for it, count, mean in zip(self.kernels, self._all, means, strict=True):
            whole, unit = whole_of(mean)
            found, step = _frequencies_of(it, whole)
            wholes += found
            unit_of += [unit * step] * it.count
            known.append(xp.broadcast_to(xp.any(whole != 0), (count,)))
        flat, _, factors = self._first.sought(state["basis"], wholes)
        norms = []
        for factor, unit in zip(factors, unit_of, strict=True):
            whole, step = integers(factor, _BITS)
            norms.append(xp.sqrt(xp.sum(whole * whole, axis=1)) * step[:, 0] * unit)
        spread = xp.astype(xp.clip(join(norms), 0.0, _HUGE), xp.float32)
        return state | {"basis": flat, "spread": xp.where(join(known), spread, state["spread"])}

    def rescale(self, state: State, quarters: int) -> State:
        # Scales are parts of these.
        return state | {"spread": state["spread"] * float(np.float32(2.0 ** (quarters / 4)))}

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
        known = self.split(state)
        visits = [self._visited(own, place) for place, own in enumerate(known)]
        p = [it.times_directions(own) for it, own in zip(visits, matrices, strict=True)]
        flat, finite = numbers(join([xp.reshape(it, (-1,)) for it in p]))
        found: Summed = yield Send(self._left.pack(flat, state["left"], ranks)[0], finite)
        sums, _, left = self._left.unpack(found.words, state["left"], ranks)
        rows = _orthonormal(self._left_rows, visits, self._numbers(self._left, sums))
        triples = zip(visits, rows, matrices, strict=True)
        q, finite = numbers(join([xp.reshape(it.times_rows(p, m), (-1,)) for it, p, m in triples]))
        words, own = self._right.pack(q, state["right"], ranks)
        found = yield Send(words, finite)
        sums, unit, right = self._right.unpack(found.words, state["right"], ranks)
        mean = xp.astype(sums, xp.float32) * (unit * found.poison)
        held, sent, values, whole = (self._numbers(self._right, it) for it in (q, own, mean, sums))
        old = [it.directions for it in visits]
        new = _orthonormal(self._right_rows, visits, whole, old)
        kept, means, states, energies = [], [], [], []
        for at, it in enumerate(visits):
            kept.append(it.left(matrices[at], rows[at], sent[at]))
            out = None if outs is None else outs[at]
            means.append(it.mean(rows[at], values[at], out, exact=exact))
            energies.append(it.energy(held[at], sent[at]))
            unit_of = self._right.split(unit)[at][0, :1]
            states.append(it.learned(known[at], new[at], whole[at], unit_of))
        following = {name: join([it[name] for it in states]) for name in states[0]}
        following |= {"left": left, "right": right}
        return Outcome(kept, means, following, xp.sum(xp.stack(energies)))

    def _visited(self, state: State, place: int) -> Visited:
        """Those of a tensor's directions that are expected to bring most."""
        xp, it = namespace(state["spread"]), self.kernels[place]
        spread, age = (xp.astype(state[name], xp.float64) for name in ("spread", "age"))
        spread = xp.maximum(spread, xp.max(spread) * _SILENT)
        expected = xp.astype(xp.clip(spread * age, _TINY, _HUGE), xp.float32)
        places = largest(orders(expected), self.sizes[place])
        basis = xp.reshape(state["basis"], (-1, it.beside))
        return Visited.of(it, places, expected, basis, self._each[place])

    def _numbers(self, columns: Columns, flat: Array) -> list[Array]:
        """[size] as one [directions, channels] for each tensor."""
        pieces = zip(columns.split(flat), self.sizes, strict=True)
        return [namespace(it).reshape(it, (size, -1)) for it, size in pieces]


def _orthonormal(
    rows_of: Orthonormal,
    visits: Sequence[Visited],
    rows: Sequence[Array],
    instead: Sequence[Array] | None = None,
) -> list[Array]:
    """Rows of each tensor, [directions, side], as orthonormal ones of the same frequencies."""

    def apart(factors: Sequence[Array]) -> Array:
        return join([it.apart(own) for it, own in zip(visits, factors, strict=True)])

    flat = rows_of(apart(rows), None if instead is None else apart(instead))
    pairs = zip(visits, rows, strict=True)
    sizes = [it.kernels.count * own.shape[0] * own.shape[1] for it, own in pairs]
    return [it.back(own) for it, own in zip(visits, split(flat, sizes), strict=True)]


def _frequencies_of(kernels: Kernels, whole: Array) -> tuple[list[Array], Array]:
    """A matrix of each frequency, [across, beside], as whole numbers of 15 bits; what one is.

    whole : the tensor as a matrix of whole numbers of 15 bits, float64
    """
    xp = namespace(whole)
    wave = xp.round(xp.astype(waves(kernels.sides).on(whole), xp.float64) * 2.0**_BITS)
    k, across, beside = kernels.count, kernels.across, kernels.beside
    # Whole numbers of 30 bits and their sums: exact.
    if kernels.last:
        found = xp.reshape(whole, (-1, k)) @ xp.permute_dims(wave, (1, 0))
        found = xp.permute_dims(xp.reshape(found, (across, beside, k)), (2, 0, 1))
    else:
        found = xp.reshape(wave @ xp.reshape(whole, (k, -1)), (k, beside, across))
        found = xp.permute_dims(found, (0, 2, 1))
    numbers_of, unit = integers(xp.reshape(found, (1, -1)), _BITS)
    cube = xp.reshape(numbers_of, (k, across, beside))
    return [cube[at, :, :] for at in range(k)], xp.reshape(unit, ()) * 2.0**-_BITS
