"""Saved tensors in fewer bytes, and back: how each treatment of the policy is carried out.

What is kept lies in one uint8 tensor, so that it is counted as any other storage. Compressing and
decompressing run on the host; a tensor on another device is copied there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any, Protocol

import numpy as np
import torch

from sn_compress.codecs.registry import codec as named_codec

from ...activations import Controller
from ..errors import ReplayError
from ..model.snapshot import version_of

ESCAPE_LIMIT = 1 / 64
"""Fraction of elements that may escape before a tensor is kept as it is."""
_AT_ONCE = 2**14  # elements
_CHUNK = 1 << 16  # elements, a multiple of 8


@dataclass(frozen=True)
class Layout:
    """A tensor without its values: what its dense memory is laid out as."""

    shape: tuple[int, ...]
    stride: tuple[int, ...]
    dtype: torch.dtype
    device: torch.device

    @classmethod
    def of(cls, tensor: torch.Tensor) -> Layout:
        return cls(tuple(tensor.shape), tensor.stride(), tensor.dtype, tensor.device)

    @property
    def numel(self) -> int:
        return math.prod(self.shape)

    def restore(self, flat: np.ndarray[Any, Any]) -> torch.Tensor:
        """Return the tensor of this layout with these values in the order of its memory."""
        made = torch.from_numpy(flat).to(self.device, self.dtype)
        return made.as_strided(self.shape, self.stride)


def is_dense(tensor: torch.Tensor) -> bool:
    """Whether its elements fill a run of memory, each once, in any order of axes."""
    expected = 1
    for stride, size in sorted(zip(tensor.stride(), tensor.shape, strict=True)):
        if size != 1:
            if stride != expected:
                return False
            expected *= size
    return True


def flat_values(tensor: torch.Tensor) -> np.ndarray[Any, Any]:
    """Return the values of a dense tensor in the order of its memory; float16 and bfloat16 cast."""
    run = tensor.detach().as_strided((tensor.numel(),), (1,))
    if run.dtype in (torch.float16, torch.bfloat16):
        run = run.float()
    return np.asarray(run.cpu().numpy())


class Exact:
    """The tensor itself; what autograd does without hooks."""

    def __init__(self, tensor: torch.Tensor) -> None:
        self.tensor, self.version = tensor.detach(), version_of(tensor)
        self.nbytes = tensor.untyped_storage().nbytes()

    def restore(self, layout: Layout) -> torch.Tensor:
        if version_of(self.tensor) != self.version:
            raise ReplayError(
                f"a tensor of shape {layout.shape} that the backward pass needs was changed in "
                f"place: version {version_of(self.tensor)}, expected {self.version}. Change a copy."
            )
        return self.tensor


class Shape:
    """Nothing: the backward pass asks for the shape only."""

    nbytes = 0

    def restore(self, layout: Layout) -> torch.Tensor:
        return torch.zeros((), dtype=layout.dtype, device=layout.device).expand(layout.shape)


class Mask:
    """One of two values per element: 1 bit."""

    def __init__(self, mask: np.ndarray[Any, Any], value: float) -> None:
        bits = np.packbits(mask, bitorder="little")
        self.buffer, self.value = _buffer([bits]), value
        self.nbytes = self.buffer.numel()

    def through(self, gradient: torch.Tensor, layout: Layout) -> torch.Tensor:
        """Return a gradient with zeros where the mask is not set."""
        return masked(gradient, self.buffer.numpy(), layout)

    def restore(self, layout: Layout) -> torch.Tensor:
        bits = np.unpackbits(self.buffer.numpy(), count=layout.numel, bitorder="little")
        if layout.dtype == torch.bool:
            return layout.restore(bits.view(np.bool_))
        return layout.restore(bits * np.float32(self.value))


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
    """Two-dimensional pooling, as max_pool2d is told: pairs of (height, width)."""

    kernel: tuple[int, int]
    stride: tuple[int, int]
    padding: tuple[int, int]
    dilation: tuple[int, int]
    width: int

    @property
    def bits(self) -> int:
        """Bits of a place in the window; 0 if it has more than 16."""
        places = self.kernel[0] * self.kernel[1]
        return next((bits for bits in (1, 2, 4) if places <= 1 << bits), 0)

    def origins(self, shape: tuple[int, ...]) -> list[torch.Tensor]:
        """Row and column of each window's first place, [oh, 1] and [ow] int64."""
        sides = zip(shape[-2:], self.stride, self.padding, strict=True)
        rows, columns = (torch.arange(size) * step - pad for size, step, pad in sides)
        return [rows[:, None], columns]


class Places:
    """Indices of a pooling layer, as places in their windows: 2 bits where a window has four."""

    def __init__(self, indices: torch.Tensor, window: Window) -> None:
        self.window, width = window, window.width
        rows, columns = window.origins(tuple(indices.shape))
        found = torch.empty(indices.shape, dtype=torch.uint8)
        for part in _parts(indices.shape):
            there = indices.detach()[part].cpu()
            down = (there.div(width, rounding_mode="floor") - rows) // window.dilation[0]
            across = (there % width - columns) // window.dilation[1]
            found[part] = (down * window.kernel[1] + across).to(torch.uint8)
        places = found.view(-1)
        per = 8 // window.bits
        padded = torch.nn.functional.pad(places, (0, -len(places) % per)).view(-1, per)
        self.buffer = torch.zeros(len(padded), dtype=torch.uint8)
        for i in range(per):
            self.buffer |= padded[:, i] << (i * window.bits)
        self.nbytes = self.buffer.numel()

    def restore(self, layout: Layout) -> torch.Tensor:
        window, per = self.window, 8 // self.window.bits
        shifts = torch.arange(per, dtype=torch.uint8) * window.bits
        places = (self.buffer[:, None] >> shifts) & ((1 << window.bits) - 1)
        places = places.reshape(-1)[: layout.numel].view(layout.shape)
        rows, columns = window.origins(layout.shape)
        made = torch.empty_strided(layout.shape, layout.stride, dtype=layout.dtype)
        for part in _parts(layout.shape):
            place = places[part].long()
            down = place // window.kernel[1] * window.dilation[0] + rows
            across = place % window.kernel[1] * window.dilation[1] + columns
            made[part] = down * window.width + across
        return made.to(layout.device)


def _parts(shape: Sequence[int]) -> Iterator[slice]:
    """Runs of the first axis with few elements: several numbers of 8 bytes are made of each."""
    step = max(1, _AT_ONCE // max(math.prod(shape[1:]), 1))
    return (slice(start, start + step) for start in range(0, shape[0], step))


class Lossy:
    """Values of the codec "bounded".

    Attributes
    ----------
    variance, nonzero
        Mean variance of the rounding, and the fraction of elements that are not zero.
    fits
        Whether few enough elements escaped.
    """

    def __init__(self, values: np.ndarray[Any, Any], codec: Any, step: int) -> None:
        kept = codec.quantise(values, step=step)
        self._codec, self.bits = codec, codec.bits
        n = values.size
        self.nonzero = float(np.count_nonzero(values)) / max(n, 1)
        self.fits = kept.at.size <= max(1.0, n * ESCAPE_LIMIT)
        if codec.form == "paper":
            self.variance = codec.bound**2 / 3 * self.nonzero
            coded = np.frombuffer(kept.coded, np.uint8)
            self._parts = [kept.at, kept.values, coded]
        else:
            self.variance = kept.variance(n)
            self._parts = [kept.at, kept.values, kept.bases, kept.steps, kept.codes]
        self._kind = type(kept)
        self.buffer = _buffer(self._parts)
        self._sizes = [(part.size, part.dtype) for part in self._parts]
        del self._parts
        self.nbytes = self.buffer.numel()

    def values(self, n: int) -> np.ndarray[Any, Any]:
        """Return the values, [n] float32."""
        data, parts, start = self.buffer.numpy(), [], 0
        for size, dtype in self._sizes:
            end = start + size * dtype.itemsize
            parts.append(data[start:end].view(dtype))
            start = end
        at, values, *rest = parts
        if self._codec.form == "paper":
            return np.asarray(self._codec.restore(self._kind(rest[0].tobytes(), at, values), n))
        bases, steps, codes = rest
        spread = np.empty(0, np.uint32)
        kept = self._kind(bases, steps, spread, codes, at, values)
        return np.asarray(self._codec.restore(kept, n))

    def restore(self, layout: Layout) -> torch.Tensor:
        return layout.restore(self.values(layout.numel))


class Kept(Protocol):
    """What is kept of a tensor: one of those above."""

    nbytes: int

    def restore(self, layout: Layout) -> torch.Tensor:
        """Return the tensor."""


def two_values(values: np.ndarray[Any, Any]) -> float | None:
    """Return c if all values are 0 or c, else None."""
    top = float(values.max()) if values.size else 0.0
    top = float(values.min()) if top == 0 else top
    return top if bool(((values == 0) | (values == np.float32(top))).all()) else None


@lru_cache(maxsize=256)
def codec(bits: int, tolerance: float, form: str, seed: int, threads: int) -> Any:
    """Return the codec of these settings."""
    if form == "paper":
        return named_codec("bounded", bound=tolerance, form="paper", measure=False)
    return named_codec(
        "bounded", bound=tolerance, bits=bits, seed=seed, threads=threads, measure=False
    )


def _buffer(parts: list[Any]) -> torch.Tensor:
    """Return the parts side by side in one tensor that torch has allocated."""
    made = torch.empty(sum(part.nbytes for part in parts), dtype=torch.uint8)
    view, start = made.numpy(), 0
    for part in parts:
        end = start + part.nbytes
        view[start:end] = part.view(np.uint8)
        start = end
    return made


@dataclass
class Compressor:
    """What looks at values and compresses them; each tensor draws its own random numbers."""

    controller: Controller
    form: str
    seed: int
    threads: int
    drawn: int = 0

    def rounded(self, tensor: torch.Tensor, bits: int, tolerance: float, form: str) -> Lossy:
        """Return the values in these bits."""
        chosen = codec(bits, tolerance, form, self.seed, self.threads)
        self.drawn += 1
        return Lossy(flat_values(tensor), chosen, self.drawn - 1)

    def sign(self, tensor: torch.Tensor) -> Mask:
        """Return a bit for each value. NaN counts as above zero: it lets gradients through."""
        return Mask(~(flat_values(tensor) <= 0), 1.0)

    def exact(self, tensor: torch.Tensor, kind: str, window: Window | None) -> Kept:
        """Return what is kept of a tensor of which nothing is lost."""
        if kind == "exact":
            return Exact(tensor)
        if kind == "shape":
            return Shape()
        if kind == "integers":
            if tensor.dtype == torch.bool:
                return Mask(flat_values(tensor), 1.0)
            if window is not None and window.bits and tensor.dtype == torch.int64:
                return Places(tensor, window)
            narrow = tensor.dtype in (torch.int16, torch.int32, torch.int64)
            return Narrow(tensor.detach()) if narrow else Exact(tensor)
        values = flat_values(tensor)
        if kind == "sign":
            return Mask(values > 0, 1.0)
        return Mask(values != 0, two_values(values) or 0.0)


class SignRelu(torch.autograd.Function):
    """relu(x); `keep` is given the result and returns what is kept of it, and its layout.

    Hooks of saved tensors give autograd's own backward pass of a ReLU what it asks for: a number
    per element. Decompressed, these are as large as the gradient, and often what a step's peak is
    made of. Here the backward pass reads bits.
    """

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: Callable[..., Any]) -> torch.Tensor:
        """Return relu(x)."""
        y = x.relu()
        ctx.kept = keep(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient where a bit is set, and 0 elsewhere."""
        kept, layout = ctx.kept
        return _Masked.apply(gradient, kept, layout), None


class _Masked(torch.autograd.Function):
    """A gradient through a ReLU, which is linear in it."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, mask: Any, layout: Any) -> torch.Tensor:
        ctx.kept = mask, layout
        return torch.as_tensor(mask.through(gradient, layout))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Masked.apply(gradient, *ctx.kept), None, None


def masked(gradient: torch.Tensor, bits: np.ndarray[Any, Any], layout: Any) -> torch.Tensor:
    """Return a gradient with zeros where a bit is not set.

    Parameters
    ----------
    bits
        [n / 8] uint8, in the order of the memory of `layout`.
    """
    made = torch.empty_strided(
        layout.shape, layout.stride, dtype=gradient.dtype, device=gradient.device
    )
    made.copy_(gradient)
    flat = made.as_strided((layout.numel,), (1,))
    # As integers: an AND is ten times faster than to select, and what goes is +0, NaN too.
    whole = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    host = whole.numpy() if whole.device.type == "cpu" else None
    for start in range(0, layout.numel, _CHUNK):
        count = min(_CHUNK, layout.numel - start)
        on = np.unpackbits(bits[start // 8 :][: -(-count // 8)], count=count, bitorder="little")
        ones = np.negative(on.view(np.int8))
        if host is not None:
            part = host[start : start + count]
            np.bitwise_and(part, ones.astype(part.dtype), out=part)
        else:
            part = whole[start : start + count]
            part &= torch.from_numpy(ones).to(part.device, part.dtype)
    return made
