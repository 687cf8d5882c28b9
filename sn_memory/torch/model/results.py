"""What a forward pass returns, taken apart into tensors and put together again.

Nested lists, tuples and mappings are torch's to take apart. Objects of other classes (a cache of
keys and values, a distribution, a dataclass) it hands over whole, and the tensors in them would be
missed. They are copied with a place for each tensor; a copy of that copy is made in each step.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..errors import TraceError
from .marks import Marks

# What is handed on as it is: values, and what has no tensors of its own.
_WHOLE = (
    *(type(None), bool, int, float, complex, str, bytes, type, torch.nn.Module),
    *(torch.dtype, torch.device, torch.layout, torch.Size, torch.memory_format),
    *(FunctionType, MethodType, BuiltinFunctionType),
)


@dataclass(frozen=True)
class Form:
    """How leaves make up what a forward pass returns.

    Parameters
    ----------
    spec
        Of the first leaves.
    shells
        Objects among these, as a list copied at once, with a place for each tensor.
    places
        Per place in the shells, the leaf that stands there.
    whole
        By id, what the copies share with the objects.
    """

    spec: TreeSpec
    shells: list[Any]
    places: tuple[tuple[_Place, int], ...]
    whole: dict[int, Any]

    def filled(self, leaves: Sequence[Any]) -> Any:
        """Put leaves together; objects are new ones."""
        first = list(leaves[: self.spec.num_leaves])
        if self.shells:
            memo = {id(place): leaves[at] for place, at in self.places} | self.whole
            made = copy.deepcopy(self.shells, memo)
            first = [made[it.number] if isinstance(it, Shell) else it for it in first]
        return tree_unflatten(first, self.spec)


@dataclass(frozen=True)
class Shell:
    """Stands for an object among the leaves."""

    number: int


class _Place:
    """Stands for a tensor in an object."""


def taken_apart(results: Any, model: torch.nn.Module) -> tuple[list[Any], Form]:
    """Return the leaves of what a forward pass returned, and how they make it up.

    Tensors in objects are the last leaves, each once; the objects' own leaves are a Shell.

    Parameters
    ----------
    results
        What it returned.
    model
        Its modules and what is an attribute of these is not copied.

    Raises
    ------
    TraceError
        If an object cannot be copied.
    """
    leaves, spec = tree_flatten(results)
    at = [place for place, it in enumerate(leaves) if not isinstance(it, (torch.Tensor, *_WHOLE))]
    if not at:
        return leaves, Form(spec, [], (), {})
    whole: dict[int, Any] = {}
    for module in model.modules():
        whole[id(module)] = module
        for value in module.__dict__.values():
            if not isinstance(value, torch.Tensor):
                whole[id(value)] = value
    opened = _Opened(leaves)
    try:
        with opened:
            shells = copy.deepcopy([leaves[place] for place in at], dict(whole))
    except Exception as error:
        kinds = ", ".join(dict.fromkeys(type(leaves[place]).__name__ for place in at))
        raise TraceError(
            f"the forward pass returns a {kinds}, which cannot be copied ({error}), so a replay "
            "could not return a new one. Return tensors, in lists, tuples or mappings."
        ) from error
    for number, place in enumerate(at):
        leaves[place] = Shell(number)
    return leaves, Form(spec, shells, tuple(opened.places.values()), whole)


def tensors_of(results: Any, model: torch.nn.Module) -> list[Any]:
    """Return the leaves of what a forward pass returned, with all tensors in it as far as seen."""
    try:
        return taken_apart(results, model)[0]
    except TraceError:
        leaves = tree_leaves(results)
        inside = {id(it): it for it in Marks([("results", leaves)]).tensors()}
        return [*leaves, *(it for key, it in inside.items() if key not in {*map(id, leaves)})]


class _Opened(TorchFunctionMode):
    """While objects are copied: puts a place where a tensor would be copied."""

    def __init__(self, leaves: list[Any]) -> None:
        super().__init__()
        self._leaves = leaves
        self._at = {id(it): at for at, it in enumerate(leaves) if isinstance(it, torch.Tensor)}
        self.places: dict[int, tuple[_Place, int]] = {}

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        if func is not torch.Tensor.__deepcopy__:
            return func(*args, **(kwargs or {}))
        tensor = args[0]
        if id(tensor) not in self._at:
            self._at[id(tensor)] = len(self._leaves)
            self._leaves.append(tensor)
        place, _ = self.places.setdefault(id(tensor), (_Place(), self._at[id(tensor)]))
        return place


def ends_of(returned: Any, outputs: Sequence[Any]) -> list[torch.Tensor]:
    """Return where the backward pass begins: at the loss, or at all outputs that take gradients.

    The loss is the output of that name, if it has one element. Of a tuple or list that begins with
    an output of no dimensions, it is that one, and the others like it, which may be added to it.
    """
    wanted = [it for it in outputs if isinstance(it, torch.Tensor) and it.requires_grad]
    named = returned.get("loss") if isinstance(returned, Mapping) else None
    loss: Any = getattr(returned, "loss", named)
    if any(it is loss and it.numel() == 1 for it in wanted):
        return [loss]
    first: Any = next(iter(returned), None) if isinstance(returned, tuple | list) else None
    if any(it is first and not it.dim() for it in wanted):
        return [it for it in wanted if not it.dim()]
    return wanted
