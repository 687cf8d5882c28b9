"""The order in which a dense tensor's elements lie in memory, and a vector's way to another order.

DDP's buckets hold a gradient as its parameter lies: in channels_last, not in the order of indices.
What is remembered of it is a vector in that order, which another run need not have.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from ..codecs.base import Floats

Axes = list[int]  # from the slowest to the fastest


def axes_of(shape: Sequence[int], strides: Sequence[int]) -> Axes:
    """How a tensor lies in DDP's buckets; axes of one element, whose strides mean nothing, last.

    A dense one lies there as its strides say, any other one in the order of its indices.
    """
    axes = range(len(shape))
    found = sorted(axes, key=lambda axis: (shape[axis] == 1, -strides[axis], axis))
    steps = [math.prod(shape[axis] for axis in found[at + 1 :]) for at in axes]
    if all(
        strides[axis] == step or shape[axis] == 1 for axis, step in zip(found, steps, strict=True)
    ):
        return found
    return sorted(axes, key=lambda axis: (shape[axis] == 1, axis))


def shape_of(shape: Sequence[int], strides: Sequence[int]) -> tuple[int, ...]:
    """Its sizes in the order in which its axes lie: a plain reshape of its stretch of a bucket.

    >>> shape_of((8, 3, 5, 5), (75, 1, 15, 3)), shape_of((64, 32), (1, 64))
    ((8, 5, 5, 3), (32, 64))
    """
    return tuple(shape[axis] for axis in axes_of(shape, strides))


def reorder(vector: Floats, shape: Sequence[int], old: Axes, new: Axes) -> Floats:
    """The [n] elements of a tensor of this shape, which lie as `old` says, as `new` says.

    Returns them in the shape in which they lie then; dense.
    """
    lies = vector.reshape([shape[axis] for axis in old])
    return np.ascontiguousarray(lies.transpose(np.argsort(old)).transpose(new))
