"""What mixing does: how fast a topology brings ranks together, and how far apart they are.

A step of gossip is x <- W x with a doubly stochastic W: rows sum to one, so equal values stay as
they are; columns do, so the mean over the ranks stays as it is. What is left of a disagreement
after some steps is bounded by the second largest singular value of their product (Boyd et al. 2006;
Ying et al. 2021, section 3).
"""

from __future__ import annotations

import numpy as np
import numpy.typing as npt

from .topology import Topology

Matrix = npt.NDArray[np.float64]


def is_doubly_stochastic(matrix: Matrix) -> bool:
    """Whether a matrix [r, r] has no negative entry and rows and columns that sum to one."""
    # Each sum of r terms is rounded r times at most.
    slack = len(matrix) * np.finfo(float).eps
    sums = np.concatenate([matrix.sum(0), matrix.sum(1)])
    return bool(matrix.min() >= 0 and abs(sums - 1).max() <= slack)


def product(topology: Topology, steps: int | None = None) -> Matrix:
    """The matrix [r, r] of the first `steps` steps together; None is a whole period."""
    found = np.eye(topology.ranks)
    for step in range(topology.steps if steps is None else steps):
        found = topology.at(step).mix(found)
    return found


def remainder(matrix: Matrix) -> float:
    """The part of a disagreement that may be left after the matrix [r, r], in [0, 1]."""
    return float(np.linalg.norm(matrix - 1 / len(matrix), 2))


def spectral_gap(topology: Topology) -> float:
    """1 minus what is left per step, from one period: 1 is exact, 0 would be no mixing.

    The geometric mean over the steps of a period; a single one-peer step has no gap of its own.
    """
    left = remainder(product(topology))
    if left <= _rounding(topology, topology.steps):
        return 1.0
    return float(1 - left ** (1 / topology.steps))


def steps_to_exact(topology: Topology) -> int | None:
    """Steps from the first one after which all ranks hold the mean; None if no period ends so."""
    found = np.eye(topology.ranks)
    for step in range(topology.steps):
        if remainder(found) <= _rounding(topology, step):
            return step
        found = topology.at(step).mix(found)
    return topology.steps if remainder(found) <= _rounding(topology, topology.steps) else None


def _rounding(topology: Topology, steps: int) -> float:
    """What rounding may leave in the norm: some ulps of an entry a step, r entries a row."""
    return 4 * topology.ranks * (steps + 1) * float(np.finfo(float).eps)


def consensus_distance(weights: npt.ArrayLike) -> float:
    """Root of the mean squared distance between the ranks' weights, [r, n], and their mean.

    >>> consensus_distance([[1.0, 0.0], [-1.0, 0.0]])
    1.0
    """
    values = np.asarray(weights, np.float64)
    return float(np.sqrt(((values - values.mean(0)) ** 2).sum(1).mean()))
