"""The payloads of many gradients in one vector, and the means read back from all ranks' vectors.

Payloads have a fixed size, so every rank knows where each begins, and one all-gather carries them.
On the host each gradient is encoded into its stretch; on CUDA devices all of them together, where
they are, on the framework's current stream (extra [cuda]), and nothing waits for the device.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from . import _cuda
from .arrays import Array, device_of, like_of, namespace, on_cuda, split, to_host
from .carry import Gradient
from .codecs import _device
from .codecs.base import Bytes, Payload
from .codecs.fft import FFTCodec
from .codecs.gather import payloads_of
from .feedback import ErrorFeedback

_GLANCE = 4096  # elements of a gradient looked at before all of them


def encode(
    codec: FFTCodec,
    gradients: Sequence[Gradient],
    *,
    feedback: ErrorFeedback | None,
    find_unused: bool,
    drops_unused: bool,
) -> tuple[Array, list[Payload]]:
    """The payloads one behind the other, [bytes] uint8 where the gradients are; and each of them.

    A gradient of zeros is of a parameter that was not used. A framework drops the mean of one that
    no rank has used, so its memory does not travel, and waits.

    find_unused : look for such on a device, too, which waits for it; on the host it costs nothing
    drops_unused : False where the framework does not drop it: then memories always travel
    """
    sizes, like = _sizes(codec, gradients), gradients[0].values
    xp = namespace(like)
    wire = xp.empty(sum(sizes), dtype=xp.uint8, device=device_of(like))
    pieces = split(wire, sizes)
    if on_cuda(like):
        looks = find_unused and drops_unused
        return wire, _encode_on_device(codec, gradients, pieces, feedback, looks)
    payloads = [
        _encode_on_host(codec, gradient, to_host(piece), feedback, drops_unused)
        for gradient, piece in zip(gradients, pieces, strict=True)
    ]
    return wire, payloads


def decode(codec: FFTCodec, gathered: Array, gradients: Sequence[Gradient], *, ranks: int) -> None:
    """Write the means of what all ranks encoded into the gradients' values.

    gathered : [ranks * bytes] uint8, what `encode` made on each rank, in order of rank
    Raises PayloadError, which names the rank, if bytes are not a payload.
    """
    sizes = _sizes(codec, gradients)
    ends = list(accumulate(sizes, initial=0))
    if on_cuda(gathered):
        with on_stream_of(gathered):
            whole = _cuda.view(gathered).array().reshape(ranks, -1)
            arrays = [whole[:, first:last] for first, last in pairwise(ends)]
        _device.Decoder(codec, arrays, [gradient.values for gradient in gradients]).run()
        return
    rows = to_host(gathered).reshape(ranks, -1)
    for gradient, (first, last) in zip(gradients, pairwise(ends), strict=True):
        payloads = payloads_of([row[first:last] for row in rows], gradient.elements)
        values = gradient.values
        if values.dtype == namespace(values).float32:
            codec.decode_mean_into(payloads, to_host(values))
        else:
            values[...] = like_of(codec.decode_mean(payloads), values)


def is_used(values: Array) -> bool:
    """Whether any value is not zero; the start of a gradient mostly tells. Waits for a device."""
    xp = namespace(values)
    return bool(xp.any(values[:_GLANCE])) or bool(xp.any(values))


def on_stream_of(values: Array) -> AbstractContextManager[Any]:
    """CuPy working on the framework's current stream; nothing for an array on the host."""
    return _cuda.view(values).run().context() if on_cuda(values) else nullcontext()


def _sizes(codec: FFTCodec, gradients: Sequence[Gradient]) -> list[int]:
    return [codec.payload_bytes(gradient.elements) for gradient in gradients]


def _encode_on_host(
    codec: FFTCodec,
    gradient: Gradient,
    buffer: Bytes,
    feedback: ErrorFeedback | None,
    drops_unused: bool,
) -> Payload:
    xp = namespace(gradient.values)
    values = to_host(xp.astype(gradient.values, xp.float32, copy=False))
    waits = drops_unused and not is_used(values)
    if feedback is None or gradient.name is None or waits:
        return codec.encode_into(buffer, values)
    memory = feedback.memory_of(gradient.name, values)
    return codec.encode_into(buffer, values, state=memory, decay=feedback.decay)


def _encode_on_device(
    codec: FFTCodec,
    gradients: Sequence[Gradient],
    pieces: Sequence[Array],
    feedback: ErrorFeedback | None,
    find_unused: bool,
) -> list[Payload]:
    vectors = [gradient.values for gradient in gradients]
    used = np.ones(len(vectors), bool)
    if find_unused:
        xp = namespace(vectors[0])
        used = to_host(xp.stack([xp.any(vector) for vector in vectors]))
    with on_stream_of(vectors[0]):
        states = None
        if feedback is not None:
            states = [
                feedback.memory_of(gradient.name, vector)
                if there and gradient.name is not None
                else codec.new_state(gradient.elements, like=vector)
                for gradient, vector, there in zip(gradients, vectors, used, strict=True)
            ]
        buffers = [_cuda.view(piece).array() for piece in pieces]
    decay = 1.0 if feedback is None else feedback.decay
    return _device.Encoder(codec, vectors, states, buffers).run(decay)
