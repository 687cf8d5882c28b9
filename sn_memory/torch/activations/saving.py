"""Watch a forward pass: each tensor that autograd saves gets a name, and is kept compressed.

torch's saved-tensor hooks receive a bare tensor, without the layer or op that saved it. Counting
calls (GACT) assigns wrong bits as soon as control flow changes. Here a function mode sees each call
of an op and forward hooks see each module, so a tensor is identified by module path, op and slot;
how it is kept depends on what the op's backward pass needs of it: see `activations/saved.py`.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from time import perf_counter, thread_time
from typing import Any, Literal

import torch
from torch.overrides import TorchFunctionMode
from torch.utils.checkpoint import checkpoint

from ... import settings
from ...activations import coverage, treatment
from ...activations.saved import LossyTreatment, Saved, Timed, Treatment, compressed_bytes
from ..model.signature import tensors
from ..model.snapshot import version_of
from ..target.accelerator import is_apart, synchronize
from .packing import GROUP, Test, two_values
from .rerun import decides
from .treatments import (
    Compressor,
    ConvByImages,
    Exact,
    Kept,
    Layout,
    Lossy,
    Mask,
    Offloaded,
    SignRelu,
    Window,
    flat,
    grid_bytes,
    in_memory,
    is_dense,
    is_packable,
    parts_of,
    run_in_row,
)

MIN_ELEMENTS = 1024
"""Smaller tensors are left alone."""
_PACKED = (torch.float32, torch.float16, torch.bfloat16)
RUN = "run"
"""The op that saves, exactly, the input of layers that take some images at a time."""
MODULES, BY_IMAGES = "modules run again", "layers run again, some images at a time"
ATTENTION = "scaled_dot_product_attention"


@dataclass
class Call:
    """A running call of an op: its name, its key (`place`), and what it has saved so far."""

    name: str
    place: str
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    slots: int = 0
    lossy: list[str] = field(default_factory=list)
    kept: list[weakref.ref[Kept]] = field(default_factory=list)  # weak: freed when autograd does
    by_images: bool = False

    def arguments(self, *names: str) -> dict[str, Any]:
        """Return its arguments by name; `names` are those of its first parameters, in order."""
        return dict(zip(names, self.args, strict=False)) | self.kwargs


def now(device: torch.device) -> float:
    """Return the time once the device is idle; on the host, this thread's CPU time."""
    synchronize(device)
    return perf_counter() if is_apart(device) else thread_time()


def rectified(call: Call) -> tuple[torch.Tensor, bool] | None:
    """Return the input of a ReLU whose backward pass can use a mask, and whether it is in place.

    None for any other call.
    """
    if call.name not in ("relu", "relu_"):
        return None
    args = call.arguments("input", "inplace")
    x: Any = args.get("input")
    inplace = call.name == "relu_" or bool(args.get("inplace"))
    # Autograd functions do not support subclasses of Tensor.
    plain = type(x) in (torch.Tensor, torch.nn.Parameter)
    if not plain or not (x.requires_grad and torch.is_grad_enabled()):
        return None
    if inplace and (x.is_leaf or x._is_view()):  # autograd has special rules for these
        return None
    fits = x.numel() >= MIN_ELEMENTS and is_dense(x) and x.dtype in _PACKED
    return (x, inplace) if fits else None


def convolved(call: Call) -> tuple[Any, ...] | None:
    """Return the arguments of ConvByImages for a convolution where it pays off; else None."""
    if call.name not in ("conv1d", "conv2d", "conv3d"):
        return None
    names = ("input", "weight", "bias", "stride", "padding", "dilation", "groups")
    args = dict(zip(names, (None, None, None, 1, 0, 1, 1), strict=True)) | call.arguments(*names)
    x, weight, bias, *sizes, groups = (args[name] for name in names)
    plain = all(type(operand) in (torch.Tensor, torch.nn.Parameter) for operand in (x, weight))
    if (
        not plain
        or isinstance(sizes[1], str)
        or not (torch.is_grad_enabled() and weight.requires_grad)
    ):
        return None
    axes = weight.dim() - 2
    if x.dtype not in _PACKED or x.dtype != weight.dtype or x.dim() != axes + 2:
        return None
    if not is_dense(x) or in_memory(x)[0] != 0 or torch.is_autocast_enabled(x.device.type):
        return None
    # The weight gradient of a part is held in addition to the sum.
    pays = len(parts_of(x)) > 1 and x.numel() > 2 * weight.numel()
    return (x, weight, bias, *(_each(size, axes) for size in sizes), groups) if pays else None


def of_input_size(tensor: torch.Tensor, call: Call) -> bool:
    """Whether a tensor is as large as an argument: not a statistic, an exponent or a workspace."""
    inputs = tensors((call.args, call.kwargs))
    # For these only the input's size counts: a norm may have as many statistics as weights.
    if call.name == "linear" or call.name.startswith("conv") or call.name.endswith("_norm"):
        return bool(inputs) and tensor.numel() == inputs[0].numel()
    sizes = {argument.numel() for argument in inputs}
    if call.name == ATTENTION and len(inputs) > 1:
        # Without a fused kernel it saves a number for each pair of query and key.
        query, key = inputs[:2]
        sizes.add(query.numel() // query.shape[-1] * key.shape[-2])
    return tensor.numel() in sizes or not sizes


def storages_of(values: Any) -> frozenset[int]:
    """Return the storages of the tensors among some values."""
    return frozenset(tensor.untyped_storage()._cdata for tensor in tensors(values))


def weight_of(call: Call) -> torch.nn.Parameter | None:
    """Return the parameter whose gradient needs an op's input, if the theory covers the op."""
    if call.name != "linear" and call.name not in ("conv1d", "conv2d", "conv3d"):
        return None
    weight = call.arguments("input", "weight").get("weight")
    return weight if isinstance(weight, torch.nn.Parameter) and weight.requires_grad else None


def coverage_of(call: Call, result: torch.Tensor, weight: torch.Tensor) -> float:
    """Return the fraction of a layer's products that do not involve padding."""
    if call.name == "linear":
        return 1.0
    args = call.arguments("input", "weight", "bias", "stride", "padding", "dilation")
    kernel = list(weight.shape[2:])
    dims = len(kernel)
    sizes = [_each(args.get(name, value), dims) for name, value in (("stride", 1), ("dilation", 1))]
    padding = args.get("padding", 0)
    if padding == "same":
        spans = zip(sizes[1], kernel, strict=True)
        padding = [spacing * (taps - 1) // 2 for spacing, taps in spans]
    padding = [0] * dims if padding == "valid" else _each(padding, dims)
    return coverage(
        list(args["input"].shape[2:]), list(result.shape[2:]), kernel, sizes[0], padding, sizes[1]
    )


def window_of(call: Call) -> Window | None:
    """Return the windows of a pooling call; None for any other call."""
    if call.name != "max_pool2d":
        return None
    args = call.arguments("input", "kernel_size", "stride", "padding", "dilation")
    kernel = _each(args["kernel_size"], 2)
    stride = _each(args.get("stride") or kernel, 2)
    padding, dilation = _each(args.get("padding", 0), 2), _each(args.get("dilation", 1), 2)
    pairs = [(pair[0], pair[1]) for pair in (kernel, stride, padding, dilation)]
    return Window(pairs[0], pairs[1], pairs[2], pairs[3], args["input"].shape[-1])


# The shortest rows that get grids of their own (6 bytes each) in the input of a module that is
# rerun, which may be a norm written in several ops.
_LEAST_ROW = 32


def rows_of(call: Call, tensor: torch.Tensor) -> tuple[torch.Tensor, tuple[int, ...]] | None:
    """Return a view of a saved tensor, and the axes over which the op normalizes it.

    None if there are none, or if each group lies in one row anyway.
    """
    axes, view = tuple(range(tensor.dim())), tensor
    match call.name:
        case "layer_norm" | "rms_norm":
            axes = axes[-len(call.arguments("input", "normalized_shape")["normalized_shape"]) :]
        case "batch_norm" | "instance_norm":  # an instance norm saves a tensor with a batch of one
            axes = (0, *axes[2:])
        case "group_norm":
            groups = call.arguments("input", "num_groups")["num_groups"]
            view = tensor.unflatten(1, (groups, -1))
            axes = tuple(range(2, view.dim()))
        case "softmax" | "log_softmax":
            axes = _axes(call.arguments("input", "dim").get("dim", -1), axes)
        case "normalize":
            axes = _axes(call.arguments("input", "p", "dim").get("dim", 1), axes)
        case "input" if tensor.shape[-1] >= _LEAST_ROW:
            axes = axes[-1:]
        case _:
            return None
    # If each group lies in one row anyway, there is nothing to do.
    return None if run_in_row(view, axes) % GROUP == 0 else (view, axes)


def _axes(dim: int | Sequence[int] | None, axes: tuple[int, ...]) -> tuple[int, ...]:
    """Return the axes selected by an argument `dim`; None selects the last."""
    if dim is None:
        return axes[-1:]
    return tuple(axes[axis] for axis in ([dim] if isinstance(dim, int) else dim))


def _each(value: Any, count: int) -> list[int]:
    return [value] * count if isinstance(value, int) else [*value] * (count // len(value))


@dataclass
class _Memory:
    """A storage seen in this forward pass: its bytes, and what is held instead of it."""

    nbytes: int
    saved: bool = False
    exact: bool = False
    moved: bool = False
    compressed_bytes: int = 0
    kept: dict[tuple[Any, ...], Lossy] = field(default_factory=dict)
    groups: dict[tuple[Any, ...], str] = field(default_factory=dict)
    offloaded: dict[tuple[Any, ...], Offloaded] = field(default_factory=dict)

    @property
    def held_bytes(self) -> int:
        return self.compressed_bytes + self.nbytes * self.exact

    @property
    def way(self) -> str:
        moved = "offloaded" if self.moved else "tensors packed"
        return "left as they are" if self.exact else moved


@dataclass(frozen=True)
class Input:
    """A module's input: its storage and view, and whether it would be packed or left alone."""

    elements: int
    nbytes: int
    row_bytes: int
    where: tuple[Any, ...]
    memory: _Memory
    left_alone: bool
    packed: bool


class Pass(TorchFunctionMode):
    """Compresses what a forward pass saves inside `with`; sees each call of an op.

    left_alone : storages that exist anyway: those of the model and of its arguments
    watch : called with each call that saved something lossy, and its result
    attention : for attention calls that are rerun, by key: the bytes that they would otherwise save
        per element of their inputs; `attended` has seconds and inputs of the others
    offloaded : keys of tensors that go to the host
    first : whether to time packing and unpacking, in `timed` and `packing_s`

    path : paths of the modules being run, the innermost last
    """

    def __init__(
        self,
        compressor: Compressor,
        left_alone: frozenset[int],
        watch: Callable[[Call, Any], None] | None = None,
        attention: dict[str, float] | None = None,
        offloaded: frozenset[str] = frozenset(),
        *,
        first: bool = False,
    ) -> None:
        super().__init__()
        self.attention, self.offloaded, self.first = attention or {}, offloaded, first
        self.device = torch.device("cpu")  # of the tensor saved last
        self.attended: dict[str, tuple[float, list[Input]]] = {}
        self.timed: list[Timed] = []
        self.packing_s = 0.0
        self.compressor, self.controller = compressor, compressor.controller
        self.path: list[str] = []
        self._left_alone = left_alone
        self._counts: dict[tuple[str, str], int] = {}  # calls so far, by path and op
        self.watch = watch
        self._call: Call | None = None
        self.decided: set[str] = set()  # paths of modules with control flow that depends on values
        self._input: Call | None = None  # the input of a rerun module or call that now starts
        # By kind of rerun: how many are rerun, and the bytes that autograd would hold for them.
        self._again = dict.fromkeys((MODULES, BY_IMAGES), (0, 0.0))
        self._storages: dict[int, tuple[weakref.ref[Any], _Memory]] = {}
        self._memories: list[_Memory] = []
        self._elements = 0
        self._hooks = torch.autograd.graph.saved_tensors_hooks(self._compress, _decompress)

    def __enter__(self) -> Pass:
        self._hooks.__enter__()
        super().__enter__()
        return self

    def __exit__(self, *_: object) -> None:
        super().__exit__(None, None, None)
        self._hooks.__exit__()
        self._storages.clear()
        # The pass is part of a reference cycle, and packed data would live until gc collects it.
        for memory in self._memories:
            memory.kept.clear()
            memory.offloaded.clear()

    @property
    def saved(self) -> Saved:
        """Statistics of what was saved so far."""
        plain = sum(memory.nbytes for memory in self._memories if memory.saved)
        held = sum(memory.held_bytes for memory in self._memories)
        ways = [(way, count, round(nbytes)) for way, (count, nbytes) in self._again.items()]
        again = sum(nbytes for *_, nbytes in ways)
        for way in ("tensors packed", "left as they are", "offloaded"):
            sizes = [m.nbytes for m in self._memories if m.saved and m.way == way]
            ways.append((way, len(sizes), sum(sizes)))
        return Saved(plain + again, held, self._elements, tuple(ways))

    # Running ops.

    def __torch_function__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        name, kwargs = getattr(func, "__name__", ""), kwargs or {}
        if decides(name, args, kwargs):
            self.decided.update(self.path)
        # Calls inside an op are part of it, and reading an attribute is not an op.
        if self._call is not None or name == "__get__":
            return func(*args, **kwargs)
        call = self._call = Call(name, self.place(name), args, kwargs)
        try:
            result = self._run(func, call)
            if self.watch is not None and call.lossy:
                self.watch(call, result)
        finally:
            self._call = None
        return result

    def _run(self, func: Any, call: Call) -> Any:
        """Run a call; if possible by an op whose backward pass needs less memory."""
        if self.is_innermost():
            if (arguments := rectified(call)) is not None:
                return SignRelu.apply(arguments[0], call.kept, arguments[1])
            if (arguments := convolved(call)) is not None:
                call.by_images = arguments[0].untyped_storage()._cdata not in self._left_alone
                if call.by_images:
                    return ConvByImages.apply(call.kept, *arguments)
            if call.name == ATTENTION:
                return self._attend(func, call)
        return func(*call.args, **call.kwargs)

    def place(self, name: str, path: str | None = None) -> str:
        """Name a call by module, op, and its number among several."""
        path = path or (self.path[-1] if self.path else "")
        count = self._counts[path, name] = self._counts.get((path, name), 0) + 1
        return f"{path or 'model'}/{name}" + (f":{count}" if count > 1 else "")

    def is_innermost(self) -> bool:
        """Whether autograd calls these hooks rather than those of a user's checkpoint."""
        hooks = torch._C._autograd._top_saved_tensors_default_hooks(False)
        return hooks is not None and hooks[0] == self._compress

    # Compressing one tensor.

    def _compress(self, tensor: torch.Tensor) -> tuple[Kept, Layout]:
        call = self._call or self._input or Call("", self.place(""), (), {})
        storage = tensor.untyped_storage()
        # Still counts as a slot, so that the names of others are the same in each pass.
        if storage._cdata in self._left_alone:
            call.slots += 1
            alone = Exact(tensor)
            call.kept.append(weakref.ref(alone))
            return alone, Layout.of(tensor)
        key, layout = f"{call.place}/{call.slots}", Layout.dense(tensor)
        call.slots += 1
        memory = self._memory(storage)
        # `saving_input` counts the bytes of what is rerun.
        new = memory.nbytes if not memory.saved and self._input is None else 0
        memory.saved |= new > 0
        self._elements, self.device = self._elements + layout.numel, tensor.device
        before, start = memory.held_bytes, now(tensor.device) if self.first else 0.0
        kept = self._keep(tensor, call, key, memory)
        call.kept.append(weakref.ref(kept))
        if self.first:
            kept.restore(layout)  # as the backward pass will
            # Bytes in place of seconds if the choice has to be the same in each run.
            counted = settings.deterministic
            seconds = float(tensor.nbytes) if counted else now(tensor.device) - start
            self.packing_s += seconds
            self.controller.timed(key, seconds)
            held, within = memory.held_bytes - before, frozenset((*self.path, call.place))
            way, rounded = type(kept).__name__, hasattr(kept, "variance")
            at, size = (key, id(memory) if is_apart(tensor.device) else 0), tensor.nbytes
            self.timed.append(Timed(within, way, rounded, size, new, held, seconds, *at))
        return kept, layout

    def _memory(self, storage: Any) -> _Memory:
        """Return the record of a storage; a reused address gets a new record."""
        entry = self._storages.get(storage._cdata)
        if entry is None or entry[0]() is None:
            entry = weakref.ref(storage), _Memory(storage.nbytes())
            self._storages[storage._cdata] = entry
            self._memories.append(entry[1])
        return entry[1]

    def has_saved(self, tensor: torch.Tensor) -> bool:
        """Whether some call has saved a tensor with this storage so far."""
        return self._memory(tensor.untyped_storage()).saved

    def _counted(self, kept: Kept, key: str, memory: _Memory) -> Kept:
        """Count the bytes of a kept tensor whose values are not rounded."""
        if isinstance(kept, Exact):
            if not memory.exact:
                self.controller.observe_other(key, nbytes=memory.nbytes)
            memory.exact = True
        else:
            memory.compressed_bytes += kept.nbytes
            self.controller.observe_other(key, nbytes=kept.nbytes)
        return kept

    @contextmanager
    def saving_input(
        self, plain_bytes: float, call: Call | None = None, way: str = MODULES, count: int = 1
    ) -> Iterator[None]:
        """Treat tensors saved inside as the input of modules, or of a call, to be rerun.

        `plain_bytes` are the bytes that autograd would save without the rerun.
        """
        before = self._again[way]
        self._again[way] = before[0] + count, before[1] + plain_bytes
        self._input = call or Call("input", self.place("input"), (), {})
        try:
            yield
        finally:
            self._input = None

    def _attend(self, func: Any, call: Call) -> Any:
        """Run attention; under a checkpoint if the first pass chose to rerun it."""
        args = call.arguments("query", "key", "value", "attn_mask", "dropout_p", "is_causal")
        parts = [args.pop(name) for name in ("query", "key", "value")]
        size = sum(part.numel() for part in parts)
        if call.place in self.attention and any(part.requires_grad for part in parts):
            with self.saving_input(self.attention[call.place] * size, call):
                return checkpoint(func, *parts, use_reentrant=False, **args)
        start = now(parts[0].device) - self.packing_s
        result = func(*call.args, **call.kwargs)
        seconds = now(parts[0].device) - self.packing_s - start
        self.attended[call.place] = seconds, [self.input_of(part) for part in parts]
        return result

    def foresee(self, inputs: dict[str, Input]) -> None:
        """Tell the controller the bytes of these inputs once their modules are rerun."""
        bits = self.controller.nonlinear_bits
        for key, call in inputs.items():
            if call.packed:
                group = call.memory.groups.setdefault(call.where, key)
                self.controller.observe(
                    key, n=call.elements, bits=bits, variance=None, kind="nonlinear", group=group
                )
                self.controller.observe_other(f"{key}/rows", nbytes=call.row_bytes)
            elif not call.left_alone and not call.memory.exact:
                call.memory.exact = True
                self.controller.observe_other(key, nbytes=call.memory.nbytes)

    def input_of(self, x: torch.Tensor) -> Input:
        """Return the properties of a module's input that count if the module is rerun."""
        storage = x.untyped_storage()
        left_alone = storage._cdata in self._left_alone
        packed = not left_alone and x.dtype in _PACKED and x.numel() >= MIN_ELEMENTS
        memory, n = self._memory(storage), x.numel()
        packed &= is_packable(x)
        rows = rows_of(Call("input", "", (), {}), x) if packed and is_dense(x) else None
        row_bytes = n // x.shape[-1] * grid_bytes(x.shape[-1]) - grid_bytes(n) if rows else 0
        return Input(n, x.nbytes, row_bytes, _where(x), memory, left_alone, packed)

    def _keep(self, tensor: torch.Tensor, call: Call, key: str, memory: _Memory) -> Kept:
        """Compress a tensor."""
        if key in self.offloaded:
            memory.moved = True
            where = _where(tensor)
            memory.offloaded[where] = memory.offloaded.get(where) or Offloaded(tensor)
            return memory.offloaded[where]
        kind = self._kind(tensor, call)
        value = two_values(flat(tensor)) if kind == "mask" else None
        if value is not None:
            return self._counted(Mask(flat(tensor), "not zero", value), key, memory)
        if kind in ("linear", "norm", "nonlinear", "mask"):
            return self._lossy(tensor, call, key, memory, "nonlinear" if kind == "mask" else kind)
        if kind == "sign":  # a ReLU passes the gradient where its input is NaN
            test: Test = "above zero" if call.name.startswith("leaky") else "above zero or NaN"
            return self._counted(Mask(flat(tensor), test, 1.0), key, memory)
        kept = self.compressor.exact(tensor, kind, window_of(call))
        return self._counted(kept, key, memory)

    def _kind(self, tensor: torch.Tensor, call: Call) -> Treatment | Literal["integers"]:
        """Return the treatment of a tensor: that of its op if its type and size fit."""
        if tensor.numel() < MIN_ELEMENTS or not is_packable(tensor):
            return "exact"
        if not is_dense(tensor) and tensor.dtype not in _PACKED:
            return "exact"
        if not tensor.dtype.is_floating_point:
            return "integers"
        if tensor.dtype not in _PACKED:
            return "exact"
        if self._input is not None:
            return "exact" if self._input.name == RUN else "nonlinear"
        # Without a name: saved by a user's autograd function, or the input of a checkpoint.
        kind = treatment(call.name) if call.name else "exact"
        if kind == "exact" or not of_input_size(tensor, call):
            return "exact"
        if not is_dense(tensor):
            return kind if kind in ("linear", "norm") else "nonlinear"
        # A tensor saved by attention may be its dropout mask.
        return "mask" if call.name == ATTENTION else kind

    def _lossy(
        self, tensor: torch.Tensor, call: Call, key: str, memory: _Memory, kind: LossyTreatment
    ) -> Kept:
        bits = self.controller.bits(key, kind=kind)
        tolerance = None
        if self.compressor.form == "paper" and kind == "linear":
            tolerance = self.controller.tolerance(key)
            # Before the first refresh there is no tolerance: use the fixed form, which needs none.
            tolerance = tolerance if 2.0**-100 <= tolerance <= 2.0**100 else None
        where = _where(tensor)
        n, group = tensor.numel(), memory.groups.setdefault(where, key)
        if bits is None:
            memory.exact = True
            if not self.controller.knows(key):
                self.controller.observe(key, n=n, bits=None, variance=0.0, kind=kind, group=group)
            return Exact(tensor)
        kept = memory.kept.get(where)
        dense = tensor if is_dense(tensor) else tensor.detach().contiguous()
        rows = None if kind == "linear" else rows_of(call, dense)
        # Packed again if it was kept for an op that needs fewer bits, or no rows.
        if kept is None or kept.bits < bits or (rows is not None and not kept.by_rows):
            look = self.watch is not None or not self.controller.knows(key)
            view = (dense, ()) if call.by_images and kind == "linear" else rows
            kept = self.compressor.rounded(dense, bits, tolerance, look=look, rows=view)
            if not kept.fits:
                memory.exact = True
                self.controller.overflowed(key)
                return Exact(tensor)
            memory.kept[where] = kept
            memory.compressed_bytes += kept.nbytes
            if kept.by_rows:
                more = kept.nbytes - compressed_bytes(n, bits)
                self.controller.observe_other(f"{key}/rows", nbytes=more)
        self.controller.observe(
            key, n=n, bits=kept.bits, variance=kept.variance, nonzero=kept.nonzero,
            kind=kind, group=group,
        )  # fmt: skip
        if kind == "linear":
            call.lossy.append(key)
        return kept


def _decompress(saved: tuple[Kept, Layout]) -> torch.Tensor:
    kept, layout = saved
    return kept.restore(layout)


def _where(tensor: torch.Tensor) -> tuple[Any, ...]:
    order = () if is_dense(tensor) else (tensor.shape, tensor.stride())
    return tensor.storage_offset(), tensor.numel(), version_of(tensor), tensor.dtype, order
