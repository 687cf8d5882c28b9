"""Deep Gradient Compression: top-k of the accumulated velocity, with the momentum corrected.

Error feedback alone delays an element's gradient and then applies momentum to it as if it were
fresh. DGC runs the momentum before the selection, on each rank,

    u = momentum * u + g        v = v + u        send the largest of v;  u = v = 0 where sent

so that what accumulates is what the optimizer would have done, and the momentum of sent places
is cleared lest it carry stale directions (Lin, Han, Mao, Wang, Dally, ICLR 2018). The optimizer
itself must then run without momentum.
"""

from __future__ import annotations

import math
import struct
from typing import Literal

import numpy as np
import numpy.typing as npt

from sn_compress.codecs import frame
from sn_compress.codecs.base import Floats, Payload
from sn_compress.codecs.topk import dropped_q32, kept
from sn_compress.errors import CompressError
from sn_compress.ops import indexed

_SETTINGS = struct.Struct("<IBBH")
_INDICES = {"int32": 32, "int64": 64}


def warmup_theta(step: int, *, theta: float, phase: int) -> float:
    """Fraction dropped at `step`: 0.75, 0.9375, 0.984 ... a phase each, up to `theta`.

    Every phase keeps a quarter of what the one before kept. `phase` is in steps (the paper's is
    an epoch); 0 is no warm-up.
    """
    if phase == 0:
        return theta
    return min(theta, 1 - 0.25 ** (step // phase + 1))


class DGCCodec(frame.HostCodec):
    """The largest of the accumulated velocity, as float32 values with indices.

    Parameters
    ----------
    theta : float in [0, 1), fraction dropped once warm; k = max(1, floor((1 - theta) n))
    momentum : float in [0, 1), the optimizer's; with 0 this is top-k with error feedback
    clip : float > 0 or None, largest norm of a rank's gradient; the paper sets the threshold
        meant for the average of r ranks divided by sqrt(r)
    warmup : int, steps a phase of the warm-up lasts; `at(step)` gives the codec for a step
    indices : "int32" or "int64"

    Notes
    -----
    Selection is exact over the vector; DGC's estimate from a sample would make sizes vary. The
    state holds u and v and does not depend on theta, so it passes from one phase to the next.
    Without a state, v is the gradient. `encode(decay=...)` scales v before u is added.

    Examples
    --------
    >>> codec = DGCCodec(theta=0.999, warmup=100)
    >>> [codec.at(step).theta for step in (0, 100, 400)]
    [0.75, 0.9375, 0.999]
    """

    codec_id = 19
    error_feedback = True

    def __init__(
        self,
        *,
        theta: float = 0.999,
        momentum: float = 0.9,
        clip: float | None = None,
        warmup: int = 0,
        indices: Literal["int32", "int64"] = "int32",
    ) -> None:
        ok = frame.fraction(theta, 0, 1) and theta < 1
        frame.check_setting(self, "theta", theta, ok, "a fraction from 0 (keep all) to below 1")
        ok = frame.fraction(momentum, 0, 1) and momentum < 1
        frame.check_setting(self, "momentum", momentum, ok, "from 0 to below 1")
        ok = clip is None or (frame.fraction(clip, 0, 1e30) and clip > 0)
        frame.check_setting(self, "clip", clip, ok, "a positive norm, or None")
        frame.check_int(self, "warmup", warmup, 0, 2**62, "0 or more")
        frame.check_setting(self, "indices", indices, indices in _INDICES, " or ".join(_INDICES))
        self.theta, self.momentum, self.clip = theta, momentum, clip
        self.warmup, self.indices = warmup, indices
        self._dropped_q32 = dropped_q32(theta)
        self._index_bits = _INDICES[indices]
        self.settings = frame.settings(_SETTINGS.pack(self._dropped_q32, self._index_bits, 0, 0))

    def __repr__(self) -> str:
        return frame.show(self, "theta", "momentum", "clip", "warmup", "indices")

    def at(self, step: int) -> DGCCodec:
        """The codec for a step of the warm-up: payloads change size between phases, never within.

        It takes the same state. All ranks must ask for the same step.
        """
        return DGCCodec(
            theta=warmup_theta(step, theta=self.theta, phase=self.warmup),
            momentum=self.momentum,
            clip=self.clip,
            indices=self.indices,
        )

    def runs(self, n: int) -> list[indexed.Run]:
        """The whole vector as one chunk."""
        if self.indices == "int32" and n > 2**31:
            raise CompressError(
                f'DGCCodec: {n} elements are beyond indices="int32"; use indices="int64"'
            )
        return indexed.runs(n, None, lambda length: kept(length, self._dropped_q32))

    def payload_bytes(self, n: int) -> int:
        cut = self.runs(n)
        return frame.framed_bytes(
            4 * indexed.total(cut) + indexed.index_bytes(cut, self._index_bits)
        )

    def new_state(self, n: int) -> frame.State:
        """Momentum u and velocity v, [n] float32 each, zeros at first."""
        return [np.zeros(n, np.float32), np.zeros(n, np.float32)]

    def state_to_values(self, state: frame.State, n: int) -> Floats:
        """The velocity not yet sent, [n] float32."""
        return state[1].copy()

    def values_to_state(self, values: npt.ArrayLike) -> frame.State:
        """A state with this velocity and no momentum."""
        velocity = frame.as_floats(values).copy()
        return [np.zeros_like(velocity), velocity]

    def _encode(self, array: Floats, state: frame.State | None, decay: float) -> Payload:
        """Encode [n] float32, float16 or bfloat16; see Codec.encode.

        A vector with NaN or Inf decodes to NaN everywhere and leaves u and v as they were.
        """
        array = self._clipped(array)
        n = array.size
        with np.errstate(all="ignore"):
            u = array if state is None else state[0] * np.float32(self.momentum) + array
            v = u if state is None else state[1] * np.float32(decay) + u
        inside, positions = indexed.select(v, self.runs(n))
        finite = bool(np.isfinite(u).all() and np.isfinite(v).all())
        sent = v[positions] if finite else np.full(positions.size, np.nan, np.float32)
        decoded = np.full(n, 0 if finite else np.nan, np.float32)
        if finite:
            decoded[positions] = sent
            if state is not None:
                state[0][:], state[1][:] = u, v
                state[0][positions] = 0
                state[1][positions] = 0
        parts = [sent.astype("<f4"), indexed.write_indices(inside, self._index_bits)]
        return frame.seal(self, n, parts, frame.losses(v, decoded))

    def _clipped(self, array: Floats) -> Floats:
        if self.clip is None:
            return array
        with np.errstate(all="ignore"):
            exact = array.astype(np.float64)
            norm = math.sqrt(float(np.sum(exact * exact)))
            if norm > self.clip:
                return np.asarray(exact * (self.clip / norm), np.float32)
        return array

    def _decode(self, payload: Payload) -> Floats:
        cut = self.runs(payload.n)
        k = indexed.total(cut)
        values = frame.read(payload.body, 0, k, "<f4")
        data = payload.body[4 * k : 4 * k + indexed.index_bytes(cut, self._index_bits)]
        positions = indexed.locate(indexed.read_indices(data, k, self._index_bits), cut)
        if not np.isfinite(values).all():
            return np.full(payload.n, np.nan, np.float32)
        out = np.zeros(payload.n, np.float32)
        out[positions] = values
        return out
