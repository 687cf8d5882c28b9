"""TernGrad: every element becomes -1, 0 or +1 times a scale, stochastically and unbiased.

An element is kept with probability |x| / scale, so the expectation is preserved. The scale is the
largest magnitude; a single outlier would make all other elements rare, so magnitudes are first
clipped at 2.5 standard deviations (Wen, Xu, Yan, Wu, Wang, Chen, Li, "TernGrad", NeurIPS 2017).

The paper's deviation is taken about the mean. For a vector of equal values, and so always for a
scalar parameter, that is zero, and clipping deletes it. Ours is taken about zero (`spread="rms"`),
which is the same if the mean is small compared to the noise, as the paper assumes.
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

_SETTINGS = struct.Struct("<IHH")
_PACKINGS = ("trits", "bits", "bytes")
_BITS = {"bits": 2, "bytes": 8}
_SPREADS = ("rms", "std")


class TernGradCodec(frame.HostCodec):
    """Sends one of three values: zero, plus or minus a bucket's scale; unbiased but for clipping.

    Parameters
    ----------
    clip : float > 0, magnitudes are clipped to this many deviations; None: no clipping
    spread : "rms" (about zero) or "std" (about the mean, as in the paper)
    bucket : number of elements that share a scale, or None for the whole vector
    packing : "trits" (five in a byte, 1.6 bits each), "bits" (2, as in the paper) or "bytes" (8, as
        in GRACE). "trits" cost one table look-up more and save a fifth
    seed : int from 0 to 2**64 - 1. Use a different one on each rank: errors then average out

    Notes
    -----
    State, NaN and zeros: as in QSGDCodec.

    Examples
    --------
    >>> codec = TernGradCodec()
    >>> codec.decode(codec.encode(np.array([0, 3, -3], np.float32))).tolist()
    [0.0, 3.0, -3.0]
    """

    codec_id = 17
    remembers = False
    error_feedback = False

    def __init__(
        self,
        *,
        clip: float | None = 2.5,
        spread: Literal["rms", "std"] = "rms",
        bucket: int | None = None,
        packing: Literal["trits", "bits", "bytes"] = "trits",
        seed: int = 0,
    ) -> None:
        ok = clip is None or (frame.fraction(clip, 0, 1e30) and clip > 0)
        frame.check_setting(self, "clip", clip, ok, "a positive number of deviations, or None")
        frame.check_setting(self, "spread", spread, spread in _SPREADS, " or ".join(_SPREADS))
        ok = bucket is None or frame.is_int(bucket, 1, 2**32 - 1)
        frame.check_setting(self, "bucket", bucket, ok, "1 to 2**32 - 1, or None")
        frame.check_setting(self, "packing", packing, packing in _PACKINGS, ", ".join(_PACKINGS))
        frame.check_int(self, "seed", seed, 0, 2**64 - 1, "0 to 2**64 - 1")
        self.clip, self.spread, self.bucket = clip, spread, bucket
        self.packing, self.seed = packing, seed
        self.settings = frame.settings(_SETTINGS.pack(bucket or 0, _PACKINGS.index(packing), 0))

    def __repr__(self) -> str:
        return frame.show(self, "clip", "spread", "bucket", "packing", "seed")

    def _code_bytes(self, n: int) -> int:
        if self.packing == "trits":
            return -(-n // 5)
        return codes.packed_bytes(n, _BITS[self.packing])

    def payload_bytes(self, n: int) -> int:
        return frame.framed_bytes(4 * codes.bucket_count(n, self.bucket) + self._code_bytes(n))

    def _encode(self, array: Floats, state: frame.State | None, decay: float) -> Payload:
        rows = codes.bucket_rows(array, self.bucket)
        magnitudes, scales = self._clipped(rows, codes.bucket_lengths(array.size, self.bucket))
        # The largest has probability 1; in a bucket of zeros, whose scale is 0, none is kept.
        probability = magnitudes.astype(np.float64) / np.where(scales > 0, scales, 1)[:, None]
        drawn = codes.happens(probability, self.seed, frame.take_step(state))
        signs = np.where(np.signbit(rows), -1, 1) * drawn
        trits = (signs + 1).reshape(-1)[: array.size].astype(np.uint8)
        parts = [scales.astype("<f4"), self._pack(trits)]
        decoded = self._values(scales, trits)
        return frame.seal(self, array.size, parts, frame.losses(array, decoded))

    def _clipped(self, rows: Floats, lengths: npt.NDArray[np.int64]) -> tuple[Floats, Floats]:
        """Return clipped magnitudes [nb, b] and scales [nb]; 0 and NaN if not finite."""
        if not rows.size:
            return np.abs(rows), np.zeros(len(rows), np.float32)
        finite = codes.finite_buckets(rows)
        magnitudes = np.where(finite[:, None], np.abs(rows), 0)
        if self.clip is not None:
            limit = self.clip * self._deviation(np.where(finite[:, None], rows, 0), lengths)
            # NumPy warns if a cast overflows; a limit that high does not clip anyway.
            top = float(np.finfo(np.float32).max)
            magnitudes = np.minimum(magnitudes, np.minimum(limit, top).astype(np.float32)[:, None])
        scales = np.where(finite, magnitudes.max(axis=1), np.nan)
        return magnitudes, scales.astype(np.float32)

    def _deviation(self, rows: Floats, lengths: npt.NDArray[np.int64]) -> npt.NDArray[np.float64]:
        exact = rows.astype(np.float64)
        if self.spread == "std":
            # Exclude padding of the last bucket, which minus the mean would not be zero.
            inside = np.arange(rows.shape[1]) < lengths[:, None]
            mean = exact.sum(axis=1) / lengths
            exact = np.where(inside, exact - mean[:, None], 0)
        return np.asarray(np.sqrt(np.einsum("ij,ij->i", exact, exact) / lengths), np.float64)

    def _pack(self, trits: npt.NDArray[np.uint8]) -> npt.NDArray[np.uint8]:
        if self.packing == "trits":
            return codes.pack_trits(trits)
        return codes.pack_codes(trits, _BITS[self.packing])

    def _values(self, scales: Floats, trits: npt.NDArray[np.uint8]) -> Floats:
        scale_of = codes.bucket_spread(scales, trits.size, self.bucket)
        return scale_of * (trits.astype(np.float32) - 1)

    def _decode(self, payload: Payload) -> Floats:
        nb = codes.bucket_count(payload.n, self.bucket)
        scales = frame.read(payload.body, 0, nb, "<f4")
        if (scales < 0).any():
            raise PayloadError(f"scale {scales.min()} of a bucket is negative; expected 0 or more")
        data = payload.body[4 * nb : 4 * nb + self._code_bytes(payload.n)]
        if self.packing == "trits":
            trits = codes.unpack_trits(data, payload.n)
        else:
            # Two bits have a fourth code, eight many more; unpack_trits does its own check.
            read = codes.unpack_codes(data, payload.n, _BITS[self.packing])
            if (read > 2).any():
                raise PayloadError(f"code {read.max()}; TernGrad has 0, 1 and 2")
            trits = read.astype(np.uint8)
        # No encoder writes an infinite scale; NaN marks a bucket that was not finite.
        scales = np.where(np.isfinite(scales), scales, np.nan).astype(np.float32)
        return self._values(scales, trits)
