"""Where gradients lie in a flat tensor, and in which order their elements do.

DDP's buckets hold a gradient as its parameter lies: in channels_last, not in the order of indices.
What is remembered of it is a vector in that order, which another run need not have. Of a complex
gradient they hold real and imaginary parts, which are a last axis of two here.
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


def parts_of(parameters: Iterable[tuple[str, torch.Tensor]]) -> list[BucketSlice]:
    """Return the slices of parameters whose gradients lie one after another, as in DDP's buckets.

    Shapes have the axes in memory order: a matrix that is stored transposed is one of those rows.
    """
    slices, start = [], 0
    for name, parameter in parameters:
        shape, strides = real_sides(parameter)
        slices.append(BucketSlice(name, start, shape_of(shape, strides)))
        start += prod(shape)
    return slices


def real_sides(parameter: torch.Tensor) -> tuple[tuple[int, ...], tuple[int, ...]]:
    """Shape and strides of a tensor, of a complex one those of its real and imaginary parts."""
    shape, strides = tuple(parameter.shape), parameter.stride()
    if not parameter.is_complex():
        return shape, strides
    return (*shape, 2), (*(2 * stride for stride in strides), 1)


def axes_of(shape: Sequence[int], strides: Sequence[int]) -> Axes:
    """Return the memory order of axes in DDP's buckets; axes of one element come last.

    A dense tensor lies there by its strides, any other one in the order of its indices.
    """
    axes = range(len(shape))
    # The stride of an axis of one element may be any number.
    order = sorted(axes, key=lambda axis: (shape[axis] == 1, -strides[axis], axis))
    steps = [prod(shape[axis] for axis in order[at + 1 :]) for at in axes]
    if all(
        strides[axis] == step or shape[axis] == 1 for axis, step in zip(order, steps, strict=True)
    ):
        return order
    return sorted(axes, key=lambda axis: (shape[axis] == 1, axis))


@lru_cache(maxsize=4096)  # asked for each parameter in each step
def shape_of(shape: tuple[int, ...], strides: tuple[int, ...]) -> tuple[int, ...]:
    """Its sizes in the order in which its axes lie: a plain reshape of its stretch of a bucket.

    >>> shape_of((8, 3, 5, 5), (75, 1, 15, 3)), shape_of((64, 32), (1, 64))
    ((8, 5, 5, 3), (32, 64))
    """
    return tuple(shape[axis] for axis in axes_of(shape, strides))


def in_shape_of(parameter: torch.Tensor, values: torch.Tensor) -> torch.Tensor:
    """Return a parameter's stretch of a bucket in its shape; of a complex one with an axis more."""
    shape, strides = real_sides(parameter)
    axes = axes_of(shape, strides)
    return values.view([shape[axis] for axis in axes]).permute(
        sorted(range(len(axes)), key=axes.__getitem__)
    )


def reorder(vector: Floats, shape: Sequence[int], old: Axes, new: Axes) -> Floats:
    """The [n] elements of a tensor of this shape, which lie as `old` says, as `new` says.

    Returns them in the shape in which they lie then; dense.
    """
    lies = vector.reshape([shape[axis] for axis in old])
    return np.ascontiguousarray(lies.transpose(np.argsort(old)).transpose(new))


def fingerprint_of(named: Iterable[tuple[torch.Tensor, str]]) -> list[tuple[str, str]]:
    """What ranks have to have alike of their parameters, in their order."""
    return [
        (f"tensor {place}", f"{name!r} {tuple(parameter.shape)} {parameter.dtype}")
        for place, (parameter, name) in enumerate(named)
    ]


def layout_of(named: Iterable[tuple[torch.Tensor, str]]) -> dict[str, Axes]:
    """How each parameter lies in memory, and so what is remembered of its gradient."""
    return {name: axes_of(*real_sides(parameter)) for parameter, name in named}


def changes_of(named: Iterable[tuple[torch.Tensor, str]], saved: Any) -> dict[str, Change]:
    """Return, for parameters whose layout has changed, the change from the saved order to theirs.

    saved : what layout_of returned in the run before; CompressError if it does not fit
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
    """A saved state with NumPy arrays in the place of tensors; CompressError unless it is one."""
    with reading("the saved state"):
        held(state)  # before anything is copied: a tensor may repeat one element without end
        return registry.map_tree(torch.Tensor, lambda tensor: tensor.cpu().numpy(), state)


class Names:
    """Those of a model's parameters, from named_parameters; or made up, None given, as they come.

    Raises CompressError for what are no named parameters; see names_given.
    """

    def __init__(self, named: Any) -> None:
        self.complete = named is not None
        # By identity; held, so that no other tensor can get the same one.
        self._known: dict[int, tuple[torch.Tensor, str]] = {}
        for parameter, name in names_given(named) if self.complete else ():
            self._known[id(parameter)] = parameter, name

    def known(self) -> list[tuple[torch.Tensor, str]]:
        """All so far, in their order."""
        return list(self._known.values())

    def of(self, parameter: torch.Tensor) -> str:
        """Its name; CompressError for one that is not among those given."""
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
    """Raise CompressError for what has no scale that could be followed."""
    if scaler is not None and not callable(getattr(scaler, "get_scale", None)):
        raise CompressError(
            f"got {_kind(scaler)} as scaler; expected the torch.amp.GradScaler of the training, or "
            "None"
        )


def _kind(thing: Any) -> str:
    if isinstance(thing, tuple | list):
        return f"({', '.join(type(entry).__qualname__ for entry in thing)})"
    return repr(thing) if isinstance(thing, str) else f"a {type(thing).__qualname__}"
