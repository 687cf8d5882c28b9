"""What every codec does around its own bytes: check settings and payloads, seal, average.

Functions, not a base class: a codec reads from top to bottom in its own file.

Codecs without CUDA kernels, for tensors on a GPU: copied to the host, encoded there, said once.

As with FFTCodec, the payload of a tensor on a GPU is a CuPy array there. Decoding knows by that
where its result belongs, and by `Payload.framework` whether as a torch tensor or a CuPy array.
What the codec remembers stays on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import cache, wraps
from typing import Any, TypeVar

import numpy as np
import numpy.typing as npt

from .. import _cuda
from ..arrays import on_cuda
from ..errors import CompressError, PayloadError
from .base import ALIGN, HEADER_BYTES, SETTINGS_BYTES, Bytes, Codec, Floats, Payload, as_vector
from .registry import CODECS

# Short of the length from which a BLAS starts threads for a dot product.
_PIECE = 1 << 13

State = list[npt.NDArray[Any]]
"""The memory of a codec: arrays, changed in place, so that they copy and save as they are."""


def check_setting(owner: object, name: str, got: object, ok: bool, expected: str) -> None:
    """Raise CompressError naming the codec, the setting, its value and what is legal."""
    if not ok:
        raise CompressError(f"{type(owner).__name__}: {name}={got!r}; expected {expected}")


def check_int(owner: object, name: str, got: object, low: int, high: int, expected: str) -> None:
    """Raise CompressError unless a setting is an integer from low to high; see check_setting."""
    check_setting(owner, name, got, is_int(got, low, high), expected)


def is_int(value: object, low: int, high: int) -> bool:
    """Whether `value` is an integer from low to high; True and False are not integers here."""
    return isinstance(value, int) and not isinstance(value, bool) and low <= value <= high


def fraction(value: object, low: float, high: float) -> bool:
    """Whether `value` is a number in [low, high]."""
    return isinstance(value, (int, float)) and not isinstance(value, bool) and low <= value <= high


def show(codec: object, *names: str) -> str:
    """The call that makes this codec."""
    values = ", ".join(f"{name}={getattr(codec, name)!r}" for name in names)
    return f"{type(codec).__name__}({values})"


def framed_bytes(body: int) -> int:
    """Size of a payload with `body` bytes behind its header."""
    return HEADER_BYTES + -(-body // ALIGN) * ALIGN


def as_floats(values: npt.ArrayLike) -> Floats:
    """A vector of a legal type as float32; not a copy if it is float32 already."""
    return as_vector(values).astype(np.float32, copy=False)


def seal(
    codec: Codec,
    n: int,
    settings: bytes,
    parts: Sequence[npt.NDArray[Any]],
    losses: tuple[float, float],
    saturated: int = 0,
) -> Payload:
    """Put the parts of a body, little-endian arrays, side by side behind a header."""
    buffer = np.zeros(codec.payload_bytes(n), np.uint8)
    at = HEADER_BYTES
    for part in parts:
        data = np.ascontiguousarray(part).reshape(-1).view(np.uint8)
        buffer[at : at + data.size] = data
        at += data.size
    return Payload.seal(
        buffer,
        codec_id=codec.codec_id,
        n=n,
        settings=settings,
        saturated=saturated,
        energy=losses[0],
        error=losses[1],
    )


def read(body: Bytes, at: int, count: int, dtype: str) -> npt.NDArray[Any]:
    """`count` numbers of a body from byte `at`, as a copy (bytes need not be aligned)."""
    size = count * np.dtype(dtype).itemsize
    return np.frombuffer(body[at : at + size].tobytes(), dtype)


def settings(data: bytes) -> bytes:
    """A codec's settings filled up to the length the header has for them."""
    return data.ljust(SETTINGS_BYTES, b"\0")


def check_payloads(codec: Codec, settings: bytes, payloads: Sequence[Payload]) -> int:
    """The number of elements that all payloads share, if they are of this codec and size.

    The size is compared with what the settings give for the header's n, so a forged n cannot
    make a decoder read or allocate more than the bytes at hand account for.
    """
    if not payloads:
        raise CompressError("decode_mean needs at least one payload; got none")
    n = payloads[0].n
    for payload in payloads:
        if payload.codec_id != codec.codec_id or payload.settings != settings:
            raise PayloadError(
                f"payload of codec {payload.codec_id} with settings {payload.settings.hex()}; "
                f"expected codec {codec.codec_id} with {settings.hex()}. Decode with the "
                "settings it was encoded with, on every rank."
            )
        try:
            size = codec.payload_bytes(payload.n)
        except CompressError as reason:
            raise PayloadError(f"header claims {payload.n} elements: {reason}") from reason
        if payload.n != n or payload.nbytes != size:
            raise PayloadError(
                f"payload of {payload.nbytes} bytes for {payload.n} elements; expected {n} "
                "elements in the fixed size of these settings. Was it cut or joined?"
            )
    return n


def mean(parts: Iterable[Floats], n: int, count: int) -> Floats:
    """Mean of `count` vectors, added in the order given, [n] float32.

    Each is weighted before it is added, so that large values do not overflow on the way.
    """
    out = np.zeros(n, np.float32)
    weight = np.float32(1 / count)
    with np.errstate(all="ignore"):
        for part in parts:
            out += part * weight
    return out


def losses(values: Floats, decoded: Floats) -> tuple[float, float]:
    """Return the squared norms of input and error, over what decodes to finite numbers."""
    energy = error = 0.0
    # In pieces that stay in the cache: whole float64 copies take longer than many a codec.
    for start in range(0, values.size, _PIECE):
        got = decoded[start : start + _PIECE].astype(np.float64)
        finite = np.isfinite(got)
        encoded = np.where(finite, values[start : start + _PIECE], 0).astype(np.float64)
        lost = encoded - np.where(finite, got, 0)
        energy += float(np.dot(encoded, encoded))
        error += float(np.dot(lost, lost))
    return energy, error


def add_memory(values: Floats, state: State | None, decay: float) -> Floats:
    """Values plus decay * memory, as a new array; overflow gives Inf, which is never kept."""
    if state is None:
        return values.copy()
    with np.errstate(all="ignore"):
        return np.asarray(values + state[0] * np.float32(decay), np.float32)


def remember(state: State | None, accumulated: Floats, decoded: Floats) -> None:
    """Keep in memory what was lost, but the old memory where NaN was sent."""
    if state is None:
        return
    with np.errstate(all="ignore"):
        lost = accumulated - decoded
    np.copyto(state[0], lost, where=np.isfinite(lost))


C = TypeVar("C", bound=Codec)
_log = logging.getLogger(__name__)


def through_host(cls: type[C]) -> type[C]:
    """Give a codec of NumPy arrays the way through the host; a class decorator."""
    encode, decode_mean = cls.encode, cls.decode_mean

    @wraps(encode)
    def encode_anywhere(self: C, values: Any, *, state: Any = None, decay: float = 1.0) -> Payload:
        if not on_cuda(values):
            return encode(self, values, state=state, decay=decay)
        _say_once(cls.__name__)
        view = _cuda.view(values)
        payload = encode(self, view.to_host(), state=state, decay=decay)
        with view.run().context() as xp:
            buffer = xp.asarray(payload.buffer)
        return replace(payload, buffer=buffer, framework=view.framework)

    @wraps(decode_mean)
    def decode_mean_anywhere(self: C, payloads: Sequence[Payload]) -> Any:
        if not payloads or not on_cuda(payloads[0].buffer):
            return decode_mean(self, payloads)
        _say_once(cls.__name__)
        first: Any = payloads[0]
        device = int(first.buffer.device.id)
        with _cuda.current(device, first.framework).context():
            # Read anew, which checks the bytes: they may have come straight from a peer.
            copies = [Payload.from_bytes(_cuda.to_host(payload.buffer)) for payload in payloads]
        return _cuda.from_host(decode_mean(self, copies), device, first.framework)

    cls.encode = encode_anywhere  # type: ignore[method-assign, assignment]
    cls.decode_mean = decode_mean_anywhere  # type: ignore[assignment]
    return cls


@cache
def _say_once(cls: str) -> None:
    names = [name for name, entry in CODECS.items() if entry.cls == cls]
    _log.warning("%s has no CUDA kernels: values are copied to the host", " or ".join(names) or cls)
