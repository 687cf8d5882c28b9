"""Where gradients lie in a flat tensor, and in which order their elements do.

DDP's buckets hold a gradient as its parameter lies: in channels_last, not in the order of indices.
What is remembered of it is a vector in that order, which another run need not have. Of a complex
gradient they hold real and imaginary parts, which are a last axis of two here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from math import prod
from typing import Any

import numpy as np
import torch

from ...base.errors import CompressError
from ...codecs.base import Floats

Axes = list[int]  # from the slowest to the fastest
Change = Callable[[Floats], Floats]


@dataclass(frozen=True)
class Part:
    """One parameter's stretch of a flat tensor, and its sizes in the order in which it lies."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """How many there are."""
        return prod(self.shape)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """A view of it."""
        return flat[self.start : self.start + self.elements]


def parts_of(parameters: Iterable[tuple[str, torch.Tensor]]) -> list[Part]:
    """Of parameters whose gradients lie one behind the other, each as DDP's buckets have it.

    Its axes, too, as they lie: a matrix that is stored transposed is one of those rows.
    """
    found, start = [], 0
    for name, parameter in parameters:
        shape, strides = real_sides(parameter)
        found.append(Part(name, start, shape_of(shape, strides)))
        start += prod(shape)
    return found


def real_sides(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a tensor, of a complex one those of its real and imaginary parts."""
    shape, strides = tuple(parameter.shape), parameter.stride()
    if not parameter.is_complex():
        return shape, strides
    return (*shape, 2), (*(2 * stride for stride in strides), 1)


def axes_of(shape: Sequence[int], strides: Sequence[int]) -> Axes:
    """How a tensor lies in DDP's buckets; axes of one element, whose strides mean nothing, last.

    A dense one lies there as its strides say, any other one in the order of its indices.
    """
    axes = range(len(shape))
    found = sorted(axes, key=lambda axis: (shape[axis] == 1, -strides[axis], axis))
    steps = [prod(shape[axis] for axis in found[at + 1 :]) for at in axes]
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


def said_of(named: Iterable[tuple[torch.Tensor, str]]) -> list[tuple[str, str]]:
    """What ranks have to have alike of their parameters, in their order."""
    return [
        (f"tensor {place}", f"{name!r} {tuple(parameter.shape)} {parameter.dtype}")
        for place, (parameter, name) in enumerate(named)
    ]


def layout_of(named: Iterable[tuple[torch.Tensor, str]]) -> dict[str, Axes]:
    """How each parameter lies in memory, and so what is remembered of its gradient."""
    return {name: axes_of(*real_sides(parameter)) for parameter, name in named}


def changes_of(named: Iterable[tuple[torch.Tensor, str]], saved: Any) -> dict[str, Change]:
    """For parameters that lie otherwise than they did: from the saved order to theirs.

    saved : what layout_of returned in the run before; CompressError if it does not fit
    """
    found: dict[str, Change] = {}
    for parameter, name in named:
        shape, strides = real_sides(parameter)
        new = axes_of(shape, strides)
        old = saved.get(name, new) if isinstance(saved, dict) else None
        if not isinstance(old, list) or sorted(map(str, old)) != sorted(map(str, new)):
            raise CompressError(
                f"the saved layout of {name!r} is {old!r}; expected the order of {len(new)} "
                "axes. Load what state_dict() returned, unchanged."
            )
        if old != new:
            found[name] = partial(reorder, shape=shape, old=old, new=new)
    return found
