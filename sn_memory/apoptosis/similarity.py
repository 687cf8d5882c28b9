"""How alike two neurons are: by the weights that feed them, or by what they put out.

Weights are known without data, but two neurons may put out the same on all data there is and still
have different weights: the difference lies where no input ever is. So activations decide where
there are statistics of them, and weights where there are none.
"""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]


def angles(incoming: Floats) -> Floats:
    """Return the angle between the incoming weights of each two neurons.

    Parameters
    ----------
    incoming
        [n, inputs], a row for each neuron; a bias is one more column (its input is always one).

    Returns
    -------
    Floats
        [n, n] radians in [0, pi]. A neuron with no weights at all is at a right angle to all others
        and at none to itself.

    Notes
    -----
    The angle is 2 atan2(|u - v|, |u + v|) of the unit vectors (Kahan 2006, "How futile are mindless
    assessments of roundoff", section 12): the arc cosine of their product loses half the digits
    where the angle is small, and small angles are what is looked for.

    >>> angles(np.array([[1.0, 0.0], [2.0, 0.0], [0.0, 3.0]])).round(3).tolist()
    [[0.0, 0.0, 1.571], [0.0, 0.0, 1.571], [1.571, 1.571, 0.0]]
    """
    weights = np.asarray(incoming, np.float64)
    if weights.ndim != 2:
        raise ValueError(
            f"angles: got incoming weights of shape {weights.shape}, expected [neurons, inputs]. "
            "Reshape them to one row for each neuron."
        )
    norms = np.linalg.norm(weights, axis=1)
    units = weights / np.where(norms > 0, norms, 1.0)[:, None]
    found = np.empty((len(weights), len(weights)))
    # Row by row: all differences at once would take n times the memory of the weights.
    for row, unit in enumerate(units):
        apart = np.linalg.norm(units - unit, axis=1)
        together = np.linalg.norm(units + unit, axis=1)
        found[row] = 2 * np.arctan2(apart, together)
    found[norms == 0, :] = found[:, norms == 0] = np.pi / 2
    np.fill_diagonal(found, 0.0)
    return found


def correlations(moment: Floats, *, centred: bool) -> Floats:
    """Return how well each neuron's output is a multiple of each other one's, in [-1, 1].

    Parameters
    ----------
    moment
        [n + 1, n + 1], the mean of (h, 1) (h, 1)^T over samples; h are the n outputs.
    centred
        True: a constant may be added as well (this is the usual correlation); False: it may not.

    Returns
    -------
    Floats
        [n, n]; 0 for a neuron that is always zero (or, if centred, always the same).
    """
    moment = np.asarray(moment, np.float64)
    inner, mean = moment[:-1, :-1], moment[:-1, -1]
    power = np.diagonal(inner).copy()
    spread = power.copy()
    if centred:
        inner = inner - np.outer(mean, mean)
        spread = np.diagonal(inner).copy()
    # What is left of a subtraction below rounding of what was subtracted is no spread.
    alive = spread > 1e-12 * power
    scale = np.sqrt(np.where(alive, spread, 1.0))
    found: Floats = np.clip(inner / np.outer(scale, scale), -1.0, 1.0)
    found[~alive, :] = found[:, ~alive] = 0.0
    return found
