"""Auto: the method that captures most of this tensor's energy in a given number of bytes.

No one transform is right for all tensors: a fixed long FFT loses two- to fivefold on heavy-tailed
gradients, plain top-k loses as much on smooth ones, and both lose to low rank where the gradient
is nearly one (`docs/methods.md` has the measurements). So a few candidates, each set so that its
payload fills the same bytes, are tried on the tensor itself, and the best one is used until the
next trial. Ranks may choose differently and still be averaged; `scores` and `choose` are there
for those that decide together.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import numpy.typing as npt

from sn_compress.codecs import frame, registry
from sn_compress.codecs.base import HEADER_BYTES, Codec, Floats, Payload, as_vector, saved_item
from sn_compress.codecs.fft import MOST_BINS, FFTCodec
from sn_compress.errors import CompressError, PayloadError
from sn_compress.ops.products import cut
from sn_compress.ops.spectrum import fast_length

from .lowrank import LowRankCodec

_SETTINGS = struct.Struct("<BIBHI")
_LARGEST = float(np.finfo(np.float32).max)
_FORMATS: list[dict[str, Any]] = [
    {"bits": 4, "mantissa": 1},
    {"bits": 6, "mantissa": 2},
    {"values": "2bit"},
    {"values": "sign"},
]
# Worth their bits only where nearly everything is kept.
_FINE_FORMATS: list[dict[str, Any]] = [
    {"bits": bits, "mantissa": mantissa} for bits, mantissa in ((8, 3), (10, 5), (12, 7), (15, 10))
]
_FINE_BELOW = 8.0  # ratio


@dataclass
class AutoState:
    """The candidate in use, its memory, and how many encodings it has been in use for."""

    choice: int | None
    inner: Any
    age: int


class AutoCodec(frame.HostCodec):
    """Whatever fits `ratio` and loses least on this tensor.

    Parameters
    ----------
    ratio : bytes of the float32 tensor over bytes of the payload, above 1; the payload has
        exactly the size that follows, header included, for tensors large enough to hold it
    shape : the tensor's shape; without it low rank and transforms along axes are left out
    every : encodings with one state after which the choice is made anew

    Examples
    --------
    >>> codec = AutoCodec(ratio=100, shape=(256, 576))
    >>> payload = codec.encode(np.ones(256 * 576, np.float32))
    >>> round(4 * 256 * 576 / payload.nbytes)
    100
    """

    codec_id = 3

    def __init__(
        self, *, ratio: float = 100.0, shape: Sequence[int] | None = None, every: int = 500
    ) -> None:
        if not ratio > 1 or every < 1:
            raise CompressError(
                f"AutoCodec: ratio={ratio!r}, every={every!r}; expected a ratio above 1 and at "
                "least one encoding per choice"
            )
        self.ratio, self.every = float(ratio), every
        self.shape = None if shape is None else tuple(int(size) for size in shape)
        self._settings_head = round(ratio * 1000) % 2**32
        self.settings = self._settings(0)
        self._candidates_of: dict[int, list[Codec]] = {}

    @classmethod
    def like(cls, *, shape: Sequence[int] | None = None, **settings: Any) -> AutoCodec:
        """The AutoCodec whose payloads are as large as those of FFTCodec(**settings)."""
        fixed = FFTCodec(**settings)
        return cls(ratio=4 * 2**20 / (fixed.payload_bytes(2**20) - HEADER_BYTES), shape=shape)

    def __repr__(self) -> str:
        return f"AutoCodec(ratio={self.ratio!r}, shape={self.shape!r}, every={self.every!r})"

    @property
    def basis(self) -> dict[str, Any]:
        """The settings that the candidates follow from."""
        return {"ratio": self.ratio, "shape": self.shape}

    def payload_bytes(self, n: int) -> int:
        budget = int(4 * n / self.ratio) // 16 * 16
        return max(budget, HEADER_BYTES + smallest(n)) if n else HEADER_BYTES

    def candidates(self, n: int) -> list[Codec]:
        """The codecs tried on n elements, every one as large as the budget allows."""
        if n not in self._candidates_of:
            if self.shape is not None and math.prod(self.shape) != n:
                raise CompressError(f"{n} elements do not fill shape {self.shape}")
            self._candidates_of[n] = proposals(n, self.payload_bytes(n), self.ratio, self.shape)
        return self._candidates_of[n]

    def scores(self, values: npt.ArrayLike) -> npt.NDArray[np.float64]:
        """What each candidate would lose of these values, in squared norm; [candidates].

        Infinite where not all of them would come back finite.
        """
        array = as_vector(values)
        # A sum of so many values may overflow on the way, and what decodes to NaN counts as no
        # error. (Written so that a NaN is a risk, too.)
        peak = float(np.abs(array.astype(np.float32)).max(initial=0))
        safe = peak * 4 * array.size <= _LARGEST
        lost = []
        for codec in self.candidates(array.size):
            payload = codec.encode(array)
            sound = safe or bool(np.isfinite(codec.decode(payload)).all())
            lost.append(payload.error if sound and payload.error is not None else math.inf)
        return np.array(lost)

    def choose(self, state: AutoState, scores: npt.NDArray[np.float64], n: int) -> None:
        """Use the candidate of the lowest score from now on; the memory is carried over.

        Without a finite score all stays as it is.
        """
        if np.isfinite(scores).any():
            self._switch(state, int(np.argmin(scores)), n)

    def _switch(self, state: AutoState, choice: int, n: int) -> None:
        codecs = self.candidates(n)
        state.age = 0
        if choice == state.choice:
            return
        inner: Any = codecs[choice].new_state(n)
        if state.choice is not None:
            inner = codecs[choice].values_to_state(
                codecs[state.choice].state_to_values(state.inner, n)
            )
        state.choice, state.inner = choice, inner

    def new_state(self, n: int) -> AutoState:
        return AutoState(None, None, 0)

    def state_to_values(self, state: AutoState, n: int) -> Floats:
        """The memory as the vector it stands for, [n] float32."""
        if state.choice is None:
            return np.zeros(n, np.float32)
        return self.candidates(n)[state.choice].state_to_values(state.inner, n)

    def values_to_state(self, values: npt.ArrayLike) -> AutoState:
        """A state with this memory and the choice still open."""
        array = np.asarray(as_vector(values), np.float32)
        codec = self.candidates(array.size)[0]
        return AutoState(0, codec.values_to_state(array), self.every)

    def dump_state(self, state: AutoState, n: int) -> dict[str, Any]:
        """Age, and what saving.save makes of the candidate's state."""
        if state.choice is None:
            return {"age": state.age}
        codec = self.candidates(n)[state.choice]
        return {
            "age": state.age,
            "choice": state.choice,
            "settings": codec.settings.hex(),
            "inner": registry.save(codec, state.inner, n),
        }

    def load_state(self, saved: dict[str, Any], n: int) -> AutoState:
        """See Codec.load_state."""
        age = saved_item(saved, "age")
        if not isinstance(age, int) or isinstance(age, bool) or age < 0:
            raise CompressError(f"it is {age!r} encodings old; expected a number, 0 or more")
        if "choice" not in saved:
            return AutoState(None, None, age)
        choice, inner = saved["choice"], saved_item(saved, "inner")
        if registry.elements(inner) != n:
            raise CompressError(
                f"it has a memory of {registry.elements(inner)} elements; expected {n}"
            )
        codecs = self.candidates(n)
        known = isinstance(choice, int) and 0 <= choice < len(codecs)
        if not known or codecs[choice].settings.hex() != saved_item(saved, "settings"):
            raise CompressError(f"candidate {choice!r} is none of the {len(codecs)} of {self!r}")
        state = registry.load(codecs[choice], inner)
        return self.new_state(n) if state is None else AutoState(choice, state, age)

    def _encode(self, array: Floats, state: AutoState | None, decay: float) -> Payload:
        """Encode [n] float32, float16 or bfloat16; see Codec.encode.

        Chooses when the state is new or `every` encodings old; without a state, each time.
        """
        n = array.size
        buffer = np.zeros(self.payload_bytes(n), np.uint8)
        known = state if state is not None else self.new_state(n)
        if n == 0:
            return self._seal(buffer, 0, 0, None)
        if known.choice is None or known.age >= self.every:
            with np.errstate(all="ignore"):
                memory = self.state_to_values(known, n)
                target = array.astype(np.float32) + np.float32(decay) * memory
            if np.isfinite(target).all():
                self.choose(known, self.scores(target), n)
        # As long as there was nothing finite to judge by: the first, which remembers nothing.
        choice = known.choice or 0
        inner = self.candidates(n)[choice].encode(
            array, state=known.inner if state is not None else None, decay=decay
        )
        known.age += 1
        buffer[HEADER_BYTES : inner.nbytes] = inner.body
        return self._seal(buffer, n, choice, inner)

    def _settings(self, choice: int) -> bytes:
        return _SETTINGS.pack(choice, self._settings_head, 0, 0, 0)

    def _seal(
        self, buffer: npt.NDArray[np.uint8], n: int, choice: int, inner: Payload | None
    ) -> Payload:
        return Payload.seal(
            buffer,
            codec_id=self.codec_id,
            n=n,
            settings=self._settings(choice),
            saturated=inner.saturated if inner else 0,
            energy=inner.energy if inner else 0.0,
            error=inner.error if inner else 0.0,
        )

    def _decode_mean(self, payloads: Sequence[Payload]) -> Floats:
        """The mean of the vectors, [n] float32, also where ranks chose differently."""
        if not payloads:
            raise CompressError("decode_mean needs at least one payload; got none")
        n = payloads[0].n
        by_choice: dict[int, list[Payload]] = {}
        for payload in payloads:
            choice = self._check(payload, n)
            by_choice.setdefault(choice, []).append(payload)
        if n == 0:
            return np.zeros(0, np.float32)
        mean = np.zeros(n, np.float32)
        for choice in sorted(by_choice):
            codec = self.candidates(n)[choice]
            inner = [_unwrap(codec, payload) for payload in by_choice[choice]]
            with np.errstate(all="ignore"):
                mean += codec.decode_mean(inner) * np.float32(len(inner) / len(payloads))
        return mean

    def _check(self, payload: Payload, n: int) -> int:
        choice, head, *_ = _SETTINGS.unpack(payload.settings)
        # n is bounded by the bytes at hand before anything of that size is made.
        fits = (
            payload.codec_id == self.codec_id
            and head == self._settings_head
            and payload.n == n
            and n <= payload.nbytes * (self.ratio + 4) * 2
            and (self.shape is None or n == math.prod(self.shape))
            and payload.nbytes == self.payload_bytes(n)
            and (n == 0 or choice < len(self.candidates(n)))
        )
        if not fits:
            raise PayloadError(
                f"payload of codec {payload.codec_id}, candidate {choice}, {payload.n} elements, "
                f"{payload.nbytes} bytes; expected {n} elements of {self!r} on every rank"
            )
        return int(choice)


def proposals(n: int, budget: int, ratio: float, shape: tuple[int, ...] | None) -> list[Codec]:
    """The codecs to try on n elements, each filling `budget` bytes of payload as well as it can.

    Their order is that of the numbers in payloads, so ranks must run one version.
    """
    bases: list[dict[str, Any]] = [{"transform": t} for t in ("identity", "dct", "hadamard", "fft")]
    along: list[dict[str, Any]] = [
        {"transform": "axes", "axes": axes, "shape": shape} for axes in _axes(shape or ())
    ]
    if fast_length(n) <= MOST_BINS:
        bases += [{"transform": "identity", "block": None}, *along]
        bases += [{**basis, "block": None} for basis in along]
    else:
        bases += along
    candidates: list[Codec | None] = [
        _sparse(n, budget, {**basis, **fmt}) for basis in bases for fmt in _FORMATS
    ]
    if ratio < _FINE_BELOW:
        candidates += [
            _sparse(n, budget, {**basis, **fmt}) for basis in bases for fmt in _FINE_FORMATS
        ]
    if shape is not None and min(cut(shape)) > 1:
        candidates += [_low_rank(shape, budget, bits, m) for bits, m in ((4, 1), (6, 2), (8, 3))]
        candidates += [_two_stage(shape, budget, share) for share in (0.25, 0.5, 0.75)]
    return [codec for codec in candidates if codec is not None]


def _axes(shape: tuple[int, ...]) -> list[tuple[int, ...]]:
    """Axes worth a DCT: a kernel's height and width, and each side of a matrix."""
    if len(shape) == 4:
        return [(2, 3)] if shape[2] * shape[3] > 1 else []
    if len(shape) == 3:
        return [(2,)] if shape[2] > 1 else []
    if len(shape) == 2:
        return [(axis,) for axis in (1, 0) if shape[axis] > 1]
    return []


def smallest(n: int) -> int:
    """Bytes of the smallest record there is, for tensors too small for the ratio."""
    return (
        FFTCodec(theta=1 - 2**-32, transform="identity", values="sign").payload_bytes(n)
        - HEADER_BYTES
    )


def _sparse(n: int, budget: int, settings: dict[str, Any]) -> FFTCodec | None:
    """The FFTCodec with these settings and the smallest theta that fits the budget."""

    def codec(kept: int) -> FFTCodec:
        # Between two counts: theta falls on no edge, so that rounding cannot matter.
        return FFTCodec(**settings, theta=1 - kept / 2**20)

    def fits(kept: int) -> bool:
        return codec(kept).payload_bytes(n) <= budget

    dense = FFTCodec(**settings, theta=0.0)
    if dense.payload_bytes(n) <= budget:
        return dense
    low, high = 1, 2**20
    if not fits(low):
        return None
    while high - low > 1:
        middle = (low + high) // 2
        low, high = (middle, high) if fits(middle) else (low, middle)
    return codec(low)


def _low_rank(shape: tuple[int, ...], budget: int, bits: int, mantissa: int) -> LowRankCodec | None:
    n = math.prod(shape)

    def codec(rank: int) -> LowRankCodec:
        return LowRankCodec(shape=shape, rank=rank, bits=bits, mantissa=mantissa)

    best = None
    for rank in range(1, min(cut(shape)) + 1):
        if codec(rank).payload_bytes(n) > budget:
            break
        best = codec(rank)
    return best


def _two_stage(shape: tuple[int, ...], budget: int, share: float) -> LowRankCodec | None:
    """Low rank in `share` of the bytes, top-k of what it leaves over in the others."""
    n = math.prod(shape)
    first = _low_rank(shape, HEADER_BYTES + int((budget - HEADER_BYTES) * share), 4, 1)
    if first is None:
        return None
    left = budget - first.payload_bytes(n) + HEADER_BYTES
    rest = _sparse(n, left, {"transform": "identity", "bits": 4, "mantissa": 1})
    if rest is None:
        return None
    return LowRankCodec(shape=shape, rank=first.rank, bits=4, mantissa=1, rest=rest)


def _unwrap(codec: Codec, payload: Payload) -> Payload:
    size = codec.payload_bytes(payload.n)
    return Payload(payload.buffer[:size], codec.codec_id, payload.n, codec.settings)
