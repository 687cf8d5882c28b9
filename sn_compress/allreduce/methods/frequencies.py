"""Frequencies: low-rank factors of a convolution's frequencies; each step sends the strongest.

A DCT-II over the axes of its kernels turns a gradient of shape (out, in, height, width) into
height * width matrices [out, in], one per frequency, and few of them contain most of its energy. A
direction of one of these has out + in numbers; a direction of the whole tensor, as in low rank, has
out + in * height * width. So several times as many fit the same words. Channels have no order, and
so no frequencies.

All ranks know which directions are sent, without a message. For each direction they keep how much
it contributed per step it had waited, and how long it has been waiting; those with the largest
product of both are sent. The contribution counts as at least a thirty-second of the strongest, so
that everything is sent eventually. Norms are computed from integers, and products and roots are
those that all libraries round alike.

The two rounds are those of low rank (`low_rank.py`); directions of two frequencies are orthogonal.
A direction q of the frequency with wave c is the direction q x c of the whole tensor, so the tensor
is multiplied in its memory layout, and its spectrum is never computed.
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
from .base import Method, Outcome, Send, State, Step, StepOptions, Summed
from .low_rank import LowRank, as_integers

MOST = 64  # numbers in a kernel; axes with more are not treated as a kernel
# float32 represents all multiples of 2**-22 up to 1; rounding to them removes differences in the
# last bits of hosts' cosines.
_GRID = 2.0**22


@dataclass(frozen=True)
class Kernels:
    """A tensor's axes: channels, and those of a kernel.

    Attributes
    ----------
    sides : of a kernel
    inputs : number of input channels, the axis next to the kernel's axes
    outputs : number of output channels, the axis at the other end of the tensor
    last : whether the kernel's axes are the last ones, as in torch; else the first, as in Keras
    """

    sides: tuple[int, ...]
    inputs: int
    outputs: int
    last: bool

    @property
    def count(self) -> int:
        """Number of frequencies: as many as numbers in a kernel."""
        return math.prod(self.sides)

    @property
    def shape(self) -> tuple[int, int]:
        """Shape as a matrix: output channels versus all other axes, by a plain reshape."""
        inner = self.inputs * self.count
        return (self.outputs, inner) if self.last else (inner, self.outputs)


def kernels_of(shape: Sequence[int]) -> Kernels | None:
    """Return the kernels of a tensor; None if it has none.

    torch's layout is (out, in, height, width), Keras's (height, width, in, out). So in a tensor of
    3 to 5 axes the kernel is at the end where the product of axes is smaller; the last if equal.

    >>> kernels_of((64, 32, 3, 3))
    Kernels(sides=(3, 3), inputs=32, outputs=64, last=True)
    >>> kernels_of((3, 3, 32, 64))
    Kernels(sides=(3, 3), inputs=32, outputs=64, last=False)
    >>> kernels_of((64, 32, 1, 1)), kernels_of((128, 1024))
    (None, None)
    """
    if not 3 <= len(shape) <= 5 or not math.prod(shape):
        return None
    if math.prod(shape[2:]) <= math.prod(shape[:-2]):
        sides, outputs, inputs, last = shape[2:], shape[0], shape[1], True
    else:
        sides, inputs, outputs, last = shape[:-2], shape[-2], shape[-1], False
    if not 1 < math.prod(sides) <= MOST:
        return None
    return Kernels(tuple(sides), inputs, outputs, last)


@cache
def waves(sides: tuple[int, ...]) -> Constant:
    """Return the DCT-II matrix for kernels of these sides, [count, count] float32; row: frequency.

    Orthonormal up to the rounding to multiples of 2**-22.
    """
    basis: npt.NDArray[np.float64] = np.ones((1, 1))
    for side in sides:
        row, column = np.indices((side, side))
        matrix = np.cos(np.pi * row * (2 * column + 1) / (2 * side)) * math.sqrt(2 / side)
        matrix[0] = math.sqrt(1 / side)
        basis = np.asarray(np.kron(basis, matrix), np.float64)
    return Constant((np.round(basis * _GRID) / _GRID).astype(np.float32))


_NEWS = 5 / 16  # weight of the last contribution in a direction's moving average; see rows.py
_TINY, _HUGE = 2.0**-126, 2.0**127  # the smallest normal float32, and nearly the largest


@dataclass(frozen=True)
class RoundRobin:
    """The directions of one tensor that are sent in a step, [count], of one frequency each.

    Attributes
    ----------
    kernels : the layout of the tensor
    places : [count] int64 ascending, indices into all directions, which are ordered by frequency
    wave, waves : the frequency of each, [count] int64, and its row of the DCT matrix,
        [count, frequencies] float32
    directions : [count, input channels] float32, as last sent
    scale : [count] float32, approximate expected contribution of each
    """

    kernels: Kernels
    places: Array
    wave: Array
    waves: Array
    directions: Array
    scale: Array

    @classmethod
    def of(
        cls, kernels: Kernels, places: Array, expected: Array, basis: Array, per_frequency: int
    ) -> RoundRobin:
        """Create from the indices of directions.

        expected : [all directions] float32, positive
        basis : [all directions, channels] float32
        per_frequency : number of directions per frequency
        """
        xp = namespace(basis)
        wave = places // per_frequency
        return cls(
            kernels,
            places,
            wave,
            xp.take(waves(kernels.sides).on(basis), wave, axis=0),
            xp.take(basis, places, axis=0),
            units(covering(xp.take(expected, places, axis=0))[0]),
        )

    def times_directions(self, matrix: Array) -> Array:
        """Return the first product of a step, [count, output channels]."""
        factor = self._tensor_directions(self.directions)
        times = times_rows if self.kernels.last else times_columns
        return self._scaled(times([factor], [matrix]))

    def times_rows(self, rows: Array, matrix: Array) -> Array:
        """Return the second product, [count, input channels].

        rows : [count, output channels]
        """
        times = times_columns if self.kernels.last else times_rows
        count, kernels = rows.shape[0], self.kernels
        product = times([rows], [matrix])
        xp = namespace(product)
        if kernels.last:
            cube = xp.reshape(product, (count, kernels.inputs, kernels.count))
            product = products(cube, self.waves[:, :, None])
        else:
            cube = xp.reshape(product, (count, kernels.count, kernels.inputs))
            product = products(self.waves[:, None, :], cube)
        return self._scaled(product)

    def mean(self, rows: Array, values: Array, out: Array | None, *, exact: bool) -> Array:
        """Return the product of the factors: the tensor as a matrix.

        values : of the second product, divided by the scale
        exact : use a fixed order of sums and a single rounding
        """
        pair = self._pair(rows, values)
        outs = None if out is None else [out]
        (product,) = exact_outer(*pair, outs) if exact else outer(*pair, outs)
        return product

    def residual(self, matrix: Array, rows: Array, values: Array) -> Array:
        """Return the matrix minus the product of the factors, in place if possible."""
        return subtract_outer([matrix], *self._pair(rows, values))[0]

    def energy(self, before: Array, sent: Array) -> Array:
        """Return by how much sending `sent` of the second product reduces the squared norm, 0-d."""
        xp = namespace(sent)
        scale = self.scale[:, None]  # its square may overflow float32
        return xp.sum((sent * scale) * ((2 * before - sent) * scale))

    def learned(self, state: State, directions: Array, sums: Array, unit: Array) -> State:
        """Return the state of all directions after these were sent.

        sums, unit : integers [count, channels], and their unit, relative to the scale
        """
        xp = namespace(directions)
        # Squares of integers are summed exactly, and a root is rounded once everywhere.
        wide = xp.astype(sums, xp.float64)
        norms = xp.sqrt(xp.sum(wide * wide, axis=1)) * xp.astype(unit, xp.float64)
        waited = xp.astype(xp.take(state["age"], self.places, axis=0), xp.float64)
        brought = norms * xp.astype(self.scale, xp.float64) / waited
        news = xp.astype(xp.clip(brought, 0.0, _HUGE), xp.float32)
        past = xp.astype(xp.take(state["spread"], self.places, axis=0), xp.float64) * (1 - _NEWS)
        # Both products are exact, so that a fused multiply-add rounds as two operations do.
        average = past + xp.astype(news, xp.float64) * _NEWS
        # Some processors flush subnormal numbers to zero, so do it on all.
        average = xp.where(average >= _TINY, average, xp.zeros_like(average))
        basis = xp.reshape(state["basis"], (-1, self.kernels.inputs))
        basis = put(xp.asarray(basis, copy=True), self.places, directions)
        spread = xp.asarray(state["spread"], copy=True)
        age = state["age"] + 1
        return {
            "basis": xp.reshape(basis, (-1,)),
            "spread": put(spread, self.places, xp.astype(average, xp.float32)),
            "age": put(age, self.places, xp.ones_like(age[: self.places.shape[0]])),
        }

    def embed(self, rows: Array) -> Array:
        """Pad rows [count, side] with zeros at all other frequencies, to [n].

        This makes rows of different frequencies orthogonal, as in the whole tensor.
        """
        xp, count = namespace(rows), self.kernels.count
        frequencies = xp.arange(count, dtype=xp.int64, device=device_of(rows))
        here = (self.wave[:, None] == frequencies[None, :])[:, :, None]
        wide = xp.broadcast_to(rows[:, None, :], (rows.shape[0], count, rows.shape[1]))
        return xp.reshape(xp.where(here, wide, xp.zeros_like(wide)), (-1,))

    def extract(self, flat: Array) -> Array:
        """Invert `embed`: return the rows, [count, side]."""
        xp, size, count = namespace(flat), self.places.shape[0], self.kernels.count
        starts = xp.arange(size, dtype=xp.int64, device=device_of(flat)) * count
        return xp.take(xp.reshape(flat, (size * count, -1)), starts + self.wave, axis=0)

    def _scaled(self, product: Array) -> Array:
        """Divide a product by the scale."""
        product = namespace(product).reshape(product, (self.places.shape[0], -1))
        return product / self.scale[:, None]

    def _pair(self, rows: Array, values: Array) -> tuple[list[Array], list[Array]]:
        values = self._tensor_directions(values * self.scale[:, None])
        return ([rows], [values]) if self.kernels.last else ([values], [rows])

    def _tensor_directions(self, values: Array) -> Array:
        """Expand [count, channels] to the whole tensor's directions, [count, channels * freqs]."""
        xp = namespace(values)
        if self.kernels.last:
            cube = values[:, :, None] * self.waves[:, None, :]
        else:
            cube = self.waves[:, :, None] * values[:, None, :]
        return xp.reshape(cube, (values.shape[0], -1))


_KEPT = 8  # minimum number of directions kept per frequency; only a few are sent in a step
_LEAST = 2.0**-5  # minimum expected contribution of a direction, relative to the largest
_BITS = 15  # bits of a mean gradient's frequencies when directions are computed in integers


class Frequencies(Method):
    """Sends the strongest directions of each tensor's mean gradient, each of one frequency.

    Parameters
    ----------
    kernels : the layout of each tensor
    sizes : number of directions of each sent per step, 1 to frequencies times the fewer channels
    """

    rounds = 2
    settings = ("kernels", "sizes")

    def __init__(self, kernels: Sequence[Kernels], sizes: Sequence[int]) -> None:
        for kernel, size in zip(kernels, sizes, strict=True):
            high = kernel.count * min(kernel.outputs, kernel.inputs)
            if not 1 <= size <= high:
                raise CompressError(
                    f"Frequencies: {size!r} directions of {kernel}; expected 1 to {high}"
                )
        self.kernels, self.sizes = tuple(kernels), tuple(sizes)
        self.shapes = tuple(kernel.shape for kernel in kernels)
        pairs = list(zip(self.kernels, self.sizes, strict=True))
        left = [(size, kernel.outputs) for kernel, size in pairs]
        right = [(size, kernel.inputs) for kernel, size in pairs]
        # Numbers are sent divided by their expected magnitude, so a tensor needs only one scale.
        self._left, self._right = (
            FixedPointColumns(
                [(1, size * side) for size, side in factors],
                most=most(max(side for _, side in factors)),
            )
            for factors in (left, right)
        )
        # With zeros at other frequencies; see RoundRobin.embed.
        self._left_rows, self._right_rows = (
            Orthonormal(
                [(size, k.count * side) for k, (size, side) in zip(kernels, of, strict=True)]
            )
            for of in (left, right)
        )
        # Directions per frequency: twice as many as are sent if frequencies contribute equally.
        self._known = [
            min(kernel.outputs, kernel.inputs, max(_KEPT, -(-2 * size // kernel.count)))
            for kernel, size in pairs
        ]
        self._all = [kernel.count * n for kernel, n in zip(kernels, self._known, strict=True)]
        # Each frequency as a separate tensor, to compute the first directions.
        matrices = [
            ((kernel.outputs, kernel.inputs), known)
            for kernel, known in zip(kernels, self._known, strict=True)
            for _ in range(kernel.count)
        ]
        self._first = LowRank([shape for shape, _ in matrices], [known for _, known in matrices])

    def lengths(self) -> dict[str, Sequence[int]]:
        one, count = [1] * len(self.sizes), self._all
        basis = [n * kernel.inputs for n, kernel in zip(count, self.kernels, strict=True)]
        return {"basis": basis, "spread": count, "age": count, "left": one, "right": one}

    def words(self, ranks: int) -> list[int]:
        return [self._left.words(ranks), self._right.words(ranks)]

    def new_state(self, like: Array) -> State:
        """Return directions [n]; spread and age of each, float32; two int32 exponents a tensor."""
        xp, at = namespace(like), device_of(like)
        zeros = xp.zeros(len(self.sizes), dtype=xp.int32, device=at)
        ones = xp.ones(sum(self._all), dtype=xp.float32, device=at)
        basis = self._first.new_state(like)["basis"]
        return {"basis": basis, "spread": ones, "age": 1 * ones, "left": zeros, "right": 1 * zeros}

    def begin(self, state: State, means: Sequence[Array]) -> State:
        xp = namespace(state["basis"])
        wholes, unit_of, known = [], [], []
        for kernel, count, mean in zip(self.kernels, self._all, means, strict=True):
            values, unit = as_integers(mean)
            matrices, step = _frequencies_of(kernel, values)
            wholes += matrices
            unit_of += [unit * step] * kernel.count
            known.append(xp.broadcast_to(xp.any(values != 0), (count,)))
        flat, _, factors = self._first.find_directions(state["basis"], wholes)
        norms = []
        for factor, unit in zip(factors, unit_of, strict=True):
            values, step = integers(factor, _BITS)
            norms.append(xp.sqrt(xp.sum(values * values, axis=1)) * step[:, 0] * unit)
        spread = xp.astype(xp.clip(join(norms), 0.0, _HUGE), xp.float32)
        return state | {"basis": flat, "spread": xp.where(join(known), spread, state["spread"])}

    def rescale(self, state: State, quarters: int) -> State:
        # Exponents stay: numbers are sent divided by their expected magnitude, from `spread`.
        return state | {"spread": state["spread"] * float(np.float32(2.0 ** (quarters / 4)))}

    def step(
        self,
        state: State,
        matrices: Sequence[Array],
        options: StepOptions,
        outs: Sequence[Array] | None = None,
    ) -> Step:
        xp, ranks = namespace(matrices[0]), options.ranks
        known = self.split(state)
        visits = [self._visited(one, place) for place, one in enumerate(known)]
        # The first round of low rank, for the chosen directions.
        p = [visit.times_directions(m) for visit, m in zip(visits, matrices, strict=True)]
        flat, finite = numbers(join([xp.reshape(product, (-1,)) for product in p]))
        received: Summed = yield Send(self._left.pack(flat, state["left"], ranks)[0], finite)
        sums, _, left = self._left.unpack(received.words, state["left"], ranks)
        # Orthonormal within each frequency, so that the residual follows from the factors.
        rows = _orthonormal(self._left_rows, visits, self._numbers(self._left, sums))
        triples = zip(visits, rows, matrices, strict=True)
        q, finite = numbers(join([xp.reshape(v.times_rows(p, m), (-1,)) for v, p, m in triples]))
        words, quantized = self._right.pack(q, state["right"], ranks)
        received = yield Send(words, finite)
        sums, unit, right = self._right.unpack(received.words, state["right"], ranks)
        mean = xp.astype(sums, xp.float32) * (unit * received.poison)
        parts = (self._numbers(self._right, flat) for flat in (q, quantized, mean, sums))
        held, sent, values, totals = parts
        old = [visit.directions for visit in visits]
        new = _orthonormal(self._right_rows, visits, totals, old)
        residuals, means, states, energies = [], [], [], []
        for at, visit in enumerate(visits):
            residuals.append(visit.residual(matrices[at], rows[at], sent[at]))
            out = None if outs is None else outs[at]
            means.append(visit.mean(rows[at], values[at], out, exact=options.exact))
            energies.append(visit.energy(held[at], sent[at]))
            unit_of = self._right.split(unit)[at][0, :1]
            states.append(visit.learned(known[at], new[at], totals[at], unit_of))
        following = {name: join([state[name] for state in states]) for name in states[0]}
        following |= {"left": left, "right": right}
        return Outcome(residuals, means, following, xp.sum(xp.stack(energies)))

    def _visited(self, state: State, place: int) -> RoundRobin:
        """Return the directions of a tensor with the most expected energy."""
        xp, kernels = namespace(state["spread"]), self.kernels[place]
        spread, age = (xp.astype(state[name], xp.float64) for name in ("spread", "age"))
        spread = xp.maximum(spread, xp.max(spread) * _LEAST)
        expected = xp.astype(xp.clip(spread * age, _TINY, _HUGE), xp.float32)
        places = largest(orders(expected), self.sizes[place])
        basis = xp.reshape(state["basis"], (-1, kernels.inputs))
        return RoundRobin.of(kernels, places, expected, basis, self._known[place])

    def _numbers(self, columns: FixedPointColumns, flat: Array) -> list[Array]:
        """Split [size] numbers into [directions, channels] of each tensor."""
        pieces = zip(columns.split(flat), self.sizes, strict=True)
        return [namespace(piece).reshape(piece, (size, -1)) for piece, size in pieces]


def _orthonormal(
    rows_of: Orthonormal,
    visits: Sequence[RoundRobin],
    rows: Sequence[Array],
    instead: Sequence[Array] | None = None,
) -> list[Array]:
    """Orthonormalize the rows of each tensor, [directions, side], within their frequencies."""

    def embed(factors: Sequence[Array]) -> Array:
        return join([visit.embed(m) for visit, m in zip(visits, factors, strict=True)])

    flat = rows_of(embed(rows), None if instead is None else embed(instead))
    sizes = [v.kernels.count * math.prod(m.shape) for v, m in zip(visits, rows, strict=True)]
    return [visit.extract(part) for visit, part in zip(visits, split(flat, sizes), strict=True)]


def _frequencies_of(kernels: Kernels, tensor: Array) -> tuple[list[Array], Array]:
    """Return a matrix of 15-bit integers for each frequency, [outputs, inputs], and their unit.

    tensor : the tensor as a matrix of 15-bit integers, float64
    """
    xp = namespace(tensor)
    wave = xp.round(xp.astype(waves(kernels.sides).on(tensor), xp.float64) * 2.0**_BITS)
    k, outputs, inputs = kernels.count, kernels.outputs, kernels.inputs
    # Products of 30 bits, at most 64 per kernel: float64 sums them exactly.
    if kernels.last:
        spectra = xp.reshape(tensor, (-1, k)) @ xp.permute_dims(wave, (1, 0))
        spectra = xp.permute_dims(xp.reshape(spectra, (outputs, inputs, k)), (2, 0, 1))
    else:
        spectra = xp.reshape(wave @ xp.reshape(tensor, (k, -1)), (k, inputs, outputs))
        spectra = xp.permute_dims(spectra, (0, 2, 1))
    numbers_of, unit = integers(xp.reshape(spectra, (1, -1)), _BITS)
    cube = xp.reshape(numbers_of, (k, outputs, inputs))
    return [cube[at, :, :] for at in range(k)], xp.reshape(unit, ()) * 2.0**-_BITS
