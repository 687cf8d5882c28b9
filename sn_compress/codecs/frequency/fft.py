"""FFT sparsification: keep the largest coefficients of the gradient's spectrum.

The vector is cut into blocks, each block is transformed, the fraction `theta` of smallest bins
is dropped, the rest travels as range-based N-bit floats with packed positions (Wang, Wu, Zhao,
Dongarra et al., "FFT-based Gradient Sparsification for the Distributed Training of Deep Neural
Networks", HPDC 2020, arXiv 1811.08596). The paper transforms the whole vector at once
(`block=None`); blocks of 4096 stay in the cache and run on all cores, and may be cut into spans of
their own FFTs. A fixed FFT is right for smooth gradients only, so the transform is a setting.

The memory of what was dropped is kept in coefficients. The transforms are linear, so adding
there is adding the values, and encoding needs no inverse transform.
"""

from __future__ import annotations

import inspect
import math
from collections.abc import Iterator, Sequence
from itertools import chain
from typing import Any, Literal

import numpy as np
import numpy.typing as npt
import scipy.fft

from ...base.errors import CompressError, PayloadError
from ...devices import _cuda
from ...devices._native import parallel
from ...devices.arrays import like_of, on_cuda, on_host
from ...ops.records import large, long_record, quantize, select
from ...ops.records.blockwise import decode_blocks, encode_blocks
from ...ops.records.layout import Layout, Tally, Values
from ...ops.spectra import spectrum
from ..base import HEADER_BYTES, Bytes, Codec, Floats, Payload, as_vector
from . import _device, batched
from .blocks import Section, cut
from .fft_settings import Positions, TransformName, check_settings, pack_settings

PAPER = {"block": None, "positions": "bitmap", "half": True}
"""Settings that make the codec the paper's: fp16 in, one transform, bitmap positions."""

Memory = list[Floats]
MOST_BINS = 2**32 - 1
"""Bins of one record: positions are 32 bits wide, on every back end."""
_LENGTHS_KNOWN = 4096  # vectors of more different lengths are cut anew, not remembered


class FFTCodec(Codec):
    """Keep the fraction 1 - theta of a vector's transform coefficients, by magnitude.

    Parameters
    ----------
    theta : float in [0, 1), fraction of the bins dropped; every block keeps at least one
    block : power of two from 32 to 2**20, or None for one transform over the whole vector
    span : elements of each FFT within a block, a power of two from 32 to `block`; None for one FFT
        of the block. The bins kept are the strongest of the block either way
    bits, mantissa : format of the kept values, see RangeFloat; N = 4..16
    positions : "elias-fano" or "bitmap"
    values : "range"; "fp16", half precision scaled per block; "sign", one bit and a mean per
        block; "2bit", sign and one of two levels per block. The last two have no zero.
    window : "block" (each block's own range), "payload" (one for all), or the largest
        magnitude expected, a float: beyond it values are clipped and counted in
        `Payload.saturated`
    half : cast the input to float16 first, as the paper does
    transform : "fft", "dct", "hadamard", "identity" (plain top-k), or "axes", a DCT over the
        tensor's axes `axes` before plain top-k: for kernels over height and width. Which is best
        for a tensor, `AutoCodec` tries
    shape, axes : the tensor's shape and the axes transformed, for transform="axes"
    threads : threads for encode and decode; no effect on the result

    Examples
    --------
    >>> codec = FFTCodec(theta=0.9)
    >>> payload = codec.encode(np.ones(8192, np.float32))
    >>> payload.nbytes == codec.payload_bytes(8192)
    True
    >>> bool(abs(codec.decode(payload) - 1).max() < 1e-3)
    True
    """

    codec_id = 1

    def __init__(
        self,
        *,
        theta: float = 0.98,
        block: int | None = 4096,
        span: int | None = None,
        bits: int = 8,
        mantissa: int = 3,
        positions: Positions = "elias-fano",
        values: Values = "range",
        window: Literal["block", "payload"] | float = "block",
        half: bool = False,
        transform: TransformName = "fft",
        shape: Sequence[int] | None = None,
        axes: Sequence[int] | None = None,
        threads: int = 1,
    ) -> None:
        # Tuples, so that a list of the same numbers makes the same payloads.
        shape, axes = (None if given is None else tuple(given) for given in (shape, axes))
        check_settings(
            theta, block, span, bits, mantissa, positions, values, window, transform, shape, axes,
            threads,
        )  # fmt: skip
        self.theta, self.block, self.span = theta, block, span
        self.bits, self.mantissa = bits, mantissa
        self.positions, self.values, self.window = positions, values, window
        self.half, self.threads = half, threads
        self.transform, self.shape, self.axes = transform, shape, axes
        # Along axes, the blocks hold coefficients already.
        self._within = "identity" if transform == "axes" else transform
        self._blockwise = spectrum.transform(self._within, span)
        # Fixed point, so that every rank, language and device counts the same bins.
        self._dropped_q32 = min(int(theta * 2**32), 2**32 - 1)
        self.settings = pack_settings(
            self._dropped_q32, block, span, bits, mantissa, positions, values, transform, shape,
            axes,
        )  # fmt: skip
        self._sections_of: dict[int, list[Section]] = {}

    def __repr__(self) -> str:
        names = ["theta", "block", "span", "bits", "mantissa", "positions", "values"]
        names += ["window", "half", "transform"] + ["shape", "axes"] * (self.transform == "axes")
        return f"FFTCodec({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def at(self, theta: float) -> FFTCodec:
        """The codec of another theta; its memories are of the same kind."""
        names = inspect.signature(FFTCodec.__init__).parameters
        own = {name: getattr(self, name) for name in names if name != "self"}
        return FFTCodec(**own | {"theta": theta})

    @property
    def basis(self) -> dict[str, Any]:
        """The settings that say what a coefficient is."""
        # Without spans it is what it was before there were any, so that states saved then load.
        spans = {} if self.span is None else {"span": self.span}
        return {
            "block": self.block,
            **spans,
            "transform": self.transform,
            "shape": self.shape,
            "axes": self.axes,
        }

    def kept(self, bins: int) -> int:
        """How many of a block's bins travel."""
        return bins - (bins * self._dropped_q32 >> 32)

    def sections(self, n: int) -> list[Section]:
        """How n elements are cut, see blocks.cut."""
        if n not in self._sections_of:
            if self.shape is not None and math.prod(self.shape) != n:
                raise CompressError(
                    f"{n} elements do not fill shape {self.shape}; expected "
                    f"{math.prod(self.shape)}. A codec over axes serves one tensor shape."
                )
            if len(self._sections_of) >= _LENGTHS_KNOWN:
                self._sections_of.clear()
            self._sections_of[n] = cut(n, self.block, self._whole, self._layout)
        return self._sections_of[n]

    def _whole(self, n: int) -> int:
        if self.transform == "hadamard":
            return 1 << (n - 1).bit_length()
        return spectrum.fast_length(n)

    def _layout(self, block: int) -> Layout:
        parts = self._blockwise.parts
        bins = block // 2 + 1 if parts == 2 else block
        if bins > MOST_BINS:
            raise CompressError(
                f"block=None makes one transform of {bins} bins; expected at most {MOST_BINS}, "
                "since positions have 32 bits. Use a block of up to 2**20, such as 4096."
            )
        values, bits, mantissa = self.values, self.bits, self.mantissa
        return Layout(block, self.kept(bins), values, bits, mantissa, self.positions, parts)

    def payload_bytes(self, n: int) -> int:
        words = sum(s.count * s.layout.words for s in self.sections(n))
        return HEADER_BYTES + -(-4 * words // 16) * 16

    def new_state(self, n: int, *, like: Any = None) -> Memory:
        """Zero memory: the residual's coefficients, [blocks, bins * parts] float32 per section.

        It lies on the device of the vector `like`, if one is given; see place_state.
        """
        if like is not None and _cuda.takes(like):
            return _device.new_state(self, like)
        if like is not None and not on_host(like):
            return batched.new_memory(self, n, like)
        return [
            np.zeros((s.count, s.layout.bins * s.layout.parts), np.float32)
            for s in self.sections(n)
        ]

    def state_to_values(self, state: Memory, n: int) -> Floats:
        """The memory as the vector it stands for, [n] float32."""
        out = np.empty(n, np.float32)
        # Copies, which an inverse transform may overwrite.
        for section, memory in zip(self.sections(n), _device.to_host(state), strict=True):
            section.put(self._blockwise.inverse(memory, section.layout.block), out, 0)
        return self._from_axes(out)

    def place_state(self, state: Memory, like: Any) -> Memory:
        """On the device of the vector, as an array of CuPy if the kernels are to encode it.

        Copied only if it is elsewhere.
        """
        if _cuda.takes(like):
            return _device.to_device(state, like)
        if not on_host(like):
            return [like_of(part, like) for part in state]
        return state if all(isinstance(it, np.ndarray) for it in state) else _device.to_host(state)

    def dump_state(self, state: Memory, n: int) -> dict[str, Any]:
        return super().dump_state(_device.to_host(state), n)

    def values_to_state(self, values: npt.ArrayLike) -> Memory:
        """The memory that stands for a vector; inverse of state_to_values."""
        array = self._to_axes(as_vector(values))
        return [
            self._blockwise.forward(section.blocks(array, 0, section.count))
            for section in self.sections(array.size)
        ]

    def encode(
        self, values: npt.ArrayLike, *, state: Memory | None = None, decay: float = 1.0
    ) -> Payload:
        """Encode [n] float32, float16 or bfloat16; see Codec.encode.

        `decay` scales the memory before it is added. A block with NaN or Inf decodes to NaN, so
        that every rank sees it, and leaves its memory as it was. CuPy arrays and CUDA tensors are
        encoded where they are, see _device.py.
        """
        if on_cuda(values):
            return _device.encode(self, values, state, decay)
        array = as_vector(values)
        # Its size raises before anything of the size of n is made.
        buffer = np.empty(self.payload_bytes(array.size), np.uint8)
        return self.encode_into(buffer, array, state=state, decay=decay)

    def encode_into(
        self, buffer: Bytes, values: npt.ArrayLike, *, state: Any = None, decay: float = 1.0
    ) -> Payload:
        """Encode into [payload_bytes(n)] uint8, aligned to four bytes; see Codec.encode_into."""
        array = as_vector(values)
        n = array.size
        if buffer.shape != (self.payload_bytes(n),) or buffer.dtype != np.uint8:
            raise CompressError(
                f"a buffer of shape {buffer.shape} and dtype {buffer.dtype} for {n} elements; "
                f"expected {self.payload_bytes(n)} bytes. Make it with payload_bytes({n})."
            )
        if self.half and not self._rounds_inside(array):
            with np.errstate(over="ignore"):
                array = array.astype(np.float16)
        array = self._to_axes(array)
        words = buffer[HEADER_BYTES:].view("<u4")
        words[sum(s.count * s.layout.words for s in self.sections(n)) :] = 0
        memories = self._check_state(state, n)
        top = self._fixed_top(array, memories, decay)
        tallies: list[Tally] = []
        for section, memory in zip(self.sections(n), memories, strict=True):
            tallies += self._encode_section(array, section, memory, words, decay, top)
        return Payload.seal(
            buffer,
            codec_id=self.codec_id,
            n=n,
            settings=self.settings,
            saturated=sum(t.saturated for t in tallies),
            energy=math.fsum(t.energy for t in tallies),
            error=math.fsum(t.error for t in tallies),
        )

    def _is_long(self, layout: Layout) -> bool:
        """Whether a block is one long transform, which has code of its own."""
        return self.span is None and long_record.fits(self._within, layout)

    def _rounds_inside(self, array: npt.NDArray[Any]) -> bool:
        """Whether the transform casts to float16 as it reads the values."""
        layouts = (section.layout for section in self.sections(array.size))
        long = all(self._is_long(layout) for layout in layouts)
        return long and array.dtype == np.float32 and self.window != "payload"

    def _encode_section(
        self,
        array: npt.NDArray[Any],
        section: Section,
        memory: Floats | None,
        words: npt.NDArray[np.uint32],
        decay: float,
        top: int | None,
    ) -> list[Tally]:
        own = section.records(words)
        if self._is_long(section.layout):
            return [
                long_record.encode_long(
                    section.row(array, i).astype(np.float32, copy=False),
                    None if memory is None else memory[i],
                    own[i],
                    section.layout,
                    decay=decay,
                    top=top,
                    half=self.half,
                    threads=self.threads,
                )
                for i in range(section.count)
            ]

        def work(firsts: Iterator[int]) -> list[Tally]:
            tallies = []
            for first in firsts:
                last = min(first + section.chunk, section.count)
                part = section.blocks(array, first, last)
                kept = None if memory is None else memory[first:last]
                own_words, layout = own[first:last], section.layout
                given = self._within, part, kept, own_words, layout, decay, top, self.span
                tallies.append(encode_blocks(*given))
            return tallies

        return list(chain.from_iterable(parallel(work, section.chunks(), self.threads)))

    def _check_state(self, state: Memory | None, n: int) -> Sequence[Floats | None]:
        sections = self.sections(n)
        if state is None:
            return [None] * len(sections)
        shapes = [(s.count, s.layout.bins * s.layout.parts) for s in sections]
        if [memory.shape for memory in state] != shapes:
            raise CompressError(
                f"state of shapes {[memory.shape for memory in state]}; expected {shapes} for "
                f"{n} elements. Make it with new_state({n}) of this codec."
            )
        return state

    def _fixed_top(
        self, array: npt.NDArray[Any], memories: Sequence[Floats | None], decay: float
    ) -> int | None:
        """The end of the range that all blocks share, None where each has its own."""
        if self.window == "block":
            return None
        if self.window != "payload":
            peak = np.float32(self.window).view(np.uint32)
            return int(quantize.window_top(peak, self.mantissa))
        highest = 0
        for section, memory in zip(self.sections(array.size), memories, strict=True):
            blocks = section.blocks(array, 0, section.count)
            is_large = large.is_large(blocks, memory)
            down = np.where(is_large, np.float32(2.0**-large.SHIFT), np.float32(1))[:, None]
            with np.errstate(all="ignore"):
                part = self._blockwise.forward(blocks * down)
                if memory is not None:
                    part += memory * (np.float32(decay) * down)
            peaks = select.peak_bits(part)
            tops = quantize.window_top(peaks, self.mantissa) + large.OCTAVES * is_large
            highest = int(tops[peaks <= select.MAX_FINITE].max(initial=highest))
        return highest

    def decode_mean(self, payloads: Sequence[Payload]) -> Floats:
        """The mean of the vectors, [n] float32: one inverse transform, however many payloads.

        Raises PayloadError if a payload was made by another codec, with other settings or for
        another n, or is damaged.
        """
        n = self._check_payloads(payloads)
        if on_cuda(payloads[0].buffer):
            return _device.decode_mean(self, payloads)  # type: ignore[no-any-return]
        out = np.empty(n, np.float32)
        self._decode_into(payloads, out)
        return self._from_axes(out)

    def decode_mean_into(self, payloads: Sequence[Payload], out: Floats) -> None:
        """Write the mean into `out`, contiguous [n] float32 on the host; see decode_mean."""
        n = self._check_payloads(payloads)
        ready = out.flags.c_contiguous and out.dtype == np.float32 and out.shape == (n,)
        if not ready:
            raise CompressError(
                f"decoding {n} elements into an array of shape {out.shape} and dtype {out.dtype}; "
                f"expected ({n},) and float32, contiguous"
            )
        self._decode_into(payloads, out)
        if self.transform == "axes":
            out[:] = self._from_axes(out)

    def _decode_into(self, payloads: Sequence[Payload], out: Floats) -> None:
        bodies = [payload.body.view("<u4") for payload in payloads]
        for section in self.sections(out.size):
            self._decode_section(section, bodies, 1.0 / len(payloads), out)

    def _check_payloads(self, payloads: Sequence[Payload]) -> int:
        """The number of elements that all have."""
        if not payloads:
            raise CompressError("decode_mean needs at least one payload; got none")
        n = payloads[0].n
        for payload in payloads:
            self._check_payload(payload, n)
        return n

    def _check_payload(self, payload: Payload, n: int) -> None:
        if payload.codec_id != self.codec_id or payload.settings != self.settings:
            raise PayloadError(
                f"payload of codec {payload.codec_id} with settings {payload.settings.hex()}; "
                f"expected codec {self.codec_id} with {self.settings.hex()}. Decode with the "
                "settings it was encoded with, on every rank."
            )
        # Bounding n by the bytes at hand first keeps a forged header from costing memory.
        fits = payload.n == n and n <= 8 * payload.nbytes * self._expansion()
        if self.shape is not None:
            fits = fits and n == math.prod(self.shape)
        if not fits or payload.nbytes != self.payload_bytes(n):
            raise PayloadError(
                f"payload of {payload.nbytes} bytes for {payload.n} elements; expected {n} "
                "elements in the fixed size of these settings. Was it cut or joined?"
            )

    def _expansion(self) -> int:
        """More elements per bit of payload than these settings can ever give."""
        return 2 + int(1 / (1 - self._dropped_q32 / 2**32))

    def _decode_section(
        self, section: Section, bodies: list[npt.NDArray[np.uint32]], weight: float, out: Floats
    ) -> None:
        layout = section.layout
        records = [section.records(body) for body in bodies]
        if self._is_long(layout):
            for i in range(section.count):
                row = section.row(out, i)
                long_record.decode_long([r[i] for r in records], row, layout, weight, self.threads)
            return

        def work(firsts: Iterator[int]) -> None:
            for first in firsts:
                last = min(first + section.chunk, section.count)
                blocks = section.room(out, first, last)
                parts = [words[first:last] for words in records]
                decode_blocks(self._within, parts, blocks, layout, weight, self.span)
                section.put(blocks, out, first)

        parallel(work, section.chunks(), self.threads)

    def _to_axes(self, array: npt.NDArray[Any]) -> npt.NDArray[Any]:
        if self.transform != "axes":
            return array
        self.sections(array.size)  # raises if the shape does not fit
        tensor = array.astype(np.float32, copy=False).reshape(self.shape)
        return self._along_axes(scipy.fft.dctn, tensor)

    def _from_axes(self, array: Floats) -> Floats:
        if self.transform != "axes":
            return array
        tensor = array.reshape(self.shape)
        return self._along_axes(scipy.fft.idctn, tensor)

    def _along_axes(self, transform: Any, tensor: Floats) -> Floats:
        if not large.is_large(tensor.reshape(1, -1)).any():
            return transform(tensor, axes=self.axes, norm="ortho").reshape(-1)  # type: ignore[no-any-return]
        lowered = tensor * np.float32(2.0**-large.SHIFT)
        turned = transform(lowered, axes=self.axes, norm="ortho")
        return large.enlarged(turned.reshape(-1))  # type: ignore[no-any-return]
