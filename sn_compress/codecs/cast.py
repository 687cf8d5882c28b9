"""Casts every element to float16, bfloat16 or float8, rounded to nearest.

Not much of a compressor, but the baseline that any other has to beat in time: no selection, and
hardware support for conversion. float16 has three more bits of precision; bfloat16 has the range of
float32. float8 (e4m3, a scale per 256 elements) is off by up to a sixteenth, and has an error
memory.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from ..arrays import to_host
from ..ops.casts import DTYPES, Cast, DType
from . import frame
from .base import Bytes, Floats, Payload


class CastCodec(frame.HostCodec):
    """Sends elements as 16- or 8-bit floats.

    Parameters
    ----------
    dtype : "fp16", "bf16" or "fp8"

    Notes
    -----
    Unlike in other codecs, NaN and Inf are preserved element by element; "fp8" has no Inf, and
    sends NaN. Values beyond the largest number of the format, 65504 for "fp16", become Inf as in
    any cast, which a loss scaler detects; `Payload.saturated` counts them. The relative error is at
    most 2**-11 for "fp16" above 2**-14, 2**-8 for "bf16" above 2**-126, and 2**-4 for "fp8" above
    2**-15 times the largest of 256 elements.

    Examples
    --------
    >>> codec = CastCodec(dtype="bf16")
    >>> codec.decode(codec.encode(np.array([1.0, 1e30, 0.0], np.float32)))[0].item()
    1.0
    """

    codec_id = 22

    def __init__(self, *, dtype: DType = "fp16") -> None:
        frame.check_setting(self, "dtype", dtype, dtype in DTYPES, " or ".join(DTYPES))
        self.dtype = dtype
        self.cast = Cast(dtype)
        self.settings = frame.settings(bytes([DTYPES.index(dtype)]) + bytes(7))
        self.remembers = self.error_feedback = dtype == "fp8"

    def __repr__(self) -> str:
        return frame.show(self, "dtype")

    @property
    def basis(self) -> dict[str, Any]:
        """The dtype, which decides whether there is a state."""
        return {"dtype": self.dtype}

    def payload_bytes(self, n: int) -> int:
        return frame.framed_bytes(self.cast.nbytes(self.cast.padded(n)))

    def new_state(self, n: int) -> frame.State:
        """Return the memory of "fp8", [n] float32 zeros; with 16 bits there is none."""
        return super().new_state(n) if self.remembers else []

    def dump_state(self, state: frame.State, n: int) -> dict[str, Any]:
        # The exchange of casts keeps the memory on the device of its bucket, which may be a GPU.
        return super().dump_state([to_host(part) for part in state], n)

    def _encode(self, array: Floats, state: frame.State | None, decay: float) -> Payload:
        state = state if self.remembers else None
        array = frame.add_memory(array, state, decay)
        words = self.cast.encode(np.pad(array, (0, self.cast.padded(array.size) - array.size)))
        decoded = self._values(words, array.size)
        frame.remember(state, array, decoded)
        # Finite numbers that became Inf; not possible in "fp8", whose scales fit the largest.
        saturated = int(np.count_nonzero(np.isfinite(array) & ~np.isfinite(decoded)))
        losses = frame.losses(array, decoded)
        return frame.seal(self, array.size, [words], losses, saturated)

    def _values(self, words: Bytes, n: int) -> Floats:
        return np.asarray(self.cast.decode(words)[:n], np.float32)

    def _decode(self, payload: Payload) -> Floats:
        size = self.cast.nbytes(self.cast.padded(payload.n))
        return self._values(frame.read(payload.body, 0, size, "u1"), payload.n)
