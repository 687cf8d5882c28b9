"""One forward pass, watched: each tensor that autograd saves gets a name, and is kept packed.

torch offers hooks that pack and unpack saved tensors, but a hook is given a bare tensor: not which
layer or op saved it. Counting calls (GACT) assigns wrong bits as soon as control flow changes.
Here a function mode sees each call of an op and forward hooks see each module, so a tensor is
known by module path, op and slot; what an op needs of it decides how it is kept (policy.py).

Over 300 lines: one object with the state of one forward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, field
from typing import Any, Protocol

import torch
from torch._subclasses.fake_tensor import FakeTensor
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..activations import Controller, coverage, treatment
from ..activations.again import INPUT
from ..sizes import show_bytes
from . import packing
from .packing import Exact, Kept, Layout, Lossy, Mask, Narrow, Places, Shape, Window
from .signs import SignRelu

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


@dataclass
class _Memory:
    """A storage seen in this forward pass: what autograd would hold, and what is held instead."""

    nbytes: int
    saved: bool = False
    exact: bool = False
    packed_bytes: int = 0
    kept: dict[tuple[Any, ...], Lossy] = field(default_factory=dict)
    groups: dict[tuple[Any, ...], str] = field(default_factory=dict)


@dataclass(frozen=True)
class Saved:
    """What one forward pass saved: bytes as autograd would hold them, and as they are held."""

    plain_bytes: int
    packed_bytes: int
    elements: int

    @property
    def ratio(self) -> float:
        """Plain bytes over packed ones."""
        return self.plain_bytes / max(self.packed_bytes, 1)

    @property
    def saving_bytes(self) -> int:
        return self.plain_bytes - self.packed_bytes

    def __str__(self) -> str:
        return (
            f"activations {show_bytes(self.plain_bytes)} -> {show_bytes(self.packed_bytes)}, "
            f"{self.ratio:.1f} times less"
        )


@dataclass
class Packer:
    """What looks at values and packs them; each tensor draws its own random numbers."""

    controller: Controller
    form: str
    seed: int
    threads: int
    packed: int = 0
    blank = False
    """Whether there are no values, only sizes."""

    def rounded(self, tensor: torch.Tensor, bits: int, bound: float, form: str) -> Lossy:
        """Return the values in these bits."""
        codec = packing.codec(bits, bound, form, self.seed, self.threads)
        self.packed += 1
        return Lossy(packing.flat_values(tensor), codec, self.packed - 1)

    def holds_two(self, tensor: torch.Tensor, key: str) -> bool:
        """Whether all values are 0 or one other."""
        return packing.two_values(packing.flat_values(tensor)) is not None

    def sign(self, tensor: torch.Tensor, key: str) -> Kept:
        """Return a bit for each value. NaN counts as above zero: it lets gradients through."""
        return Mask(~(packing.flat_values(tensor) <= 0), 1.0)

    def exact(self, tensor: torch.Tensor, kind: str, window: Window | None, key: str) -> Kept:
        """Return what is kept of a tensor of which nothing is lost."""
        if kind == "exact":
            return Exact(tensor)
        if kind == "shape":
            return Shape()
        if kind == "integers":
            if tensor.dtype == torch.bool:
                return Mask(packing.flat_values(tensor), 1.0)
            if window is not None and window.bits and tensor.dtype == torch.int64:
                return Places(tensor, window)
            narrow = tensor.dtype in (torch.int16, torch.int32, torch.int64)
            return Narrow(tensor.detach()) if narrow else Exact(tensor)
        values = packing.flat_values(tensor)
        if kind == "sign":
            return Mask(values > 0, 1.0)
        return Mask(values != 0, packing.two_values(values) or 0.0)


class Promises(Protocol):
    """A unit that runs: in its first run it promises what it saves, in the second it keeps it."""

    def promise(self, layout: Layout) -> Kept:
        """Return what stands for the next tensor."""

    def fulfil(self, kept: Kept, layout: Layout) -> None:
        """Take the next tensor. May raise, to say that there are no more."""


class Pass:
    """What a forward pass, or a second one of a unit, saves while it is entered.

    Parameters
    ----------
    packer
        Packs.
    resident, given
        Storages that are there anyway: of the model, and of what it was given.
    path, counts
        Of modules, the innermost last; of calls so far, by path and op.
    watch
        Called with each call that saved something lossy, and its result.
    again
        The unit that runs a second time, if this is that.
    exactly
        Nothing is packed.
    """

    def __init__(
        self,
        packer: Packer,
        resident: frozenset[int],
        given: frozenset[int],
        *,
        path: Sequence[str] = (),
        counts: Mapping[tuple[str, str], int] | None = None,
        watch: Callable[[Call, Any], None] | None = None,
        again: Promises | None = None,
        exactly: bool = False,
    ) -> None:
        self.packer, self.controller = packer, packer.controller
        self.resident, self.left_alone, self.path = resident, resident | given, list(path)
        self.counts = dict(counts or {})
        self.first: Promises | None = None
        """The unit that runs its first time just now."""
        self._watch, self._again, self._exactly = watch, again, exactly
        self._call: Call | None = None
        self._storages: dict[int, tuple[weakref.ref[Any], _Memory]] = {}
        self._memories: list[_Memory] = []
        self._elements = 0
        self._contexts = ExitStack()

    def __enter__(self) -> Pass:
        self._contexts.enter_context(torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack))
        self._contexts.enter_context(_Calls(self._called))
        return self

    def __exit__(self, *_: object) -> None:
        self._contexts.close()
        self._storages.clear()

    def enter(self, context: Any) -> None:
        """Enter a context that is left with this one."""
        self._contexts.enter_context(context)

    @property
    def can_repeat(self) -> bool:
        """Whether a unit that begins here may be one that runs again: it is in no other."""
        return self.first is None and self._again is None

    @property
    def saved(self) -> Saved:
        """What was saved so far."""
        plain = sum(memory.nbytes for memory in self._memories if memory.saved)
        held = sum(m.packed_bytes + m.nbytes * m.exact for m in self._memories)
        return Saved(plain, held, self._elements)

    # The op that runs.

    def _called(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if self._call is not None or name == "__get__":
            return func(*args, **kwargs)
        path = self.path[-1] if self.path else ""
        count = self.counts[path, name] = self.counts.get((path, name), 0) + 1
        place = f"{path or 'model'}/{name}" + (f":{count}" if count > 1 else "")
        call = self._call = Call(name, place, args, kwargs)
        try:
            x = _rectified(call) if self._is_innermost() else None
            result = func(*args, **kwargs) if x is None else SignRelu.apply(x, self._sign)
            if self._watch is not None and call.lossy:
                self._watch(call, result)
        finally:
            self._call = None
        return result

    def _is_innermost(self) -> bool:
        """Whether autograd calls these hooks: no checkpoint of the user's has put in its own."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return hooks is not None and hooks[0] == self._pack

    # Packing one tensor.

    def _pack(self, tensor: torch.Tensor) -> tuple[Kept, Layout]:
        path = self.path[-1] if self.path else "model"
        call = self._call or Call("", f"{path}/", (), {})
        storage = tensor.untyped_storage()
        if storage._cdata in self.left_alone:
            call.slots += 1
            return Exact(tensor), Layout.of(tensor)
        return self._delivered(tensor, call, lambda *it: self._keep(tensor, call, *it))

    def _sign(self, y: torch.Tensor) -> tuple[Kept, Layout]:
        """Keep what the backward pass of a ReLU needs."""
        assert self._call is not None
        return self._delivered(
            y, self._call, lambda key, memory: self._counted(self.packer.sign(y, key), key, memory)
        )

    def _delivered(
        self, tensor: torch.Tensor, call: Call, keep: Callable[[str, _Memory], Kept]
    ) -> tuple[Kept, Layout]:
        key, layout = f"{call.place}/{call.slots}", Layout.of(tensor)
        call.slots += 1
        memory = self._memory(tensor.untyped_storage())
        memory.saved = True
        self._elements += layout.numel
        if self.first is not None:
            # What a unit saves in its first run is a promise.
            if treatment(call.name) == "linear" and layout.numel >= MIN_ELEMENTS:
                call.lossy.append(key)
            return self.first.promise(layout), layout
        kept = keep(key, memory)
        if self._again is not None:
            self._again.fulfil(kept, layout)
        return kept, layout

    def given(self, tensor: torch.Tensor, name: str, place: int) -> tuple[Kept, Layout]:
        """Keep what a unit was given."""
        if tensor.untyped_storage()._cdata in self.left_alone:
            return Exact(tensor), Layout.of(tensor)
        if not packing.is_dense(tensor):
            tensor = tensor.detach().contiguous()
        memory = self._memory(tensor.untyped_storage())
        call = Call(INPUT, f"{name}/{INPUT}", (tensor,), {})
        kept = self._keep(tensor, call, f"{name}/{INPUT}/{place}", memory)
        return kept, Layout.of(tensor)

    def know(self, tensor: torch.Tensor, kept: Kept) -> None:
        """Let a tensor be known as packed already, should it be saved."""
        if isinstance(kept, Lossy):
            self._memory(tensor.untyped_storage()).kept[_where(tensor)] = kept

    def group(self, tensor: torch.Tensor, key: str) -> str:
        """Return the name of the memory that a tensor lies in; `key`, if it has none yet."""
        return self._memory(tensor.untyped_storage()).groups.setdefault(_where(tensor), key)

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
            memory.packed_bytes += kept.nbytes
            self.controller.observe_other(key, nbytes=kept.nbytes)
        return kept

    def _keep(self, tensor: torch.Tensor, call: Call, key: str, memory: _Memory) -> Kept:
        """Pack a tensor; in a second run that packs nothing, keep it."""
        if self._exactly:
            return Exact(tensor)
        kind = self._kind(tensor, call, key)
        if kind in ("linear", "nonlinear"):
            return self._lossy(tensor, call, key, memory, linear=kind == "linear")
        kept = self.packer.exact(tensor, kind, _window(call), key)
        return self._counted(kept, key, memory)

    def _kind(self, tensor: torch.Tensor, call: Call, key: str) -> str:
        """The treatment of a tensor: that of its op, unless it is of another type or size."""
        if tensor.numel() < MIN_ELEMENTS or not packing.is_dense(tensor):
            return "exact"
        if not tensor.dtype.is_floating_point:
            return "integers"
        # Without a name it is an autograd function of the user's, or a checkpoint's input.
        kind = treatment(call.name) if call.name else "exact"
        if tensor.dtype == torch.float64 or kind == "exact" or not _of_input_size(tensor, call):
            return "exact"
        if kind == "mask" and not self.packer.holds_two(tensor, key):
            return "nonlinear"
        return kind

    def _lossy(
        self, tensor: torch.Tensor, call: Call, key: str, memory: _Memory, *, linear: bool
    ) -> Kept:
        bits = self.controller.bits(key, linear=linear)
        bound, form = self.controller.bound(key), "fixed"
        if self.packer.form == "paper" and linear:
            exact = self.controller.theory == "exact"
            bound = self.controller.exact_bound(key) if exact else bound
            # Until the first refresh there is no bound, and the fixed form does without.
            form = "paper" if 2.0**-100 <= bound <= 2.0**100 else "fixed"
        n, group = tensor.numel(), self.group(tensor, key)
        if bits is None or bound < 2.0**-100:
            memory.exact = True
            self.controller.observe(key, n=n, bits=None, variance=0.0, linear=linear, group=group)
            return Exact(tensor)
        kept = memory.kept.get(_where(tensor))
        if kept is None or kept.bits < bits:
            kept = self.packer.rounded(tensor, bits, bound, form)
            if not kept.fits:
                memory.exact = True
                self.controller.overflowed(key)
                return Exact(tensor)
            memory.kept[_where(tensor)] = kept
            memory.packed_bytes += kept.nbytes
        self.controller.observe(
            key, n=n, bits=kept.bits, variance=kept.variance, nonzero=kept.nonzero,
            linear=linear, group=group,
        )  # fmt: skip
        if linear:
            call.lossy.append(key)
        return kept


class _Calls(TorchFunctionMode):
    def __init__(self, call: Callable[..., Any]) -> None:
        super().__init__()
        self._call = call

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        return self._call(func, args, kwargs or {})


def _unpack(saved: tuple[Kept, Layout]) -> torch.Tensor:
    kept, layout = saved
    return kept.restore(layout)


def _where(tensor: torch.Tensor) -> tuple[Any, ...]:
    return tensor.storage_offset(), tensor.numel(), tensor._version, tensor.dtype


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))


def _rectified(call: Call) -> torch.Tensor | None:
    """What a ReLU is given whose backward pass can read bits; None of any other call."""
    if call.name != "relu":
        return None
    inplace = call.kwargs.get("inplace", call.args[1] if len(call.args) > 1 else False)
    x: Any = call.kwargs.get("input", call.args[0] if call.args else None)
    # Of other types of tensors, autograd functions know nothing.
    plain = type(x) in (torch.Tensor, torch.nn.Parameter, FakeTensor)
    if inplace or not plain or not (x.requires_grad and torch.is_grad_enabled()):
        return None
    fits = x.numel() >= MIN_ELEMENTS and packing.is_dense(x) and x.dtype.is_floating_point
    return x if fits and x.dtype not in _WITHOUT_KERNEL else None


def _of_input_size(tensor: torch.Tensor, call: Call) -> bool:
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


def _window(call: Call) -> Window | None:
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
