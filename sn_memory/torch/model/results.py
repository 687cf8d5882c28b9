"""Flatten the results of a forward pass into tensors, and rebuild them.

torch's pytree flattens nested lists, tuples and mappings. Objects of other classes (a cache of keys
and values, a distribution, a dataclass) are leaves to it, so it would miss the tensors in them.
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

# Leaves that need no copy: plain values, and objects without tensors of their own.
_WHOLE = (
    *(type(None), bool, int, float, complex, str, bytes, type, torch.nn.Module),
    *(torch.dtype, torch.device, torch.layout, torch.Size, torch.memory_format),
    *(FunctionType, MethodType, BuiltinFunctionType),
)


@dataclass(frozen=True)
class Form:
    """The structure of what a forward pass returns, without its leaves.

    spec : the pytree of the first leaves
    shells : objects among these, copied as one list, with a placeholder for each tensor
    places : per placeholder in the shells, the index of the leaf that replaces it
    shared : by id, what the copies share with the objects
    """

    spec: TreeSpec
    shells: list[Any]
    places: tuple[tuple[_Place, int], ...]
    shared: dict[int, Any]

    def filled(self, leaves: Sequence[Any]) -> Any:
        """Rebuild the results from leaves; objects are new ones."""
        first = list(leaves[: self.spec.num_leaves])
        if self.shells:
            # deepcopy takes copies from its memo, which is how tensors get into the objects.
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
    """Return the leaves of what a forward pass returned, and its structure.

    Tensors in objects are the last leaves, each once; an object itself is replaced by a Shell.

    model : its modules and their attributes are not copied

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
        # An object that cannot be copied can still be searched for tensors.
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
    """Return the tensors that the backward pass starts from: the loss, or all that need gradients.

    The loss is the output named `loss`, if it has one element. If a tuple or list begins with a
    scalar, all scalars in it are returned, as others may be added to the loss.
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


# A gradient's norm counts as at least this share of its norm if all gradients were equally large.
_SHARE = 0.1

Results = Mapping[str, torch.Tensor | None]


def differences(expected: Results, got: Results) -> dict[str, float]:
    """Return the relative errors of the results of two steps that are not bit-equal, by name.

    The error is the norm of the difference over the expected norm. For a gradient the latter counts
    as at least a tenth of its value if all gradients were equally large: a gradient that is zero
    except for rounding (of the bias of attention's keys) has a relative error of the order of 1.
    Infinite if a result is missing, of another type or shape, or has NaN in other places.
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
    """Return the values as float64; complex numbers as real and imaginary parts."""
    plain = torch.view_as_real(tensor.detach().resolve_conj()) if tensor.is_complex() else tensor
    return plain.detach().double()


def _norm(numbers: torch.Tensor) -> float:
    # Finite numbers only: relative to an infinite norm every difference would be zero.
    return float(torch.where(numbers.isfinite(), numbers, 0.0).norm())


def _distance(left: torch.Tensor | None, right: torch.Tensor | None, least: float) -> float:
    if left is None or right is None or left.dtype != right.dtype or left.shape != right.shape:
        return math.inf
    expected, got = _numbers(left), _numbers(right)
    lost = ~(expected.isfinite() & got.isfinite())
    # NaN and Inf either match or are infinitely far apart.
    if not torch.allclose(expected[lost], got[lost], rtol=0, atol=0, equal_nan=True):
        return math.inf
    distance, size = _norm(expected - got), max(_norm(expected), least)
    return distance / size if size else (math.inf if distance else 0.0)
