"""Where a convolution's gradient has its kernels, and the frequencies of a kernel.

torch lays kernels out as (out, in, height, width), Keras as (height, width, in, out). The DCT-II
over the axes of a kernel gathers what neighbours have in common in few numbers; channels have no
order, and so no frequencies.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cache

import numpy as np
import numpy.typing as npt

from ...devices.arrays import Constant

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
