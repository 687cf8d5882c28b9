"""Top-k: sends the largest elements as (index, value); the rest stays in the error memory.

No transform: the plain form of sparsification that all others are compared with (Aji and Heafield,
EMNLP 2017; with error feedback as in Stich, Cordonnier, Jaggi, NeurIPS 2018). The size of an
element on the wire differs eightfold between implementations, from an int64 index with a float32
value to 12 bits with a 2-bit value, so widths are settings, and there are named presets.
"""

from __future__ import annotations

import struct
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..errors import CompressError
from ..ops import codes, indexed
from . import frame
from .base import Floats, Payload

_SETTINGS = struct.Struct("<IHBB")  # docs/format.md
_INDICES = ("int64", "int32", "packed")
_VALUES = ("fp32", "fp16", "2bit")
_VALUE_BITS = {"fp32": 32, "fp16": 16, "2bit": 2}
_HALF_MAX = np.float32(65504)  # of float16


class TopKCodec(frame.HostCodec):
    """Keep the elements of largest magnitude, k = max(1, floor((1 - theta) n)) of them.

    Parameters
    ----------
    theta : float in [0, 1), fraction dropped
    chunk : from 2 to 65536, each chunk keeps its own k; None selects over the whole vector
    indices : "int64", "int32" or "packed" (as few bits as the chunk needs: 12 for 4096)
    values : "fp32"; "fp16", clipped at 65504 and counted in `Payload.saturated`; or "2bit", four
        bins of 1.5 standard deviations around the mean of the kept values, each sent as the mean of
        its values
    decay : float in (0, 1], factor on the memory at every step, in addition to encode's own

    Notes
    -----
    Ties go to the lower position. Rounding and clipping errors stay in the memory as well. A vector
    with NaN or Inf decodes to NaN everywhere and leaves the memory unchanged.

    Examples
    --------
    >>> codec = TopKCodec(theta=0.5)
    >>> codec.decode(codec.encode(np.array([1, -4, 2, 3], np.float32))).tolist()
    [0.0, -4.0, 0.0, 3.0]
    """

    codec_id = 18
    error_feedback = True

    def __init__(
        self,
        *,
        theta: float = 0.99,
        chunk: int | None = None,
        indices: Literal["int64", "int32", "packed"] = "int32",
        values: Literal["fp32", "fp16", "2bit"] = "fp32",
        decay: float = 1.0,
    ) -> None:
        ok = frame.fraction(theta, 0, 1) and theta < 1
        frame.check_setting(self, "theta", theta, ok, "a fraction from 0 (keep all) to below 1")
        ok = chunk is None or frame.is_int(chunk, 2, 65536)
        frame.check_setting(self, "chunk", chunk, ok, "2 to 65536, or None")
        frame.check_setting(self, "indices", indices, indices in _INDICES, ", ".join(_INDICES))
        frame.check_setting(self, "values", values, values in _VALUES, ", ".join(_VALUES))
        ok = frame.fraction(decay, 0, 1) and decay > 0
        frame.check_setting(self, "decay", decay, ok, "above 0 and at most 1 (1 forgets nothing)")
        if indices == "packed" and chunk is None:
            raise CompressError(
                'TopKCodec: indices="packed" needs the width of a chunk; got chunk=None. Set '
                'chunk=4096, or indices="int32".'
            )
        self.theta, self.chunk, self.indices = theta, chunk, indices
        self.values, self.decay = values, decay
        self._dropped_q32 = dropped_q32(theta)
        self._index_bits = {"int64": 64, "int32": 32}.get(indices, ((chunk or 1) - 1).bit_length())
        coders = _INDICES.index(indices) | _VALUES.index(values) << 4
        self.settings = frame.settings(
            _SETTINGS.pack(self._dropped_q32, (chunk or 1) - 1, coders, chunk is None)
        )

    def __repr__(self) -> str:
        return frame.show(self, "theta", "chunk", "indices", "values", "decay")

    def kept(self, length: int) -> int:
        """Return the number of elements sent of a chunk of this length."""
        return kept(length, self._dropped_q32)

    def runs(self, n: int) -> list[indexed.Run]:
        """Return how n elements are divided into chunks."""
        if self.indices == "int32" and self.chunk is None and n > 2**31:
            raise CompressError(
                f'TopKCodec: {n} elements are beyond indices="int32". Use indices="int64" or '
                "chunk=4096."
            )
        return indexed.runs(n, self.chunk, self.kept)

    def payload_bytes(self, n: int) -> int:
        cut = self.runs(n)
        k = indexed.total(cut)
        table = 16 if self.values == "2bit" else 0
        values = codes.packed_bytes(k, _VALUE_BITS[self.values])
        return frame.framed_bytes(table + values + indexed.index_bytes(cut, self._index_bits))

    def _encode(self, array: Floats, state: frame.State | None, decay: float) -> Payload:
        array = frame.add_memory(array, state, decay * self.decay)
        cut = self.runs(array.size)
        # The size of a payload is fixed, so a non-finite vector has positions like any other (the
        # bits of NaN sort above all numbers), and NaN as values.
        finite = bool(np.isfinite(array).all())
        inside, positions = indexed.select(array, cut)
        parts, sent, saturated = self._write(array[positions] if finite else None, positions.size)
        decoded = np.full(array.size, np.nan, np.float32)
        if finite:
            decoded[:] = 0
            decoded[positions] = sent
            # Includes rounding and clipping errors, not only dropped elements.
            frame.remember(state, array, decoded)
        parts.append(indexed.write_indices(inside, self._index_bits))
        losses = frame.losses(array, decoded)
        return frame.seal(self, array.size, parts, losses, saturated)

    def _write(
        self, kept: Floats | None, k: int
    ) -> tuple[list[npt.NDArray[np.generic]], Floats, int]:
        """Return bytes of the kept values, decoded values, number saturated; None encodes NaN."""
        values = np.full(k, np.nan, np.float32) if kept is None else kept
        if self.values == "fp32":
            return [values.astype("<f4")], values, 0
        if self.values == "fp16":
            saturated = int(np.count_nonzero(np.abs(values) > _HALF_MAX))
            halves = np.clip(values, -_HALF_MAX, _HALF_MAX).astype("<f2")
            return [halves], halves.astype(np.float32), saturated
        table, chosen = _four_bins(values)
        return [table.astype("<f4"), codes.pack_codes(chosen, 2)], table[chosen], 0

    def _decode(self, payload: Payload) -> Floats:
        cut = self.runs(payload.n)
        k = indexed.total(cut)
        body = payload.body
        if self.values == "2bit":
            table = frame.read(body, 0, 4, "<f4")
            at = 16 + codes.packed_bytes(k, 2)
            # Needs no check: two bits cannot exceed the table.
            values = table[codes.unpack_codes(body[16:at], k, 2)]
            finite = np.isfinite(table).all()
        else:
            kind = "<f4" if self.values == "fp32" else "<f2"
            values = frame.read(body, 0, k, kind)
            at = values.nbytes
            finite = np.isfinite(values).all()
        data = body[at : at + indexed.index_bytes(cut, self._index_bits)]
        indices = indexed.read_indices(data, k, self._index_bits)
        positions = indexed.locate(indices, cut)
        out = np.full(payload.n, 0 if finite else np.nan, np.float32)
        if finite:
            out[positions] = values
        return out


def dropped_q32(theta: float) -> int:
    """Return theta as a fraction of 2**32, so that k does not depend on a language's rounding."""
    # Rounded up: rounded down, theta=0.9 would send 9 of 100 elements.
    keep = int(np.ceil((1 - theta) * 2**32))
    return min(max(2**32 - keep, 0), 2**32 - 1)


def kept(length: int, dropped: int) -> int:
    """Return max(1, floor((1 - theta) length)), or 0 if length is 0."""
    return max(1, length * (2**32 - dropped) >> 32) if length else 0


def _four_bins(values: Floats) -> tuple[Floats, npt.NDArray[np.int64]]:
    """Return a table of four means, and the index of each value's mean."""
    # A table of NaN marks a non-finite vector.
    if not np.isfinite(values).all():
        return np.full(4, np.nan, np.float32), np.zeros(values.size, np.int64)
    exact = values.astype(np.float64)
    middle = exact.mean() if values.size else 0.0
    width = 1.5 * float(np.sqrt(np.mean((exact - middle) ** 2))) if values.size else 0.0
    edges = middle + width * np.array([-1.0, 0.0, 1.0])
    chosen = np.searchsorted(edges, exact, side="right")
    sums = np.bincount(chosen, weights=exact, minlength=4)
    table = sums / np.maximum(np.bincount(chosen, minlength=4), 1)
    return table.astype(np.float32), chosen
