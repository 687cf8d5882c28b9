"""Which neurons go, into which, and what their readers add to make up for it.

A *group* is n neurons (or channels) that can only shrink together; its *readers* are the layers
that take them in. Neuron j is replaced, for each reader, by  factor * h_i + constant  with the
factor and constant of least squares on the activations the reader saw, so the reader's weights of
i become a_i + factor * a_j and its bias grows by constant * a_j. Removing a dead neuron, or turning
one that never varies into a bias, is the case of no survivor.

What this changes in the reader's output is a sum of a_j r_j over all merged neurons, r_j being what
least squares left. Its size is followed exactly, correlations included, for each offset of the
reader's kernel; offsets are added by the triangle inequality. So the relative change reported here
is a bound on the rows that were measured, and equality for a plain linear layer.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from .similarity import correlations

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Reader:
    """One layer that takes in the group, and what it saw.

    Attributes
    ----------
    name
        For reports.
    weights
        [offsets, outputs, n]: offsets are the places of a convolution's kernel, or the positions
        that a flattened channel has in a linear layer; 1 for a linear layer.
    fit, check
        [n + 1, n + 1] each: the sum of (h, 1) (h, 1)^T over samples (rows, or rows and positions).
        Factors come from `fit`, the change is measured by `check`; they may be the same.
    output_norm
        The root of the sum of squares of what the layer put out, on the rows of `check`.
    takes_constant
        Whether a constant input can become a bias: there is one, and no zero padding around h.
    """

    name: str
    weights: Floats
    fit: Floats
    check: Floats
    output_norm: float
    takes_constant: bool

    def __post_init__(self) -> None:
        n = self.weights.shape[-1]
        for what, moment in (("fit", self.fit), ("check", self.check)):
            if self.weights.ndim != 3 or moment.shape != (n + 1, n + 1):
                raise ValueError(
                    f"Reader {self.name}: got weights of shape {self.weights.shape} and {what} of "
                    f"{moment.shape}, expected [offsets, outputs, n] and [n + 1, n + 1]. Give "
                    "statistics of all n neurons and of the constant 1."
                )


@dataclass(frozen=True)
class Merge:
    """One neuron that went: into `survivor` (None: into a constant, or into nothing).

    `factors` and `constants` have one number for each reader of the group.
    """

    neuron: int
    survivor: int | None
    factors: tuple[float, ...]
    constants: tuple[float, ...]


@dataclass(frozen=True)
class Choice:
    """What goes in one group in one event; `changes` is the relative change of each reader."""

    width: int
    merges: tuple[Merge, ...]
    changes: tuple[float, ...]

    @property
    def kept(self) -> NDArray[np.int64]:
        gone = {merge.neuron for merge in self.merges}
        return np.array([i for i in range(self.width) if i not in gone], np.int64)


def choose(
    readers: Sequence[Reader],
    *,
    tolerance: float,
    share: float = 1.0,
    min_width: int = 1,
    round_to: int = 1,
) -> Choice:
    """Merge the cheapest neurons while every reader's output changes by at most `tolerance`.

    Parameters
    ----------
    readers
        One or more; all see the same n neurons.
    tolerance
        The relative change of each reader's output in this event, in (0, 1).
    share
        The most of the neurons that may go, in (0, 1].
    min_width, round_to
        At least so many neurons stay, and a multiple of `round_to` (or all of them).
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance: got {tolerance}, expected above 0 and below 1. 0.01 is mild.")
    if not readers:
        raise ValueError("choose: got no readers; a group nobody reads has no bound. Leave it.")
    width = readers[0].weights.shape[-1]
    most = min(width - max(min_width, 1), int(share * width))
    changes = [_Change(reader) for reader in readers]
    merges: list[Merge] = []
    trail = [tuple(change.relative for change in changes)]
    for merge in _cheapest(readers, width):
        if len(merges) >= most:
            break
        steps = [change.with_merge(merge, place) for place, change in enumerate(changes)]
        if max(step.relative for step in steps) > tolerance:
            break
        for step in steps:
            step.take()
        merges.append(merge)
        trail.append(tuple(change.relative for change in changes))
    left = -(-(width - len(merges)) // round_to) * round_to
    taken = max(width - left, 0)
    return Choice(width, tuple(merges[:taken]), trail[taken])


def fold(
    weights: Floats, bias: Floats | None, choice: Choice, place: int
) -> tuple[Floats, Floats | None]:
    """Return a reader's weights [offsets, outputs, kept] and bias [outputs] after the merges.

    `place` is the reader's place among the readers that `choose` was given.
    """
    weights = np.array(weights, np.float64)
    bias = None if bias is None else np.array(bias, np.float64)
    for merge in choice.merges:
        gone = weights[:, :, merge.neuron]
        if merge.survivor is not None:
            weights[:, :, merge.survivor] += merge.factors[place] * gone
        if bias is not None:
            bias += merge.constants[place] * gone.sum(axis=0)
    return weights[:, :, choice.kept], bias


class _Change:
    """What the merges so far change in one reader: sum over offsets of |sum_j a_j r_j|."""

    def __init__(self, reader: Reader) -> None:
        self.reader = reader
        offsets, outputs, n = reader.weights.shape
        # E|delta|^2 of each offset; a_j and E[r_j (h, 1)] of each merge, for crossed terms.
        self.squares = np.zeros(offsets)
        self.gone = np.empty((offsets, 8, outputs))
        self.seen = np.empty((8, n + 1))
        self.taken = 0

    @property
    def relative(self) -> float:
        return _relative(self.squares, self.reader.output_norm)

    def with_merge(self, merge: Merge, place: int) -> _Step:
        """Return what one more merge would make of it."""
        n = self.reader.weights.shape[-1]
        terms = [(merge.neuron, 1.0), (n, -merge.constants[place])]
        if merge.survivor is not None:
            terms.append((merge.survivor, -merge.factors[place]))
        # r_j is a combination of three of the n + 1 columns: never a product with all.
        past, gone = self.seen[: self.taken], self.reader.weights[:, :, merge.neuron]
        seen, shared = np.zeros(n + 1), np.zeros(self.taken)
        for index, value in terms:
            seen += value * self.reader.check[index]
            shared += value * past[:, index]
        own = sum(value * float(seen[index]) for index, value in terms)
        crossed = (self.gone[:, : self.taken] @ gone[:, :, None])[:, :, 0] @ shared
        squares = self.squares + (gone**2).sum(axis=1) * own + 2 * crossed
        return _Step(self, np.maximum(squares, 0.0), gone, seen)


@dataclass(frozen=True)
class _Step:
    change: _Change
    squares: Floats
    gone: Floats
    seen: Floats

    @property
    def relative(self) -> float:
        return _relative(self.squares, self.change.reader.output_norm)

    def take(self) -> None:
        change = self.change
        if change.taken == len(change.seen):
            change.gone = np.concatenate([change.gone, np.empty_like(change.gone)], axis=1)
            change.seen = np.concatenate([change.seen, np.empty_like(change.seen)])
        change.gone[:, change.taken], change.seen[change.taken] = self.gone, self.seen
        change.squares, change.taken = self.squares, change.taken + 1


def _relative(squares: Floats, norm: float) -> float:
    total = float(np.sqrt(squares).sum())
    if total == 0:
        return 0.0
    return total / norm if norm > 0 else math.inf


def _cheapest(readers: Sequence[Reader], width: int) -> Iterator[Merge]:
    """Yield merges from the cheapest on; who has taken in another stays, who is gone is not asked.

    Column `width` stands for no survivor. Ties go to the lower number, on every rank alike.
    """
    costs = np.zeros((width, width + 1))
    for reader in readers:
        costs += _costs(reader)
    np.fill_diagonal(costs, np.inf)
    # A survivor that helps nothing is none: the dead and the constant go without one.
    costs[:, :-1][costs[:, :-1] >= costs[:, -1:]] = np.inf
    best = costs.argmin(axis=1)
    lowest = costs[np.arange(width), best]
    while True:
        neuron = int(lowest.argmin())
        if not np.isfinite(lowest[neuron]):
            return
        survivor = int(best[neuron])
        yield _merge(readers, neuron, None if survivor == width else survivor)
        costs[:, neuron] = np.inf
        costs[neuron, :] = np.inf
        lowest[neuron] = np.inf
        if survivor < width:
            costs[survivor, :] = np.inf
            lowest[survivor] = np.inf
        # Column `width` stays, so there is always a finite cost left.
        again = np.flatnonzero((best == neuron) & np.isfinite(lowest))
        best[again] = costs[again].argmin(axis=1)
        lowest[again] = costs[again, best[again]]


def _costs(reader: Reader) -> Floats:
    """Return [n, n + 1]: squared relative change by each merge alone, by the statistics to fit."""
    power, spread = np.diagonal(reader.fit)[:-1], _spread(reader)
    alike = correlations(reader.fit / reader.fit[-1, -1], centred=reader.takes_constant)
    left = np.empty((len(power), len(power) + 1))
    left[:, :-1] = spread[:, None] * np.maximum(1 - alike**2, 0.0)
    left[:, -1] = spread
    # Rounding of 1 - r^2 must not order duplicates: what is below it counts as nothing.
    left[left <= 1e-12 * power[:, None]] = 0.0
    reach = np.linalg.norm(reader.weights, axis=1).sum(axis=0)  # [n]
    found: Floats = left * (reach[:, None] / max(reader.output_norm, np.finfo(float).tiny)) ** 2
    return found


def _spread(reader: Reader) -> Floats:
    """Return [n]: what is left of each neuron's power once the best constant is taken away."""
    power = np.diagonal(reader.fit)[:-1]
    if not reader.takes_constant:
        return np.array(power, np.float64)
    sums, samples = reader.fit[:-1, -1], reader.fit[-1, -1]
    found: Floats = np.maximum(power - sums**2 / samples, 0.0)
    return found


def _merge(readers: Sequence[Reader], neuron: int, survivor: int | None) -> Merge:
    factors, constants = [], []
    for reader in readers:
        fit, samples = reader.fit, reader.fit[-1, -1]
        mean = fit[:-1, -1] * (reader.takes_constant / samples)
        factor = 0.0
        if survivor is not None:
            power = fit[survivor, survivor] / samples
            spread = power - mean[survivor] ** 2
            if spread > 1e-12 * power:
                factor = (fit[neuron, survivor] / samples - mean[neuron] * mean[survivor]) / spread
        factors.append(float(factor))
        constant = mean[neuron] - (factor * mean[survivor] if survivor is not None else 0.0)
        constants.append(float(constant))
    return Merge(neuron, survivor, tuple(factors), tuple(constants))
