"""A codec like DeMo's: the cosine transform of small chunks, top-k in each.

DeMo (Peng, Quesnelle, Kingma, arXiv 2411.19870) is an optimizer: its momentum is the memory, what
is sent leaves it, and the sign of what arrives is the step. This is the part that goes over the
wire, written from a description of it, for comparison at equal bytes. Each dimension is cut into
pieces of its largest divisor up to `edge`; a matrix gives rectangles, a vector gives runs. An
element costs 12 bytes there, an int64 index and a float32 value.
"""

from __future__ import annotations

import struct
from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt
import scipy.fft

from sn_compress.codecs import frame
from sn_compress.codecs.base import Floats, Payload
from sn_compress.errors import CompressError
from sn_compress.ops import indexed

_SETTINGS = struct.Struct("<IHH")
_ENTRY = 12  # bytes: int64 index, float32 value


class DeMoCodec(frame.HostCodec):
    """The largest coefficients of each chunk's orthonormal DCT-II.

    Parameters
    ----------
    shape : (rows, columns) of the gradient, or None for a vector
    topk : int from 1 to 65535, coefficients kept in each chunk (all, if it has fewer)
    edge : int from 1 to 256, longest side of a chunk
    decay : float in (0, 1], factor on the memory at every step, on top of encode's own

    Notes
    -----
    decode_mean divides by the number of ranks, in rank order. DeMo divides each coefficient by
    the number of ranks that sent it, and takes the sign. A dimension that is prime and above
    `edge` has chunks of one element there, and nothing is saved.

    Examples
    --------
    >>> codec = DeMoCodec(shape=(64, 128), topk=8)
    >>> codec.payload_bytes(64 * 128)  # 32 + 2 chunks * 8 * 12
    224
    """

    codec_id = 23
    error_feedback = True

    def __init__(
        self,
        *,
        shape: tuple[int, int] | None = None,
        topk: int = 32,
        edge: int = 64,
        decay: float = 0.999,
    ) -> None:
        ok = shape is None or (
            isinstance(shape, tuple)
            and len(shape) == 2
            and all(frame.is_int(side, 0, 2**32 - 1) for side in shape)
        )
        frame.check_setting(self, "shape", shape, ok, "(rows, columns), or None")
        frame.check_int(self, "topk", topk, 1, 65535, "1 to 65535")
        frame.check_int(self, "edge", edge, 1, 256, "1 to 256")
        ok = frame.fraction(decay, 0, 1) and decay > 0
        frame.check_setting(self, "decay", decay, ok, "above 0 and at most 1 (1 forgets nothing)")
        self.shape, self.topk, self.edge, self.decay = shape, topk, edge, decay
        self.settings = frame.settings(_SETTINGS.pack(shape[0] if shape else 0, topk, edge))

    def __repr__(self) -> str:
        return frame.show(self, "shape", "topk", "edge", "decay")

    @property
    def basis(self) -> dict[str, Any]:
        """The setting that a state's length follows from."""
        return {"shape": self.shape}

    def sides(self, n: int) -> tuple[int, int, int, int]:
        """Rows, columns, and height and width of a chunk; a vector is one row."""
        rows, cols = self.shape or (1, n)
        if rows * cols != n:
            raise CompressError(
                f"DeMoCodec: {n} elements for shape {self.shape}; expected {rows * cols}. Make "
                "one codec per shape."
            )
        return rows, cols, largest_divisor(rows, self.edge), largest_divisor(cols, self.edge)

    def runs(self, n: int) -> list[indexed.Run]:
        """The chunks, all equal."""
        _, _, height, width = self.sides(n)
        size = height * width
        return indexed.runs(n, size or None, lambda length: min(self.topk, length))

    def payload_bytes(self, n: int) -> int:
        return frame.framed_bytes(_ENTRY * indexed.total(self.runs(n)))

    def new_state(self, n: int) -> frame.State:
        """What was dropped so far: one vector, [n] float32, zeros at first."""
        self.sides(n)
        return [np.zeros(n, np.float32)]

    def state_to_values(self, state: frame.State, n: int) -> Floats:
        """The memory as the vector it stands for, [n] float32."""
        return state[0].copy()

    def values_to_state(self, values: npt.ArrayLike) -> frame.State:
        """The memory that stands for a vector; inverse of state_to_values."""
        return [frame.as_floats(values).copy()]

    def _encode(self, array: Floats, state: frame.State | None, decay: float) -> Payload:
        """Encode [n] float32, float16 or bfloat16; see Codec.encode.

        A vector with NaN or Inf, or whose transform overflows, decodes to NaN everywhere and
        leaves the memory as it was.
        """
        array = frame.add_memory(array, state, decay * self.decay)
        n = array.size
        spectrum = self._forward(array)
        inside, positions = indexed.select(spectrum, self.runs(n))
        sent = spectrum[positions]
        decoded = self._inverse(positions, sent, n)
        with np.errstate(all="ignore"):
            finite = bool(np.isfinite(array - decoded).all() and np.isfinite(spectrum).all())
        if finite:
            frame.remember(state, array, decoded)
        else:
            sent, decoded = np.full_like(sent, np.nan), np.full(n, np.nan, np.float32)
        parts = [inside.astype("<i8"), sent.astype("<f4")]
        return frame.seal(self, n, parts, frame.losses(array, decoded))

    def _forward(self, array: Floats) -> Floats:
        """[n] values -> [n] coefficients, chunk after chunk."""
        rows, cols, height, width = self.sides(array.size)
        if not array.size:
            return array
        tiles = array.reshape(rows // height, height, cols // width, width).swapaxes(1, 2)
        with np.errstate(all="ignore"):
            spectrum = scipy.fft.dctn(np.ascontiguousarray(tiles), axes=(2, 3), norm="ortho")
        return np.asarray(spectrum, np.float32).reshape(-1)

    def _inverse(self, positions: indexed.Positions, sent: Floats, n: int) -> Floats:
        spectrum = np.zeros(n, np.float32)
        spectrum[positions] = sent
        return self._values(spectrum)

    def _values(self, spectrum: Floats) -> Floats:
        n = spectrum.size
        rows, cols, height, width = self.sides(n)
        if not n:
            return spectrum
        tiles = spectrum.reshape(rows // height, cols // width, height, width)
        with np.errstate(all="ignore"):
            values = scipy.fft.idctn(tiles, axes=(2, 3), norm="ortho")
        return np.asarray(values, np.float32).swapaxes(1, 2).reshape(-1)

    def _decode_mean(self, payloads: Sequence[Payload]) -> Floats:
        """The mean of the vectors, [n] float32: coefficients are added, one inverse transform."""
        n = frame.check_payloads(self, payloads)
        cut = self.runs(n)
        k = indexed.total(cut)
        spectrum = np.zeros(n, np.float32)
        weight = np.float32(1 / len(payloads))
        finite = True
        for payload in payloads:
            indices = frame.read(payload.body, 0, k, "<i8").astype(np.int64)
            sent = frame.read(payload.body, 8 * k, k, "<f4")
            finite &= bool(np.isfinite(sent).all())
            with np.errstate(all="ignore"):
                spectrum[indexed.locate(indices, cut)] += sent * weight
        if not finite:
            return np.full(n, np.nan, np.float32)
        return self._values(spectrum)


def largest_divisor(side: int, edge: int) -> int:
    """The largest number up to `edge` that divides `side`; 0 of nothing."""
    return next((d for d in range(min(edge, side), 0, -1) if side % d == 0), 0)
