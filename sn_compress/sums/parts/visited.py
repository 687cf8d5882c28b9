"""Visited: the directions of one tensor's frequencies that travel in a step.

A direction q of the frequency with wave c is the direction q x c of the whole tensor, so that the
tensor is multiplied where it lies, and no spectrum of it is made.
"""

from __future__ import annotations

from dataclasses import dataclass

from ...devices.arrays import Array, device_of, namespace, products, put
from ...ops.linear.kernels import Kernels, waves
from ...ops.linear.products import exact_outer, outer, subtract_outer, times_columns, times_rows
from ...ops.words.scales import covering, units
from .base import State

_NEWS = 5 / 16  # weight of the last time in the average of what a direction brought
_TINY, _HUGE = 2.0**-126, 2.0**127  # of float32


@dataclass(frozen=True)
class Visited:
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
    ) -> Visited:
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
