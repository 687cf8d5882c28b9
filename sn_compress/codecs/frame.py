"""Shared parts of codecs for NumPy arrays: settings, payloads, memories, copies from a GPU.

FFTCodec has array code and CUDA kernels; all other codecs are a HostCodec. The payload of a tensor
on a GPU is a CuPy array there, as for FFTCodec. This tells decoding where the result belongs, and
`Payload.framework` whether it is a torch tensor or a CuPy array. Memories stay on the host.
"""

from __future__ import annotations

import logging
from abc import abstractmethod
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _cuda
from ..arrays import on_cuda, to_host
from ..errors import CompressError, PayloadError
from .base import ALIGN, HEADER_BYTES, SETTINGS_BYTES, Bytes, Codec, Floats, Payload, as_vector
from .registry import CODECS

# Elements whose norms are summed at a time: few enough that a BLAS dot product starts no threads.
_PIECE = 1 << 13

State = list[npt.NDArray[Any]]
"""The memory of a codec: arrays, updated in place, which can be copied and saved directly."""


def check_setting(owner: object, name: str, got: object, ok: bool, expected: str) -> None:
    """Raise CompressError naming the codec, the setting, its value and what is legal."""
    if not ok:
        raise CompressError(f"{type(owner).__name__}: {name}={got!r}; expected {expected}")


def check_int(owner: object, name: str, got: object, low: int, high: int, expected: str) -> None:
    """Raise CompressError unless a setting is an integer from low to high; see check_setting."""
    check_setting(owner, name, got, is_int(got, low, high), expected)


def is_int(value: object, low: int, high: int) -> bool:
    """Whether `value` is an integer from low to high, not a bool."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def fraction(value: object, low: float, high: float) -> bool:
    """Whether `value` is a number in [low, high]."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def show(codec: object, *names: str) -> str:
    """Return the call that creates this codec."""
    values = ", ".join(f"{name}={getattr(codec, name)!r}" for name in names)
    return f"{type(codec).__name__}({values})"


def framed_bytes(body: int) -> int:
    """Return the size of a payload with `body` bytes after its header."""
    return HEADER_BYTES + -(-body // ALIGN) * ALIGN


def as_floats(values: npt.ArrayLike) -> Floats:
    """Return a vector of a legal type as float32, without a copy if it already is."""
    return as_vector(values).astype(np.float32, copy=False)


def seal(
    codec: Codec,
    n: int,
    parts: Sequence[npt.NDArray[Any]],
    losses: tuple[float, float],
    saturated: int = 0,
) -> Payload:
    """Concatenate the parts of a body, little-endian arrays, after a header."""
    # Zeros: padding up to a multiple of 16 bytes is sent and enters the checksum.
    buffer = np.zeros(codec.payload_bytes(n), np.uint8)
    at = HEADER_BYTES
    for part in parts:
        data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        buffer[at : at + data.size] = data
        at += data.size
    energy, error = losses
    return Payload.seal(
        buffer, codec_id=codec.codec_id, n=n, settings=codec.settings, saturated=saturated,
        energy=energy, error=error,
    )  # fmt: skip


def read(body: Bytes, at: int, count: int, dtype: str) -> npt.NDArray[Any]:
    """Copy `count` numbers from byte `at` of a body (bytes need not be aligned)."""
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer(body[at : at + size].tobytes(), dtype)


def settings(data: bytes) -> bytes:
    """Pad a codec's settings to their length in the header."""
    return data.ljust(SETTINGS_BYTES, b"\0")


def check_payloads(codec: Codec, payloads: Sequence[Payload], *, fixed_size: bool = True) -> int:
    """Check that payloads are of this codec and equal size; return their number of elements.

    fixed_size : whether the size follows from settings and n; else the codec checks it itself
    """
    if not payloads:
        raise CompressError("decode_mean needs at least one payload; got none")
    n = payloads[0].n
    for payload in payloads:
        if payload.codec_id != codec.codec_id or payload.settings != codec.settings:
            raise PayloadError(
                f"payload of codec {payload.codec_id} with settings {payload.settings.hex()}; "
                f"expected codec {codec.codec_id} with {codec.settings.hex()}. Decode with the "
                "settings it was encoded with, on every rank."
            )
        # Compare the size that follows from the header's n with the actual bytes before allocating
        # anything of that size: n comes from a peer, and a CRC does not stop a forger.
        try:
            size = codec.payload_bytes(payload.n) if fixed_size else payload.nbytes
        except CompressError as reason:
            raise PayloadError(f"header claims {payload.n} elements: {reason}") from reason
        if payload.n != n or payload.nbytes != size:
            raise PayloadError(
                f"payload of {payload.nbytes} bytes for {payload.n} elements; expected {n} "
                "elements in the fixed size of these settings. Was it cut or joined?"
            )
    return n


def mean(parts: Iterable[Floats], n: int, count: int) -> Floats:
    """Return the mean of `count` vectors, summed in the order of `parts`, [n] float32."""
    out = np.zeros(n, np.float32)
    # Weighted before they are added, so that numbers near float32's limit do not overflow.
    weight = np.float32(1 / count)
    with np.errstate(all="ignore"):
        for part in parts:
            out += part * weight
    return out


def losses(values: Floats, decoded: Floats) -> tuple[float, float]:
    """Return the squared norms of input and error, over what decodes to finite numbers."""
    energy = error = 0.0
    # In pieces that fit the cache: whole float64 copies take longer than many codecs. In float64,
    # as squares of gradients below 1e-23 are zero in float32.
    for start in range(0, values.size, _PIECE):
        got = decoded[start : start + _PIECE].astype(np.float64)
        finite = np.isfinite(got)
        encoded = np.where(finite, values[start : start + _PIECE], 0).astype(np.float64)
        lost = encoded - np.where(finite, got, 0)
        energy += float(np.dot(encoded, encoded))
        error += float(np.dot(lost, lost))
    return energy, error


def add_memory(values: Floats, state: State | None, decay: float) -> Floats:
    """Return values plus decay * memory, as a new array; overflow gives Inf, never remembered."""
    if state is None:
        return values.copy()
    with np.errstate(all="ignore"):
        return np.asarray(values + state[0] * np.float32(decay), np.float32)


def remember(state: State | None, accumulated: Floats, decoded: Floats) -> None:
    """Store what was lost in the memory, but keep the old memory where NaN was sent."""
    if state is None:
        return
    with np.errstate(all="ignore"):
        lost = accumulated - decoded
    # NaN in a memory would be in every later step; a step skipped by a loss scaler leaves no trace.
    np.copyto(state[0], lost, where=np.isfinite(lost))


def take_step(state: State | None) -> int:
    """Return the step number, which seeds the random numbers, and increment it in the state."""
    if state is None:
        return 0
    state[0] += 1
    return int(state[0][0]) - 1


_log = logging.getLogger(__name__)


class HostCodec(Codec):
    """A codec for NumPy arrays; GPU tensors are copied to the host and back.

    Its state is the error memory; a codec without one rounds stochastically, and its state is the
    step count instead.
    """

    @abstractmethod
    def _encode(self, array: Floats, state: Any, decay: float) -> Payload: ...

    def _decode(self, payload: Payload) -> Floats:
        """Decode a payload that `check_payloads` has passed; for `_decode_mean`."""
        raise NotImplementedError

    def new_state(self, n: int) -> Any:
        """Return the memory, [n] float32 zeros; or the number of the next step, [1] int64."""
        return [np.zeros(n, np.float32) if self.remembers else np.zeros(1, np.int64)]

    def state_to_values(self, state: Any, n: int) -> Floats:
        return np.array(to_host(state[0])) if self.remembers else super().state_to_values(state, n)

    def values_to_state(self, values: npt.ArrayLike) -> Any:
        if not self.remembers:
            return super().values_to_state(values)
        return [as_floats(values).copy()]

    def encode(self, values: Any, *, state: Any = None, decay: float = 1.0) -> Payload:
        """See Codec.encode; a codec without an error memory ignores `decay`."""
        if not on_cuda(values):
            return self._encode(as_floats(values), state, decay)
        _warn_once(type(self).__name__)
        view = _cuda.view(values)
        payload = self._encode(as_floats(view.to_host()), state, decay)
        # On the current stream of the tensor's framework, where its collective comes next.
        with view.run().context() as xp:
            buffer = xp.asarray(payload.buffer)
        return replace(payload, buffer=buffer, framework=view.framework)

    def decode_mean(self, payloads: Sequence[Payload]) -> Any:
        if not payloads or not on_cuda(payloads[0].buffer):
            return self._decode_mean(payloads)
        _warn_once(type(self).__name__)
        first: Any = payloads[0]
        device = int(first.buffer.device.id)
        with _cuda.current(device, first.framework).context():
            # Parse again, which checks the bytes: they may come directly from a peer.
            copies = [Payload.from_bytes(_cuda.to_host(payload.buffer)) for payload in payloads]
        return _cuda.from_host(self._decode_mean(copies), device, first.framework)

    def _decode_mean(self, payloads: Sequence[Payload]) -> Floats:
        n = check_payloads(self, payloads)
        return mean((self._decode(payload) for payload in payloads), n, len(payloads))


@cache
def _warn_once(cls: str) -> None:
    names = [name for name, entry in CODECS.items() if entry.cls == cls]
    _log.warning("%s has no CUDA kernels: values are copied to the host", " or ".join(names) or cls)
