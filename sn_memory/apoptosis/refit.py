"""What stands for neurons that went: least squares on those that stay, and what it leaves.

First the one neuron that says most of it takes over, then all that stay take what is left. Only
the second fit is held back (ridge): a duplicate is replaced exactly, and what few rows show by
chance is not believed.
"""

from __future__ import annotations

import math
from typing import Final

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve

Floats = NDArray[np.float64]
Fold = NDArray[np.float64]
# What is left of a subtraction below this share of what was subtracted is rounding.
_ROUNDING = 1e-12
# The share of a neuron's variation that one other has to explain to inherit its memory.
_HEIR = 0.9
# Added to squares of one. Of 0.01 to 10, this left the fewest neurons within a tolerance, with 128
# rows for 1024 neurons as with thousands for 32.
RIDGE: Final = 0.01


def spread_of(moment: Floats, takes_constant: bool) -> tuple[Floats, Floats]:
    """Return second moments [n, n] and the roots of their diagonal.

    They are centred if a constant may be added. A neuron that does not vary has zeros there, and a
    root of one.
    """
    inner, sums = moment[:-1, :-1], moment[:-1, -1]
    power = np.diagonal(inner)
    if takes_constant:
        inner = inner - np.outer(sums, sums) / moment[-1, -1]
    inner = inner.copy()
    still = np.diagonal(inner) <= _ROUNDING * power
    inner[still, :] = inner[:, still] = 0.0
    return inner, np.sqrt(np.where(still, 1.0, np.diagonal(inner)))


def refit(
    moment: Floats, gone: NDArray[np.int64], kept: NDArray[np.int64], takes_constant: bool
) -> tuple[Fold, NDArray[np.int64]]:
    """Return what stands for each neuron that goes, and who inherits its memory.

    Parameters
    ----------
    moment
        [n + 1, n + 1]: the sum of (h, 1) (h, 1)^T over rows.
    gone, kept
        Numbers of neurons, ascending; together all.
    takes_constant
        Whether the last column may be other than zero.

    Returns
    -------
    fold
        [gone, kept + 1]
    heirs
        [gone]; -1: nobody.
    """
    inner, scale = spread_of(moment, takes_constant)
    stays = scale[kept]
    among = inner[np.ix_(kept, kept)] / np.outer(stays, stays)
    shared = inner[np.ix_(gone, kept)] / stays
    best = np.argmax(shared**2, axis=1)
    rows = np.arange(len(gone))
    factor = shared[rows, best]
    left = shared - factor[:, None] * among[best]
    # The best one explains all it can: what is left along it is rounding.
    left[np.abs(left) <= math.sqrt(_ROUNDING) * scale[gone][:, None]] = 0.0
    fold = np.zeros((len(gone), len(kept) + 1))
    # What is held back needs no more digits than float32 has.
    held_back = (among + RIDGE * np.eye(len(kept))).astype(np.float32)
    fold[:, :-1] = solve(held_back, left.T.astype(np.float32), assume_a="pos").T
    fold[rows, best] += factor
    fold[:, :-1] /= stays
    if takes_constant:
        mean = moment[:-1, -1] / moment[-1, -1]
        fold[:, -1] = mean[gone] - fold[:, :-1] @ mean[kept]
    own = np.diagonal(inner)[gone]
    close = (own > 0) & (factor**2 >= _HEIR * own)
    return fold, np.where(close, kept[best], -1)


def change(
    weights: Floats,
    samples: NDArray[np.floating],
    output_norm: float,
    gone: NDArray[np.int64],
    kept: NDArray[np.int64],
    fold: Fold,
) -> float:
    """Return how much the outputs of a layer move at the samples, relative to their norm.

    `weights` are [offsets, outputs, n], `samples` [samples, offsets, n].
    """
    fold, outgoing = fold.astype(samples.dtype), weights[:, :, gone].astype(samples.dtype)
    left = samples[:, :, gone] - samples[:, :, kept] @ fold[:, :-1].T - fold[:, -1]
    total = float(np.linalg.norm(np.tensordot(left, outgoing, axes=((1, 2), (0, 2)))))
    if total == 0:
        return 0.0
    return total / output_norm if output_norm > 0 else math.inf
