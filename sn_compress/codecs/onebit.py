"""One bit per element: its sign, with one or two means per bucket, and error feedback.

1-bit SGD sends the mean of the negatives and the mean of the others (Seide, Fu, Droppo, Li, Yu,
Interspeech 2014); EF-SignSGD sends the mean magnitude (Karimireddy, Rebjock, Stich, Jaggi, ICML
2019). Neither has a code for zero: a zero among other numbers decodes to a mean of its bucket, and
only the error memory corrects that.
"""

from __future__ import annotations

import struct
from typing import Literal

import numpy as np
import numpy.typing as npt

from ..errors import PayloadError
from ..ops import codes
from . import frame
from .base import Floats, Payload

_SETTINGS = struct.Struct("<IBBH")
_VARIANTS = ("1bit", "ef-sign")
_PACKINGS = {"bits": 1, "bytes": 8}


class OneBitCodec(frame.HostCodec):
    """Sends signs, and the values they represent.

    Parameters
    ----------
    variant : "1bit" (mean of the negatives, mean of the others) or "ef-sign" (plus and minus the
        mean magnitude)
    bucket : number of elements that share means, or None for the whole vector. Original 1-bit SGD
        uses the columns of the weight matrix
    packing : "bits", or "bytes" for a whole byte per sign, as GRACE does

    Notes
    -----
    Zero counts as not negative. A bucket of zeros decodes to zeros. A bucket with NaN or Inf
    decodes to NaN and leaves its memory unchanged.

    Examples
    --------
    >>> codec = OneBitCodec(bucket=None)
    >>> codec.decode(codec.encode(np.array([-1, -3, 2, 4], np.float32))).tolist()
    [-2.0, -2.0, 3.0, 3.0]
    """

    codec_id = 20
    error_feedback = True

    def __init__(
        self,
        *,
        variant: Literal["1bit", "ef-sign"] = "1bit",
        bucket: int | None = 512,
        packing: Literal["bits", "bytes"] = "bits",
    ) -> None:
        ok = variant in _VARIANTS
        frame.check_setting(self, "variant", variant, ok, " or ".join(_VARIANTS))
        ok = bucket is None or frame.is_int(bucket, 1, 2**32 - 1)
        frame.check_setting(self, "bucket", bucket, ok, "1 to 2**32 - 1, or None")
        frame.check_setting(self, "packing", packing, packing in _PACKINGS, " or ".join(_PACKINGS))
        self.variant, self.bucket, self.packing = variant, bucket, packing
        self._bits = _PACKINGS[packing]
        self._means = 2 if variant == "1bit" else 1
        self.settings = frame.settings(_SETTINGS.pack(bucket or 0, self._means, self._bits, 0))

    def __repr__(self) -> str:
        return frame.show(self, "variant", "bucket", "packing")

    def payload_bytes(self, n: int) -> int:
        means = 4 * self._means * codes.bucket_count(n, self.bucket)
        return frame.framed_bytes(means + codes.packed_bytes(n, self._bits))

    def _encode(self, array: Floats, state: frame.State | None, decay: float) -> Payload:
        array = frame.add_memory(array, state, decay)
        negative = array < 0
        means = self._mean_values(array)
        decoded = self._values(means, negative)
        frame.remember(state, array, decoded)
        parts = [means.astype("<f4"), codes.pack_codes(negative, self._bits)]
        return frame.seal(self, array.size, parts, frame.losses(array, decoded))

    def _mean_values(self, array: Floats) -> Floats:
        """Return [nb, 1 or 2] float32: (others, negatives) or the magnitude; NaN if not finite."""
        rows = codes.bucket_rows(array, self.bucket)
        lengths = codes.bucket_lengths(array.size, self.bucket)
        finite = codes.finite_buckets(rows)
        exact = np.where(finite[:, None], rows, 0).astype(np.float64)
        if self.variant == "ef-sign":
            means = (np.abs(exact).sum(axis=1) / lengths)[:, None]
        else:
            # A side without elements has the mean 0, which no sign refers to.
            negatives = (exact < 0).sum(axis=1)
            below = np.minimum(exact, 0).sum(axis=1) / np.maximum(negatives, 1)
            above = np.maximum(exact, 0).sum(axis=1) / np.maximum(lengths - negatives, 1)
            means = np.stack([above, below], axis=1)
        return np.where(finite[:, None], means, np.nan).astype(np.float32)

    def _values(self, means: Floats, negative: npt.NDArray[np.bool_]) -> Floats:
        n = negative.size
        above = codes.bucket_spread(means[:, 0], n, self.bucket)
        below = codes.bucket_spread(means[:, 1], n, self.bucket) if self._means == 2 else -above
        return np.asarray(np.where(negative, below, above), np.float32)

    def _decode(self, payload: Payload) -> Floats:
        nb = codes.bucket_count(payload.n, self.bucket)
        means = frame.read(payload.body, 0, nb * self._means, "<f4").reshape(nb, self._means)
        at = means.nbytes
        data = payload.body[at : at + codes.packed_bytes(payload.n, self._bits)]
        negative = codes.unpack_codes(data, payload.n, self._bits)
        if (negative > 1).any():  # a byte for a sign has room for more than 0 and 1
            raise PayloadError(f"sign {negative.max()}; expected 0 or 1")
        # A non-finite mean makes both signs of its bucket NaN, as in encoding.
        finite = codes.finite_buckets(means)
        means = np.where(finite[:, None], means, np.nan).astype(np.float32)
        return self._values(means, negative.astype(bool))
