"""The distance of the ranks from their mean, by a few numbers that may be summed over the ranks.

Exact, it would need a sum of the whole model. Each rank instead makes WIDTH numbers of its weights:
rows of WIDTH elements are added with random signs, the same on all ranks. That is linear, and the
squared norm of a vector's numbers is on average that of the vector (the tug of war of Alon, Matias
and Szegedy 1996, with WIDTH copies that share signs). So the deviations of the numbers from their
mean over the ranks have the norm of the deviations of the weights, up to a standard deviation of
1 / sqrt(2 WIDTH), 4 %, if rows deviate independently. What partners hold of each other does not
enter: with a codec their copies lag behind, and are nearer to each other than the ranks.
"""

from __future__ import annotations

import math

import numpy as np
import numpy.typing as npt

from ..codecs.base import Floats

WIDTH = 256
_SEED = 0  # shared by all ranks


def signs(rows: int) -> Floats:
    """+1 or -1 for each row of WIDTH elements, [rows] float32, the same on all ranks."""
    return np.random.default_rng(_SEED).choice(np.array([-1, 1], np.float32), rows)


def rows_of(n: int) -> int:
    """Rows of n elements, the last one filled up with zeros."""
    return -(-n // WIDTH)


def spread(total: npt.NDArray[np.float64], ranks: int) -> float:
    """Root mean square distance to the mean over the root mean square norm.

    total : [WIDTH + 2] the sum over the ranks of their numbers, of the squared norm of these, and
        of the squared norm of the weights
    """
    numbers, squares, norms = total[:-2], float(total[-2]), float(total[-1])
    # Of equal ranks rounding could leave less than nothing.
    apart = max(squares - float(numbers @ numbers) / ranks, 0.0)
    return math.sqrt(apart / norms) if norms else 0.0
