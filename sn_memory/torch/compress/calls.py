"""One call of an op: what its name and its arguments say of the tensors it saves."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...activations import coverage
from . import treatments
from .treatments import Window

MIN_ELEMENTS = 1024
"""Smaller tensors are left alone."""
_WITHOUT_KERNEL = (torch.float64,)
DRAWS_BY_VALUE = frozenset(("rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"))
"""Ops that draw as many random numbers as there are values of some kind."""


@dataclass
class Call:
    """A call of an op that is running: its name, where, and what it saved so far."""

    name: str
    place: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slots: int = 0
    lossy: list[str] = field(default_factory=list)


class Calls(TorchFunctionMode):
    """Hands each call of an op on: the function, its arguments and its keywords."""

    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._call(func, args, kwargs or {})


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))


def rectified(call: Call) -> torch.Tensor | None:
    """What a ReLU is given whose backward pass can read bits; None of any other call."""
    if call.name != "relu":
        return None
    inplace = call.kwargs.get("inplace", call.args[1] if len(call.args) > 1 else False)
    x: Any = call.kwargs.get("input", call.args[0] if call.args else None)
    # Of other types of tensors, autograd functions know nothing.
    plain = type(x) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
    if inplace or not plain or not (x.requires_grad and torch.is_grad_enabled()):
        return None
    fits = x.numel() >= MIN_ELEMENTS and treatments.is_dense(x) and x.dtype.is_floating_point
    return x if fits and x.dtype not in _WITHOUT_KERNEL else None


def of_input_size(tensor: torch.Tensor, call: Call) -> bool:
    """Whether it is as large as an argument: not a statistic, an exponent or a workspace."""
    if call.name == "linear" or call.name.startswith("conv"):
        first = next(iter(_tensors((call.args, call.kwargs))), None)
        return first is not None and tensor.numel() == first.numel()
    sizes = {argument.numel() for argument in _tensors((call.args, call.kwargs))}
    return tensor.numel() in sizes or not sizes


def storages_of(values: Any) -> frozenset[int]:
    """Return the storages of the tensors among some values."""
    return frozenset(it.untyped_storage()._cdata for it in _tensors(values))


def weight_of(call: Call) -> torch.nn.Parameter | None:
    """The parameter whose gradient an op's input makes, if it is one the theory knows."""
    if call.name != "linear" and call.name not in ("conv1d", "conv2d", "conv3d"):
        return None
    given = call.kwargs.get("weight", call.args[1] if len(call.args) > 1 else None)
    return given if isinstance(given, torch.nn.Parameter) and given.requires_grad else None


def coverage_of(call: Call, result: torch.Tensor, weight: torch.Tensor) -> float:
    """The part of a layer's products that do not meet padding."""
    if call.name == "linear":
        return 1.0
    names = ("input", "weight", "bias", "stride", "padding", "dilation")
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    kernel = list(weight.shape[2:])
    each = len(kernel)
    sizes = [
        _each(given.get(name, value), each) for name, value in (("stride", 1), ("dilation", 1))
    ]
    padding = given.get("padding", 0)
    if padding == "same":
        padding = [apart * (taps - 1) // 2 for apart, taps in zip(sizes[1], kernel, strict=True)]
    padding = [0] * each if padding == "valid" else _each(padding, each)
    return coverage(
        list(given["input"].shape[2:]), list(result.shape[2:]), kernel, sizes[0], padding, sizes[1]
    )


def window_of(call: Call) -> Window | None:
    """Return the windows that a pooling call looks at; None of any other call."""
    if call.name != "max_pool2d":
        return None
    names = ("input", "kernel_size", "stride", "padding", "dilation")
    given = dict(zip(names, call.args, strict=False)) | call.kwargs
    kernel = _each(given["kernel_size"], 2)
    stride = _each(given.get("stride") or kernel, 2)
    padding, dilation = _each(given.get("padding", 0), 2), _each(given.get("dilation", 1), 2)
    pairs = [(pair[0], pair[1]) for pair in (kernel, stride, padding, dilation)]
    return Window(pairs[0], pairs[1], pairs[2], pairs[3], given["input"].shape[-1])


def _each(value: Any, count: int) -> list[int]:
    return [value] * count if isinstance(value, int) else [*value] * (count // len(value))
