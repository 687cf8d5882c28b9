"""Low rank: a gradient matrix as the product of two thin factors, and the factors in few bits.

PowerSGD's idea (Vogels, Karimireddy, Jaggi 2019): one step of power iteration from the factor of
the step before finds nearly the best rank-r approximation, because gradients change slowly.
PowerSGD sends float32 factors; four or eight bits hold them as well, so the same bytes carry four
to eight times the rank. The second factor is fitted to the first one as quantised, which
takes back most of the first one's rounding.

`LowRankCodec` is a codec of one rank's gradient. `AlternatingFactors` is the form for an
all-reduce: all ranks share one factor, so the other one can be summed, and one all-reduce a step
is enough when the roles change from step to step (as ACP-SGD, arXiv 2306.08881).
"""

from __future__ import annotations

import math
import struct
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from ..codec import HEADER_BYTES, Codec, Floats, Payload, as_vector
from ..errors import CompressError, PayloadError
from .fft import FFTCodec

_SETTINGS = struct.Struct("<HBBII")
_SEED = 2019
_COLD_ROUNDS = 2  # power iterations that make up for a random start


@dataclass
class LowRankState:
    """What a rank remembers: what was dropped, and the factor to start from."""

    memory: Floats  # [n]
    start: Floats  # [columns, rank]
    warm: bool = False  # `start` comes from a gradient, not from a random generator


def matrix_shape(shape: Sequence[int]) -> tuple[int, int]:
    """A tensor's shape as a matrix: its first axis by all others, as PowerSGD does."""
    return (shape[0], math.prod(shape[1:])) if shape else (1, 1)


def first_factor(columns: int, rank: int) -> Floats:
    """Where the power iteration begins: the same normal numbers on every rank."""
    rng = np.random.default_rng((_SEED, columns, rank))
    return rng.standard_normal((columns, rank), dtype=np.float32)


class LowRankCodec(Codec):
    """Rank-`rank` approximation with quantised factors.

    Parameters
    ----------
    shape : the tensor's shape; more than two axes are flattened behind the first
    rank : columns of the factors, at most the smaller side of the matrix
    bits, mantissa : range float of the factors; fp16 with bits=16
    rest : FFTCodec that sparsifies what the low rank leaves over, or None

    The payload holds the codes of P [rows, rank] and Q [columns, rank], column by column, each
    column in blocks with a range of its own, then the records of `rest`. With BLAS of
    different processors decoded values may differ in the last bit.
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
    ) -> None:
        self.shape = tuple(int(size) for size in shape)
        rows, columns = matrix_shape(self.shape)
        if rows < 1 or columns < 1 or not 1 <= rank <= min(rows, columns, 65535):
            raise CompressError(
                f"LowRankCodec: shape={shape!r}, rank={rank!r}; expected sizes above zero and a "
                f"rank from 1 to {min(rows, columns)}"
            )
        self.rank, self.bits, self.mantissa, self.rest = rank, bits, mantissa, rest
        self._rows, self._columns = rows, columns
        coder: dict[str, Any] = (
            {"values": "fp16"} if bits == 16 else {"bits": bits, "mantissa": mantissa}
        )
        self._factor = FFTCodec(theta=0.0, transform="identity", block=None, **coder)
        about = repr((self.shape, self._factor, rest)).encode()
        self.settings = _SETTINGS.pack(rank, bits, mantissa, zlib.crc32(about), 0)

    def __repr__(self) -> str:
        return (
            f"LowRankCodec(shape={self.shape}, rank={self.rank}, bits={self.bits}, "
            f"mantissa={self.mantissa}, rest={self.rest!r})"
        )

    @property
    def _n(self) -> int:
        return self._rows * self._columns

    def _parts(self) -> list[tuple[FFTCodec, int]]:
        """Codec and number of elements of each piece of the body, in order."""
        pieces = [(self._factor, self._rows)] * self.rank + [
            (self._factor, self._columns)
        ] * self.rank
        return pieces + ([(self.rest, self._n)] if self.rest else [])

    def payload_bytes(self, n: int) -> int:
        if n != self._n:
            raise CompressError(f"{n} elements do not fill shape {self.shape}; expected {self._n}")
        bodies = sum(codec.payload_bytes(size) - HEADER_BYTES for codec, size in self._parts())
        return HEADER_BYTES + bodies

    def new_state(self, n: int) -> LowRankState:
        self.payload_bytes(n)
        return LowRankState(np.zeros(n, np.float32), first_factor(self._columns, self.rank))

    def state_to_values(self, state: LowRankState, n: int) -> Floats:
        """The memory, [n] float32."""
        return state.memory.copy()

    def values_to_state(self, values: npt.ArrayLike) -> LowRankState:
        """A state with this memory and a fresh start."""
        state = self.new_state(as_vector(values).size)
        state.memory[:] = np.asarray(values, np.float32)
        return state

    def encode(
        self, values: npt.ArrayLike, *, state: LowRankState | None = None, decay: float = 1.0
    ) -> Payload:
        """Encode [n] float32, float16 or bfloat16; see Codec.encode.

        NaN or Inf anywhere makes the whole vector NaN on every rank, and leaves the state alone.
        """
        vector = as_vector(values).astype(np.float32)
        known = state or self.new_state(vector.size)
        with np.errstate(all="ignore"):  # overflow ends as a vector that is not finite
            vector += known.memory * np.float32(decay)
            body = self._encode_finite(vector, known) if np.isfinite(vector).all() else None
        if body is None or not np.isfinite(body.left).all():
            body = self._encode_nan(vector.size)
        elif state is not None:
            state.memory[:], state.start[:] = body.left.reshape(-1), body.start
            state.warm = state.warm or bool(vector.any())
        return Payload.seal(
            body.buffer,
            codec_id=self.codec_id,
            n=vector.size,
            settings=self.settings,
            saturated=body.saturated,
            energy=_squared_norm(vector) if body.finite else 0.0,
            error=_squared_norm(body.left) if body.finite else 0.0,
        )

    def _encode_finite(self, vector: Floats, known: LowRankState) -> _Body:
        matrix = vector.reshape(self._rows, self._columns)
        p, q, start = self._factorise(matrix, known)
        body = _Body(np.zeros(self.payload_bytes(vector.size), np.uint8), matrix, start)
        decoded = [body.append(self._factor, column) for column in (*p.T, *q.T)]
        back_p, back_q = np.stack(decoded[: self.rank], 1), np.stack(decoded[self.rank :], 1)
        body.left = np.asarray(matrix - back_p @ back_q.T, np.float32)
        if self.rest:
            body.left -= body.append(self.rest, body.left.reshape(-1)).reshape(matrix.shape)
        return body

    def _encode_nan(self, n: int) -> _Body:
        """What every rank decodes to NaN."""
        buffer, nothing = np.zeros(self.payload_bytes(n), np.uint8), np.zeros(0, np.float32)
        body = _Body(buffer, nothing, nothing, finite=False)
        for codec, size in self._parts():
            body.append(codec, np.full(size, np.nan, np.float32))
        return body

    def _factorise(self, matrix: Floats, known: LowRankState) -> tuple[Floats, Floats, Floats]:
        """P orthonormal, Q fitted to P as it will be decoded, and Q for the next start."""
        # Scaled to one, so that squares of tiny or huge gradients stay inside float32.
        scale = np.float32(np.abs(matrix).max(initial=0.0))
        if scale == 0:
            return (
                np.zeros((self._rows, self.rank), np.float32),
                np.zeros((self._columns, self.rank), np.float32),
                known.start,
            )
        unit = matrix / scale
        p = np.linalg.qr(unit @ known.start)[0]
        for _ in range(0 if known.warm else _COLD_ROUNDS):
            p = np.linalg.qr(unit @ (unit.T @ p))[0]
        back = np.stack([self._factor.decode(self._factor.encode(column)) for column in p.T], 1)
        # Least squares, not a projection: rounding has bent P a little out of orthonormal.
        gram = back.T @ back + 1e-6 * np.eye(self.rank, dtype=np.float32)
        q: Floats = np.ascontiguousarray(np.linalg.solve(gram, back.T @ unit).T, np.float32)
        return p, q * scale, q

    def decode_mean(self, payloads: Sequence[Payload]) -> Floats:
        """The mean of the products, [n] float32; raises PayloadError for foreign payloads."""
        if not payloads:
            raise CompressError("decode_mean needs at least one payload; got none")
        total = np.zeros((self._rows, self._columns), np.float32)
        rests = []
        for payload in payloads:
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
            at, pieces = HEADER_BYTES, []
            for codec, size in self._parts():
                at, piece = _read(codec, size, payload, at)
                pieces.append(piece)
            factors = [self._factor.decode(piece) for piece in pieces[: 2 * self.rank]]
            p, q = np.stack(factors[: self.rank], 1), np.stack(factors[self.rank :], 1)
            with np.errstate(all="ignore"):
                total += p @ q.T
            rests += pieces[2 * self.rank :]
        mean = (total / np.float32(len(payloads))).reshape(-1)
        with np.errstate(all="ignore"):
            return mean + self.rest.decode_mean(rests) if self.rest else mean


@dataclass
class _Body:
    """A body in the making, and what is left of the matrix."""

    buffer: npt.NDArray[np.uint8]
    left: Floats
    start: Floats
    finite: bool = True
    at: int = HEADER_BYTES
    saturated: int = 0

    def append(self, codec: FFTCodec, values: Floats) -> Floats:
        """Put in the body that `codec` makes of the values, and return what it decodes to."""
        payload = codec.encode(values)
        end = self.at + payload.nbytes - HEADER_BYTES
        self.buffer[self.at : end] = payload.body
        self.at, self.saturated = end, self.saturated + payload.saturated
        return codec.decode(payload)


def _squared_norm(values: Floats) -> float:
    return float(np.square(values, dtype=np.float64).sum())


def _read(codec: FFTCodec, size: int, payload: Payload, at: int) -> tuple[int, Payload]:
    """The piece of a body that `codec` encoded from `size` elements, as a payload of its own."""
    end = at + codec.payload_bytes(size) - HEADER_BYTES
    buffer = np.concatenate([np.zeros(HEADER_BYTES, np.uint8), payload.buffer[at:end]])
    return end, Payload(buffer, codec.codec_id, size, codec.settings)


class AlternatingFactors:
    """Low rank for an all-reduce: one factor is shared, the other one summed, in turn.

    All ranks hold the same basis. A rank calls `project`, the ranks average what it returns
    (any all-reduce, in any precision), and each calls `reconstruct` with that average. Because
    the product is linear in the factor sent, the result is the mean of the ranks' projections.

    One step may be off while two in a row are right: what the first drops comes with the second.
    What the ranks' gradients have of their own, beside the mean, is never sent and stays in their
    memories; only the mean of the memories is bounded. NaN or Inf on one rank makes the result
    NaN on all, and leaves basis and memories as they were.

    Parameters
    ----------
    shape : the tensor's shape
    rank : columns of the factors
    """

    def __init__(self, *, shape: Sequence[int], rank: int = 4) -> None:
        rows, columns = matrix_shape(shape)
        if not 1 <= rank <= min(rows, columns):
            raise CompressError(
                f"AlternatingFactors: rank={rank!r} for a {rows} x {columns} matrix; expected 1 "
                f"to {min(rows, columns)}"
            )
        self._size = rows, columns
        self._basis = np.linalg.qr(first_factor(columns, rank))[0]  # orthonormal, of one side
        self._left = True  # the next factor sent is the left one
        self._sent: tuple[Floats, Floats] | None = None  # the matrix and its factor
        self.memory = np.zeros((rows, columns), np.float32)

    def project(self, values: npt.ArrayLike) -> Floats:
        """The factor of `values` plus memory on the shared basis, [side, rank] float32."""
        with np.errstate(all="ignore"):  # NaN, Inf and overflow travel
            matrix = np.asarray(values, np.float32).reshape(self._size) + self.memory
            factor: Floats = (matrix if self._left else matrix.T) @ self._basis
        self._sent = matrix, factor
        return factor

    def reconstruct(self, mean: npt.ArrayLike) -> Floats:
        """The mean gradient from the averaged factor, [n] float32; turns the roles around."""
        if self._sent is None:
            raise CompressError(
                "reconstruct() follows project(); the factor of this step is missing"
            )
        factor = np.asarray(mean, np.float32)
        (matrix, sent), self._sent = self._sent, None
        if not np.isfinite(factor).all():
            return np.full(matrix.size, np.nan, np.float32)
        own, result = (f @ self._basis.T for f in (sent, factor))
        if not self._left:
            own, result = own.T, result.T
        self.memory = matrix - own
        if factor.any():
            # The averaged factor spans what the mean gradient does: the basis of the next step.
            self._basis = np.linalg.qr(factor)[0]
            self._left = not self._left
        return np.ascontiguousarray(result, np.float32).reshape(-1)
