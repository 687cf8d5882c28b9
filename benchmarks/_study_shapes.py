"""A transform for each tensor by its shape alone: what the study compares bare FFTCompression with.

Frequencies catch more than values only along axes whose elements have an order: a kernel's height
and width. Along a matrix's shorter axis a DCT at least leaves what is sparse along the longer one
(dead inputs, unused rows of an embedding) as sparse as it was, which blocks of the flat vector mix.
So do DCTs of a few neighbours, which need no shape.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any

import numpy as np
from scipy.fft import dct, idct
from simulated import Floats, Gather


def transform_of(shape: Sequence[int]) -> dict[str, Any]:
    """Settings of FFTCodec: a DCT over the axes chosen, an FFT of blocks where there are none.

    >>> transform_of((64, 32, 3, 3))
    {'transform': 'axes', 'shape': (64, 32, 3, 3), 'axes': (2, 3)}
    >>> transform_of((128, 1024))["axes"], transform_of((3, 3, 32, 64))["axes"]
    ((0,), (0, 1))
    >>> transform_of((65536,))
    {'transform': 'fft'}
    """
    shape = tuple(shape)
    axes = _of_kernel(shape) or _of_matrix(shape)
    return {"transform": "axes", "shape": shape, "axes": axes} if axes else {"transform": "fft"}


def _of_kernel(shape: tuple[int, ...]) -> tuple[int, ...]:
    """Height and width: torch has them last, TensorFlow first. They are fewer than channels are."""
    if len(shape) < 3:
        return ()
    last, first = tuple(range(2, len(shape))), tuple(range(len(shape) - 2))
    axes = min(last, first, key=lambda some: prod(shape[axis] for axis in some))
    return tuple(axis for axis in axes if shape[axis] > 1)


def _of_matrix(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shorter one, the last of equals; none of a vector."""
    axes = [axis for axis, size in enumerate(shape) if size > 1]
    return (min(reversed(axes), key=lambda axis: shape[axis]),) if len(axes) > 1 else ()


class OfSpans(Gather):
    """DCTs of a few neighbours, the strongest picked out of blocks: what is sparse stays sparse."""

    SPAN = 64

    def mean(self, vectors: Sequence[Floats]) -> Floats:
        n = vectors[0].size

        def coefficients(vector: Floats) -> Floats:
            spans = np.pad(vector, (0, -n % self.SPAN)).reshape(-1, self.SPAN)
            return np.ravel(dct(spans, norm="ortho"))

        mean = super().mean([coefficients(vector) for vector in vectors])
        return np.ravel(idct(mean.reshape(-1, self.SPAN), norm="ortho"))[:n]
