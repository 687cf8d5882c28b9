"""QSGD: rounds every element stochastically to one of a few levels, without bias.

Rounding to nearest would lose everything below half a step. Stochastic rounding preserves the
expectation and needs no error memory (Alistarh, Grubic, Li, Tomioka, Vojnovic, "QSGD", NeurIPS
2017, section 3). Published QSGD shortens the codes with Elias integers, whose length varies; ours
have a fixed width, as Horovod's collectives require.
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

_SETTINGS = struct.Struct("<HIH")
_PACKINGS = ("bits", "bytes")
_NORMS = ("l2", "max")


class QSGDCodec(frame.HostCodec):
    """Rounds to levels of a bucket's norm, stochastically and unbiased.

    Parameters
    ----------
    levels : int from 1 to 32767, steps from zero to the norm; codes take ceil(log2(2 levels + 1))
        bits
    bucket : number of elements that share a norm, or None for the whole vector
    norm : "l2", or "max" for the largest magnitude, which has finer steps
    packing : "bits", or "bytes" to round the width of a code up to 8 or 16 bits, as GRACE does
    seed : int from 0 to 2**64 - 1. Use a different one on each rank: errors then average out

    Notes
    -----
    The expectation of `decode(encode(x))` is x. The state is the step number, which together with
    the seed determines all random numbers; without a state every call is step 0. A bucket with NaN
    or Inf decodes to NaN, and zeros to zeros, even in a bucket of zeros.

    Examples
    --------
    >>> codec = QSGDCodec(levels=1, bucket=None, norm="max")
    >>> codec.decode(codec.encode(np.array([0, 2, -2], np.float32))).tolist()
    [0.0, 2.0, -2.0]
    """

    codec_id = 16
    remembers = False
    error_feedback = False

    def __init__(
        self,
        *,
        levels: int = 7,
        bucket: int | None = 512,
        norm: Literal["l2", "max"] = "l2",
        packing: Literal["bits", "bytes"] = "bits",
        seed: int = 0,
    ) -> None:
        frame.check_int(self, "levels", levels, 1, 32767, "1 to 32767")
        ok = bucket is None or frame.is_int(bucket, 1, 2**32 - 1)
        frame.check_setting(self, "bucket", bucket, ok, "1 to 2**32 - 1, or None")
        frame.check_setting(self, "norm", norm, norm in _NORMS, " or ".join(_NORMS))
        frame.check_setting(self, "packing", packing, packing in _PACKINGS, " or ".join(_PACKINGS))
        frame.check_int(self, "seed", seed, 0, 2**64 - 1, "0 to 2**64 - 1")
        self.levels, self.bucket, self.norm = levels, bucket, norm
        self.packing, self.seed = packing, seed
        tight = (2 * levels).bit_length()  # of the codes 0 to 2 levels
        self.bits = tight if packing == "bits" else -(-tight // 8) * 8
        self.settings = frame.settings(_SETTINGS.pack(levels, bucket or 0, self.bits))

    def __repr__(self) -> str:
        return frame.show(self, "levels", "bucket", "norm", "packing", "seed")

    def payload_bytes(self, n: int) -> int:
        body = 4 * codes.bucket_count(n, self.bucket) + codes.packed_bytes(n, self.bits)
        return frame.framed_bytes(body)

    def _encode(self, array: Floats, state: frame.State | None, decay: float) -> Payload:
        rows = codes.bucket_rows(array, self.bucket)
        norms = self._norms(rows)
        signed = self._round(rows, norms, frame.take_step(state)).reshape(-1)[: array.size]
        decoded = self._values(norms, signed)
        # Codes are not negative: level 0 is the code `levels`.
        packed = codes.pack_codes(signed + self.levels, self.bits)
        parts = [norms.astype("<f4"), packed]
        return frame.seal(self, array.size, parts, frame.losses(array, decoded))

    def _norms(self, rows: Floats) -> Floats:
        """Return [nb] float32, at least the largest magnitude of each row; NaN if not finite."""
        if not rows.size:
            return np.zeros(len(rows), np.float32)
        exact = rows.astype(np.float64)
        with np.errstate(all="ignore"):
            # Squares of float32 cannot overflow in float64.
            if self.norm == "max":
                norms = np.abs(exact).max(axis=1)
            else:
                norms = np.sqrt(np.einsum("ij,ij->i", exact, exact))
        # A norm beyond float32 is clipped to its largest number: no element is larger than that, so
        # no level exceeds `levels`. NaN marks a bucket whose elements are not all finite.
        top = float(np.finfo(np.float32).max)
        return np.where(np.isfinite(norms), np.minimum(norms, top), np.nan).astype(np.float32)

    def _round(self, rows: Floats, norms: Floats, step: int) -> npt.NDArray[np.int64]:
        # Buckets of zeros, or that are not finite, have level 0 everywhere.
        usable = (np.isfinite(norms) & (norms > 0))[:, None]
        divisor = np.where(usable, norms[:, None], 1).astype(np.float64)
        # levels * |x| is exact in float64, so the quotient is never above `levels`.
        exact = np.where(usable, np.abs(rows), 0).astype(np.float64) * self.levels / divisor
        below = np.floor(exact)
        level = below + codes.happens(exact - below, self.seed, step)
        return np.where(np.signbit(rows), -level, level).astype(np.int64)

    def _values(self, norms: Floats, signed: npt.NDArray[np.int64]) -> Floats:
        scale = codes.bucket_spread(norms, signed.size, self.bucket).astype(np.float64)
        with np.errstate(all="ignore"):
            return np.asarray(scale * signed / self.levels, np.float32)

    def _decode(self, payload: Payload) -> Floats:
        nb = codes.bucket_count(payload.n, self.bucket)
        norms = frame.read(payload.body, 0, nb, "<f4")
        if (norms < 0).any():
            raise PayloadError(f"norm {norms.min()} of a bucket is negative; expected 0 or more")
        size = codes.packed_bytes(payload.n, self.bits)
        signed = codes.unpack_codes(payload.body[4 * nb : 4 * nb + size], payload.n, self.bits)
        if (signed > 2 * self.levels).any():
            raise PayloadError(
                f"code {signed.max()}; {self.levels} levels end at {2 * self.levels}"
            )
        # No encoder writes an infinite norm; times level 0 it would be NaN, times others Inf.
        norms = np.where(np.isfinite(norms), norms, np.nan).astype(np.float32)
        return self._values(norms, signed.astype(np.int64) - self.levels)
