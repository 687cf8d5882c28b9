"""In which order neurons can best be done without.

A neuron costs what its readers lose once others make up for it: the square of its outgoing weights,
times what is left of it. Others make up for it in one of two ways, whichever leaves less: all that
stay, by least squares that is held back, or the one that is most like it. What the first leaves is
one over the neuron's entry in the inverse of the second moments, and a formula updates the inverse,
and the outgoing weights, when a neuron has gone (optimal brain surgeon, Hassibi and Stork 1993; for
layers, Frantar and Alistarh 2022, arXiv 2208.11580). Offsets of a kernel are taken as if they were
independent: this gives an order only, and what is done is measured.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
from numpy.typing import NDArray

from .reader import Reader
from .refit import RIDGE, spread_of

Floats = NDArray[np.float32]
# Neurons go in turns of so large a share of all: one at a time would cost as many passes.
_TURNS = 64
# Those of one turn must not be able to stand for each other: their squared partial correlation.
_APART = 0.1


@dataclass(frozen=True)
class _State:
    """What one reader still needs: all [n, n], in units of each neuron's spread."""

    alike: Floats  # correlations
    inverse: Floats
    weights: Floats  # products of outgoing weights, relative to what the reader puts out

    def costs(self, alive: NDArray[np.bool_]) -> tuple[Floats, NDArray[np.int64]]:
        """Return what each would cost, and the one that could stand for it; -1: all together."""
        alike = np.where(alive[None, :], self.alike, 0.0) ** 2
        np.fill_diagonal(alike, -1.0)
        best = alike.argmax(axis=1)
        alone = np.maximum(1 - alike.max(axis=1), 0.0)
        together = 1 / np.diagonal(self.inverse)
        left = np.minimum(alone, together)
        return np.diagonal(self.weights) * left, np.where(alone <= together, best, -1)

    def without(self, turn: list[int], heirs: NDArray[np.int64]) -> _State:
        """Return what is left when these have gone, and others have taken over."""
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
    """Return `count` neurons, those that go first in front; ties go to the lower number."""
    width = readers[0].weights.shape[-1]
    states = [_begin(reader) for reader in readers]
    found: list[int] = []
    alive = np.ones(width, bool)
    while len(found) < count:
        told = [state.costs(alive) for state in states]
        costs = np.zeros(width)
        for cost, _ in told:
            costs += cost
        costs[~alive] = np.inf
        most = min(max(1, width // _TURNS), count - len(found))
        turn = _apart(costs, states, [heirs for _, heirs in told], most)
        found += turn
        alive[turn] = False
        states = [s.without(turn, heirs) for s, (_, heirs) in zip(states, told, strict=True)]
    return np.array(found, np.int64)


def _begin(reader: Reader) -> _State:
    moments, scale = spread_of(reader.fit, reader.takes_constant)
    n = len(scale)
    still = np.diagonal(moments) == 0
    alike = moments / np.outer(scale, scale)
    # What is held back needs no more digits than float32 has.
    inverse = np.linalg.inv((alike + RIDGE * np.eye(n)).astype(np.float32)).astype(np.float32)
    outgoing = reader.weights.reshape(-1, n) * np.where(still, 0.0, scale)
    outgoing = (outgoing / max(reader.output_norm, np.finfo(float).tiny)).astype(np.float32)
    # What differs by rounding alone is a duplicate.
    alike[1 - alike**2 < 1e-9] = np.sign(alike[1 - alike**2 < 1e-9])
    return _State(alike.astype(np.float32), inverse, (outgoing.T @ outgoing).astype(np.float32))


def _apart(
    costs: NDArray[np.float64],
    states: Sequence[_State],
    heirs: Sequence[NDArray[np.int64]],
    most: int,
) -> list[int]:
    """Return the cheapest that do not count on each other."""
    turn: list[int] = []
    needed: set[int] = set()
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
