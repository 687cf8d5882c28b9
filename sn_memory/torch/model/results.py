"""What a forward pass returns, flattened into tensors and put together again.

torch's pytree flattens nested lists, tuples and mappings. Objects of other classes (a cache of keys
and values, a distribution, a dataclass) are leaves to it, and the tensors in them would be missed.
They are copied with a placeholder for each tensor; each step copies that copy.
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from types import BuiltinFunctionType, FunctionType, MethodType
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import TreeSpec, tree_flatten, tree_leaves, tree_unflatten

from ..errors import TraceError
from .snapshot import StateSnapshot

# Leaves that need no copy: values, and what has no tensors of its own.
_WHOLE = (
    *(type(None), bool, int, float, complex, str, bytes, type, torch.nn.Module),
    *(torch.dtype, torch.device, torch.layout, torch.Size, torch.memory_format),
    *(FunctionType, MethodType, BuiltinFunctionType),
)


@dataclass(frozen=True)
class Form:
    """How leaves make up what a forward pass returns.

    spec : of the first leaves
    shells : objects among these, copied as one list, with a placeholder for each tensor
    places : per placeholder in the shells, the leaf that takes its place
    shared : by id, what the copies share with the objects
    """

    spec: TreeSpec
    shells: list[Any]
    places: tuple[tuple[_Place, int], ...]
    shared: dict[int, Any]

    def filled(self, leaves: Sequence[Any]) -> Any:
        """Put leaves together; objects are new ones."""
        first = list(leaves[: self.spec.num_leaves])
        if self.shells:
            # deepcopy takes what its memo has for the copy: so tensors get into the objects.
            memo = {id(place): leaves[at] for place, at in self.places} | self.shared
            results = copy.deepcopy(self.shells, memo)
            first = [
                results[output.number] if isinstance(output, Shell) else output for output in first
            ]
        return tree_unflatten(first, self.spec)


@dataclass(frozen=True)
class Shell:
    """Stands for an object among the leaves."""

    number: int


class _Place:
    """Stands for a tensor in a copied object."""


def flatten_outputs(results: Any, model: torch.nn.Module) -> tuple[list[Any], Form]:
    """Return the leaves of what a forward pass returned, and how they make it up.

    Tensors in objects are the last leaves, each once; the objects' own leaves are a Shell.

    model : its modules and what is an attribute of these is not copied

    Raises TraceError if an object cannot be copied.
    """
    leaves, spec = tree_flatten(results)
    at = [
        place for place, leaf in enumerate(leaves) if not isinstance(leaf, (torch.Tensor, *_WHOLE))
    ]
    if not at:
        return leaves, Form(spec, [], (), {})
    # Parts of the model that an object refers to are not copied with it.
    shared: dict[int, Any] = {}
    for module in model.modules():
        values = (module, *module.__dict__.values())
        shared |= {id(value): value for value in values if not isinstance(value, torch.Tensor)}
    opened = _Opened(leaves)
    try:
        with opened:
            shells = copy.deepcopy([leaves[place] for place in at], dict(shared))
    except Exception as error:
        kinds = ", ".join(dict.fromkeys(type(leaves[place]).__name__ for place in at))
        raise TraceError(
            f"the forward pass returns a {kinds}, which cannot be copied ({error}), so a replay "
            "could not return a new one. Return tensors, in lists, tuples or mappings."
        ) from error
    for number, place in enumerate(at):
        leaves[place] = Shell(number)
    return leaves, Form(spec, shells, tuple(opened.places.values()), shared)


def tensors_of(results: Any, model: torch.nn.Module) -> list[Any]:
    """Return the leaves of what a forward pass returned, with the tensors in objects among them."""
    try:
        return flatten_outputs(results, model)[0]
    except TraceError:
        # What cannot be copied can be looked into.
        leaves = tree_leaves(results)
        inside = {id(tensor): tensor for tensor in StateSnapshot([("results", leaves)]).tensors()}
        return [*leaves, *(value for key, value in inside.items() if key not in {*map(id, leaves)})]


class _Opened(TorchFunctionMode):
    """Puts a placeholder where deepcopy would copy a tensor, and adds the tensor to the leaves."""

    def __init__(self, leaves: list[Any]) -> None:
        super().__init__()
        self._leaves = leaves
        self._at = {
            id(leaf): at for at, leaf in enumerate(leaves) if isinstance(leaf, torch.Tensor)
        }
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
    wanted = [
        output for output in outputs if isinstance(output, torch.Tensor) and output.requires_grad
    ]
    named = returned.get("loss") if isinstance(returned, Mapping) else None
    loss: Any = getattr(returned, "loss", named)
    if any(tensor is loss and tensor.numel() == 1 for tensor in wanted):
        return [loss]
    first: Any = next(iter(returned), None) if isinstance(returned, tuple | list) else None
    if any(tensor is first and not tensor.dim() for tensor in wanted):
        return [tensor for tensor in wanted if not tensor.dim()]
    return wanted


# Comparing two steps


# A gradient counts as at least this part of what it were if all gradients were equally large.
_SHARE = 0.1

Results = Mapping[str, torch.Tensor | None]


def differences(expected: Results, got: Results) -> dict[str, float]:
    """Return the relative errors of the results of two steps that are not bit-equal, by name.

    The norm of the difference over the norm expected; for gradients over a tenth of what it would
    be were all gradients equally large, if that is more: one that is zero but for rounding (the
    bias of attention's keys) has a relative error of the order of 1. Infinite where one is missing,
    of another type or shape, or NaN in other places.
    """
    gradients = [
        value for name, value in expected.items() if _is_gradient(name) and value is not None
    ]
    size = math.sqrt(sum(_norm(_numbers(grad)) ** 2 for grad in gradients))
    count = sum(grad.numel() for grad in gradients)
    errors = {}
    for name in sorted({*expected, *got}):
        left, right = expected.get(name), got.get(name)
        if same_bits(left, right):
            continue
        share = _SHARE * size * math.sqrt(left.numel() / count) if left is not None and count else 0
        errors[name] = _distance(left, right, share if _is_gradient(name) else 0.0)
    return errors


def same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Whether two results are equal to the bit, or both absent."""
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(
        left.detach().contiguous().view(-1).view(torch.uint8) if left.numel() else left,
        right.detach().contiguous().view(-1).view(torch.uint8) if right.numel() else right,
    )


def _is_gradient(name: str) -> bool:
    return name.startswith("gradient of ")


def _numbers(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values as float64; complex numbers count by their two parts."""
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor
    return plain.detach().double()


def _norm(numbers: torch.Tensor) -> float:
    # Of finite numbers alone: over an infinite norm every difference would be zero.
    return float(torch.where(numbers.isfinite(), numbers, 0.0).norm())


def _distance(left: torch.Tensor | None, right: torch.Tensor | None, least: float) -> float:
    if left is None or right is None or left.dtype != right.dtype or left.shape != right.shape:
        return math.inf
    expected, got = _numbers(left), _numbers(right)
    lost = ~(expected.isfinite() & got.isfinite())
    # NaN and Inf have no distance: they are the same, or infinitely far apart.
    if not torch.allclose(expected[lost], got[lost], rtol=0, atol=0, equal_nan=True):
        return math.inf
    distance, size = _norm(expected - got), max(_norm(expected), least)
    return distance / size if size else (math.inf if distance else 0.0)
