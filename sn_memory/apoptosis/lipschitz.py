"""How much a merge can change what the next layer puts out, from weights alone.

Neuron j, with incoming weights w_j (bias included) and outgoing weights a_j, is replaced by c times
neuron i. Where the activation is L-Lipschitz, and c f(z) = f(c z) or c = 1,

    |change of the output| = |a_j| |f(w_j x) - c f(w_i x)| <= |a_j| L |d x|,   d = w_j - c w_i

so its mean square over inputs with second moment C is at most |a_j|^2 L^2 d^T C d. Norms of sums
are at most sums of norms, so several merges cost at most the sum of theirs.
"""

from __future__ import annotations

from types import MappingProxyType
from typing import Final

import numpy as np
from numpy.typing import NDArray

Floats = NDArray[np.float64]

# The largest slope of each; those of GELU and SiLU are rounded up from 1.12890 and 1.09984.
LIPSCHITZ: Final = MappingProxyType(
    {
        "linear": 1.0,
        "relu": 1.0,
        "leaky_relu": 1.0,
        "elu": 1.0,
        "tanh": 1.0,
        "softplus": 1.0,
        "sigmoid": 0.25,
        "gelu": 1.13,
        "silu": 1.10,
    }
)
_HOMOGENEOUS = frozenset({"linear", "relu", "leaky_relu"})


def is_homogeneous(activation: str) -> bool:
    """Say whether c f(z) = f(c z) for every c > 0: only then may a factor pass through."""
    _check(activation)
    return activation in _HOMOGENEOUS


def largest_change(
    incoming: Floats, outgoing: Floats, activation: str, second_moment: Floats | None = None
) -> tuple[Floats, Floats]:
    """Return how much the output changes at most, for each neuron j merged into each neuron i.

    Parameters
    ----------
    incoming
        [n, inputs], bias as a last column.
    outgoing
        [outputs, n]
    activation
        A key of `LIPSCHITZ`.
    second_moment
        [inputs, inputs], the mean of x x^T over inputs. None: the change is then that of an input
        of length one in the direction that is worst.

    Returns
    -------
    change, factor
        Both [n, n] float64: the root mean square change of the output at most, and the c with which
        the outgoing weights of j are added to those of i. `change` is infinite on the diagonal and
        where c would not be above 0.
    """
    _check(activation)
    weights, outgoing = np.asarray(incoming, np.float64), np.asarray(outgoing, np.float64)
    n = len(weights)
    if outgoing.ndim != 2 or outgoing.shape[1] != n:
        raise ValueError(
            f"largest_change: got outgoing weights of shape {outgoing.shape}, expected "
            f"[outputs, {n}], as there are {n} neurons. Transpose them."
        )
    products = weights @ weights.T
    squares = np.diagonal(products)
    factor = np.ones((n, n))
    if is_homogeneous(activation):
        # [j, i]; the c that makes d shortest.
        factor = products / np.where(squares > 0, squares, 1.0)[None, :]
    lengths = np.empty((n, n))
    for j in range(n):
        apart = weights[j] - factor[j][:, None] * weights  # [n, inputs]
        if second_moment is None:
            lengths[j] = np.linalg.norm(apart, axis=1)
        else:
            squared = np.einsum("ik,kl,il->i", apart, second_moment, apart)
            lengths[j] = np.sqrt(np.maximum(squared, 0.0))
    change = LIPSCHITZ[activation] * np.linalg.norm(outgoing, axis=0)[:, None] * lengths
    change[factor <= 0] = np.inf
    np.fill_diagonal(change, np.inf)
    return change, factor


def _check(activation: str) -> None:
    if activation not in LIPSCHITZ:
        raise ValueError(
            f"activation: got {activation!r}, expected one of {', '.join(sorted(LIPSCHITZ))}. "
            "For another one, merge by statistics of activations (sn_memory.apoptosis.choose)."
        )
