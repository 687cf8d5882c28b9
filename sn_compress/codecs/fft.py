"""FFT sparsification: keep the largest coefficients of the gradient's spectrum.

The vector is cut into blocks, each block is transformed, the fraction `theta` of smallest bins
is dropped, the rest travels as range-based N-bit floats with packed positions (Wang, Wu, Zhao,
Dongarra et al., "FFT-based Gradient Sparsification for the Distributed Training of Deep Neural
Networks", HPDC 2020, arXiv 1811.08596). The paper transforms the whole vector at once
(`block=None`); blocks of 4096 stay in the cache and run on all cores.

The memory of what was dropped is kept as a spectrum. The transform is linear, so adding there is
adding the values, and encoding needs no inverse transform.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import numpy.typing as npt

from .._native import parallel
from ..codec import HEADER_BYTES, Codec, Floats, Payload, as_vector
from ..errors import CompressError, PayloadError
from ..ops import quantize, select, spectrum
from ..ops.record import Layout, Tally, decode_records, encode_records

PAPER = {"block": None, "positions": "bitmap", "half": True}
"""Settings that make the codec the paper's: fp16 in, one transform, bitmap positions."""

Memory = list[spectrum.Spectrum]
_SETTINGS = struct.Struct("<IBBBB")
_CHUNK = 1 << 18  # elements worked on at a time: 1 MiB, inside a core's second-level cache
_SMALLEST = 32
_LARGEST = float(np.finfo(np.float32).max)
_LENGTHS_KNOWN = 4096  # vectors of more different lengths are cut anew, not remembered


@dataclass(frozen=True)
class Section:
    """A run of equal blocks: where it starts in the vector and in the body."""

    start: int  # first element
    stop: int  # end of the elements; the last block may be padded beyond it
    count: int  # blocks
    layout: Layout
    words_at: int  # offset in the body, 32-bit words


class FFTCodec(Codec):
    """Keep the fraction 1 - theta of a vector's spectral bins, by magnitude.

    Parameters
    ----------
    theta : float in [0, 1), fraction of the bins dropped; every block keeps at least one
    block : power of two from 32 to 2**20, or None for one transform over the whole vector
    bits, mantissa : format of the kept values, see RangeFloat; N = 4..16
    positions : "elias-fano" or "bitmap"
    values : "range", or "fp16" for half-precision values scaled per block
    window : "block" (each block's own range), "payload" (one for all), or the largest
        magnitude expected, a float: beyond it values are clipped and counted in
        `Payload.saturated`
    half : cast the input to float16 first, as the paper does
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
        bits: int = 8,
        mantissa: int = 3,
        positions: Literal["elias-fano", "bitmap"] = "elias-fano",
        values: Literal["range", "fp16"] = "range",
        window: Literal["block", "payload"] | float = "block",
        half: bool = False,
        threads: int = 1,
    ) -> None:
        fraction = isinstance(theta, (int, float)) and 0 <= theta < 1
        _check("theta", theta, fraction, "a fraction from 0 (keep all) to below 1")
        power = block is None or (
            isinstance(block, int) and block & (block - 1) == 0 and 32 <= block <= 1 << 20
        )
        _check("block", block, power, "a power of two from 32 to 2**20, or None")
        _check("positions", positions, positions in _POSITIONS, " or ".join(_POSITIONS))
        _check("values", values, values in _VALUES, " or ".join(_VALUES))
        ok = window in ("block", "payload") or (
            isinstance(window, (int, float)) and 0 < window <= _LARGEST
        )
        _check("window", window, ok, '"block", "payload" or a positive number within float32')
        _check("threads", threads, isinstance(threads, int) and threads >= 1, "at least 1")
        if values == "range":
            quantize.check_format(bits, mantissa)
        elif window != "block":
            raise CompressError('values="fp16" always scales per block; expected window="block"')
        self.theta, self.block, self.bits, self.mantissa = theta, block, bits, mantissa
        self.positions, self.values, self.window = positions, values, window
        self.half, self.threads = half, threads
        # Fixed point, so that every rank, language and device counts the same bins.
        self._dropped_q32 = min(int(theta * 2**32), 2**32 - 1)
        coders = _POSITIONS.index(positions) | _VALUES.index(values) << 4
        self._settings = _SETTINGS.pack(
            self._dropped_q32,
            0 if block is None else block.bit_length() - 1,
            bits if values == "range" else 16,
            mantissa if values == "range" else 0,
            coders,
        )
        self._sections_of: dict[int, list[Section]] = {}

    def __repr__(self) -> str:
        names = ("theta", "block", "bits", "mantissa", "positions", "values", "window", "half")
        return f"FFTCodec({', '.join(f'{name}={getattr(self, name)!r}' for name in names)})"

    def kept(self, block: int) -> int:
        """How many bins of a block of this length travel."""
        f = spectrum.bins(block)
        return f - (f * self._dropped_q32 >> 32)

    def sections(self, n: int) -> list[Section]:
        """How n elements are cut: full blocks, then the rest as one block of its own size.

        The rest is padded with zeros to a power of two, and a whole vector to a length without
        large prime factors.
        """
        if n not in self._sections_of:
            full = n // self.block if self.block else 0
            cuts = [(0, full * self.block, full, self.block)] if self.block and full else []
            start = cuts[0][1] if cuts else 0
            if rest := n - start:
                length = max(_SMALLEST, 1 << (rest - 1).bit_length())
                if self.block is None:
                    length = max(_SMALLEST, spectrum.fast_length(rest))
                cuts.append((start, n, 1, length))
            sections, at = [], 0
            for first, stop, count, length in cuts:
                layout = Layout(
                    length, self.kept(length), self.values, self.bits, self.mantissa, self.positions
                )
                sections.append(Section(first, stop, count, layout, at))
                at += count * layout.words
            if len(self._sections_of) >= _LENGTHS_KNOWN:
                self._sections_of.clear()
            self._sections_of[n] = sections
        return self._sections_of[n]

    def payload_bytes(self, n: int) -> int:
        words = sum(s.count * s.layout.words for s in self.sections(n))
        return HEADER_BYTES + -(-4 * words // 16) * 16

    def new_state(self, n: int) -> Memory:
        """Zero memory: the residual's spectrum, one [blocks, bins] complex64 per section."""
        return [np.zeros((s.count, s.layout.bins), np.complex64) for s in self.sections(n)]

    def state_to_values(self, state: Memory, n: int) -> Floats:
        """The memory as the vector it stands for, [n] float32."""
        out = np.empty(n, np.float32)
        for section, memory in zip(self.sections(n), state, strict=True):
            blocks = spectrum.inverse(memory.copy(), section.layout.block)
            out[section.start : section.stop] = blocks.reshape(-1)[: section.stop - section.start]
        return out

    def values_to_state(self, values: npt.ArrayLike) -> Memory:
        """The memory that stands for a vector; inverse of state_to_values."""
        array = as_vector(values)
        return [
            spectrum.forward(_blocks(array, section, 0, section.count))
            for section in self.sections(array.size)
        ]

    def encode(
        self, values: npt.ArrayLike, *, state: Memory | None = None, decay: float = 1.0
    ) -> Payload:
        """Encode [n] float32, float16 or bfloat16; see Codec.encode.

        `decay` scales the memory before it is added. A block with NaN or Inf decodes to NaN, so
        that every rank sees it, and leaves its memory as it was.
        """
        array = as_vector(values)
        n = array.size
        if self.half:
            with np.errstate(over="ignore"):
                array = array.astype(np.float16)
        buffer = np.zeros(self.payload_bytes(n), np.uint8)
        words = buffer[HEADER_BYTES:].view("<u4")
        memories = self._check_state(state, n)
        top = self._fixed_top(array, memories, decay)
        tallies: list[Tally] = []
        for section, memory in zip(self.sections(n), memories, strict=True):
            tallies += self._encode_section(array, section, memory, words, decay, top)
        return Payload.seal(
            buffer,
            codec_id=self.codec_id,
            n=n,
            settings=self._settings,
            saturated=sum(t.saturated for t in tallies),
            energy=math.fsum(t.energy for t in tallies),
            error=math.fsum(t.error for t in tallies),
        )

    def _encode_section(
        self,
        array: npt.NDArray[Any],
        section: Section,
        memory: spectrum.Spectrum | None,
        words: npt.NDArray[np.uint32],
        decay: float,
        top: int | None,
    ) -> list[Tally]:
        layout = section.layout
        at = section.words_at
        own = words[at : at + section.count * layout.words].reshape(section.count, layout.words)
        chunk = max(1, _CHUNK // layout.block)

        def work(first: int) -> Tally:
            last = min(first + chunk, section.count)
            part = spectrum.forward(_blocks(array, section, first, last))
            kept = None if memory is None else memory[first:last]
            return encode_records(part, kept, own[first:last], layout, decay, top)

        return parallel(work, range(0, section.count, chunk), self.threads)

    def _check_state(self, state: Memory | None, n: int) -> Sequence[spectrum.Spectrum | None]:
        sections = self.sections(n)
        if state is None:
            return [None] * len(sections)
        shapes = [(section.count, section.layout.bins) for section in sections]
        if [memory.shape for memory in state] != shapes:
            raise CompressError(
                f"state of shapes {[memory.shape for memory in state]}; expected {shapes} for "
                f"{n} elements. Make it with new_state({n}) of this codec."
            )
        return state

    def _fixed_top(
        self,
        array: npt.NDArray[Any],
        memories: Sequence[spectrum.Spectrum | None],
        decay: float,
    ) -> int | None:
        """The end of the range that all blocks share, None where each has its own."""
        if self.window == "block":
            return None
        if self.window != "payload":
            peak = np.float32(self.window).view(np.uint32)
            return int(quantize.window_top(peak, self.mantissa))
        highest = np.uint32(0)
        for section, memory in zip(self.sections(array.size), memories, strict=True):
            part = spectrum.forward(_blocks(array, section, 0, section.count))
            if memory is not None:
                with np.errstate(all="ignore"):
                    part.view(np.float32)[:] += memory.view(np.float32) * np.float32(decay)
            peaks = select.peak_bits(part)
            highest = peaks[peaks <= select.MAX_FINITE].max(initial=highest)
        return int(quantize.window_top(highest, self.mantissa))

    def decode_mean(self, payloads: Sequence[Payload]) -> Floats:
        """The mean of the vectors, [n] float32: one inverse transform, however many payloads.

        Raises PayloadError if a payload was made by another codec, with other settings or for
        another n, or is damaged.
        """
        if not payloads:
            raise CompressError("decode_mean needs at least one payload; got none")
        n = payloads[0].n
        for payload in payloads:
            self._check_payload(payload, n)
        bodies = [payload.body.view("<u4") for payload in payloads]
        weight = 1.0 / len(payloads)
        out = np.empty(n, np.float32)
        for section in self.sections(n):
            self._decode_section(section, bodies, weight, out)
        return out

    def _check_payload(self, payload: Payload, n: int) -> None:
        if payload.codec_id != self.codec_id or payload.settings != self._settings:
            raise PayloadError(
                f"payload of codec {payload.codec_id} with settings {payload.settings.hex()}; "
                f"expected codec {self.codec_id} with {self._settings.hex()}. Decode with the "
                "settings it was encoded with, on every rank."
            )
        # Bounding n by the bytes at hand first keeps a forged header from costing memory.
        if (
            payload.n != n
            or n > 8 * payload.nbytes * self._expansion()
            or (payload.nbytes != self.payload_bytes(n))
        ):
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
        end = section.words_at + section.count * layout.words
        rows = [b[section.words_at : end].reshape(section.count, layout.words) for b in bodies]
        chunk = max(1, _CHUNK // layout.block)

        def work(first: int) -> None:
            last = min(first + chunk, section.count)
            accum = np.zeros((last - first, layout.bins), np.complex64)
            for words in rows:
                decode_records(words[first:last], accum, layout, weight)
            start = section.start + first * layout.block
            stop = min(section.start + last * layout.block, section.stop)
            out[start:stop] = spectrum.inverse(accum, layout.block).reshape(-1)[: stop - start]

        parallel(work, range(0, section.count, chunk), self.threads)


def _blocks(array: npt.NDArray[Any], section: Section, first: int, last: int) -> Floats:
    """Blocks first..last of a section as [blocks, block] float32; the rest of it padded."""
    block = section.layout.block
    start = section.start + first * block
    part = array[start : min(section.start + last * block, section.stop)]
    part = part.astype(np.float32, copy=False)
    if part.size < (last - first) * block:
        padded = np.zeros((last - first) * block, np.float32)
        padded[: part.size] = part
        part = padded
    return part.reshape(last - first, block)


def _check(name: str, got: object, ok: bool, expected: str) -> None:
    if not ok:
        raise CompressError(f"FFTCodec: {name}={got!r}; expected {expected}")


_POSITIONS = ("elias-fano", "bitmap")
_VALUES = ("range", "fp16")
