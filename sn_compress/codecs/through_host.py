"""Codecs without CUDA kernels, for tensors on a GPU: copied to the host, encoded there, said once.

As with FFTCodec, the payload of a tensor on a GPU is a CuPy array there. Decoding knows by that
where its result belongs, and by `Payload.framework` whether as a torch tensor or a CuPy array.
What the codec remembers stays on the host.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from functools import cache, wraps
from typing import Any, TypeVar

from ..devices import _cuda
from ..devices.arrays import on_cuda
from .base import Codec, Payload
from .registry import CODECS

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
