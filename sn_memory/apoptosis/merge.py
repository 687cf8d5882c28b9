"""Which neurons to remove, and how the readers of the remaining ones compensate.

A *group* is n neurons (or channels) that must shrink together; its *readers* are the layers that
take them as input. For each reader, neuron j is replaced by a sum over all remaining ones plus a
constant, `sum_k B_jk h_k + b_j`, by least squares on the activations the reader saw; so the
reader's weights of k become a_k + B_jk a_j and its bias grows by b_j a_j. A dead neuron is removed
at no cost, and one that never varies becomes a bias.

The change of the reader's output is measured: the replacement is computed on samples that the fit
has not seen, and the reader's weights are applied to the residual of each neuron. The reported
relative change is that of those samples, for linear layers and convolutions alike.

There are three steps. *Order*: the cost of a neuron is the square of its outgoing weights times its
residual after compensation by all remaining ones (ridge regression) or by the most similar one,
whichever is smaller. The former is one over its entry in the inverse of the second moments, which a
formula updates after a removal (optimal brain surgeon, Hassibi and Stork 1993; for layers, Frantar
and Alistarh 2022, arXiv 2208.11580). Kernel offsets are taken as independent: this only gives an
order, and the actual change is measured. *Refit*: the neuron that explains most of it takes over,
then all remaining ones fit the residual. Only the second fit is regularized (ridge): a duplicate is
replaced exactly, and chance correlations of few rows are not fitted. *Choose*: remove as many as
the tolerance allows, by bisection.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Final, Literal

import numpy as np
from numpy.typing import NDArray
from scipy.linalg import solve

Floats = NDArray[np.float64]
Singles = NDArray[np.float32]
# [gone, kept + 1]: what replaces each removed neuron; the last column is the constant.
Fold = NDArray[np.float64]
# (neuron, survivor) of the removed ones; None: replaced by a bias, or by nothing.
Merges = tuple[tuple[int, int | None], ...]
# (neuron, survivor, c): the survivor's incoming weights times c are the neuron's.
Scale = tuple[int, int, float]
# A difference below this share of its operands is rounding error.
_ROUNDING = 1e-12
# The share of a neuron's variation that another has to explain to inherit its optimizer state.
_HEIR = 0.9
# Added to squares normalized to 1. Of 0.01 to 10, this left the fewest neurons within a tolerance,
# with 128 rows for 1024 neurons as well as with thousands for 32.
RIDGE: Final = 0.01
# Neurons are removed in 1/64 of all at a time: one at a time would need as many passes.
_TURNS = 64
# Neurons removed at the same time must not replace each other: their largest squared partial
# correlation.
_APART = 0.1


@dataclass(frozen=True)
class Reader:
    """One layer that reads the group, and its statistics.

    name : for reports
    weights : [offsets, outputs, n]: offsets are the positions in a convolution's kernel, or those
        of a flattened channel in a linear layer; 1 for a linear layer
    fit : [n + 1, n + 1]: the sum of (h, 1) (h, 1)^T over rows, or rows and positions
    samples : [samples, offsets, n]: the inputs of outputs of the layer, on other rows
    output_norm : the root of the sum of squares of the layer's outputs at the samples
    takes_constant : whether a constant input can become a bias: the layer has a bias, and there is
        no zero padding around h
    """

    name: str
    weights: Floats
    fit: Floats
    samples: NDArray[np.floating]
    output_norm: float
    takes_constant: bool

    def __post_init__(self) -> None:
        offsets, n = self.weights.shape[0], self.weights.shape[-1]
        moment, seen = self.fit.shape, self.samples.shape
        if self.weights.ndim != 3 or moment != (n + 1, n + 1) or seen[1:] != (offsets, n):
            raise ValueError(
                f"Reader {self.name}: got weights of shape {self.weights.shape}, fit of {moment} "
                f"and samples of {seen}, expected [offsets, outputs, n], [n + 1, n + 1] and "
                "[samples, offsets, n]. Pass statistics of all n neurons."
            )


def spread_of(moment: Floats, takes_constant: bool) -> tuple[Floats, Floats]:
    """Return second moments [n, n] and the roots of their diagonal.

    They are centred if a constant may be added. A neuron that does not vary has moments of zero,
    and a root of one.
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
    """Return what replaces each removed neuron, and which neuron inherits its optimizer state.

    The former is [gone, kept + 1]; the latter [gone], -1 for none.

    moment : [n + 1, n + 1]: the sum of (h, 1) (h, 1)^T over rows
    gone, kept : numbers of neurons, ascending; together all
    takes_constant : whether the last column may be other than zero
    """
    inner, scale = spread_of(moment, takes_constant)
    stays = scale[kept]
    among = inner[np.ix_(kept, kept)] / np.outer(stays, stays)
    shared = inner[np.ix_(gone, kept)] / stays
    best = np.argmax(shared**2, axis=1)
    rows = np.arange(len(gone))
    factor = shared[rows, best]
    left = shared - factor[:, None] * among[best]
    # The best one explains all that it can: a tiny residual along it is rounding error.
    left[np.abs(left) <= math.sqrt(_ROUNDING) * scale[gone][:, None]] = 0.0
    fold = np.zeros((len(gone), len(kept) + 1))
    # A regularized fit needs no more digits than float32 has.
    regularized = (among + RIDGE * np.eye(len(kept))).astype(np.float32)
    fold[:, :-1] = solve(regularized, left.T.astype(np.float32), assume_a="pos").T
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
    """Return how much the outputs of a layer change at the samples, relative to their norm.

    `weights` are [offsets, outputs, n], `samples` [samples, offsets, n].
    """
    fold, outgoing = fold.astype(samples.dtype), weights[:, :, gone].astype(samples.dtype)
    left = samples[:, :, gone] - samples[:, :, kept] @ fold[:, :-1].T - fold[:, -1]
    # Summed over neurons before taking the norm: changes of two neurons may cancel.
    total = float(np.linalg.norm(np.tensordot(left, outgoing, axes=((1, 2), (0, 2)))))
    if total == 0:
        return 0.0
    return total / output_norm if output_norm > 0 else math.inf


@dataclass(frozen=True)
class _State:
    """The state of one reader: all [n, n], in units of each neuron's standard deviation."""

    alike: Singles  # correlations
    inverse: Singles
    weights: Singles  # products of outgoing weights, relative to the reader's output

    def costs(self, alive: NDArray[np.bool_]) -> tuple[Singles, NDArray[np.int64]]:
        """Return the cost of each, and the one that could replace it; -1 for all together."""
        alike = np.where(alive[None, :], self.alike, 0.0) ** 2
        # No neuron replaces itself.
        np.fill_diagonal(alike, -1.0)
        best = alike.argmax(axis=1)
        alone = np.maximum(1 - alike.max(axis=1), 0.0)
        together = 1 / np.diagonal(self.inverse)
        left = np.minimum(alone, together)
        return np.diagonal(self.weights) * left, np.where(alone <= together, best, -1)

    def without(self, turn: list[int], heirs: NDArray[np.int64]) -> _State:
        """Return the state after removing these, whose heirs take over."""
        among = self.inverse[np.ix_(turn, turn)]
        takes = np.linalg.solve(among, self.inverse[turn]).T.astype(np.float32)  # [n, turn]
        inverse = self.inverse - takes @ self.inverse[turn]
        inverse[turn, :] = inverse[:, turn] = 0.0
        inverse[turn, turn] = 1.0
        for place, neuron in enumerate(turn):
            if (heir := heirs[neuron]) >= 0:
                takes[:, place] = 0.0
                takes[neuron, place] = 1.0
                takes[heir, place] = -self.alike[neuron, heir]
        weights = self.weights - takes @ self.weights[turn]
        weights -= weights[:, turn] @ takes.T
        return replace(self, inverse=inverse, weights=weights)


def order(readers: Sequence[Reader], count: int) -> NDArray[np.int64]:
    """Return `count` neurons in the order of removal; ties go to the lower number."""
    width = readers[0].weights.shape[-1]
    states = [_begin(reader) for reader in readers]
    merged_order: list[int] = []
    alive = np.ones(width, bool)
    while len(merged_order) < count:
        losses_of = [state.costs(alive) for state in states]
        costs = np.zeros(width)
        for cost, _ in losses_of:
            costs += cost
        costs[~alive] = np.inf
        most = min(max(1, width // _TURNS), count - len(merged_order))
        turn = _apart(costs, states, [heirs for _, heirs in losses_of], most)
        merged_order += turn
        alive[turn] = False
        states = [s.without(turn, heirs) for s, (_, heirs) in zip(states, losses_of, strict=True)]
    return np.array(merged_order, np.int64)


def _begin(reader: Reader) -> _State:
    moments, scale = spread_of(reader.fit, reader.takes_constant)
    n = len(scale)
    still = np.diagonal(moments) == 0
    alike = moments / np.outer(scale, scale)
    # A regularized fit needs no more digits than float32 has.
    inverse = np.linalg.inv((alike + RIDGE * np.eye(n)).astype(np.float32)).astype(np.float32)
    outgoing = reader.weights.reshape(-1, n) * np.where(still, 0.0, scale)
    outgoing = (outgoing / max(reader.output_norm, np.finfo(float).tiny)).astype(np.float32)
    # Neurons that differ only by rounding are duplicates.
    alike[1 - alike**2 < 1e-9] = np.sign(alike[1 - alike**2 < 1e-9])
    return _State(alike.astype(np.float32), inverse, (outgoing.T @ outgoing).astype(np.float32))


def _apart(
    costs: NDArray[np.float64],
    states: Sequence[_State],
    heirs: Sequence[NDArray[np.int64]],
    most: int,
) -> list[int]:
    """Return the cheapest neurons that do not rely on each other."""
    turn: list[int] = []
    needed: set[int] = set()
    # Stable: of two with the same cost, the lower number goes first.
    for neuron in map(int, np.argsort(costs, kind="stable")):
        if len(turn) == most or not np.isfinite(costs[neuron]):
            break
        mine = {int(heir[neuron]) for heir in heirs} - {-1}
        if neuron in needed or mine & set(turn):
            continue
        partial = (
            s.inverse[neuron, turn] ** 2
            / (s.inverse[neuron, neuron] * np.diagonal(s.inverse)[turn])
            for s in states
        )
        if all((one < _APART).all() for one in partial):
            turn.append(neuron)
            needed |= mine
    return turn


@dataclass(frozen=True)
class Choice:
    """The neurons to remove from one group in one event, by number.

    width : number of neurons before
    merges : (neuron, survivor) of the removed ones; the survivor is nearly the same and inherits
        the optimizer's state; None if there is none
    changes : the relative change of each reader's output
    folds : for each reader [gone, kept + 1]: what replaces each neuron, the constant last
    """

    width: int
    merges: Merges
    changes: tuple[float, ...]
    folds: tuple[Fold, ...] = field(repr=False)

    @property
    def gone(self) -> NDArray[np.int64]:
        return np.array([neuron for neuron, _ in self.merges], np.int64)

    @property
    def kept(self) -> NDArray[np.int64]:
        return np.setdiff1d(np.arange(self.width), self.gone)

    def text(self) -> str:
        """Return the exact decision as text, for ranks to compare."""
        digest = hashlib.sha256(b"".join(fold.tobytes() for fold in self.folds))
        return f"{self!r} {digest.hexdigest()}"


def choose(
    readers: Sequence[Reader],
    *,
    tolerance: float,
    share: float = 1.0,
    min_width: int = 1,
    round_to: int = 1,
) -> Choice:
    """Merge the cheapest neurons while every reader's output changes by at most `tolerance`.

    readers : one or more; all see the same n neurons
    tolerance : the largest relative change of each reader's output in this event, in (0, 1)
    share : the largest share of the neurons that may be removed, in (0, 1]
    min_width, round_to : at least `min_width` neurons stay, and a multiple of `round_to` (or all)
    """
    if not 0 < tolerance < 1:
        raise ValueError(f"tolerance: got {tolerance}, expected above 0 and below 1. 0.01 is mild.")
    if not readers:
        raise ValueError(
            "choose: got no readers, expected at least one: a group that no layer reads has no "
            "effect. Skip it."
        )
    width = readers[0].weights.shape[-1]
    most = min(width - max(min_width, 1), int(share * width))
    # Allowed widths, the widest first.
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
        trial = _attempt(readers, np.sort(sequence[: width - widths[middle]]))
        if max(trial.changes) <= tolerance:
            best, low = trial, middle + 1
        else:
            high = middle
    return best


def _attempt(readers: Sequence[Reader], gone: NDArray[np.int64]) -> Choice:
    """Return the choice that removes these neurons."""
    width = readers[0].weights.shape[-1]
    kept = np.setdiff1d(np.arange(width), gone)
    fits = [refit(reader.fit, gone, kept, reader.takes_constant) for reader in readers]
    changes = tuple(
        change(reader.weights, reader.samples, reader.output_norm, gone, kept, fold)
        for reader, (fold, _) in zip(readers, fits, strict=True)
    )
    # A survivor has to be the same for all readers, as its optimizer state exists once.
    heirs = np.stack([heir for _, heir in fits])
    same = (heirs == heirs[0]).all(axis=0)
    merges = tuple(
        (int(j), int(heir) if agreed and heir >= 0 else None)
        for j, heir, agreed in zip(gone, heirs[0], same, strict=True)
    )
    return Choice(width, merges, changes, tuple(fold for fold, _ in fits))


def fold(
    weights: Floats, bias: Floats | None, choice: Choice, place: int
) -> tuple[Floats, Floats | None]:
    """Return a reader's weights [offsets, outputs, kept] and bias [outputs] after the merges.

    `place` is the reader's index among the readers passed to `choose`.
    """
    weights, stands = np.asarray(weights, np.float64), choice.folds[place]
    gone = weights[:, :, choice.gone]
    left = weights[:, :, choice.kept] + gone @ stands[:, :-1]
    if bias is None:
        return left, None
    return left, np.asarray(bias, np.float64) + gone.sum(axis=0) @ stands[:, -1]


def scales(rows: Floats, merges: Merges) -> list[Scale]:
    """Return c of each merge for one layer, whose neurons have incoming weights [n, inputs]."""
    scales_found = []
    for neuron, survivor in merges:
        if survivor is None:
            continue
        length = float(rows[survivor] @ rows[survivor])
        along = float(rows[neuron] @ rows[survivor])
        scales_found.append((neuron, survivor, along / length if length > 0 else 0.0))
    return scales_found


def add_up(kind: Literal["mean", "square"], state: Any, merges: Sequence[Scale]) -> None:
    """Add the merged neurons' optimizer state [n, ...] to the survivors' rows, in place.

    `state` is an array of NumPy or a tensor of torch: a mean (or sum) of gradients, or of squares.
    """
    for neuron, survivor, scale in merges:
        if kind == "mean":
            state[survivor] += scale * state[neuron]
        else:
            roots = state[survivor] ** 0.5 + abs(scale) * state[neuron] ** 0.5
            state[survivor] = roots**2
