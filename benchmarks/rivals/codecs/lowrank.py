"""Low rank: a gradient matrix as the product of two thin factors, and the factors in few bits.

PowerSGD's idea (Vogels, Karimireddy, Jaggi 2019): one step of power iteration from the factor of
the step before finds nearly the best rank-r approximation, because gradients change slowly.
PowerSGD sends float32 factors; four or eight bits hold them as well, so the same bytes carry four
to eight times the rank. The second factor is fitted to the first one as quantised, which
takes back most of the first one's rounding.

This is a codec of one rank's gradient; `allreduce/methods/low_rank.py` has the form for an
all-reduce.
"""

from __future__ import annotations

import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sn_compress.codecs import frame
from sn_compress.codecs.base import (
    HEADER_BYTES,
    Bytes,
    Floats,
    Payload,
    as_vector,
    check_held,
    saved_array,
    saved_item,
)
from sn_compress.codecs.fft import FFTCodec
from sn_compress.errors import CompressError, PayloadError
from sn_compress.ops.products import cut, directions, first_factor
from sn_compress.ops.quantize import NON_FINITE, Layout, Values, check_format
from sn_compress.ops.record import Words, decode_records, encode_records

_SETTINGS = struct.Struct("<HBBII")


@dataclass
class LowRankState:
    """What a rank remembers: what was dropped, and the factor to start from."""

    memory: Floats  # [n]
    start: Floats  # [columns, rank]


class LowRankCodec(frame.HostCodec):
    """Rank-`rank` approximation with quantised factors.

    Parameters
    ----------
    shape : the tensor's shape; `ops.matrices.cut` makes a matrix of it
    rank : columns of the factors, at most the smaller side of the matrix
    bits, mantissa : range float of the factors; with bits=16, half precision
    rest : FFTCodec that sparsifies what the low rank leaves over, or None
    rounds : power iterations on top of PowerSGD's one. They cost products, no bytes; gradients of
        small batches turn so fast that the start of the step before may be worth little.

    The payload holds one record per column of P [rows, rank], then of Q [columns, rank], each with
    a range of its own, then the records of `rest`. With BLAS of different processors decoded
    values may differ in the last bit.
    """

    codec_id = 2

    def __init__(
        self,
        *,
        shape: Sequence[int],
        rank: int = 4,
        bits: int = 8,
        mantissa: int = 3,
        rest: FFTCodec | None = None,
        rounds: int = 2,
    ) -> None:
        self.shape = tuple(int(size) for size in shape)
        rows, columns = cut(self.shape)
        if rows < 1 or columns < 1 or not 1 <= rank <= min(rows, columns, 65535):
            raise CompressError(
                f"LowRankCodec: shape={shape!r}, rank={rank!r}; expected sizes above zero and a "
                f"rank from 1 to {min(rows, columns)}"
            )
        if bits != 16:
            check_format(bits, mantissa)
        if rounds < 0:
            raise CompressError(f"LowRankCodec: rounds={rounds!r}; expected 0 or more")
        self.rank, self.bits, self.mantissa, self.rest = rank, bits, mantissa, rest
        self.rounds = rounds
        self._size = rows, columns
        self._layouts = [self._layout(side) for side in self._size]
        about: tuple[object, ...] = (self.shape, rest)
        if self.shape and rows != self.shape[0]:
            # Payloads of before were cut behind the first axis: elsewhere they are not these.
            about += (self._size,)
        self.settings = _SETTINGS.pack(rank, bits, mantissa, zlib.crc32(repr(about).encode()), 0)

    def _layout(self, side: int) -> Layout:
        """A column of a factor as one record of which everything is kept."""
        values: Values = "fp16" if self.bits == 16 else "range"
        return Layout(side, side, values, self.bits, self.mantissa, "bitmap", 1)

    def __repr__(self) -> str:
        return (
            f"LowRankCodec(shape={self.shape}, rank={self.rank}, bits={self.bits}, "
            f"mantissa={self.mantissa}, rest={self.rest!r}, rounds={self.rounds})"
        )

    @property
    def basis(self) -> dict[str, Any]:
        """The settings that give a state its shapes."""
        return {"shape": self.shape, "rank": self.rank}

    @property
    def _n(self) -> int:
        return self._size[0] * self._size[1]

    def payload_bytes(self, n: int) -> int:
        if n != self._n:
            raise CompressError(f"{n} elements do not fill shape {self.shape}; expected {self._n}")
        factors = 4 * self.rank * sum(layout.words for layout in self._layouts)
        rest = self.rest.payload_bytes(n) - HEADER_BYTES if self.rest else 0
        return HEADER_BYTES + -(-(factors + rest) // 16) * 16

    def new_state(self, n: int) -> LowRankState:
        self.payload_bytes(n)
        return LowRankState(np.zeros(n, np.float32), first_factor(self._size[1], self.rank))

    def state_to_values(self, state: LowRankState, n: int) -> Floats:
        """The memory, [n] float32."""
        return state.memory.copy()

    def values_to_state(self, values: npt.ArrayLike) -> LowRankState:
        """A state with this memory and a fresh start."""
        state = self.new_state(as_vector(values).size)
        state.memory[:] = np.asarray(values, np.float32)
        return state

    def dump_state(self, state: LowRankState, n: int) -> dict[str, Any]:
        return {"memory": state.memory.copy(), "start": state.start.copy()}

    def load_state(self, saved: dict[str, Any], n: int) -> LowRankState:
        check_held([saved_item(saved, "memory"), saved_item(saved, "start")], n)
        like = self.new_state(n)
        return LowRankState(
            saved_array(saved_item(saved, "memory"), like.memory),
            saved_array(saved_item(saved, "start"), like.start),
        )

    def _pieces(self, buffer: Bytes) -> tuple[list[Words], Bytes]:
        """The records of P and of Q, [rank, words] each, and the body of `rest`; views."""
        body, at, records = buffer[HEADER_BYTES:], 0, []
        for layout in self._layouts:
            size = 4 * self.rank * layout.words
            records.append(body[at : at + size].view("<u4").reshape(self.rank, layout.words))
            at += size
        rest = self.rest.payload_bytes(self._n) - HEADER_BYTES if self.rest else 0
        return records, body[at : at + rest]

    def _quantise(self, factor: Floats, records: Words, layout: Layout) -> Floats:
        """Write a factor's records; return the factor as they decode, [side, rank]."""
        encode_records(np.array(factor.T, np.float32, order="C"), None, records, layout)
        return self._factor(records, layout)

    def _factor(self, records: Words, layout: Layout) -> Floats:
        columns = np.zeros((self.rank, layout.block), np.float32)
        decode_records(records, columns, layout, 1.0)
        return columns.T

    def _encode(self, array: Floats, state: LowRankState | None, decay: float) -> Payload:
        """Encode [n] float32, float16 or bfloat16; see Codec.encode.

        NaN or Inf anywhere makes the whole vector NaN on every rank, and leaves the state alone.
        """
        vector = array.copy()
        buffer = np.zeros(self.payload_bytes(vector.size), np.uint8)
        known = state or self.new_state(vector.size)
        with np.errstate(all="ignore"):  # overflow ends as a vector that is not finite
            vector += known.memory * np.float32(decay)
            usable = bool(np.isfinite(vector).all())
            saturated = self._encode_finite(vector, known, buffer) if usable else None
        finite = saturated is not None
        left = known.memory if finite else np.zeros(0, np.float32)
        if not finite:
            self._encode_nan(buffer)
        return Payload.seal(
            buffer,
            codec_id=self.codec_id,
            n=vector.size,
            settings=self.settings,
            saturated=saturated or 0,
            energy=_squared_norm(vector) if finite else 0.0,
            error=_squared_norm(left),
        )

    def _encode_finite(self, vector: Floats, known: LowRankState, buffer: Bytes) -> int | None:
        """Fill the buffer, update the state; saturated values, None if something overflowed."""
        saturated = 0
        matrix = vector.reshape(self._size)
        (records_p, records_q), body = self._pieces(buffer)
        # Scaled to one, so that squares of tiny or huge gradients stay inside float32.
        scale = np.float32(np.abs(matrix).max(initial=0.0)) or np.float32(1)
        unit = matrix / scale
        p = directions(unit, known.start, self.rounds)
        p = self._quantise(p, records_p, self._layouts[0])
        # Least squares, not a projection: rounding has bent P a little out of orthonormal.
        gram = p.T @ p + 1e-6 * np.eye(self.rank, dtype=np.float32)
        start: Floats = np.asarray(np.linalg.solve(gram, p.T @ unit).T, np.float32)
        q = self._quantise(start * scale, records_q, self._layouts[1])
        left: Floats = np.asarray(matrix - p @ q.T, np.float32).reshape(-1)
        if self.rest:
            payload = self.rest.encode(left)
            body[:], saturated = payload.body, payload.saturated
            left = left - self.rest.decode(payload)
        if not np.isfinite(left).all():
            return None
        known.memory[:] = left
        if start.any():  # a start of zeros would never find anything again
            known.start[:] = start
        return saturated

    def _encode_nan(self, buffer: Bytes) -> None:
        """Fill the buffer with what every rank decodes to NaN."""
        buffer[HEADER_BYTES:] = 0
        records, body = self._pieces(buffer)
        for part in records:
            part[:, 0] = NON_FINITE
        if self.rest:
            body[:] = self.rest.encode(np.full(self._n, np.nan, np.float32)).body

    def _decode_mean(self, payloads: Sequence[Payload]) -> Floats:
        """The mean of the products, [n] float32; raises PayloadError for foreign payloads."""
        if not payloads:
            raise CompressError("decode_mean needs at least one payload; got none")
        total = np.zeros(self._size, np.float32)
        rests = []
        for payload in payloads:
            self._check_payload(payload)
            records, body = self._pieces(payload.buffer)
            p, q = (self._factor(*pair) for pair in zip(records, self._layouts, strict=True))
            with np.errstate(all="ignore"):
                total += p @ q.T
            if self.rest:
                head = np.zeros(HEADER_BYTES, np.uint8)
                inner = np.concatenate([head, body])
                rests.append(Payload(inner, self.rest.codec_id, self._n, self.rest.settings))
        mean = (total / np.float32(len(payloads))).reshape(-1)
        with np.errstate(all="ignore"):
            return mean + self.rest.decode_mean(rests) if self.rest else mean

    def _check_payload(self, payload: Payload) -> None:
        if (
            payload.codec_id != self.codec_id
            or payload.settings != self.settings
            or payload.n != self._n
            or payload.nbytes != self.payload_bytes(self._n)
        ):
            raise PayloadError(
                f"payload of codec {payload.codec_id} with settings {payload.settings.hex()}, "
                f"{payload.n} elements, {payload.nbytes} bytes; expected that of {self!r}"
            )


def _squared_norm(values: Floats) -> float:
    return float(np.square(values, dtype=np.float64).sum())
