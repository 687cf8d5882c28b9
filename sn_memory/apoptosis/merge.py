"""Which neurons go, and what the readers of those that stay add to make up for them.

A *group* is n neurons (or channels) that can only shrink together; its *readers* are the layers
that take them in. Neuron j is replaced, for each reader, by a sum over all that stay, and a
constant, `sum_k B_jk h_k + b_j`, by least squares on the activations the reader saw; so the
reader's weights of k become a_k + B_jk a_j and its bias grows by b_j a_j. A dead neuron goes for
nothing, and one that never varies becomes a bias.

What this changes in the reader's output is measured: the replacement is computed on samples that
the fit has not seen, and the reader's weights are applied to what is left of each neuron. So the
relative change reported here is that of those samples, for linear layers and convolutions alike.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from dataclasses import dataclass, field

import numpy as np
from numpy.typing import NDArray

from .order import order
from .reader import Reader
from .refit import Fold, change, refit

Floats = NDArray[np.float64]


@dataclass(frozen=True)
class Merge:
    """One neuron that went: into `survivor` if one of the others said nearly the same, else None.

    `survivor` also inherits what the optimizer remembers.
    """

    neuron: int
    survivor: int | None


@dataclass(frozen=True)
class Choice:
    """What goes in one group in one event, by number.

    Attributes
    ----------
    width
        Neurons before.
    merges
        Those that go.
    changes
        The relative change of what each reader puts out.
    folds
        For each reader [gone, kept + 1]: what stands for each neuron, the constant last.
    """

    width: int
    merges: tuple[Merge, ...]
    changes: tuple[float, ...]
    folds: tuple[Fold, ...] = field(repr=False)

    @property
    def gone(self) -> NDArray[np.int64]:
        return np.array([merge.neuron for merge in self.merges], np.int64)

    @property
    def kept(self) -> NDArray[np.int64]:
        return np.setdiff1d(np.arange(self.width), self.gone)

    def text(self) -> str:
        """Return the decision to the last bit, for ranks to compare."""
        found = hashlib.sha256(b"".join(fold.tobytes() for fold in self.folds))
        return f"{self!r} {found.hexdigest()}"


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
        raise ValueError("choose: got no readers; a group nobody reads changes nothing. Leave it.")
    width = readers[0].weights.shape[-1]
    most = min(width - max(min_width, 1), int(share * width))
    # Widths that would do, the widest first.
    widths = [left for left in range(width - 1, width - most - 1, -1) if left % round_to == 0]
    best = Choice(
        width, (), (0.0,) * len(readers), tuple(np.zeros((0, width + 1)) for _ in readers)
    )
    if not widths:
        return best
    sequence = order(readers, width - widths[-1])
    low, high = 0, len(widths)
    while low < high:
        middle = (low + high) // 2
        found = _attempt(readers, np.sort(sequence[: width - widths[middle]]))
        if max(found.changes) <= tolerance:
            best, low = found, middle + 1
        else:
            high = middle
    return best


def _attempt(readers: Sequence[Reader], gone: NDArray[np.int64]) -> Choice:
    """Return the choice that these go."""
    width = readers[0].weights.shape[-1]
    kept = np.setdiff1d(np.arange(width), gone)
    fits = [refit(reader.fit, gone, kept, reader.takes_constant) for reader in readers]
    changes = tuple(
        change(reader.weights, reader.samples, reader.output_norm, gone, kept, fold)
        for reader, (fold, _) in zip(readers, fits, strict=True)
    )
    # A survivor has to be one for all readers, as it has one memory.
    heirs = np.stack([heir for _, heir in fits])
    same = (heirs == heirs[0]).all(axis=0)
    merges = tuple(
        Merge(int(j), int(heir) if agreed and heir >= 0 else None)
        for j, heir, agreed in zip(gone, heirs[0], same, strict=True)
    )
    return Choice(width, merges, changes, tuple(fold for fold, _ in fits))


def fold(
    weights: Floats, bias: Floats | None, choice: Choice, place: int
) -> tuple[Floats, Floats | None]:
    """Return a reader's weights [offsets, outputs, kept] and bias [outputs] after the merges.

    `place` is the reader's place among the readers that `choose` was given.
    """
    weights, stands = np.asarray(weights, np.float64), choice.folds[place]
    gone = weights[:, :, choice.gone]
    left = weights[:, :, choice.kept] + gone @ stands[:, :-1]
    if bias is None:
        return left, None
    return left, np.asarray(bias, np.float64) + gone.sum(axis=0) @ stands[:, -1]
