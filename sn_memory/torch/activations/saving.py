"""One forward pass, watched: each tensor that autograd saves gets a name, and is kept compressed.

torch offers hooks that pack and unpack saved tensors, but a hook is given a bare tensor: not which
layer or op saved it. Counting calls (GACT) assigns wrong bits as soon as control flow changes.
Here a function mode sees each call of an op and forward hooks see each module, so a tensor is
known by module path, op and slot; what an op needs of it decides how it is kept (policy.py).
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ...activations import coverage, treatment
from ...base.sizes import show_bytes
from ..model.snapshot import version_of
from .treatments import (
    Compressor,
    Exact,
    Kept,
    Layout,
    Lossy,
    SignRelu,
    Window,
    flat_values,
    is_dense,
    two_values,
)

MIN_ELEMENTS = 1024
"""Smaller tensors are left alone."""
_WITHOUT_KERNEL = (torch.float64,)


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
    plain = type(x) in (torch.Tensor, torch.nn.Parameter)
    if inplace or not plain or not (x.requires_grad and torch.is_grad_enabled()):
        return None
    fits = x.numel() >= MIN_ELEMENTS and is_dense(x) and x.dtype.is_floating_point
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


@dataclass(frozen=True)
class Saved:
    """What one forward pass saved: bytes as autograd would hold them, and as they are held."""

    plain_bytes: int
    compressed_bytes: int
    elements: int

    @property
    def ratio(self) -> float:
        """Plain bytes over compressed ones."""
        return self.plain_bytes / max(self.compressed_bytes, 1)

    @property
    def saving_bytes(self) -> int:
        return self.plain_bytes - self.compressed_bytes

    def __str__(self) -> str:
        return (
            f"activations {show_bytes(self.plain_bytes)} -> {show_bytes(self.compressed_bytes)}, "
            f"{self.ratio:.1f} times less"
        )


@dataclass
class _Memory:
    """A storage seen in this forward pass: what autograd would hold, and what is held instead."""

    nbytes: int
    saved: bool = False
    exact: bool = False
    compressed_bytes: int = 0
    kept: dict[tuple[Any, ...], Lossy] = field(default_factory=dict)
    groups: dict[tuple[Any, ...], str] = field(default_factory=dict)


class Pass:
    """What a forward pass saves while it is entered.

    Parameters
    ----------
    compressor
        Compresses.
    left_alone
        Storages that are there anyway: of the model, and of what it was given.
    watch
        Called with each call that saved something lossy, and its result.

    Attributes
    ----------
    path
        Of modules, the innermost last.
    """

    def __init__(
        self,
        compressor: Compressor,
        left_alone: frozenset[int],
        watch: Callable[[Call, Any], None] | None = None,
    ) -> None:
        self.compressor, self.controller = compressor, compressor.controller
        self.path: list[str] = []
        self._left_alone = left_alone
        self._counts: dict[tuple[str, str], int] = {}  # of calls so far, by path and op
        self.watch = watch
        self._call: Call | None = None
        self._storages: dict[int, tuple[weakref.ref[Any], _Memory]] = {}
        self._memories: list[_Memory] = []
        self._elements = 0
        self._contexts = ExitStack()

    def __enter__(self) -> Pass:
        self._contexts.enter_context(
            torch.autograd.graph.saved_tensors_hooks(self._compress, _decompress)
        )
        self._contexts.enter_context(Calls(self._called))
        return self

    def __exit__(self, *_: object) -> None:
        self._contexts.close()
        self._storages.clear()

    @property
    def saved(self) -> Saved:
        """What was saved so far."""
        plain = sum(memory.nbytes for memory in self._memories if memory.saved)
        held = sum(m.compressed_bytes + m.nbytes * m.exact for m in self._memories)
        return Saved(plain, held, self._elements)

    # The op that runs.

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if self._call is not None or name == "__get__":
            return func(*args, **kwargs)
        path = self.path[-1] if self.path else ""
        count = self._counts[path, name] = self._counts.get((path, name), 0) + 1
        place = f"{path or 'model'}/{name}" + (f":{count}" if count > 1 else "")
        call = self._call = Call(name, place, args, kwargs)
        try:
            x = rectified(call) if self._is_innermost() else None
            result = func(*args, **kwargs) if x is None else SignRelu.apply(x, self._sign)
            if self.watch is not None and call.lossy:
                self.watch(call, result)
        finally:
            self._call = None
        return result

    def _is_innermost(self) -> bool:
        """Whether autograd calls these hooks: no checkpoint of the user's has put in its own."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return hooks is not None and hooks[0] == self._compress

    # Compressing one tensor.

    def _compress(self, tensor: torch.Tensor) -> tuple[Kept, Layout]:
        path = self.path[-1] if self.path else "model"
        call = self._call or Call("", f"{path}/", (), {})
        storage = tensor.untyped_storage()
        if storage._cdata in self._left_alone:
            call.slots += 1
            return Exact(tensor), Layout.of(tensor)
        return self._delivered(tensor, call, lambda *it: self._keep(tensor, call, *it))

    def _sign(self, y: torch.Tensor) -> tuple[Kept, Layout]:
        """Keep what the backward pass of a ReLU needs."""
        assert self._call is not None
        return self._delivered(
            y,
            self._call,
            lambda key, memory: self._counted(self.compressor.sign(y), key, memory),
        )

    def _delivered(
        self, tensor: torch.Tensor, call: Call, keep: Callable[[str, _Memory], Kept]
    ) -> tuple[Kept, Layout]:
        key, layout = f"{call.place}/{call.slots}", Layout.of(tensor)
        call.slots += 1
        memory = self._memory(tensor.untyped_storage())
        memory.saved = True
        self._elements += layout.numel
        return keep(key, memory), layout

    def _memory(self, storage: Any) -> _Memory:
        """The record of a storage; an address that is used anew gets a new one."""
        found = self._storages.get(storage._cdata)
        if found is None or found[0]() is None:
            found = weakref.ref(storage), _Memory(storage.nbytes())
            self._storages[storage._cdata] = found
            self._memories.append(found[1])
        return found[1]

    def _counted(self, kept: Kept, key: str, memory: _Memory) -> Kept:
        """Note what something kept takes, other than rounded values."""
        if isinstance(kept, Exact):
            if not memory.exact:
                self.controller.observe_other(key, nbytes=memory.nbytes)
            memory.exact = True
        else:
            memory.compressed_bytes += kept.nbytes
            self.controller.observe_other(key, nbytes=kept.nbytes)
        return kept

    def _keep(self, tensor: torch.Tensor, call: Call, key: str, memory: _Memory) -> Kept:
        """Compress a tensor."""
        kind = self._kind(tensor, call)
        if kind in ("linear", "nonlinear"):
            return self._lossy(tensor, call, key, memory, linear=kind == "linear")
        kept = self.compressor.exact(tensor, kind, window_of(call))
        return self._counted(kept, key, memory)

    def _kind(self, tensor: torch.Tensor, call: Call) -> str:
        """The treatment of a tensor: that of its op, unless it is of another type or size."""
        if tensor.numel() < MIN_ELEMENTS or not is_dense(tensor):
            return "exact"
        if not tensor.dtype.is_floating_point:
            return "integers"
        # Without a name it is an autograd function of the user's, or a checkpoint's input.
        kind = treatment(call.name) if call.name else "exact"
        if tensor.dtype == torch.float64 or kind == "exact" or not of_input_size(tensor, call):
            return "exact"
        if kind == "mask" and two_values(flat_values(tensor)) is None:
            return "nonlinear"
        return kind

    def _lossy(
        self, tensor: torch.Tensor, call: Call, key: str, memory: _Memory, *, linear: bool
    ) -> Kept:
        bits = self.controller.bits(key, linear=linear)
        tolerance, form = self.controller.tolerance(key), "fixed"
        if self.compressor.form == "paper" and linear:
            exact = self.controller.theory == "exact"
            tolerance = self.controller.exact_tolerance(key) if exact else tolerance
            # Until the first refresh there is no tolerance, and the fixed form does without.
            form = "paper" if 2.0**-100 <= tolerance <= 2.0**100 else "fixed"
        n, group = tensor.numel(), memory.groups.setdefault(_where(tensor), key)
        if bits is None or tolerance < 2.0**-100:
            memory.exact = True
            self.controller.observe(key, n=n, bits=None, variance=0.0, linear=linear, group=group)
            return Exact(tensor)
        kept = memory.kept.get(_where(tensor))
        if kept is None or kept.bits < bits:
            kept = self.compressor.rounded(tensor, bits, tolerance, form)
            if not kept.fits:
                memory.exact = True
                self.controller.overflowed(key)
                return Exact(tensor)
            memory.kept[_where(tensor)] = kept
            memory.compressed_bytes += kept.nbytes
        self.controller.observe(
            key, n=n, bits=kept.bits, variance=kept.variance, nonzero=kept.nonzero,
            linear=linear, group=group,
        )  # fmt: skip
        if linear:
            call.lossy.append(key)
        return kept


def _decompress(saved: tuple[Kept, Layout]) -> torch.Tensor:
    kept, layout = saved
    return kept.restore(layout)


def _where(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.numel(), version_of(tensor), tensor.dtype
