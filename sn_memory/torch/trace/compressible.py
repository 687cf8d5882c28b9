"""What may wait for the backward pass in fewer bytes, in which form, how it gets there and back.

Who reads a storage in the backward pass decides. Where the pass is linear in it (inputs of
convolutions and matrix products), values rounded at random make gradients that are right on
average. A ReLU asks for the sign, a pooling layer for the shape: one bit, and exact. What is read
for value and sign keeps the sign beside the rounded value, so that no ReLU's mask is ever wrong.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from types import SimpleNamespace
from typing import Any, Final, Literal, Protocol

import numpy as np
import torch
from torch.utils._pytree import tree_flatten, tree_unflatten

from ...cost.devices import NOMINAL_BYTES_PER_S
from ...graph.records import Device
from ..compress import treatments
from .op_seconds import best_seconds, cached_seconds
from .record import Call, Recording, View, byte_view

Kind = Literal["values", "signed", "signs", "mask", "bits"]
"""values: rounded. signed: and a bit that says "above 0". signs: that bit alone. mask: which of two
values. bits: of a Boolean."""

MIN_ELEMENTS: Final = 1024
_NONLINEAR_BITS: Final = 8
_CHUNK: Final = 1 << 16  # elements, a multiple of 8

# What calls of the backward pass ask of what they read, by op and argument. Others are asked for
# nothing: what they read is not touched.
_NEEDS: Final[dict[str, dict[str, str]]] = {
    "convolution_backward": {"input": "linear"},
    "mm": {"self": "linear", "mat2": "linear"},
    "bmm": {"self": "linear", "mat2": "linear"},
    "addmm": {"mat1": "linear", "mat2": "linear"},
    "baddbmm": {"batch1": "linear", "batch2": "linear"},
    "threshold_backward": {"self": "sign"},
    "leaky_relu_backward": {"self": "sign"},
    "max_pool2d_with_indices_backward": {"self": "shape"},
    "max_pool3d_with_indices_backward": {"self": "shape"},
    "avg_pool2d_backward": {"self": "shape"},
    "native_batch_norm_backward": {"input": "nonlinear"},
    "native_layer_norm_backward": {"input": "nonlinear"},
    "native_group_norm_backward": {"input": "nonlinear"},
    "gelu_backward": {"self": "nonlinear"},
    "silu_backward": {"self": "nonlinear"},
    "sigmoid_backward": {"output": "nonlinear"},
    "tanh_backward": {"output": "nonlinear"},
    "_softmax_backward_data": {"output": "nonlinear"},
}


@dataclass(frozen=True, slots=True)
class Form:
    """How a storage waits.

    Parameters
    ----------
    kind
        See Kind.
    view
        How its maker's result looks at it: all of it, in any order of axes.
    bits
        Of a rounded value.
    direct
        All readers in the backward pass read the form as it is; see `reading`.
    """

    kind: Kind
    view: View
    bits: int = 8
    direct: bool = False

    @property
    def n(self) -> int:
        return math.prod(self.view.size)

    @property
    def grid_bytes(self) -> int:
        """Bytes of the rounded values."""
        if self.kind not in ("values", "signed"):
            return 0
        return int(treatments.codec(self.bits, math.inf, "fixed", 0, 1).grid_bytes(self.n))

    @property
    def nbytes(self) -> int:
        """What is held: known before, as nothing is entropy-coded."""
        bit_bytes = 0 if self.kind == "values" else -(-self.n // 8)
        return self.grid_bytes + bit_bytes + (4 if self.kind == "mask" else 0)


class Widths(Protocol):
    """What chooses the bits of each tensor: a `sn_memory.activations.Controller`."""

    def bits(self, key: str, *, linear: bool = True) -> int | None:
        """Return the bits of a tensor; None: keep it as it is."""


def forms(recording: Recording, bits: int | Widths) -> dict[int, Form]:
    """Return the storages whose readers in the backward pass all bear it, and their forms."""
    makers: dict[int, View] = {}
    needs: dict[int, set[str]] = {}
    writers: dict[int, list[str]] = {}
    keys: dict[int, list[str]] = {}
    views: dict[int, set[torch.dtype]] = {}
    for call in recording.calls:
        for view in call.outputs:
            if view is not None and view.storage in call.makes:
                makers.setdefault(view.storage, view)
        for storage in (*call.makes, *call.writes):
            writers.setdefault(storage, []).append(call.name)
        for storage, need in _asked(call):
            if call.phase == "backward":
                needs.setdefault(storage, set()).add(need)
            elif (key := _key(call)) is not None and need == "linear":
                keys.setdefault(storage, []).append(key)
        for arg in call.flat:
            if isinstance(arg, View):
                views.setdefault(arg.storage, set()).add(arg.dtype)
    found: dict[int, Form] = {}
    for storage, asked in needs.items():
        view = makers.get(storage)
        if view is None or views[storage] != {view.dtype} or not _whole(view, recording, storage):
            continue
        drawn = "bernoulli_" in writers[storage]
        if view.dtype == torch.bool:
            found[storage] = Form("bits", view)
        elif view.dtype != torch.float32:
            continue
        elif drawn and set(writers[storage]) <= {"empty_like", "bernoulli_", "div_"}:
            found[storage] = Form("mask", view)
        elif asked <= {"sign", "shape"}:
            found[storage] = Form("signs", view)
        elif asked <= {"linear", "nonlinear", "sign", "shape"}:
            width = _bits(bits, keys.get(storage, []), "nonlinear" not in asked)
            if width is not None:
                found[storage] = Form("signed" if "sign" in asked else "values", view, width)
    found = {storage: form for storage, form in found.items() if form.n >= MIN_ELEMENTS}
    late = [call for call in recording.calls if call.phase == "backward"]
    for storage, form in found.items():
        readers = [call for call in late if storage in call.reads]
        if all(reading(call, form, storage) is not None for call in readers):
            found[storage] = replace(form, direct=True)
    return found


def reading(call: Call, form: Form, storage: int, small: int = -1) -> Call | None:
    """Return a call that reads the form of a storage as it is, held in `small`; None if none can.

    A ReLU's backward pass zeroes a gradient where a bit is not set, dropout's scales it where one
    is; a pooling layer's asks for a size, which any memory can be looked at in.
    """
    views = [arg for arg in call.flat if isinstance(arg, View)]
    mine = [arg for arg in views if arg.storage == storage]
    others = [arg for arg in views if arg.storage != storage]
    out = call.outputs[0]
    if len(mine) != 1 or not others or out is None:
        return None
    own, gradient = mine[0], others[0]
    if form.kind == "signs" and dict(_asked(call))[storage] == "shape":
        with torch.device("meta"):
            usual = torch.empty(own.size).stride() == own.stride
        if not usual or gradient.dtype != own.dtype:
            return None
        shape = View(gradient.storage, own.size, (0,) * len(own.size), 0, own.dtype)
        return replace(call, flat=tuple(shape if arg == own else arg for arg in call.flat))
    names = {"signs": ("threshold_backward",), "mask": ("mul", "mul_")}.get(form.kind, ())
    # In place, the gradient stands among the arguments twice.
    same = all(it == gradient for it in others)
    same = same and _layout(gradient) == _layout(out) == _layout(own)
    if call.name not in names or own != form.view or not same:
        return None
    row = byte_view(small, form.nbytes)
    flat, spec = tree_flatten(((gradient, row), {}))
    target = Masked(form, in_place=gradient.storage in call.writes)
    return replace(call, target=target, flat=tuple(flat), spec=spec)


def _layout(view: View) -> tuple[tuple[int, ...], tuple[int, ...], torch.dtype]:
    return view.size, view.stride, view.dtype


def seconds_of_forms(
    found: Mapping[int, Form], device: Device, *, profile: bool
) -> dict[int, tuple[float, float | None]]:
    """Return seconds to compress and to restore, per storage: measured, or by the roofline.

    What is read as it is counts as restored by its reader, and those seconds with the first ones:
    too much rather than too little, as they take the place of seconds of that op.
    """
    if profile:
        host = torch.device("cpu")
        works = [work for form in found.values() for work in _works(form)]
        times = [it or 0.0 for it in cached_seconds(works, host)]
    else:
        # Read and write once, in either direction.
        speed = device.bytes_per_s or NOMINAL_BYTES_PER_S
        times = [_traffic(form) / speed for form in found.values() for _ in range(2)]
    result: dict[int, tuple[float, float | None]] = {}
    for storage, there, back in zip(found, times[::2], times[1::2], strict=True):
        result[storage] = (there + back, None) if found[storage].direct else (there, back)
    return result


def _traffic(form: Form) -> int:
    return form.n * form.view.dtype.itemsize + form.nbytes


def _works(form: Form) -> Iterator[tuple[str, Callable[[], float]]]:
    """What is timed, with its signature: compress, then restore."""
    host = torch.device("cpu")
    text = f"sn_memory {form.kind} {form.bits} {form.view.size} {form.view.dtype}"

    def sample() -> torch.Tensor:
        values = torch.randn(form.n, device=host)
        if form.kind in ("mask", "bits"):
            values = values.gt(0).to(form.view.dtype)
        return values.relu_() if form.kind in ("signed", "signs") else values

    def compress() -> float:
        flat, compress = sample(), Compress(form, 0)
        return best_seconds(lambda: compress(flat), host)

    def restore() -> float:
        small, decompress = Compress(form, 0)(sample()), Decompress(form)
        return best_seconds(lambda: decompress(small), host)

    yield f"compress {text}", compress
    yield f"restore {text}", restore


def _asked(call: Call) -> Iterator[tuple[int, str]]:
    """Per storage among the arguments, what the call asks of it; `all` where that is not known."""
    names: dict[int, str] = {}
    table: Mapping[str, str] = _NEEDS.get(call.name, {})
    if call.name == "convolution":
        table = {"input": "linear"}
    if call.name == "threshold_backward" and 0 not in call.flat:
        table = {}
    if table:
        args, kwargs = tree_unflatten(list(range(len(call.flat))), call.spec)
        schema = (it.name for it in call.target._schema.arguments)
        places = dict(zip(schema, args, strict=False)) | kwargs
        names = {place: name for name, place in places.items() if isinstance(place, int)}
    seen: set[int] = set()
    for place, arg in enumerate(call.flat):
        if isinstance(arg, View):
            # A product of something with itself is not linear in it.
            known = table.get(names.get(place, ""), "all")
            yield arg.storage, "all" if arg.storage in seen else known
            seen.add(arg.storage)


def _whole(view: View, recording: Recording, storage: int) -> bool:
    if view.offset or math.prod(view.size) * view.dtype.itemsize != recording.nbytes[storage]:
        return False
    with torch.device("meta"):
        return treatments.is_dense(torch.empty_strided(view.size, view.stride))


def _key(call: Call) -> str | None:
    """The name under which a controller knows the input of a layer."""
    if call.name == "convolution":
        weight = next(arg for arg in call.flat[1:] if isinstance(arg, View))
        return f"{call.scope or 'model'}/conv{len(weight.size) - 2}d/0"
    return f"{call.scope or 'model'}/linear/0" if call.name in ("addmm", "mm") else None


def _bits(bits: int | Widths, keys: list[str], linear: bool) -> int | None:
    """Bits of a storage; None for one that the controller wants exact."""
    if isinstance(bits, int):
        return bits if linear else max(bits, _NONLINEAR_BITS)
    if not linear or not keys:
        return _NONLINEAR_BITS
    widths = [bits.bits(key, linear=True) for key in keys]
    return None if None in widths else max(width for width in widths if width is not None)


class _Target:
    """What stands in a Call for an overload of torch's."""

    namespace = "sn_memory"
    _schema = SimpleNamespace(arguments=())

    def __init__(self, name: str, form: Form) -> None:
        self.overloadpacket, self.form = SimpleNamespace(__name__=name), form

    def __str__(self) -> str:
        return f"sn_memory.{self.overloadpacket.__name__}"


class Compress(_Target):
    """A tensor to its form, in uint8 memory of its own.

    Each call rounds with random numbers of its own, the same in each run: those of (seed, count).
    """

    def __init__(self, form: Form, seed: int) -> None:
        super().__init__("compress", form)
        self.seed, self.count = seed, 0

    def __call__(self, tensor: torch.Tensor) -> torch.Tensor:
        form, flat = self.form, treatments.flat_values(tensor)
        small = torch.empty(form.nbytes, dtype=torch.uint8)
        memory, grid = small.numpy(), form.grid_bytes
        if grid:
            codec = treatments.codec(form.bits, math.inf, "fixed", self.seed, 1)
            kept = codec.quantise(flat, step=self.count, into=memory[:grid])
            self.count += 1
            if kept.at.size:
                # NaN and Inf: beside the memory that is planned, and as many as there are.
                small.escapes = kept.at, kept.values  # type: ignore[attr-defined]
        if form.kind == "mask":
            top = flat.max()
            memory[:4].view(np.float32)[0] = top if top != 0 else flat.min()
            grid = 4
        if form.kind != "values":
            for start in range(0, form.n, _CHUNK):
                part = flat[start : start + _CHUNK]
                bits = (
                    part if form.kind == "bits" else part != 0 if form.kind == "mask" else part > 0
                )
                compressed = np.packbits(bits, bitorder="little")
                memory[grid + start // 8 :][: compressed.size] = compressed
        return small


class Decompress(_Target):
    """A form to a tensor."""

    def __init__(self, form: Form) -> None:
        super().__init__("decompress", form)

    def __call__(self, small: torch.Tensor) -> torch.Tensor:
        form, memory = self.form, small.numpy()
        made = torch.empty_strided(form.view.size, form.view.stride, dtype=form.view.dtype)
        flat = made.as_strided((form.n,), (1,)).numpy()
        grid = form.grid_bytes
        if grid:
            codec = treatments.codec(form.bits, math.inf, "fixed", 0, 1)
            at, values = getattr(small, "escapes", (np.empty(0, np.int64), np.empty(0, np.float32)))
            codec.restore_grids(memory[:grid], form.n, at, values, out=flat)
        value = np.float32(1)
        if form.kind == "mask":
            value, grid = memory[:4].view(np.float32)[0], 4
        if form.kind == "values":
            return made
        for start in range(0, form.n, _CHUNK):
            part = flat[start : start + _CHUNK]
            found = memory[grid + start // 8 :][: -(-part.size // 8)]
            bits = np.unpackbits(found, count=part.size, bitorder="little")
            if form.kind == "signed":
                _put_signs(part, bits.view(np.bool_))
            else:
                np.multiply(bits, value, out=part, casting="unsafe")
        return made


class Masked(_Target):
    """A gradient through a ReLU or a dropout, by the bits of its form."""

    def __init__(self, form: Form, *, in_place: bool) -> None:
        super().__init__("masked", form)
        self.in_place = in_place

    def __call__(self, gradient: torch.Tensor, small: torch.Tensor) -> torch.Tensor:
        form, memory = self.form, small.numpy()
        made = gradient if self.in_place else gradient.clone()
        flat = made.as_strided((form.n,), (1,)).numpy()
        grid = 4 if form.kind == "mask" else 0
        for start in range(0, form.n, _CHUNK):
            part = flat[start : start + _CHUNK]
            found = memory[grid + start // 8 :][: -(-part.size // 8)]
            bits = np.unpackbits(found, count=part.size, bitorder="little")
            if form.kind == "mask":
                part *= bits * memory[:4].view(np.float32)[0]
            else:
                # 0 or all ones: ten times faster than to select, and what goes is +0, NaN too.
                ones = np.negative(bits.view(np.int8)).astype(np.int32)
                np.bitwise_and(part.view(np.int32), ones, out=part.view(np.int32))
        return made


def _put_signs(part: np.ndarray[Any, Any], above: np.ndarray[Any, Any]) -> None:
    """Let what was above 0 be above 0 and the rest not; NaN stays."""
    tiny = np.finfo(np.float32).tiny
    np.copyto(part, tiny, where=above & (part <= 0))
    np.copyto(part, np.float32(0), where=~above & (part > 0))
