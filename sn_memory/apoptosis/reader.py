"""What a layer that takes in a group of neurons saw of them."""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

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
    fit
        [n + 1, n + 1]: the sum of (h, 1) (h, 1)^T over rows, or rows and positions.
    samples
        [samples, offsets, n]: what each output of the layer is made of, on other rows.
    output_norm
        The root of the sum of squares of what the layer put out at the samples.
    takes_constant
        Whether a constant input can become a bias: there is one, and no zero padding around h.
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
                "[samples, offsets, n]. Give what the layer saw of all n neurons."
            )
