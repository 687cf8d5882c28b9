"""Layout of gradients in a flat tensor: their positions, and the memory order of their axes.

DDP's buckets hold a gradient in the memory order of its parameter, e.g. channels_last, not in index
order. Its residual is a vector in that order, which may differ in another run. A complex gradient
is stored as its real and imaginary parts, in a trailing axis of size 2.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from functools import lru_cache, partial
from math import prod
from typing import Any

import numpy as np
import torch

from ..codecs import registry
from ..codecs.base import Floats
from ..errors import CompressError
from ..saved import held, reading

Axes = list[int]  # from the slowest to the fastest
Change = Callable[[Floats], Floats]


@dataclass(frozen=True)
class BucketSlice:
    """One parameter's slice of a flat tensor; `shape` has the axes in memory order."""

    name: str
    start: int
    shape: tuple[int, ...]

    @property
    def elements(self) -> int:
        """Number of elements."""
        return prod(self.shape)

    def of(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a view of this slice of a flat tensor."""
        return flat[self.start : self.start + self.elements]


def parts_of(parameters: Iterable[tuple[str, torch.Tensor]]) -> list[BucketSlice]:
    """Return the slices of parameters whose gradients are concatenated, as in DDP's buckets.

    Shapes have the axes in memory order: a matrix stored transposed has its transposed shape.
    """
    slices, start = [], 0
    for name, parameter in parameters:
        shape, strides = real_sides(parameter)
        slices.append(BucketSlice(name, start, shape_of(shape, strides)))
        start += prod(shape)
    return slices


def real_sides(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Return shape and strides of a tensor; a complex one is viewed as real, with an axis of 2."""
    shape, strides = tuple(parameter.shape), parameter.stride()
    if not parameter.is_complex():
        return shape, strides
    return (*shape, 2), (*(2 * stride for stride in strides), 1)


def axes_of(shape: Sequence[int], strides: Sequence[int]) -> Axes:
    """Return the memory order of axes in DDP's buckets; axes of size 1 come last.

    A dense tensor is stored there by its strides, any other one in index order.
    """
    axes = range(len(shape))
    # The stride of an axis of size 1 may be any number.
    order = sorted(axes, key=lambda axis: (shape[axis] == 1, -strides[axis], axis))
    steps = [prod(shape[axis] for axis in order[at + 1 :]) for at in axes]
    if all(
        strides[axis] == step or shape[axis] == 1 for axis, step in zip(order, steps, strict=True)
    ):
        return order
    return sorted(axes, key=lambda axis: (shape[axis] == 1, axis))


@lru_cache(maxsize=4096)  # called for each parameter in each step
def shape_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Return the shape with axes in memory order, to which a bucket's slice can be reshaped.

    >>> shape_of((8, 3, 5, 5), (75, 1, 15, 3)), shape_of((64, 32), (1, 64))
    ((8, 5, 5, 3), (32, 64))
    """
    return tuple(shape[axis] for axis in axes_of(shape, strides))


def in_shape_of(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """View a parameter's slice of a bucket in its shape; with a trailing axis of 2 if complex."""
    shape, strides = real_sides(parameter)
    axes = axes_of(shape, strides)
    return values.view([shape[axis] for axis in axes]).permute(
        sorted(range(len(axes)), key=axes.__getitem__)
    )


def reorder(vector: Floats, shape: Sequence[int], old: Axes, new: Axes) -> Floats:
    """Reorder the [n] elements of a tensor of this shape from memory order `old` to `new`.

    Returns a contiguous array whose axes are in the new order.
    """
    array = vector.reshape([shape[axis] for axis in old])
    return np.ascontiguousarray(array.transpose(np.argsort(old)).transpose(new))


def fingerprint_of(named: Iterable[tuple[torch.Tensor, str]]) -> list[tuple[str, str]]:
    """Return what must be equal on all ranks about their parameters, in order."""
    return [
        (f"tensor {place}", f"{name!r} {tuple(parameter.shape)} {parameter.dtype}")
        for place, (parameter, name) in enumerate(named)
    ]


def layout_of(named: Iterable[tuple[torch.Tensor, str]]) -> dict[str, Axes]:
    """Return the memory order of each parameter's axes, and so of its residual."""
    return {name: axes_of(*real_sides(parameter)) for parameter, name in named}


def changes_of(named: Iterable[tuple[torch.Tensor, str]], saved: Any) -> dict[str, Change]:
    """Return a function that converts the saved order, for each parameter whose layout has changed.

    saved : what layout_of returned in the previous run; CompressError if it does not fit
    """
    changes: dict[str, Change] = {}
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
            changes[name] = partial(reorder, shape=shape, old=old, new=new)
    return changes


def loaded_arrays(state: Any) -> Any:
    """Convert the tensors of a saved state to NumPy arrays; CompressError if it is not a state."""
    with reading("the saved state"):
        held(state)  # before anything is copied: zero strides may hide a huge size
        return registry.map_tree(torch.Tensor, lambda tensor: tensor.cpu().numpy(), state)


class Names:
    """Names of a model's parameters, from named_parameters; if None, numbered as they come.

    Raises CompressError if `named` is not valid; see names_given.
    """

    def __init__(self, named: Any) -> None:
        self.complete = named is not None
        # By id; holds the tensors, so that ids are not reused.
        self._known: dict[int, tuple[torch.Tensor, str]] = {}
        for parameter, name in names_given(named) if self.complete else ():
            self._known[id(parameter)] = parameter, name

    def known(self) -> list[tuple[torch.Tensor, str]]:
        """Return all parameters so far, in order."""
        return list(self._known.values())

    def of(self, parameter: torch.Tensor) -> str:
        """Return a parameter's name; CompressError if it is not in named_parameters."""
        if id(parameter) not in self._known:
            if self.complete:
                raise CompressError(
                    f"a parameter of shape {tuple(parameter.shape)} is not in named_parameters; "
                    "expected all of the model's. Pass model.named_parameters() of the model that "
                    "DDP wraps."
                )
            self._known[id(parameter)] = parameter, f"parameter {len(self._known)}"
        return self._known[id(parameter)][1]


def names_given(named: Any) -> list[tuple[torch.Tensor, str]]:
    """Return the parameters and names that were passed as named_parameters, in their order.

    Raises CompressError unless these are pairs of a unique name and a tensor.
    """
    pairs: list[tuple[torch.Tensor, str]] = []
    names: set[str] = set()
    for pair in _listed(named):
        ok = isinstance(pair, tuple | list) and len(pair) == 2
        if not (ok and isinstance(pair[0], str) and isinstance(pair[1], torch.Tensor)):
            raise CompressError(
                f"named_parameters has {_kind(pair)} in it; expected pairs of a name and a "
                "parameter. Pass model.named_parameters()."
            )
        if pair[0] in names:
            raise CompressError(
                f"named_parameters has {pair[0]!r} twice; expected unique names. Pass "
                "model.named_parameters() of one model."
            )
        names.add(pair[0])
        pairs.append((pair[1], pair[0]))
    return pairs


def _listed(named: Any) -> list[Any]:
    if not isinstance(named, str | dict | torch.nn.Module):
        try:
            return list(named)
        except TypeError:
            pass
    raise CompressError(
        f"got a {type(named).__qualname__} as named_parameters; expected pairs of a name and a "
        "parameter. Pass model.named_parameters()."
    )


def check_scaler(scaler: Any) -> None:
    """Raise CompressError for a scaler whose scale cannot be read."""
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise CompressError(
            f"got {_kind(scaler)} as scaler; expected the torch.amp.GradScaler of the training, or "
            "None"
        )


def _kind(thing: Any) -> str:
    if isinstance(thing, tuple | list):
        return f"({', '.join(type(entry).__qualname__ for entry in thing)})"
    return repr(thing) if isinstance(thing, str) else f"a {type(thing).__qualname__}"
