"""The order in which a dense tensor's elements lie in memory, and a vector's way to another order.

DDP's buckets hold a gradient as its parameter lies: in channels_last, not in the order of indices.
What is remembered of it is a vector in that order, which another run need not have.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..codecs.base import Floats

Axes = list[int]  # from the slowest to the fastest


def axes_of(shape: Sequence[int], strides: Sequence[int]) -> Axes:
    """How a dense tensor lies; axes of one element, whose strides mean nothing, come last."""
    axes = range(len(shape))
    return sorted(axes, key=lambda axis: (shape[axis] == 1, -strides[axis], axis))


def reorder(vector: Floats, shape: Sequence[int], old: Axes, new: Axes) -> Floats:
    """The [n] elements of a tensor of this shape, which lie as `old` says, as `new` says."""
    lies = vector.reshape([shape[axis] for axis in old])
    return lies.transpose(np.argsort(old)).transpose(new).reshape(-1)
