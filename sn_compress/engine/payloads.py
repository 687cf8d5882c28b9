"""The payloads of many gradients in one vector, and the means read back from all ranks' vectors.

Payloads have a fixed size, so every rank knows where each begins, and one all-gather carries them.
They are made where the gradients are, all of them together and without a wait: on the host by the
compiled codec, each into its stretch; on CUDA devices by fused kernels where CuPy is installed (the
extra [cuda]), on the framework's current stream; elsewhere by array code, `batched.py` of
`codecs/frequency`.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any, Protocol

import numpy as np

from ..base.errors import PayloadError
from ..codecs.base import Bytes, Payload
from ..codecs.frequency import _device, batched
from ..codecs.frequency.fft import FFTCodec
from ..codecs.gather import payloads_of
from ..devices import _cuda
from ..devices.arrays import (
    Array,
    Later,
    device_of,
    like_of,
    namespace,
    on_host,
    put_all,
    split,
    to_host,
)
from .carry import Gradient

_GLANCE = 4096  # elements of a gradient looked at before all of them


class Memories(Protocol):
    """What was dropped of gradients before, by name: an ErrorFeedback, or a part of one."""

    @property
    def decay(self) -> float:
        """Factor on a memory before it is added."""

    def memory_of(self, name: str, like: Any) -> Any:
        """The codec's state; encoding updates it in place."""


@dataclass(frozen=True)
class Sent:
    """What a rank brings to an all-gather.

    wire : [bytes] uint8 where the gradients are, the payloads one behind the other
    payloads : each of them
    numbers : energy and error of all of them and how many values were clipped, where payloads do
        not know their own and it was asked for; to be read a step late
    """

    wire: Array
    payloads: list[Payload]
    numbers: Later | None = None


@dataclass(frozen=True)
class Arrival:
    """What became of an all-gather on a device: to be asked when the next step begins.

    later : a number that is not zero if a payload was damaged
    cuda : the device whose kernels have read it; None where array code has
    """

    later: Later
    cuda: int | None = None

    def conclude(self) -> None:
        """PayloadError if a payload was damaged; waits for the device if it is not so far."""
        if self.later.read()[0] == 0:
            return
        if self.cuda is not None:
            _device.raise_if_damaged(self.cuda)
        raise PayloadError(
            "a payload of the step before was damaged on the way or is of other settings: its "
            "header, its checksum or a record is not what was expected, and the mean of its "
            "tensor was NaN. Go on from the last checkpoint; if it happens again, suspect memory "
            "or the network, or versions that differ between ranks."
        )


def encode(
    codec: FFTCodec,
    gradients: Sequence[Gradient],
    *,
    feedback: Memories | None,
    find_unused: bool,
    drops_unused: bool,
    tally: bool = False,
) -> Sent:
    """The payloads of gradients of one dtype, at least one.

    A gradient of zeros is of a parameter that was not used. A framework drops the mean of one that
    no rank has used, so its memory does not travel, and waits.

    find_unused : have the kernels look for such, which waits for the device; others do so anyway
    drops_unused : False where the framework does not drop it: then memories always travel
    tally : whether what was lost has to be known; kernels do not tell
    """
    sizes, like = _sizes(codec, gradients), gradients[0].values
    if not _cuda.takes(like) and not on_host(like):
        return _encode_as_arrays(codec, gradients, sizes, feedback, drops_unused, tally)
    xp = namespace(like)
    wire = xp.empty(sum(sizes), dtype=xp.uint8, device=device_of(like))
    pieces = split(wire, sizes)
    if _cuda.takes(like):
        looks = find_unused and drops_unused
        return Sent(wire, _encode_by_kernels(codec, gradients, pieces, feedback, looks))
    payloads = [
        _encode_on_host(codec, gradient, to_host(piece), feedback, drops_unused)
        for gradient, piece in zip(gradients, pieces, strict=True)
    ]
    return Sent(wire, payloads)


def decode(
    codec: FFTCodec, gathered: Array, gradients: Sequence[Gradient], *, ranks: int
) -> Arrival | None:
    """Write the means of what all ranks encoded into the gradients' values.

    gathered : [ranks * bytes] uint8, what `encode` made on each rank, in order of rank
    Raises PayloadError, which names the rank, if bytes on the host are not a payload. Elsewhere the
    mean is NaN then, and what is returned raises.
    """
    sizes = _sizes(codec, gradients)
    ends = list(accumulate(sizes, initial=0))
    if _cuda.takes(gathered):
        with on_stream_of(gathered):
            whole = _cuda.view(gathered).array().reshape(ranks, -1)
            arrays = [whole[:, first:last] for first, last in pairwise(ends)]
        _device.Decoder(codec, arrays, [gradient.values for gradient in gradients]).run()
        return _arrival_of_kernels(gathered)
    if not on_host(gathered):
        return _decode_as_arrays(codec, gathered, gradients, ranks)
    rows = to_host(gathered).reshape(ranks, -1)
    for gradient, (first, last) in zip(gradients, pairwise(ends), strict=True):
        payloads = payloads_of([row[first:last] for row in rows], gradient.elements)
        values = gradient.values
        if values.dtype == namespace(values).float32:
            codec.decode_mean_into(payloads, to_host(values))
        else:
            values[...] = like_of(codec.decode_mean(payloads), values)
    return None


def is_used(values: Array) -> bool:
    """Whether any value is not zero; the start of a gradient mostly tells. Waits for a device."""
    xp = namespace(values)
    return bool(xp.any(values[:_GLANCE])) or bool(xp.any(values))


def on_stream_of(values: Array) -> AbstractContextManager[Any]:
    """CuPy working on the framework's current stream, where it is to work at all."""
    return _cuda.view(values).run().context() if _cuda.takes(values) else nullcontext()


def _sizes(codec: FFTCodec, gradients: Sequence[Gradient]) -> list[int]:
    return [codec.payload_bytes(gradient.elements) for gradient in gradients]


def _encode_on_host(
    codec: FFTCodec,
    gradient: Gradient,
    buffer: Bytes,
    feedback: Memories | None,
    drops_unused: bool,
) -> Payload:
    xp = namespace(gradient.values)
    values = to_host(xp.astype(gradient.values, xp.float32, copy=False))
    waits = drops_unused and not is_used(values)
    if feedback is None or gradient.name is None or waits:
        return codec.encode_into(buffer, values)
    memory = feedback.memory_of(gradient.name, values)
    return codec.encode_into(buffer, values, state=memory, decay=feedback.decay)


def _encode_as_arrays(
    codec: FFTCodec,
    gradients: Sequence[Gradient],
    sizes: Sequence[int],
    feedback: Memories | None,
    drops_unused: bool,
    tally: bool,
) -> Sent:
    vectors = [gradient.values for gradient in gradients]
    memories = None
    if feedback is not None:
        memories = [
            codec.new_state(gradient.elements, like=vector)
            if gradient.name is None
            else feedback.memory_of(gradient.name, vector)
            for gradient, vector in zip(gradients, vectors, strict=True)
        ]
    made = batched.encode(
        codec,
        vectors,
        memories,
        decay=1.0 if feedback is None else feedback.decay,
        unused_waits=drops_unused,
        tally=tally,
    )
    if memories is not None and made.memories is not None:
        held = [part for memory in memories for part in memory]
        if held:
            put_all(held, [part for memory in made.memories for part in memory])
    wire = made.words.view(namespace(made.words).uint8)
    payloads = [
        Payload(piece, codec.codec_id, gradient.elements, codec.settings)
        for piece, gradient in zip(split(wire, sizes), gradients, strict=True)
    ]
    return Sent(wire, payloads, None if made.numbers is None else Later(made.numbers))


def _decode_as_arrays(
    codec: FFTCodec, gathered: Array, gradients: Sequence[Gradient], ranks: int
) -> Arrival:
    xp = namespace(gathered)
    words = xp.reshape(gathered.view(xp.int32), (ranks, -1))
    made = batched.decode(codec, words, [gradient.elements for gradient in gradients])
    put_all([gradient.values for gradient in gradients], made.means)
    return Arrival(Later(xp.reshape(xp.astype(made.damaged, xp.float64), (1,))))


def _encode_by_kernels(
    codec: FFTCodec,
    gradients: Sequence[Gradient],
    pieces: Sequence[Array],
    feedback: Memories | None,
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


def _arrival_of_kernels(gathered: Array) -> Arrival:
    """The flag as it is behind the decoding that was launched last."""
    view = _cuda.view(gathered)
    with on_stream_of(gathered):
        flag = _device.damage_of(view.device).astype("float64")
        if view.is_torch:
            flag = namespace(gathered).from_dlpack(flag)
    return Arrival(Later(flag), view.device)
