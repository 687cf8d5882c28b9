"""Pack and unpack saved tensors: the implementation of each treatment of the policy.

Packed data is in tensors on the device of the original, allocated by torch, so that it is counted
like any other storage. On the host C++ packs, elsewhere packing.py; only the paper's form, which
uses symbols of variable length, is copied to the host.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any, Protocol

import numpy as np
import torch

from sn_compress.codecs.registry import codec as named_codec
from sn_compress.ops import groups

from ...activations import Controller
from ...activations.saved import Timed
from ..errors import ReplayError
from ..model.snapshot import version_of
from ..target.accelerator import is_apart
from ..trace.op_seconds import transfer_speeds
from . import packing

ESCAPE_LIMIT = 1 / 64
"""Fraction of elements that may escape before a tensor is kept as it is."""
# Elements for which a pooling layer's indices are computed at a time: each takes several 8-byte
# integers, which for all elements at once would set the peak of a step.
_AT_ONCE = 2**14
# Elements of the images packed or differentiated at a time: 1 MiB of float32.
_ROWS_AT_ONCE = 2**18
_LEAST_OFFLOADED = 2**20  # bytes: launching two copies takes ~20 us, the time to move half of that
_LEAST_RUN = 64  # fewest contiguous elements of a row that are worth a grid (6 bytes)


@dataclass(frozen=True)
class Layout:
    """A tensor without its values: shape, strides, dtype and device."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @classmethod
    def dense(cls, tensor: torch.Tensor) -> Layout:
        """Return a tensor's layout; if it has gaps in memory, that of a copy without them."""
        # On the meta device, so that it has strides but no memory.
        packed = tensor if is_dense(tensor) else torch.empty(tensor.shape, device="meta")
        return cls(tuple(tensor.shape), packed.stride(), tensor.dtype, tensor.device)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def restore(self, flat: torch.Tensor) -> torch.Tensor:
        """Return a tensor of this layout from its values in memory order."""
        return flat.to(self.device, self.dtype).as_strided(self.shape, self.stride)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether a tensor's elements fill a range of memory, each once, in any order of axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def is_packable(tensor: torch.Tensor) -> bool:
    """Whether a copy without gaps is no larger than the tensor's storage."""
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


def grid_bytes(n: int) -> int:
    """Bytes of the grids of [n] elements."""
    return 6 * -(-n // packing.GROUP)


def flat(tensor: torch.Tensor) -> torch.Tensor:
    """Return the values of a dense tensor in memory order, [n], without a copy."""
    return tensor.detach().as_strided((tensor.numel(),), (1,))


class Kept(Protocol):
    """What is kept of a saved tensor: one of the classes below."""

    nbytes: int

    def restore(self, layout: Layout) -> torch.Tensor:
        """Return the tensor."""


class Exact:
    """The tensor itself, as autograd saves it without hooks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        # Detached: its graph node holds this object, so that would be a reference cycle.
        self.tensor, self.version = tensor.detach(), version_of(tensor)
        self.nbytes = tensor.untyped_storage().nbytes()

    def restore(self, layout: Layout) -> torch.Tensor:
        # autograd does not check the versions of tensors packed by hooks.
        if version_of(self.tensor) != self.version:
            raise ReplayError(
                f"a tensor of shape {layout.shape} that the backward pass needs was changed in "
                f"place: version {version_of(self.tensor)}, expected {self.version}. Change a copy."
            )
        return self.tensor


class Offloaded:
    """The values in pinned host memory, copied in order with the device's ops."""

    nbytes = 0  # on the device

    def __init__(self, tensor: torch.Tensor) -> None:
        dense = tensor if is_dense(tensor) else tensor.detach().contiguous()
        self.values = torch.empty(
            dense.numel(), dtype=dense.dtype, pin_memory=is_apart(tensor.device)
        )
        self.values.copy_(flat(dense), non_blocking=True)

    def restore(self, layout: Layout) -> torch.Tensor:
        return layout.restore(self.values.to(layout.device, non_blocking=True))


def offloadable(timed: Sequence[Timed]) -> dict[str, list[Timed]]:
    """Return the tensors saved in each large storage of a device, by the first tensor's key."""
    memories: dict[int, list[Timed]] = {}
    for saved in timed:
        if saved.memory:
            memories.setdefault(saved.memory, []).append(saved)
    return {
        group[0].key: group
        for group in memories.values()
        if sum(saved.plain_bytes for saved in group) >= _LEAST_OFFLOADED
    }


def copy_seconds(device: torch.device) -> float:
    """Return the seconds for copying a byte from a device to the host and back."""
    block = torch.empty(8 * _LEAST_OFFLOADED, dtype=torch.uint8, device=device)
    return sum(1 / speed for speed in transfer_speeds(block))


class Shape:
    """No values: the backward pass needs only the shape."""

    nbytes = 0

    def restore(self, layout: Layout) -> torch.Tensor:
        return torch.zeros((), dtype=layout.dtype, device=layout.device).expand(layout.shape)


class Mask:
    """One bit per element: 0 where [n] values fail a test, else a fixed value."""

    def __init__(self, values: torch.Tensor, test: packing.Test, value: float) -> None:
        self.buffer, self.value = packing.pack_mask(values, test), value
        self.nbytes = self.buffer.numel()

    def through(self, gradient: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return a gradient with zeros where mask bits are not set."""
        values = torch.empty_strided(
            layout.shape, layout.stride, dtype=gradient.dtype, device=gradient.device
        )
        fits = gradient.stride() == layout.stride
        source = flat(gradient if fits else values.copy_(gradient))
        packing.spread_mask(self.buffer, source, flat(values))
        return values

    def restore(self, layout: Layout) -> torch.Tensor:
        values = torch.empty(layout.numel, dtype=layout.dtype, device=layout.device)
        packing.spread_mask(self.buffer, self.value, values)
        return layout.restore(values)


class Narrow:
    """Integers in the smallest type that holds them."""

    def __init__(self, values: torch.Tensor) -> None:
        low, high = (int(v) for v in values.aminmax())
        kinds = (torch.uint8, torch.int16, torch.int32, torch.int64)
        fits = (
            kind for kind in kinds if torch.iinfo(kind).min <= low and high <= torch.iinfo(kind).max
        )
        self.values = values.to(next(fits))
        self.nbytes = self.values.numel() * self.values.element_size()

    def restore(self, layout: Layout) -> torch.Tensor:
        return self.values.to(layout.dtype).as_strided(layout.shape, layout.stride)


@dataclass(frozen=True)
class Window:
    """Arguments of max_pool2d as pairs of (height, width), and the width of its input."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    width: int

    @property
    def bits(self) -> int:
        """Bits for a position in the window; 0 if the window has more than 16 positions."""
        places = self.kernel[0] * self.kernel[1]
        return next((bits for bits in (1, 2, 4) if places <= 1 << bits), 0)

    def origins(self, shape: tuple[int, ...], device: torch.device) -> list[torch.Tensor]:
        """Return row and column of each window's first position, [oh, 1] and [ow] int64."""
        sides = zip(shape[-2:], self.stride, self.padding, strict=True)
        rows, columns = (
            torch.arange(size, device=device) * step - pad for size, step, pad in sides
        )
        return [rows[:, None], columns]


class Places:
    """Indices of a pooling layer as positions in their windows: 2 bits for 2x2 windows."""

    def __init__(self, indices: torch.Tensor, window: Window) -> None:
        self.window, width = window, window.width
        rows, columns = window.origins(tuple(indices.shape), indices.device)
        places = torch.empty(indices.shape, dtype=torch.uint8, device=indices.device)
        for part in _parts(indices.shape, indices.device):
            at = indices.detach()[part]
            down = (at.div(width, rounding_mode="floor") - rows) // window.dilation[0]
            across = (at % width - columns) // window.dilation[1]
            places[part] = (down * window.kernel[1] + across).to(torch.uint8)
        self.buffer = packing.pack_codes(places.view(-1), window.bits)
        self.nbytes = self.buffer.numel()

    def restore(self, layout: Layout) -> torch.Tensor:
        window = self.window
        places = packing.unpack_codes(self.buffer, layout.numel, window.bits).view(layout.shape)
        rows, columns = window.origins(layout.shape, places.device)
        values = torch.empty_strided(
            layout.shape, layout.stride, dtype=layout.dtype, device=places.device
        )
        for part in _parts(layout.shape, places.device):
            place = places[part].long()
            down = place // window.kernel[1] * window.dilation[0] + rows
            across = place % window.kernel[1] * window.dilation[1] + columns
            values[part] = down * window.width + across
        return values


def _parts(shape: Sequence[int], device: torch.device, on_host: int = _AT_ONCE) -> Iterator[slice]:
    """Slices of the first axis with few elements, as each takes several 8-byte numbers."""
    # Elsewhere, a kernel launch takes as long as the host needs for a slice of this size.
    most = on_host if device.type == "cpu" else 64 * _AT_ONCE
    step = max(1, most // max(math.prod(shape[1:]), 1))
    return (slice(start, start + step) for start in range(0, shape[0], step))


class Lossy(Kept, Protocol):
    """Values in fewer bits.

    variance, nonzero : mean variance of the rounding, and the fraction of elements that are not
        zero; None if statistics are not wanted.
    fits : whether few enough elements escaped
    by_rows : whether no grid spans two rows
    """

    bits: int
    by_rows: bool
    fits: bool
    variance: float | None
    nonzero: float | None


class OnHost:
    """Host values, in any order of axes, in groups on grids, plus escaped elements."""

    by_rows = False

    def __init__(
        self, values: torch.Tensor, bits: int, key: tuple[int, int], threads: int, run: int, *,
        look: bool,
    ) -> None:  # fmt: skip
        n = values.numel()
        self.bits, self._run, self._threads = bits, run, threads
        self._groups, width = groups.Parts(n, bits, packing.GROUP, run).at(n)
        self._memory = torch.empty(6 * self._groups + width, dtype=torch.uint8)
        kept = groups.pack(
            packing.as_numpy(values), bits, packing.GROUP, math.inf, key, threads, self._grids(),
            run, look,
        )  # fmt: skip
        # Elements that escape the grids: their positions and exact values.
        self._lost = (torch.tensor(kept.at), torch.tensor(kept.values)) if kept.at.size else None
        self.variance = kept.variance(n) if look else None
        self.nonzero = 1 - float(kept.zeros) / max(n, 1) if look else None
        self.fits = kept.at.size <= max(1.0, n * ESCAPE_LIMIT)
        self.nbytes = self._memory.nbytes + kept.at.nbytes + kept.values.nbytes

    def _grids(self) -> tuple[Any, Any, Any]:
        """Return bases, steps and codes as views of one buffer."""
        memory, ends = self._memory.numpy(), (4 * self._groups, 6 * self._groups)
        bases, steps = memory[: ends[0]], memory[ends[0] : ends[1]]
        return bases.view(np.float32), steps.view(np.uint16), memory[ends[1] :]

    def restore(self, layout: Layout) -> torch.Tensor:
        out = torch.empty(layout.numel, dtype=layout.dtype)
        self.fill(out)
        return layout.restore(out)

    def fill(self, out: torch.Tensor) -> None:
        """Write the values to a tensor with the axes of the packed one."""
        values, n = packing.as_numpy(out), out.numel()
        groups.unpack(*self._grids(), n, self.bits, packing.GROUP, self._threads, values, self._run)
        if self._lost is not None:
            values.flat[self._lost[0].numpy()] = packing.as_numpy(self._lost[1].to(out.dtype))


class OnDevice:
    """[n] values packed on their device; see packing.py."""

    fits, by_rows = True, False

    def __init__(
        self, values: torch.Tensor, bits: int, key: tuple[int, int], run: int, *, look: bool
    ) -> None:
        self.bits, self._run, n = bits, run, values.numel()
        packed = packing.pack(values, bits, key, run)
        self.variance = float(packed.variance(n)) if look else None
        self.nonzero = float((values != 0).float().mean()) if look else None
        # The spread is only needed for the variance; cloned, as a slice would keep its storage.
        self._packed = replace(packed, spread=packed.spread[:0].clone())
        self.nbytes = packed.nbytes

    def restore(self, layout: Layout) -> torch.Tensor:
        values = packing.unpack(self._packed, layout.numel, self.bits, layout.dtype, self._run)
        return layout.restore(values)


class Turned:
    """Values whose rows are not contiguous in memory: packed with each row's elements together.

    view : [...] the tensor, with axes possibly split
    axes : those that make up a row; empty: packed in memory order, some images at a time
    pack : packs a view in runs of a given length
    """

    def __init__(
        self,
        view: torch.Tensor,
        axes: tuple[int, ...],
        pack: Callable[[torch.Tensor, int], Lossy],
    ) -> None:
        order, self.by_rows = in_memory(view), bool(axes)
        # Axes in memory order, but those of a row last.
        self._turn = sorted(range(len(order)), key=lambda place: order[place] in axes)
        inner = sum(axis in axes for axis in order)
        ordered = view.detach().permute(order)
        self._shape = ordered.shape
        self._kept: list[tuple[slice, Lossy]] = []
        # On the host rows are transposed tile by tile; elsewhere, and for images, parts are copied.
        undivided = self.by_rows and view.device.type == "cpu"
        for part in [slice(None)] if undivided else parts_of(ordered):
            turned = ordered[part].permute(self._turn)
            run = math.prod(turned.shape[turned.dim() - inner :]) if axes else 0
            self._kept.append((part, pack(turned, run)))
        kept = [part for _, part in self._kept]
        self.bits, self.fits = kept[0].bits, all(part.fits for part in kept)
        self.nbytes = sum(part.nbytes for part in kept)
        known = [part.variance for part in kept if part.variance is not None]
        self.variance = sum(known) / len(known) if known else None
        self.nonzero = 1.0 if known else None

    def restore(self, layout: Layout) -> torch.Tensor:
        out = torch.empty(self._shape, dtype=layout.dtype, device=layout.device)
        for part, kept in self._kept:
            turned = out[part].permute(self._turn)
            if isinstance(kept, OnHost):
                kept.fill(turned)
                continue
            shape = tuple(turned.shape)
            strides = torch.empty(shape, device="meta").stride()
            turned.copy_(kept.restore(Layout(shape, strides, layout.dtype, layout.device)))
        return layout.restore(out.view(-1))

    def images(self, layout: Layout) -> Iterator[tuple[slice, torch.Tensor]]:
        """Yield slices, and their images, of a tensor that was packed in memory order."""
        for part, kept in self._kept:
            count = len(range(*part.indices(layout.shape[0])))
            yield part, kept.restore(replace(layout, shape=(count, *layout.shape[1:])))


def parts_of(x: torch.Tensor, growth: float = 1.0) -> list[slice]:
    """Return slices of the first axis to process at a time; growth : elements made of each one."""
    shape = x.shape[0], round(math.prod(x.shape[1:]) * growth)
    return list(_parts(shape, x.device, _ROWS_AT_ONCE))


def in_memory(tensor: torch.Tensor) -> list[int]:
    """Return the axes of a dense tensor in memory order, outermost first."""
    axes = range(tensor.dim())
    return sorted(axes, key=lambda axis: (tensor.shape[axis] == 1, -tensor.stride(axis)))


def run_in_row(view: torch.Tensor, axes: tuple[int, ...]) -> int:
    """Return the number of consecutive elements in memory that are in one row."""
    run = 1
    for axis in reversed(in_memory(view)):
        if axis not in axes and view.shape[axis] > 1:
            break
        run *= view.shape[axis]
    return run


class Coded:
    """The paper's form: rounded to nearest, predicted, entropy-coded."""

    by_rows = False

    def __init__(self, values: torch.Tensor, bits: int, codec: Any) -> None:
        run = values.float().cpu().numpy()
        self._codec, self.bits = codec, bits
        kept = codec.quantise(run)
        self.nonzero = float(np.count_nonzero(run)) / max(run.size, 1)
        self.fits = kept.at.size <= max(1.0, run.size * ESCAPE_LIMIT)
        self.variance = codec.bound**2 / 3 * self.nonzero
        self._kept = type(kept), torch.tensor(np.frombuffer(kept.coded, np.uint8))
        self._at, self._values = torch.tensor(kept.at), torch.tensor(kept.values)
        self.nbytes = len(kept.coded) + self._at.nbytes + self._values.nbytes

    def restore(self, layout: Layout) -> torch.Tensor:
        kind, coded = self._kept
        kept = kind(coded.numpy().tobytes(), self._at.numpy(), self._values.numpy())
        return layout.restore(torch.from_numpy(self._codec.restore(kept, layout.numel)))


@dataclass
class Compressor:
    """Compresses values; a count of previous tensors gives each its own random numbers."""

    controller: Controller
    form: str
    seed: int
    threads: int
    drawn: int = 0

    def rounded(
        self, tensor: torch.Tensor, bits: int, tolerance: float | None, *,
        look: bool, rows: tuple[torch.Tensor, tuple[int, ...]] | None = None,
    ) -> Lossy:  # fmt: skip
        """Return the values packed in this number of bits.

        tolerance : of the paper's form; None: the fixed form
        look : whether statistics are wanted
        rows : a view of the tensor, and those of its axes over which it is normalized, or no axes
            if it is unpacked by images
        """
        if rows is None:
            return self._packed(flat(tensor), 0, bits, tolerance, look=look)
        run = run_in_row(*rows) if rows[1] else 0
        if rows[1] and (
            run >= _LEAST_RUN or run == math.prod(rows[0].shape[axis] for axis in rows[1])
        ):
            kept = self._packed(flat(tensor), run, bits, None, look=look)
            kept.by_rows = True
            return kept
        tolerance = None if rows[1] else tolerance
        return Turned(*rows, lambda part, run: self._packed(part, run, bits, tolerance, look=look))

    def _packed(
        self, values: torch.Tensor, run: int, bits: int, tolerance: float | None, *, look: bool
    ) -> Lossy:
        """Return values, in the order of their axes, packed in runs."""
        step = self.drawn
        self.drawn += 1
        if tolerance is not None:
            codec = named_codec("bounded", bound=tolerance, form="paper", measure=False)
            return Coded(values.reshape(-1), bits, codec)
        key = groups.keys(self.seed, step)
        if values.device.type == "cpu":
            return OnHost(values, bits, key, self.threads, run, look=look)
        return OnDevice(values.reshape(-1), bits, key, run, look=look)

    def exact(self, tensor: torch.Tensor, kind: str, window: Window | None) -> Kept:
        """Return what is kept of a tensor without loss."""
        if kind == "exact":
            return Exact(tensor)
        if kind == "shape":
            return Shape()
        if tensor.dtype == torch.bool:
            return Mask(flat(tensor), "not zero", 1.0)
        if window is not None and window.bits and tensor.dtype == torch.int64:
            return Places(tensor, window)
        narrow = tensor.dtype in (torch.int16, torch.int32, torch.int64)
        return Narrow(tensor.detach()) if narrow else Exact(tensor)


class SignRelu(torch.autograd.Function):
    """relu(x), whose backward pass reads the bits kept of the result.

    autograd's own backward pass of a ReLU needs the result itself, which decompressed is as large
    as the gradient, and often part of a step's peak.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, kept: list[Any], inplace: bool) -> torch.Tensor:
        """Return relu(x)."""
        y = x.relu_() if inplace else x.relu()
        if inplace:
            ctx.mark_dirty(x)
        ctx.kept, ctx.layout = kept, Layout.of(y)
        # Packed by the hooks, which append a weak reference to the packed result to `kept`.
        ctx.save_for_backward(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        """Return the gradient where a bit is set, else 0."""
        mask = ctx.kept[0]()
        if isinstance(mask, Mask):
            return _Masked.apply(gradient, mask, ctx.layout), None, None
        # Freed by an earlier backward pass, so that reading saved tensors raises; or kept as it is.
        return torch.ops.aten.threshold_backward(gradient, *ctx.saved_tensors, 0), None, None


class ConvByImages(torch.autograd.Function):
    """A convolution whose backward pass unpacks and processes some images at a time.

    So the whole input is never unpacked at once, nor do kernels make copies of all of it or of the
    gradients in other layouts. `kept` has weak references to what is kept of input and weight.
    """

    @staticmethod
    def forward(
        ctx: Any, kept: list[Any], x: torch.Tensor, weight: torch.Tensor, bias: Any, *how: Any
    ) -> torch.Tensor:
        """Return the convolution; `how` are strides, padding, dilation and groups."""
        ctx.how = (*how[:3], False, [0] * len(how[0]), how[3])
        ctx.kept, ctx.layouts = kept, [Layout.of(tensor) for tensor in (x, weight)]
        ctx.sizes = None if bias is None else list(bias.shape)
        ctx.save_for_backward(x, weight)
        return torch.ops.aten.convolution(x, weight, bias, *ctx.how)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[Any, ...]:
        """Return the gradients of input, weight and bias."""
        wanted, back = ctx.needs_input_grad[1:4], torch.ops.aten.convolution_backward
        kept, weight = (unpack() for unpack in ctx.kept)
        layout = ctx.layouts[0]
        # Higher-order gradients need the input in the graph. Without a weight, the saved tensors
        # were freed, and reading them raises.
        if torch.is_grad_enabled() or not isinstance(kept, Turned) or weight is None:
            x, weight = ctx.saved_tensors
            gradients = back(gradient, x, weight, ctx.sizes, *ctx.how, wanted)
            return None, *gradients, None, None, None, None
        weight = weight.restore(ctx.layouts[1])
        totals: list[Any] = [None, None, None]
        if wanted[0]:
            totals[0] = torch.empty_strided(
                layout.shape, layout.stride, dtype=layout.dtype, device=layout.device
            )
        for part, x in kept.images(layout):
            gradients = back(gradient[part], x, weight, ctx.sizes, *ctx.how, wanted)
            if wanted[0]:
                totals[0][part] = gradients[0]
            for slot in (1, 2):
                if wanted[slot]:
                    total = totals[slot]
                    totals[slot] = gradients[slot] if total is None else total.add_(gradients[slot])
            del x, gradients  # freed before the next images
        return None, *totals, None, None, None, None


class _Masked(torch.autograd.Function):
    """A gradient through a ReLU; linear, so that its own gradient passes the same mask."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, mask: Any, layout: Any) -> torch.Tensor:
        ctx.kept = mask, layout
        return torch.as_tensor(mask.through(gradient, layout))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Masked.apply(gradient, *ctx.kept), None, None
