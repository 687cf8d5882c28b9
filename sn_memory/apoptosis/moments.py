"""What the optimizer remembers of merged neurons.

The survivor s = (w_i, a_i + f a_j) is moved by the gradients of both: where w_j = c w_i, the chain
rule gives g = g_i + c g_j for its incoming weights. So a mean of gradients (momentum) becomes
m_i + c m_j, exactly for duplicates. Of a mean of squares only the largest value is known: its root
is a norm, so sqrt(v) <= sqrt(v_i) + |c| sqrt(v_j), with equality where the gradients were
proportional; that is taken, as it gives the smaller step. Outgoing weights of the survivor have the
gradient they had, so what is remembered of them stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Literal

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]
# (neuron, survivor, c): the survivor's incoming weights times c are the neuron's.
Scale = tuple[int, int, float]


def scales(rows: Floats, pairs: Sequence[tuple[int, int | None]]) -> list[Scale]:
    """Return c of each merge for one layer, whose neurons have incoming weights [n, inputs]."""
    found = []
    for neuron, survivor in pairs:
        if survivor is None:
            continue
        length = float(rows[survivor] @ rows[survivor])
        along = float(rows[neuron] @ rows[survivor])
        found.append((neuron, survivor, along / length if length > 0 else 0.0))
    return found


def add_up(kind: Literal["mean", "square"], state: Any, merges: Sequence[Scale]) -> None:
    """Make the survivors' rows of state [n, ...] remember the merged ones, in place.

    `state` is an array of NumPy or a tensor of torch: a mean (or sum) of gradients, or of squares.
    """
    for neuron, survivor, scale in merges:
        if kind == "mean":
            state[survivor] += scale * state[neuron]
        else:
            roots = state[survivor] ** 0.5 + abs(scale) * state[neuron] ** 0.5
            state[survivor] = roots**2
