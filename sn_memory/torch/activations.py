"""compress_activations: what autograd saves for the backward pass, in far fewer bytes.

torch offers hooks that pack and unpack saved tensors, but a hook is given a bare tensor: not which
layer or op saved it. Counting calls (GACT) assigns wrong bits as soon as control flow changes.
Here a function mode sees each call of an op and forward hooks see each module, so a tensor is
known by module path, op and slot; what an op needs of it decides how it is kept (policy.py).

Over 300 lines: one object with the state of one forward pass.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from torch.utils._pytree import tree_leaves

from ..activations import Controller, coverage, treatment
from ..sizes import parse_bytes, show_bytes
from . import packing
from .errors import TraceError
from .packing import Exact, Kept, Layout, Lossy, Mask, Narrow, Places, Shape, Window

MIN_ELEMENTS = 1024
"""Smaller tensors are left alone."""


@dataclass
class _Op:
    """A call that is running: its name, where, and what it saved so far."""

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
    exact: bool = False
    packed_bytes: int = 0
    kept: dict[tuple[Any, ...], Lossy] = field(default_factory=dict)


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


def compress_activations(
    model: torch.nn.Module,
    *,
    error: float | None = None,
    budget: int | str | None = None,
    bits: int | None = None,
    optimizer: torch.optim.Optimizer | None = None,
    form: Literal["fixed", "paper"] = "fixed",
    seed: int = 0,
    threads: int = 1,
    **settings: Any,
) -> CompressedActivations:
    """Keep what `model` saves for the backward pass compressed, until closed.

    Parameters
    ----------
    model
        Trained eagerly; compiled models are refused.
    error
        Acceptable deviation of a weight's gradient, as a fraction of its momentum's mean magnitude
        (of the gradient's, without an optimizer). For Adam both are taken in units of its step.
    budget
        Instead: bytes that saved tensors may take, "500 MiB" for example.
    bits
        Instead: 1, 2, 4 or 8 for all inputs of linear and convolution layers.
    optimizer
        Where momentum is read; SGD's momentum_buffer, or exp_avg and exp_avg_sq.
    form
        "fixed" rounds at random; "paper" to nearest within a bound, entropy-coded (needs `error`).
    seed, threads
        Of the codec.
    settings
        Further ones of Controller: every, start_bits, nonlinear_bits, theory ...

    Returns
    -------
    CompressedActivations
        At work already; a context manager that ends it, as does `close()`.

    Raises
    ------
    TraceError
        If the model is compiled.
    ValueError
        If not exactly one of error, budget and bits is given, or a setting is illegal.

    Examples
    --------
    >>> import torch
    >>> from sn_memory.torch import compress_activations
    >>> model = torch.nn.Sequential(
    ...     torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, 64))
    >>> with compress_activations(model, bits=2) as packed:
    ...     model(torch.randn(256, 64)).sum().backward()
    >>> packed.saved.ratio > 9
    True
    """
    if hasattr(model, "_orig_mod"):
        raise TraceError(
            "compress_activations: got a compiled model; expected an eager one, as compiled code "
            "saves tensors of its own making. Compress the model that torch.compile was given."
        )
    if form not in ("fixed", "paper") or (form == "paper" and error is None):
        raise ValueError(
            f"compress_activations: form={form!r}; expected fixed, or paper together with error="
        )
    budget_bytes = None if budget is None else parse_bytes(budget)
    controller = Controller(error=error, budget_bytes=budget_bytes, bits=bits, **settings)
    return CompressedActivations(model, controller, optimizer, form, seed, threads)


class CompressedActivations:
    """Hooks on a model, and what they have seen.

    Attributes
    ----------
    controller
        Chooses the bits; `controller.rows()` has what is known of each tensor.
    saved
        Of the last forward pass.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        controller: Controller,
        optimizer: torch.optim.Optimizer | None = None,
        form: str = "fixed",
        seed: int = 0,
        threads: int = 1,
    ) -> None:
        self.model, self.controller, self.optimizer = model, controller, optimizer
        self._form, self._seed, self._threads = form, seed, threads
        self.saved = Saved(0, 0, 0)
        self.active = True
        self._step = self._packed = 0
        self._names = {module: name for name, module in model.named_modules()}
        self._path: list[str] = []
        self._op: _Op | None = None
        self._counts: dict[tuple[str, str], int] = {}
        self._storages: dict[int, tuple[weakref.ref[Any], _Memory]] = {}
        self._memories: list[_Memory] = []
        self._left_alone: set[int] = set()
        self._elements = 0
        self._gathering = False
        self._gathered: dict[str, dict[str, Any]] = {}
        self._weights: dict[str, torch.nn.Parameter] = {}
        self._magnitudes: dict[torch.nn.Parameter, float] = {}
        self._watched: list[Any] = []
        self._contexts: list[Any] = []
        self._handles = [model.register_forward_pre_hook(self._begin, with_kwargs=True)]
        for module in model.modules():
            self._handles.append(module.register_forward_pre_hook(self._enter))
            self._handles.append(module.register_forward_hook(self._leave, always_call=True))
        self._handles.append(model.register_forward_hook(self._end, always_call=True))

    def __enter__(self) -> CompressedActivations:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Take the hooks off the model. What was packed can still be unpacked."""
        for handle in [*self._handles, *self._watched]:
            handle.remove()
        self._handles, self._watched = [], []

    def report(self) -> str:
        """Return bytes saved, and a row per tensor: bits, predicted and measured error."""
        return f"{self.saved}\n{self.controller.report()}"

    # The forward pass: contexts, the path of modules, the op that runs.

    def _begin(self, _: torch.nn.Module, args: Any, kwargs: Any) -> None:
        if self._contexts or not self.active or not torch.is_grad_enabled():
            return
        self._refresh()
        self._counts.clear()
        self._storages.clear()
        self._memories.clear()
        self._elements = 0
        held = [*self.model.parameters(), *self.model.buffers(), *tree_leaves((args, kwargs))]
        self._left_alone = {
            tensor.untyped_storage()._cdata for tensor in held if isinstance(tensor, torch.Tensor)
        }
        self._gathering = self.controller.due(self._step)
        self._step += 1
        self._contexts = [
            torch.autograd.graph.saved_tensors_hooks(self._pack, _unpack),
            _Calls(self._call),
        ]
        for context in self._contexts:
            context.__enter__()

    def _end(self, *_: object) -> None:
        if not self._contexts or self._path:
            return
        for context in reversed(self._contexts):
            context.__exit__(None, None, None)
        self._contexts = []
        self._storages.clear()
        plain = sum(memory.nbytes for memory in self._memories)
        held = sum(m.packed_bytes + m.nbytes * m.exact for m in self._memories)
        self.saved = Saved(plain, held, self._elements)

    def _enter(self, module: torch.nn.Module, _: Any) -> None:
        if self._contexts:
            self._path.append(self._names.get(module, ""))

    def _leave(self, *_: object) -> None:
        if self._contexts and self._path:
            self._path.pop()

    def _call(self, func: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        name = getattr(func, "__name__", "")
        if self._op is not None or name == "__get__":
            return func(*args, **kwargs)
        path = self._path[-1] if self._path else ""
        count = self._counts[path, name] = self._counts.get((path, name), 0) + 1
        place = f"{path or 'model'}/{name}" + (f":{count}" if count > 1 else "")
        self._op = _Op(name, place, args, kwargs)
        try:
            result = func(*args, **kwargs)
            if self._gathering and self._op.lossy:
                self._watch(self._op, result)
        finally:
            self._op = None
        return result

    # Packing one tensor.

    def _pack(self, tensor: torch.Tensor) -> tuple[Kept, Layout]:
        op = self._op or _Op("", f"{self._path[-1] if self._path else 'model'}/", (), {})
        key = f"{op.place}/{op.slots}"
        op.slots += 1
        layout = Layout.of(tensor)
        storage = tensor.untyped_storage()
        if storage._cdata in self._left_alone:
            return Exact(tensor), layout
        memory = self._memory(storage)
        self._elements += tensor.numel()
        kept = self._keep(tensor, op, key, memory)
        if isinstance(kept, Exact):
            memory.exact = True
        elif not isinstance(kept, Lossy):
            memory.packed_bytes += kept.nbytes
            self.controller.observe_other(key, nbytes=kept.nbytes)
        return kept, layout

    def _memory(self, storage: Any) -> _Memory:
        """The record of a storage; an address that is used anew gets a new one."""
        found = self._storages.get(storage._cdata)
        if found is None or found[0]() is None:
            found = weakref.ref(storage), _Memory(storage.nbytes())
            self._storages[storage._cdata] = found
            self._memories.append(found[1])
        return found[1]

    def _keep(self, tensor: torch.Tensor, op: _Op, key: str, memory: _Memory) -> Kept:
        if tensor.numel() < MIN_ELEMENTS or not packing.is_dense(tensor):
            return Exact(tensor)
        if tensor.dtype == torch.bool:
            return Mask(packing.flat_values(tensor), 1.0)
        if not tensor.dtype.is_floating_point:
            window = _window(op)
            if window is not None and window.bits and tensor.dtype == torch.int64:
                return Places(tensor, window)
            integers = tensor.dtype in (torch.int16, torch.int32, torch.int64)
            return Narrow(tensor.detach()) if integers else Exact(tensor)
        # Without a name it is an autograd function of the user's, or a checkpoint's input.
        kind = treatment(op.name) if op.name else "exact"
        if tensor.dtype == torch.float64 or kind == "exact" or not _of_input_size(tensor, op):
            return Exact(tensor)
        if kind == "shape":
            return Shape()
        if kind == "sign":
            return Mask(packing.flat_values(tensor) > 0, 1.0)
        values = packing.flat_values(tensor)
        if kind == "mask" and (value := packing.two_values(values)) is not None:
            return Mask(values != 0, value)
        return self._lossy(tensor, values, op, key, memory, linear=kind == "linear")

    def _lossy(
        self, tensor: torch.Tensor, values: Any, op: _Op, key: str, memory: _Memory, *, linear: bool
    ) -> Kept:
        bits = self.controller.bits(key, linear=linear)
        bound, form = self.controller.bound(key), "fixed"
        if self._form == "paper" and linear:
            exact = self.controller.theory == "exact"
            bound = self.controller.exact_bound(key) if exact else bound
            # Until the first refresh there is no bound, and the fixed form does without.
            form = "paper" if 2.0**-100 <= bound <= 2.0**100 else "fixed"
        if bits is None or bound < 2.0**-100:
            self.controller.observe(key, n=values.size, bits=None, variance=0.0, linear=linear)
            return Exact(tensor)
        where = (tensor.storage_offset(), tensor.numel(), tensor._version, tensor.dtype)
        kept = memory.kept.get(where)
        if kept is None or kept.bits < bits:
            codec = packing.codec(bits, bound, form, self._seed, self._threads)
            kept = Lossy(values, codec, self._packed)
            self._packed += 1
            if not kept.fits:
                self.controller.overflowed(key)
                return Exact(tensor)
            memory.kept[where] = kept
            memory.packed_bytes += kept.nbytes
        self.controller.observe(
            key, n=values.size, bits=kept.bits, variance=kept.variance, nonzero=kept.nonzero,
            linear=linear,
        )  # fmt: skip
        if linear:
            op.lossy.append(key)
        return kept

    # Statistics: sums of squares of what arrives at a layer's output, and the yardstick.

    def _watch(self, op: _Op, result: Any) -> None:
        weight = _weight(op)
        if weight is None or not isinstance(result, torch.Tensor) or not result.requires_grad:
            return
        shape = tuple(result.shape)
        channels = 1 if op.name.startswith("conv") else len(shape) - 1
        about = {
            "outputs": shape[channels],
            "terms": result.numel() // max(shape[channels], 1),
            "coverage": _coverage(op, result, weight),
        }

        keys = op.lossy  # not the call itself, which holds its arguments

        def arrived(gradient: torch.Tensor) -> None:
            exact = gradient.detach().float()
            for key in keys:
                self._gathered[key] = about | {
                    "energy": float(exact.square().sum()),
                    "mean": float(exact.abs().mean()),
                }
                self._weights[key] = weight

        def magnitude(gradient: torch.Tensor) -> None:
            self._magnitudes[weight] = float(gradient.detach().float().abs().mean())

        self._watched.append(result.register_hook(arrived))
        self._watched.append(weight.register_hook(magnitude))

    def _refresh(self) -> None:
        """Hand over what the last backward pass gathered, and let the controller choose."""
        if not self._gathered:
            return
        for key, about in self._gathered.items():
            yardstick = self._yardstick(self._weights[key])
            self.controller.observe_gradient(key, yardstick=yardstick, **about)
        for handle in self._watched:
            handle.remove()
        self._watched = []
        self._gathered = {}
        self.controller.refresh()

    def refresh(self) -> None:
        """Choose bits now from what was gathered; otherwise the next forward pass does."""
        self._refresh()

    def _yardstick(self, weight: torch.nn.Parameter) -> float:
        """Mean magnitude of momentum; for Adam that of its step, times the root of the mean of v.

        Entries that never had a gradient have no step, and no error either.
        """
        state = self.optimizer.state.get(weight, {}) if self.optimizer is not None else {}
        if "exp_avg_sq" in state:
            square = state["exp_avg_sq"].float()
            unit = torch.where(square > 0, square.rsqrt(), torch.zeros_like(square))
            return float((state["exp_avg"].float().abs() * unit).mean() * square.mean().sqrt())
        if state.get("momentum_buffer") is not None:
            return float(state["momentum_buffer"].float().abs().mean())
        return self._magnitudes.get(weight, 0.0)

    def measure(
        self, loss: Callable[[], torch.Tensor], repeats: int = 1
    ) -> dict[str, torch.Tensor]:
        """Return the errors of the weights' gradients, [repeats, ...] by parameter name.

        `loss` runs a forward pass of the model and returns what is to be differentiated; it is
        called once without compression and `repeats` times with. Random numbers and buffers
        are put back each time. The deviations go into the controller's rows.
        """
        names = {name: p for name, p in self.model.named_parameters() if p.requires_grad}
        buffers = [buffer.clone() for buffer in self.model.buffers()]
        errors: dict[str, list[torch.Tensor]] = {name: [] for name in names}

        def gradients() -> list[torch.Tensor | None]:
            with torch.random.fork_rng(devices=[]):
                found = torch.autograd.grad(loss(), list(names.values()), allow_unused=True)
            with torch.no_grad():
                for buffer, before in zip(self.model.buffers(), buffers, strict=True):
                    buffer.copy_(before)
            return list(found)

        self.active = False
        try:
            plain = gradients()
        finally:
            self.active = True
        for _ in range(repeats):
            for name, packed, exact in zip(names, gradients(), plain, strict=True):
                if packed is not None and exact is not None:
                    errors[name].append(packed - exact)
        stacked = {name: torch.stack(each) for name, each in errors.items() if each}
        by_weight = {id(p): name for name, p in names.items()}
        for key, weight in self._weights.items():
            name = by_weight.get(id(weight))
            if name in stacked:
                self.controller.observe_error(key, float(stacked[name].double().std()))
        return stacked


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


def _tensors(values: Any) -> Iterable[torch.Tensor]:
    return (value for value in tree_leaves(values) if isinstance(value, torch.Tensor))


def _of_input_size(tensor: torch.Tensor, op: _Op) -> bool:
    """Whether it is as large as an argument: not a statistic, an exponent or a workspace."""
    if op.name == "linear" or op.name.startswith("conv"):
        first = next(iter(_tensors((op.args, op.kwargs))), None)
        return first is not None and tensor.numel() == first.numel()
    sizes = {argument.numel() for argument in _tensors((op.args, op.kwargs))}
    return tensor.numel() in sizes or not sizes


def _weight(op: _Op) -> torch.nn.Parameter | None:
    """The parameter whose gradient an op's input makes, if it is one the theory knows."""
    if op.name != "linear" and op.name not in ("conv1d", "conv2d", "conv3d"):
        return None
    given = op.kwargs.get("weight", op.args[1] if len(op.args) > 1 else None)
    return given if isinstance(given, torch.nn.Parameter) and given.requires_grad else None


def _coverage(op: _Op, result: torch.Tensor, weight: torch.Tensor) -> float:
    if op.name == "linear":
        return 1.0
    names = ("input", "weight", "bias", "stride", "padding", "dilation")
    given = dict(zip(names, op.args, strict=False)) | op.kwargs
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


def _window(op: _Op) -> Window | None:
    if op.name != "max_pool2d":
        return None
    names = ("input", "kernel_size", "stride", "padding", "dilation")
    given = dict(zip(names, op.args, strict=False)) | op.kwargs
    kernel = _each(given["kernel_size"], 2)
    stride = _each(given.get("stride") or kernel, 2)
    padding, dilation = _each(given.get("padding", 0), 2), _each(given.get("dilation", 1), 2)
    pairs = [(pair[0], pair[1]) for pair in (kernel, stride, padding, dilation)]
    return Window(pairs[0], pairs[1], pairs[2], pairs[3], given["input"].shape[-1])


def _each(value: Any, count: int) -> list[int]:
    return [value] * count if isinstance(value, int) else [*value] * (count // len(value))
