"""What the optimizer remembers of merged neurons.

The survivor s = (w_i, a_i + f a_j) is moved by the gradients of both: where w_j = c w_i, the chain
rule gives g = g_i + c g_j for its incoming weights. So a mean of gradients (momentum) becomes
m_i + c m_j, exactly for duplicates. A mean of squares can only be bounded: its root is a norm, so
sqrt(v) <= sqrt(v_i) + |c| sqrt(v_j), with equality where the gradients were proportional; the bound
is taken, as it gives the smaller step. Outgoing weights of the survivor have the gradient they had,
so what is remembered of them stays.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# Names of state that torch.optim gives to means (or sums) of gradients and of their squares.
_MEANS = frozenset({"momentum_buffer", "exp_avg"})
_SQUARES = frozenset({"exp_avg_sq", "max_exp_avg_sq", "square_avg", "sum"})

# (neuron, survivor, c): the survivor's incoming weights times c are the neuron's.
Scale = tuple[int, int, float]


def scales(rows: Sequence[torch.Tensor], pairs: Sequence[tuple[int, int | None]]) -> list[Scale]:
    """Return c of each merge for one layer, whose weight and bias have rows [n, ...]."""
    flat = torch.cat([row.detach().double().reshape(len(row), -1) for row in rows], dim=1)
    found = []
    for neuron, survivor in pairs:
        if survivor is None:
            continue
        length = float(flat[survivor] @ flat[survivor])
        along = float(flat[neuron] @ flat[survivor])
        found.append((neuron, survivor, along / length if length > 0 else 0.0))
    return found


def add_up(key: str, state: torch.Tensor, merges: Sequence[Scale]) -> torch.Tensor:
    """Return a state tensor [n, ...] whose survivors' rows remember the merged ones too.

    State of other names is left to the survivor alone.
    """
    if key not in _MEANS and key not in _SQUARES:
        return state
    state = state.clone()
    for neuron, survivor, scale in merges:
        if key in _MEANS:
            state[survivor] += scale * state[neuron]
        else:
            roots = state[survivor].sqrt() + abs(scale) * state[neuron].sqrt()
            state[survivor] = roots.square()
    return state


def unknown_state(parameter: torch.Tensor, state: dict[str, object]) -> str | None:
    """Return the name of a state tensor that is neither a number nor shaped like the parameter."""
    for key, value in state.items():
        if isinstance(value, torch.Tensor) and value.numel() > 1 and value.shape != parameter.shape:
            return key
    return None
