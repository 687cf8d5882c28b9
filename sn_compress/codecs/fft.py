"""FFT sparsification: keep the largest coefficients of the gradient's spectrum.

The vector is cut into blocks, each block is transformed, the fraction `theta` of smallest bins
is dropped, and the rest is sent as range-based N-bit floats with packed positions (Wang, Wu, Zhao,
Dongarra et al., "FFT-based Gradient Sparsification for the Distributed Training of Deep Neural
Networks", HPDC 2020, arXiv 1811.08596). The paper transforms the whole vector at once
(`block=None`); blocks of 4096 stay in the cache and run on all cores, and may be cut into spans
with separate FFTs. A fixed FFT suits only smooth gradients, so the transform is a setting.

The error memory is kept in coefficients. The transforms are linear, so adding coefficients is
adding values, and encoding needs no inverse transform.
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

from .. import _cuda
from .._native import parallel
from ..arrays import asarray_like, on_cuda, on_host
from ..errors import CompressError
from ..ops import quantize, spectrum
from ..ops.quantize import Layout, Tally, Values
from ..ops.record import decode_blocks, encode_blocks
from . import batched, frame
from .base import HEADER_BYTES, Bytes, Codec, Floats, Payload, as_vector
from .fft_settings import (
    Positions,
    Section,
    TransformName,
    blockwise,
    check_settings,
    cut,
    fixed_top,
    pack_settings,
)

PAPER = {"block": None, "positions": "bitmap", "half": True}
"""The paper's settings: fp16 input, one transform, bitmap positions."""

OptimizerState = list[Floats]
MOST_BINS = 2**32 - 1
"""Maximum bins of one record: positions are 32 bits wide, on every back end."""
_LENGTHS_KNOWN = 4096  # cached vector lengths


class FFTCodec(Codec):
    """Keep the fraction 1 - theta of a vector's transform coefficients, by magnitude.

    Parameters
    ----------
    theta : float in [0, 1), fraction of the bins dropped; every block keeps at least one
    block : power of two from 32 to 2**20, or None for one transform over the whole vector
    span : elements of each FFT within a block, a power of two from 32 to `block`; None for one FFT
        per block. The bins kept are the strongest of the block in either case
    bits, mantissa : format of the kept values, see RangeFloat; N = 4..16
    positions : "elias-fano" or "bitmap"
    values : "range"; "fp16", half precision scaled per block; "sign", one bit and a mean per
        block; "2bit", sign and one of two levels per block. The last two have no zero.
    window : "block" (each block's own range), "payload" (one for all), or the largest
        magnitude expected, a float: beyond it values are clipped and counted in
        `Payload.saturated`
    half : cast the input to float16 first, as the paper does
    transform : "fft", "dct", "hadamard", "identity" (plain top-k), or "axes", a DCT over the
        tensor's axes `axes` before plain top-k, e.g. height and width of kernels
    shape, axes : the tensor's shape and the transformed axes, for transform="axes"
    threads : number of threads for encode and decode; no effect on the result

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
        # Tuples, so that lists produce the same payloads: the repr is hashed.
        shape, axes = (None if sides is None else tuple(sides) for sides in (shape, axes))
        self.theta, self.block, self.span = theta, block, span
        self.bits, self.mantissa = bits, mantissa
        self.positions, self.values, self.window = positions, values, window
        self.half, self.threads = half, threads
        self.transform, self.shape, self.axes = transform, shape, axes
        check_settings(self)
        self._within = blockwise(self)
        self._rounds_blocks = half and transform != "axes"  # "axes" rounds before the transform
        self._blockwise = spectrum.transform(self._within, span)
        # Fixed point, so that every rank, language and device counts the same bins; these 32 bits
        # are sent. Below 1, or a block would keep no bin.
        self._dropped_q32 = min(int(theta * 2**32), 2**32 - 1)
        self.settings = pack_settings(self, self._dropped_q32)
        # FFTs longer than `spectrum.LONGEST` are computed by a library, with different last bits. A
        # short last block of such a vector has this version as well: it follows from settings, not
        # n.
        length = None if block is None else spectrum.span_length(span, block)
        if transform == "fft" and (length is None or length > spectrum.LONGEST):
            self.version = 3
        self._sections_of: dict[int, list[Section]] = {}

    def __repr__(self) -> str:
        names = ["theta", "block", "span", "bits", "mantissa", "positions", "values"]
        names += ["window", "half", "transform"] + ["shape", "axes"] * (self.transform == "axes")
        return f"FFTCodec({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def at(self, theta: float) -> FFTCodec:
        """Return the codec with another theta, which can use the same memories."""
        names = inspect.signature(FFTCodec.__init__).parameters
        settings = {name: getattr(self, name) for name in names if name != "self"}
        return FFTCodec(**settings | {"theta": theta})

    @property
    def basis(self) -> dict[str, Any]:
        """The settings that define a coefficient."""
        # Without spans it is the same as before spans existed, so that old saved states load.
        spans = {} if self.span is None else {"span": self.span}
        return {
            "block": self.block,
            **spans,
            "transform": self.transform,
            "shape": self.shape,
            "axes": self.axes,
        }

    def kept(self, bins: int) -> int:
        """Return the number of a block's bins that are kept."""
        return bins - (bins * self._dropped_q32 >> 32)

    def sections(self, n: int) -> list[Section]:
        """Return how n elements are divided; see fft_settings.cut."""
        if n not in self._sections_of:
            if self.shape is not None and math.prod(self.shape) != n:
                raise CompressError(
                    f"{n} elements do not fill shape {self.shape}; expected "
                    f"{math.prod(self.shape)}. A codec over axes serves one tensor shape."
                )
            # n may come from a header, so the cache has to be bounded.
            if len(self._sections_of) >= _LENGTHS_KNOWN:
                self._sections_of.clear()
            self._sections_of[n] = cut(n, self.block, self._one_block, self._layout)
        return self._sections_of[n]

    def _one_block(self, n: int) -> int:
        if self.transform == "hadamard":  # needs a power of two
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

    def new_state(self, n: int, *, like: Any = None) -> OptimizerState:
        """Return zero memory: the residual's coefficients, [blocks, bins * parts] per section.

        On the device of the vector `like`, if there is one; see place_state.
        """
        if like is not None and _cuda.takes(like):
            from . import _fft_cuda

            return _fft_cuda.new_state(self, like)
        if like is not None and not on_host(like):
            return batched.new_memory(self, n, like)
        return [np.zeros(section.memory_shape, np.float32) for section in self.sections(n)]

    def state_to_values(self, state: OptimizerState, n: int) -> Floats:
        """Convert the memory to a residual, [n] float32."""
        out = np.empty(n, np.float32)
        # Copies, as an inverse transform may overwrite its argument.
        for section, memory in zip(self.sections(n), batched.memory_on_host(state), strict=True):
            section.put(self._blockwise.inverse(memory, section.layout.block), out, 0)
        return self._from_axes(out)

    def place_state(self, state: OptimizerState, like: Any) -> OptimizerState:
        """Move the state to the device of the vector, as CuPy arrays if kernels encode it.

        Nothing is copied if it is already there.
        """
        if _cuda.takes(like):
            from . import _fft_cuda

            return _fft_cuda.to_device(state, like)
        if not on_host(like):
            return [asarray_like(part, like) for part in state]
        if all(isinstance(array, np.ndarray) for array in state):
            return state
        return batched.memory_on_host(state)

    def dump_state(self, state: OptimizerState, n: int) -> dict[str, Any]:
        return super().dump_state(batched.memory_on_host(state), n)

    def values_to_state(self, values: npt.ArrayLike) -> OptimizerState:
        """Convert a residual to a memory; inverse of state_to_values."""
        array = self._to_axes(as_vector(values))
        return [
            self._blockwise.forward(section.blocks(array, 0, section.count))
            for section in self.sections(array.size)
        ]

    def encode(
        self, values: npt.ArrayLike, *, state: OptimizerState | None = None, decay: float = 1.0
    ) -> Payload:
        """Encode [n] float32, float16 or bfloat16; see Codec.encode.

        `decay` scales the memory before it is added. A block with NaN or Inf decodes to NaN, so
        that every rank sees it, and leaves its memory unchanged. CuPy arrays and CUDA tensors are
        encoded on their device, see _fft_cuda.py.
        """
        if on_cuda(values):
            from . import _fft_cuda

            return _fft_cuda.encode(self, values, state, decay)
        array = as_vector(values)
        # payload_bytes raises for a shape that does not fit, before anything of size n exists.
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
        array = self._to_axes(array, self.half)
        words = buffer[HEADER_BYTES:].view("<u4")
        # Records are written completely, padding is not: the buffer may contain another step's.
        words[sum(s.count * s.layout.words for s in self.sections(n)) :] = 0
        memories = self._check_state(state, n)
        top = self._fixed_top(array, memories, decay)
        chunks = [
            (section, memory, section.records(words), first)
            for section, memory in zip(self.sections(n), memories, strict=True)
            for first in section.chunks()
        ]

        def arguments(
            section: Section, memory: Floats | None, records: npt.NDArray[np.uint32], first: int
        ) -> tuple[Any, ...]:
            last = min(first + section.chunk, section.count)
            part = section.blocks(array, first, last, self._rounds_blocks)
            held = None if memory is None else memory[first:last]
            rows, layout = records[first:last], section.layout
            return self._within, part, held, rows, layout, decay, top, self.span

        # Chunks of blocks that fit the L2 cache, taken by threads from a queue. Each has its own
        # rows of memory and words, so the result does not depend on which thread takes it.
        def work(places: Iterator[int]) -> list[Tally]:
            return [encode_blocks(*arguments(*chunks[place])) for place in places]

        if self.threads < 2:  # saves a generator in the call stack
            tallies = [encode_blocks(*arguments(*chunk)) for chunk in chunks]
        else:
            shares = parallel(work, range(len(chunks)), self.threads)
            tallies = list(chain.from_iterable(shares))
        return Payload.seal(
            buffer,
            codec_id=self.codec_id,
            n=n,
            settings=self.settings,
            version=self.version,
            saturated=sum(t.saturated for t in tallies),
            energy=math.fsum(t.energy for t in tallies),
            error=math.fsum(t.error for t in tallies),
        )

    def _check_state(self, state: OptimizerState | None, n: int) -> Sequence[Floats | None]:
        sections = self.sections(n)
        if state is None:
            return [None] * len(sections)
        shapes = [section.memory_shape for section in sections]
        if [memory.shape for memory in state] != shapes:
            raise CompressError(
                f"state of shapes {[memory.shape for memory in state]}; expected {shapes} for "
                f"{n} elements. Make it with new_state({n}) of this codec."
            )
        return state

    def _fixed_top(
        self, array: npt.NDArray[Any], memories: Sequence[Floats | None], decay: float
    ) -> int | None:
        """Return the end of the range shared by all blocks; None if each has its own."""
        if self.window != "payload":
            return fixed_top(self)
        # One range for all blocks needs the largest of all first: every block is transformed twice,
        # as keeping a spectrum of the whole vector would leave the cache.
        highest = 0
        for section, memory in zip(self.sections(array.size), memories, strict=True):
            blocks = section.blocks(array, 0, section.count, self._rounds_blocks)
            # Blocks near float32's limit are encoded over 2**40: add 40 octaves to their tops.
            is_large = quantize.is_large(blocks, memory)
            down = np.where(is_large, np.float32(2.0**-quantize.LARGE_SHIFT), np.float32(1))[
                :, None
            ]
            with np.errstate(all="ignore"):
                part = self._blockwise.forward(blocks * down)
                if memory is not None:
                    part += memory * (np.float32(decay) * down)
            peaks = quantize.peak_bits(part)
            tops = quantize.window_top(peaks, self.mantissa) + quantize.LARGE_OCTAVES * is_large
            # A block that is not finite has no top: it is sent as NaN, whatever the range.
            highest = int(tops[peaks <= quantize.MAX_FINITE].max(initial=highest))
        return highest

    def decode_mean(self, payloads: Sequence[Payload]) -> Floats:
        """Return the mean, [n] float32; one inverse transform for any number of payloads.

        Raises PayloadError if a payload is from another codec, has other settings or another n, or
        is corrupt.
        """
        n = frame.check_payloads(self, payloads)
        if on_cuda(payloads[0].buffer):
            from . import _fft_cuda

            return _fft_cuda.decode_mean(self, payloads)  # type: ignore[no-any-return]
        out = np.empty(n, np.float32)
        self.decode_mean_into(payloads, out)
        return out

    def decode_mean_into(self, payloads: Sequence[Payload], out: Floats) -> None:
        """Write the mean into `out`, contiguous [n] float32 on the host; see decode_mean."""
        n = frame.check_payloads(self, payloads)
        ready = out.flags.c_contiguous and out.dtype == np.float32 and out.shape == (n,)
        if not ready:
            raise CompressError(
                f"decoding {n} elements into an array of shape {out.shape} and dtype {out.dtype}; "
                f"expected ({n},) and float32, contiguous"
            )
        # Sum the coefficients of all payloads, in order, before a single inverse transform.
        weight, bodies = 1.0 / len(payloads), [payload.body.view("<u4") for payload in payloads]
        calls = [
            (
                section,
                first,
                [section.records(body)[first : first + section.chunk] for body in bodies],
                section.room(out, first, min(first + section.chunk, section.count)),
            )
            for section in self.sections(n)
            for first in section.chunks()
        ]

        def work(places: Iterator[int]) -> None:
            for place in places:
                section, first, parts, room = calls[place]
                layout = section.layout
                values = decode_blocks(self._within, parts, room, layout, weight, self.span)
                section.put(values, out, first)

        if self.threads > 1:
            parallel(work, range(len(calls)), self.threads)
        else:
            # Not through `work`: it would add a call to the stack (tests/frame/test_ddp_step.py).
            for section, first, parts, room in calls:
                layout = section.layout
                section.put(
                    decode_blocks(self._within, parts, room, layout, weight, self.span), out, first
                )
        if self.transform == "axes":
            out[:] = self._from_axes(out)

    def _to_axes(self, array: npt.NDArray[Any], half: bool = False) -> npt.NDArray[Any]:
        if self.transform != "axes":
            return array
        self.sections(array.size)  # raises CompressError, where reshape would raise ValueError
        single = array.astype(np.float32, copy=False)
        if half:
            single = quantize.through_half(single)
        return self._along_axes(scipy.fft.dctn, single.reshape(self.shape))

    def _from_axes(self, array: Floats) -> Floats:
        if self.transform != "axes":
            return array
        tensor = array.reshape(self.shape)
        return self._along_axes(scipy.fft.idctn, tensor)

    def _along_axes(self, transform: Any, tensor: Floats) -> Floats:
        # Sums over a whole tensor may overflow like those of a block: see `quantize`, large blocks.
        if not quantize.is_large(tensor.reshape(1, -1)).any():
            return transform(tensor, axes=self.axes, norm="ortho").reshape(-1)  # type: ignore[no-any-return]
        lowered = tensor * np.float32(2.0**-quantize.LARGE_SHIFT)
        coefficients = transform(lowered, axes=self.axes, norm="ortho")
        return quantize.enlarged(coefficients.reshape(-1))  # type: ignore[no-any-return]
