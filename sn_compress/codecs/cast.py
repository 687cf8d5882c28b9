"""Half or a quarter of the bytes: every element as float16, bfloat16 or float8, rounded to nearest.

Not much of a compressor, but the baseline that any other has to beat in time: no selection, and
hardware that converts it. float16 has three more bits of precision; bfloat16 has the range of
float32. float8 (e4m3, a scale for each 256 elements) is off by up to a sixteenth, and remembers it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import numpy.typing as npt

from ..arrays import to_host
from ..ops.casts import DTYPES, Cast, DType
from . import frame
from .base import Bytes, Codec, Floats, Payload, as_vector
from .frame import through_host


@through_host
class CastCodec(Codec):
    """Elements as floats of 16 or 8 bits.

    Parameters
    ----------
    dtype : "fp16", "bf16" or "fp8"

    Notes
    -----
    Unlike the other codecs, NaN and Inf travel each as itself, element by element; "fp8" has no
    Inf, and sends NaN. Beyond the largest number of the format, 65504 for "fp16", values become Inf
    as in any cast, which a loss scaler sees; `Payload.saturated` counts them. The relative error
    is at most 2**-11 for "fp16" from 2**-14 up, 2**-8 for "bf16" from 2**-126 up, and 2**-4 for
    "fp8" from the largest of 256 elements down to a 2**15th of it.

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
        """Whether there is a state at all."""
        return {"dtype": self.dtype}

    def payload_bytes(self, n: int) -> int:
        return frame.framed_bytes(self.cast.nbytes(self.cast.padded(n)))

    def new_state(self, n: int) -> frame.State:
        """What rounding to "fp8" has left, [n] float32; of 16 bits nothing is remembered."""
        return [np.zeros(n, np.float32)] if self.remembers else []

    def state_to_values(self, state: frame.State, n: int) -> Floats:
        return np.array(to_host(state[0])) if self.remembers else super().state_to_values(state, n)

    def values_to_state(self, values: npt.ArrayLike) -> frame.State:
        if not self.remembers:
            return list(super().values_to_state(values))
        return [np.array(as_vector(values), np.float32)]

    def dump_state(self, state: frame.State, n: int) -> dict[str, Any]:
        return super().dump_state([to_host(part) for part in state], n)

    def encode(
        self, values: npt.ArrayLike, *, state: frame.State | None = None, decay: float = 1.0
    ) -> Payload:
        """Encode [n]; of 16 bits there is no memory for `state` and `decay` to act on."""
        state = state if self.remembers else None
        array = frame.add_memory(frame.as_floats(values), state, decay)
        words = self.cast.encode(np.pad(array, (0, self.cast.padded(array.size) - array.size)))
        decoded = self._values(words, array.size)
        frame.remember(state, array, decoded)
        saturated = int(np.count_nonzero(np.isfinite(array) & ~np.isfinite(decoded)))
        losses = frame.losses(array, decoded)
        return frame.seal(self, array.size, self.settings, [words], losses, saturated)

    def _values(self, words: Bytes, n: int) -> Floats:
        return np.asarray(self.cast.decode(words)[:n], np.float32)

    def decode_mean(self, payloads: Sequence[Payload]) -> Floats:
        """The mean of the vectors, [n] float32, summed in float32."""
        n = frame.check_payloads(self, self.settings, payloads)
        size = self.cast.nbytes(self.cast.padded(n))
        parts = (self._values(frame.read(p.body, 0, size, "u1"), n) for p in payloads)
        return frame.mean(parts, n, len(payloads))
