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

Where a convolution's gradient has its kernels, and the frequencies of a kernel.

torch lays kernels out as (out, in, height, width), Keras as (height, width, in, out). The DCT-II
over the axes of a kernel gathers what neighbours have in common in few numbers; channels have no
order, and so no frequencies.

RoundRobin: the directions of one tensor's frequencies that travel in a step.

A direction q of the frequency with wave c is the direction q x c of the whole tensor, so that the
tensor is multiplied where it lies, and no spectrum of it is made.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ...arrays import Array, Constant, device_of, join, namespace, products, put, split
from ...errors import CompressError
from ...ops.bits import largest, orders
from ...ops.fixed_point import FixedPointColumns, covering, integers, numbers, units
from ...ops.orthonormal import Orthonormal, most
from ...ops.products import exact_outer, outer, subtract_outer, times_columns, times_rows
from .base import Method, Outcome, Send, State, Step, Summed, cut_up
from .low_rank import LowRank, whole_of

MOST = 64  # numbers in a kernel; where there are more, axes are of something else
_GRID = 2.0**22  # float32 has these multiples exactly, whatever the host's cosine ends in


@dataclass(frozen=True)
class Kernels:
    """A tensor's axes: channels, and those of a kernel.

    Attributes
    ----------
    sides : of a kernel
    beside : channels next to the kernel's axes: those that come in
    across : the channels at the tensor's other end: those that go out
    last : the kernel's axes are the last ones, as in torch; else the first, as in Keras
    """

    sides: tuple[int, ...]
    beside: int
    across: int
    last: bool

    @property
    def count(self) -> int:
        """Frequencies: as many as numbers in a kernel."""
        return math.prod(self.sides)

    @property
    def shape(self) -> tuple[int, int]:
        """The tensor as a matrix: outgoing channels against all else, by a plain reshape."""
        rest = self.beside * self.count
        return (self.across, rest) if self.last else (rest, self.across)


def kernels_of(shape: Sequence[int]) -> Kernels | None:
    """The kernels of a tensor; None where it has none.

    A tensor of 3 to 5 axes has them, at the end where they are smaller; at the last, if both are
    alike.

    >>> kernels_of((64, 32, 3, 3))
    Kernels(sides=(3, 3), beside=32, across=64, last=True)
    >>> kernels_of((3, 3, 32, 64))
    Kernels(sides=(3, 3), beside=32, across=64, last=False)
    >>> kernels_of((64, 32, 1, 1)), kernels_of((128, 1024))
    (None, None)
    """
    if not 3 <= len(shape) <= 5 or not math.prod(shape):
        return None
    if math.prod(shape[2:]) <= math.prod(shape[:-2]):
        sides, across, beside, last = shape[2:], shape[0], shape[1], True
    else:
        sides, beside, across, last = shape[:-2], shape[-2], shape[-1], False
    if not 1 < math.prod(sides) <= MOST:
        return None
    return Kernels(tuple(sides), beside, across, last)


@cache
def waves(sides: tuple[int, ...]) -> Constant:
    """[count, count] float32: the frequencies of a kernel of these sides, each an array of it.

    Rows of the DCT-II's matrix, orthonormal but for the rounding to multiples of 2**-22.
    """
    whole: npt.NDArray[np.float64] = np.ones((1, 1))
    for side in sides:
        whole = np.asarray(np.kron(whole, _cosines(side)), np.float64)
    return Constant((np.round(whole * _GRID) / _GRID).astype(np.float32))


def _cosines(side: int) -> npt.NDArray[np.float64]:
    row, column = np.indices((side, side))
    found = np.cos(np.pi * row * (2 * column + 1) / (2 * side)) * math.sqrt(2 / side)
    found[0] = math.sqrt(1 / side)
    return np.asarray(found, np.float64)


_NEWS = 5 / 16  # weight of the last time in the average of what a direction brought
_TINY, _HUGE = 2.0**-126, 2.0**127  # of float32


@dataclass(frozen=True)
class RoundRobin:
    """Some of a tensor's directions, [count], of one frequency each.

    Attributes
    ----------
    kernels : how the tensor lies
    places : [count] int64 ascending, among all directions, which lie frequency by frequency
    wave, waves : of each, which one, [count] int64, and its array, [count, frequencies] float32
    directions : [count, channels beside the kernel] float32, as they were when sent last
    scale : [count] float32, about what each is expected to bring
    """

    kernels: Kernels
    places: Array
    wave: Array
    waves: Array
    directions: Array
    scale: Array

    @classmethod
    def of(
        cls, kernels: Kernels, places: Array, expected: Array, basis: Array, each: int
    ) -> RoundRobin:
        """Those at some places of a tensor.

        expected : [all directions] float32, above zero
        basis : [all directions, channels] float32
        each : directions of a frequency
        """
        xp = namespace(basis)
        wave = places // each
        return cls(
            kernels,
            places,
            wave,
            xp.take(waves(kernels.sides).on(basis), wave, axis=0),
            xp.take(basis, places, axis=0),
            units(covering(xp.take(expected, places, axis=0))[0]),
        )

    def times_directions(self, matrix: Array) -> Array:
        """The first product of a step, [count, channels across]."""
        factor = self._tensor_directions(self.directions)
        times = times_rows if self.kernels.last else times_columns
        return self._told(times([factor], [matrix]))

    def times_rows(self, rows: Array, matrix: Array) -> Array:
        """The second product, [count, channels beside the kernel].

        rows : [count, channels across]
        """
        times = times_columns if self.kernels.last else times_rows
        count, own = rows.shape[0], self.kernels
        found = times([rows], [matrix])
        xp = namespace(found)
        if own.last:
            cube = xp.reshape(found, (count, own.beside, own.count))
            found = products(cube, self.waves[:, :, None])
        else:
            cube = xp.reshape(found, (count, own.count, own.beside))
            found = products(self.waves[:, None, :], cube)
        return self._told(found)

    def mean(self, rows: Array, values: Array, out: Array | None, *, exact: bool) -> Array:
        """The tensor that the factors make, as a matrix.

        values : of the second product, in parts of the scale
        exact : one order of sums and one rounding
        """
        pair = self._pair(rows, values)
        outs = None if out is None else [out]
        (found,) = exact_outer(*pair, outs) if exact else outer(*pair, outs)
        return found

    def left(self, matrix: Array, rows: Array, values: Array) -> Array:
        """The matrix less what the factors make, in its place where the library can."""
        return subtract_outer([matrix], *self._pair(rows, values))[0]

    def energy(self, before: Array, own: Array) -> Array:
        """0-d: the squared norm that is gone when `own` of the second product has been sent."""
        xp = namespace(own)
        scale = self.scale[:, None]  # its square may be beyond float32
        return xp.sum((own * scale) * ((2 * before - own) * scale))

    def learned(self, state: State, directions: Array, sums: Array, unit: Array) -> State:
        """What is known of the tensor's directions when these have been sent.

        sums, unit : whole numbers [count, channels], and what one stands for in parts of the scale
        """
        xp = namespace(directions)
        # Whole numbers: their squares are summed exactly, and a root has one rounding everywhere.
        wide = xp.astype(sums, xp.float64)
        norms = xp.sqrt(xp.sum(wide * wide, axis=1)) * xp.astype(unit, xp.float64)
        waited = xp.astype(xp.take(state["age"], self.places, axis=0), xp.float64)
        brought = norms * xp.astype(self.scale, xp.float64) / waited
        news = xp.astype(xp.clip(brought, 0.0, _HUGE), xp.float32)
        past = xp.astype(xp.take(state["spread"], self.places, axis=0), xp.float64) * (1 - _NEWS)
        # Both products are exact, so that it does not matter who adds before rounding.
        average = past + xp.astype(news, xp.float64) * _NEWS
        average = xp.where(average >= _TINY, average, xp.zeros_like(average))
        basis = xp.reshape(state["basis"], (-1, self.kernels.beside))
        basis = put(xp.asarray(basis, copy=True), self.places, directions)
        spread = xp.asarray(state["spread"], copy=True)
        age = state["age"] + 1
        return {
            "basis": xp.reshape(basis, (-1,)),
            "spread": put(spread, self.places, xp.astype(average, xp.float32)),
            "age": put(age, self.places, xp.ones_like(age[: self.places.shape[0]])),
        }

    def apart(self, rows: Array) -> Array:
        """Rows [count, side], with zeros in place of each other frequency, [n].

        So those of two frequencies are orthogonal.
        """
        xp, count = namespace(rows), self.kernels.count
        every = xp.arange(count, dtype=xp.int64, device=device_of(rows))
        own = (self.wave[:, None] == every[None, :])[:, :, None]
        wide = xp.broadcast_to(rows[:, None, :], (rows.shape[0], count, rows.shape[1]))
        return xp.reshape(xp.where(own, wide, xp.zeros_like(wide)), (-1,))

    def back(self, flat: Array) -> Array:
        """The rows of `apart`, [count, side]."""
        xp, size = namespace(flat), self.places.shape[0]
        every = xp.arange(size, dtype=xp.int64, device=device_of(flat)) * self.kernels.count
        return xp.take(xp.reshape(flat, (size * self.kernels.count, -1)), every + self.wave, axis=0)

    def _told(self, product: Array) -> Array:
        """In parts of the scale."""
        product = namespace(product).reshape(product, (self.places.shape[0], -1))
        return product / self.scale[:, None]

    def _pair(self, rows: Array, values: Array) -> tuple[list[Array], list[Array]]:
        values = self._tensor_directions(values * self.scale[:, None])
        return ([rows], [values]) if self.kernels.last else ([values], [rows])

    def _tensor_directions(self, values: Array) -> Array:
        """[count, channels] as directions of the whole tensor, [count, channels * frequencies]."""
        xp = namespace(values)
        if self.kernels.last:
            cube = values[:, :, None] * self.waves[:, None, :]
        else:
            cube = self.waves[:, :, None] * values[:, None, :]
        return xp.reshape(cube, (values.shape[0], -1))


_KEPT = 8  # directions that a frequency keeps at least; few of all travel in a step
_SILENT = 2.0**-5  # of the largest: what each direction is thought to bring at least
_TINY, _HUGE = 2.0**-126, 2.0**127  # of float32
_BITS = 15  # of a mean gradient's frequencies, where directions are sought in integers


class Frequencies(Method):
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
        self.shapes = tuple(kernel.shape for kernel in kernels)
        pairs = list(zip(self.kernels, self.sizes, strict=True))
        left = [(size, it.across) for it, size in pairs]
        right = [(size, it.beside) for it, size in pairs]
        # Numbers are told in parts of what is expected: one scale for a tensor.
        self._left, self._right = (
            FixedPointColumns(
                [(1, size * side) for size, side in each],
                most=most(max(side for _, side in each)),
            )
            for each in (left, right)
        )
        # With zeros in place of other frequencies; see RoundRobin.apart.
        self._left_rows, self._right_rows = (
            Orthonormal(
                [
                    (size, kernel.count * side)
                    for kernel, (size, side) in zip(kernels, each, strict=True)
                ]
            )
            for each in (left, right)
        )
        self._each = [
            min(it.across, it.beside, max(_KEPT, -(-2 * size // it.count))) for it, size in pairs
        ]
        self._all = [kernel.count * each for kernel, each in zip(kernels, self._each, strict=True)]
        # Each frequency as a tensor of its own, for the first directions.
        self._first = LowRank(
            [(kernel.across, kernel.beside) for kernel in kernels for _ in range(kernel.count)],
            [
                each
                for kernel, each in zip(kernels, self._each, strict=True)
                for _ in range(kernel.count)
            ],
        )

    @classmethod
    def together(cls, parts: Sequence[Method]) -> list[Method]:
        mine = [part for part in parts if isinstance(part, cls)]
        kernels = [kernel for part in mine for kernel in part.kernels]
        return [cls(kernels, [size for part in mine for size in part.sizes])]

    def split(self, state: State) -> list[State]:
        one = [1] * len(self.sizes)
        basis = [
            count * kernel.beside for count, kernel in zip(self._all, self.kernels, strict=True)
        ]
        each = self._all
        return cut_up(
            state, {"basis": basis, "spread": each, "age": each, "left": one, "right": one}
        )

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
        p = [visit.times_directions(own) for visit, own in zip(visits, matrices, strict=True)]
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
        old = [visit.directions for visit in visits]
        new = _orthonormal(self._right_rows, visits, whole, old)
        kept, means, states, energies = [], [], [], []
        for at, it in enumerate(visits):
            kept.append(it.left(matrices[at], rows[at], sent[at]))
            out = None if outs is None else outs[at]
            means.append(it.mean(rows[at], values[at], out, exact=exact))
            energies.append(it.energy(held[at], sent[at]))
            unit_of = self._right.split(unit)[at][0, :1]
            states.append(it.learned(known[at], new[at], whole[at], unit_of))
        following = {name: join([state[name] for state in states]) for name in states[0]}
        following |= {"left": left, "right": right}
        return Outcome(kept, means, following, xp.sum(xp.stack(energies)))

    def _visited(self, state: State, place: int) -> RoundRobin:
        """Those of a tensor's directions that are expected to bring most."""
        xp, it = namespace(state["spread"]), self.kernels[place]
        spread, age = (xp.astype(state[name], xp.float64) for name in ("spread", "age"))
        spread = xp.maximum(spread, xp.max(spread) * _SILENT)
        expected = xp.astype(xp.clip(spread * age, _TINY, _HUGE), xp.float32)
        places = largest(orders(expected), self.sizes[place])
        basis = xp.reshape(state["basis"], (-1, it.beside))
        return RoundRobin.of(it, places, expected, basis, self._each[place])

    def _numbers(self, columns: FixedPointColumns, flat: Array) -> list[Array]:
        """[size] as one [directions, channels] for each tensor."""
        pieces = zip(columns.split(flat), self.sizes, strict=True)
        return [namespace(it).reshape(it, (size, -1)) for it, size in pieces]


def _orthonormal(
    rows_of: Orthonormal,
    visits: Sequence[RoundRobin],
    rows: Sequence[Array],
    instead: Sequence[Array] | None = None,
) -> list[Array]:
    """Rows of each tensor, [directions, side], as orthonormal ones of the same frequencies."""

    def apart(factors: Sequence[Array]) -> Array:
        return join([visit.apart(own) for visit, own in zip(visits, factors, strict=True)])

    flat = rows_of(apart(rows), None if instead is None else apart(instead))
    pairs = zip(visits, rows, strict=True)
    sizes = [it.kernels.count * own.shape[0] * own.shape[1] for it, own in pairs]
    return [visit.back(own) for visit, own in zip(visits, split(flat, sizes), strict=True)]


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
