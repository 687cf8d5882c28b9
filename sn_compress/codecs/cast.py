"""Half the bytes: every element as float16 or bfloat16, rounded to nearest, ties to even.

Not much of a compressor, but the baseline that any other has to beat in time: no state, no
selection, no loss worth a name, and hardware that adds it. float16 has three more bits of
precision; bfloat16 has the range of float32.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Literal

import numpy as np
import numpy.typing as npt

from . import frame
from .base import Codec, Floats, Payload
from .frame import through_host

_DTYPES = ("fp16", "bf16")
Halves = npt.NDArray[np.uint16]


@through_host
class CastCodec(Codec):
    """Elements as 16-bit floats.

    Parameters
    ----------
    dtype : "fp16" or "bf16"

    Notes
    -----
    Unlike the other codecs, NaN and Inf travel each as itself, element by element: a cast has
    codes for both. Beyond the largest number of the format, 65504 for "fp16", values become Inf
    as in any cast, which a loss scaler sees; `Payload.saturated` counts them. The relative error
    is at most 2**-11 for "fp16" from 2**-14 up, and 2**-8 for "bf16" from 2**-126 up.

    Examples
    --------
    >>> codec = CastCodec(dtype="bf16")
    >>> codec.decode(codec.encode(np.array([1.0, 1e30, 0.0], np.float32)))[0].item()
    1.0
    """

    codec_id = 22
    remembers = False
    error_feedback = False

    def __init__(self, *, dtype: Literal["fp16", "bf16"] = "fp16") -> None:
        frame.check_setting(self, "dtype", dtype, dtype in _DTYPES, " or ".join(_DTYPES))
        self.dtype = dtype
        self.settings = frame.settings(bytes([_DTYPES.index(dtype)]) + bytes(7))

    def __repr__(self) -> str:
        return frame.show(self, "dtype")

    def payload_bytes(self, n: int) -> int:
        return frame.framed_bytes(2 * n)

    def new_state(self, n: int) -> frame.State:
        """Nothing is remembered."""
        return []

    def encode(
        self, values: npt.ArrayLike, *, state: frame.State | None = None, decay: float = 1.0
    ) -> Payload:
        """Encode [n]; there is no memory for `state` and `decay` to act on."""
        array = frame.as_floats(values)
        halves = to_bf16(array) if self.dtype == "bf16" else to_fp16(array)
        decoded = self._values(halves)
        saturated = int(np.count_nonzero(np.isfinite(array) & ~np.isfinite(decoded)))
        losses = frame.losses(array, decoded)
        parts = [halves.astype("<u2")]
        return frame.seal(self, array.size, self.settings, parts, losses, saturated)

    def _values(self, halves: Halves) -> Floats:
        if self.dtype == "bf16":
            return (halves.astype(np.uint32) << 16).view(np.float32)
        return halves.view(np.float16).astype(np.float32)

    def decode_mean(self, payloads: Sequence[Payload]) -> Floats:
        """The mean of the vectors, [n] float32, summed in float32."""
        n = frame.check_payloads(self, self.settings, payloads)
        parts = (self._values(frame.read(p.body, 0, n, "<u2").astype(np.uint16)) for p in payloads)
        return frame.mean(parts, n, len(payloads))


def to_fp16(values: Floats) -> Halves:
    """Bits of the nearest float16; beyond 65504 (and a half step) Inf."""
    with np.errstate(all="ignore"):
        return values.astype(np.float16).view(np.uint16)


def to_bf16(values: Floats) -> Halves:
    """Bits of the nearest bfloat16, ties to even; NaN stays NaN, whatever its lower bits."""
    bits = np.ascontiguousarray(values).view(np.uint32)
    # Adding just under half a step, or half where the last kept bit is odd, and cutting.
    rounded = (bits + np.uint32(0x7FFF) + ((bits >> 16) & np.uint32(1))) >> 16
    return np.where(np.isnan(values), 0x7FC0, rounded).astype(np.uint16)
