"""The payloads of many gradients in one vector, and the means decoded from all ranks' vectors.

Payloads have a fixed size, so every rank knows where each starts, and one all-gather carries them.
They are encoded on the device of the gradients, all together and without synchronization: on the
host by the compiled codec; on CUDA devices by fused kernels if CuPy is installed (the extra
[cuda]), on the framework's current stream; elsewhere by array code, `codecs/batched.py`.

In a gather a rank receives all payloads, so bytes grow with the number of ranks. With three or more
ranks, the blocks of a bucket are divided among them (docs/decisions/0040). The payloads of a piece
are sent only to its owner, by an all-to-all; the owner adds its own gradient, which needs no
encoding, and encodes the mean; and all gather the means. A rank receives less than two payloads'
worth, whatever the number of ranks.

What the second encoding drops is remembered as well (as in DoubleSqueeze, Tang et al. 2019, arXiv
1905.05957): by the owner, in the memory of its own gradient. The mean over the ranks of what is
sent and remembered is that of the gradients, and a saved state is the same as with a gather.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, pairwise
from typing import Any

import numpy as np

from .. import _cuda
from ..arrays import (
    Array,
    AsyncScalars,
    asarray_like,
    device_of,
    is_used,
    namespace,
    on_host,
    put_all,
    split,
    to_host,
)
from ..codecs import batched
from ..codecs.base import Payload, payloads_of
from ..codecs.fft import FFTCodec
from ..collective import Gradient
from ..errors import PayloadError
from ..report import PayloadStats
from .feedback import ErrorFeedback


@dataclass(frozen=True)
class Sent:
    """What a rank contributes to an all-gather.

    wire : [bytes] uint8 on the device of the gradients, the payloads concatenated
    payloads : views of each payload
    """

    wire: Array
    payloads: list[Payload]


@dataclass(frozen=True)
class DeferredCheck:
    """Whether payloads decoded on a device were corrupt; read when the next step begins.

    later : a number that is nonzero if one was
    cuda : the device whose kernels have decoded; None for array code
    """

    later: AsyncScalars
    cuda: int | None = None

    def conclude(self) -> None:
        """Raise PayloadError if a payload was corrupt; waits for the device if necessary."""
        if self.later.read()[0] == 0:
            return
        if self.cuda is not None:  # kernels have one flag for all steps, which this clears
            from ..codecs import _fft_cuda

            _fft_cuda.raise_if_damaged(self.cuda)
        raise PayloadError(
            "a payload of the previous step is corrupt or has other settings: its header, its "
            "checksum or a record is not what was expected, and the mean of its tensor was NaN. Go "
            "on from the last checkpoint; if it happens again, suspect memory or the network, or "
            "versions that differ between ranks."
        )


def encode(
    codec: FFTCodec,
    gradients: Sequence[Gradient],
    *,
    feedback: ErrorFeedback | _Rows | None,
    find_unused: bool,
    drops_unused: bool,
) -> Sent:
    """Encode at least one gradient; all have the same dtype.

    A zero gradient means that a parameter was not used. A framework may drop the mean if no rank
    has used it, so its memory is not sent but kept.

    find_unused : detect unused parameters on CUDA as well, which waits for the device
    drops_unused : False if the framework keeps all means: memories are then always sent
    """
    sizes, like = _sizes(codec, gradients), gradients[0].values
    if not _cuda.takes(like) and not on_host(like):
        return _encode_as_arrays(codec, gradients, sizes, feedback, drops_unused)
    xp = namespace(like)
    wire = xp.empty(sum(sizes), dtype=xp.uint8, device=device_of(like))
    pieces = split(wire, sizes)
    if _cuda.takes(like):
        looks = find_unused and drops_unused
        return Sent(wire, _encode_by_kernels(codec, gradients, pieces, feedback, looks))
    payloads = []
    for gradient, piece in zip(gradients, pieces, strict=True):
        values = to_host(xp.astype(gradient.values, xp.float32, copy=False))
        waits = drops_unused and not is_used(values)
        if feedback is None or gradient.name is None or waits:
            payloads.append(codec.encode_into(to_host(piece), values))
        else:
            memory = feedback.memory_of(gradient.name, values)
            payloads.append(
                codec.encode_into(to_host(piece), values, state=memory, decay=feedback.decay)
            )
    return Sent(wire, payloads)


def decode(
    codec: FFTCodec, gathered: Array, gradients: Sequence[Gradient], *, ranks: int
) -> DeferredCheck | None:
    """Write the means of all ranks' payloads into the gradients' values.

    gathered : [ranks * bytes] uint8, the result of `encode` on each rank, in rank order
    Raises PayloadError, which names the rank, if bytes on the host are not a payload. On a device
    the mean is NaN instead, and the returned check raises.
    """
    sizes = _sizes(codec, gradients)
    ends = list(accumulate(sizes, initial=0))
    if _cuda.takes(gathered):
        from ..codecs import _fft_cuda

        view = _cuda.view(gathered)
        with on_stream_of(gathered):
            words = view.array().reshape(ranks, -1)
            arrays = [words[:, first:last] for first, last in pairwise(ends)]
        _fft_cuda.Decoder(codec, arrays, [gradient.values for gradient in gradients]).run()
        # On the same stream, so that the flag is read after the kernels that may set it.
        with on_stream_of(gathered):
            flag = _fft_cuda.damage_of(view.device).astype("float64")
            if view.is_torch:
                flag = namespace(gathered).from_dlpack(flag)
        return DeferredCheck(AsyncScalars(flag), view.device)
    if not on_host(gathered):
        return _decode_as_arrays(codec, gathered, gradients, ranks)
    rows = to_host(gathered).reshape(ranks, -1)
    for gradient, (first, last) in zip(gradients, pairwise(ends), strict=True):
        payloads = payloads_of([row[first:last] for row in rows], gradient.elements)
        values = gradient.values
        if values.dtype == namespace(values).float32:
            codec.decode_mean_into(payloads, to_host(values))
        else:  # the codec computes in float32; round to half precision once, at the end
            values[...] = asarray_like(codec.decode_mean(payloads), values)
    return None


def on_stream_of(values: Array) -> AbstractContextManager[Any]:
    """Return a context of CuPy on the framework's current stream; null if CuPy is not used."""
    return _cuda.view(values).run().context() if _cuda.takes(values) else nullcontext()


def _sizes(codec: FFTCodec, gradients: Sequence[Gradient]) -> list[int]:
    return [codec.payload_bytes(gradient.elements) for gradient in gradients]


def _encode_as_arrays(
    codec: FFTCodec,
    gradients: Sequence[Gradient],
    sizes: Sequence[int],
    feedback: ErrorFeedback | _Rows | None,
    drops_unused: bool,
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
    encoded = batched.encode(
        codec,
        vectors,
        memories,
        decay=1.0 if feedback is None else feedback.decay,
        unused_waits=drops_unused,
    )
    # Copy to the arrays of the store, as array code returns new ones.
    if memories is not None and encoded.memories is not None:
        stored = [part for memory in memories for part in memory]
        if stored:
            put_all(stored, [part for memory in encoded.memories for part in memory])
    wire = encoded.words.view(namespace(encoded.words).uint8)
    payloads = [
        Payload(piece, codec.codec_id, gradient.elements, codec.settings)
        for piece, gradient in zip(split(wire, sizes), gradients, strict=True)
    ]
    return Sent(wire, payloads)


def _decode_as_arrays(
    codec: FFTCodec, gathered: Array, gradients: Sequence[Gradient], ranks: int
) -> DeferredCheck:
    xp = namespace(gathered)
    words = xp.reshape(gathered.view(xp.int32), (ranks, -1))
    decoded = batched.decode(codec, words, [gradient.elements for gradient in gradients])
    put_all([gradient.values for gradient in gradients], decoded.means)
    return DeferredCheck(AsyncScalars(xp.reshape(xp.astype(decoded.damaged, xp.float64), (1,))))


def _encode_by_kernels(
    codec: FFTCodec,
    gradients: Sequence[Gradient],
    pieces: Sequence[Array],
    feedback: ErrorFeedback | _Rows | None,
    find_unused: bool,
) -> list[Payload]:
    vectors = [gradient.values for gradient in gradients]
    used = np.ones(len(vectors), bool)
    if find_unused:
        xp = namespace(vectors[0])
        used = to_host(xp.stack([xp.any(vector) for vector in vectors]))  # one wait for all
    with on_stream_of(vectors[0]):
        states = None
        # An unused parameter gets an empty state for this step, so that its memory is kept.
        if feedback is not None:
            states = [
                feedback.memory_of(gradient.name, vector)
                if is_used and gradient.name is not None
                else codec.new_state(gradient.elements, like=vector)
                for gradient, vector, is_used in zip(gradients, vectors, used, strict=True)
            ]
        buffers = [_cuda.view(piece).array() for piece in pieces]
    decay = 1.0 if feedback is None else feedback.decay
    from ..codecs import _fft_cuda

    return _fft_cuda.Encoder(codec, vectors, states, buffers).run(decay)


# The value of every byte that an owner sends instead of means if it cannot decode what it received.
# No payload consists of these only, so every rank sees it and raises in the same step.
_DAMAGED = 255


@dataclass(frozen=True)
class Piece:
    """Some blocks of a tensor in a bucket: its elements in [start, stop)."""

    tensor: int
    start: int
    stop: int

    @property
    def elements(self) -> int:
        """Number of elements."""
        return self.stop - self.start

    def name_in(self, tensor: str) -> str:
        """Return the name of this piece of a tensor with the given name."""
        return f"{tensor}[{self.start}:{self.stop}]"


@dataclass(frozen=True)
class Shares:
    """Which rank owns which pieces, and the codecs they are encoded with.

    Attributes
    ----------
    pieces : of each rank; each element of the bucket is in exactly one
    parts, means : the codecs for what is sent to owners, and for the means that owners send
    """

    pieces: tuple[tuple[Piece, ...], ...]
    parts: FFTCodec
    means: FFTCodec

    def outgoing(self, rank: int) -> list[Piece]:
        """Return the pieces that a rank sends to their owners, in the order of the owners."""
        return [piece for owner, of in enumerate(self.pieces) if owner != rank for piece in of]

    @property
    def parts_bytes(self) -> tuple[int, ...]:
        """For each owner, the bytes that each other rank sends it."""
        return self._bytes(self.parts)

    @property
    def means_bytes(self) -> tuple[int, ...]:
        """For each owner, the bytes of the means that it sends."""
        return self._bytes(self.means)

    def _bytes(self, codec: FFTCodec) -> tuple[int, ...]:
        return tuple(sum(codec.payload_bytes(piece.elements) for piece in of) for of in self.pieces)

    def sent(self, rank: int, tensors: int) -> list[int]:
        """Return the bytes of the payloads that a rank encodes, for each tensor."""
        nbytes = [0] * tensors
        for piece in self.outgoing(rank):
            nbytes[piece.tensor] += self.parts.payload_bytes(piece.elements)
        for piece in self.pieces[rank]:
            nbytes[piece.tensor] += self.means.payload_bytes(piece.elements)
        return nbytes


def parts_theta(theta: float) -> float:
    """Return the fraction to drop from a rank's part, if `theta` is dropped from the mean.

    If little of the mean is kept, half as much is kept of the parts, and if all is kept, all: the
    errors of many ranks average out, that of the mean does not.

    >>> parts_theta(0.98), parts_theta(0.0)
    (0.9898, 0.0)
    """
    return 1 - (1 - theta) * (1 - theta / 2)


@lru_cache(maxsize=256)
def shares_of(codec: FFTCodec, sizes: tuple[int, ...], ranks: int) -> Shares | None:
    """Divide the blocks of tensors among ranks; None if gathering payloads costs less.

    codec : for the means; sizes : elements of each tensor

    Dividing gains nothing with one or two ranks or a single block, and is impossible if blocks
    depend on each other: a transform of the whole tensor, a range shared by all blocks.
    """
    if codec.block is None or codec.transform == "axes" or codec.window == "payload":
        return None
    sections = [(at, section) for at, n in enumerate(sizes) for section in codec.sections(n)]
    total = sum(section.count * section.layout.words for _, section in sections)
    pieces: list[list[Piece]] = [[] for _ in range(ranks)]
    before = 0  # words of the blocks before a section
    for tensor, section in sections:
        words, block = section.layout.words, section.layout.block
        # The words of the bucket are divided into equal parts, one per rank; a block belongs to the
        # rank whose part contains its first word. In integers, so the same on all ranks.
        owners = before * ranks // total, (before + (section.count - 1) * words) * ranks // total
        for owner in range(owners[0], owners[1] + 1):
            first, last = (
                -((before * ranks - rank * total) // (words * ranks)) for rank in (owner, owner + 1)
            )
            start = section.start + max(first, 0) * block
            stop = min(section.start + last * block, section.stop)
            owned = pieces[owner]
            # A tensor has a section for each block size; merge adjacent pieces of two sections.
            if owned and (owned[-1].tensor, owned[-1].stop) == (tensor, start):
                start = owned.pop().start
            if start < stop:
                owned.append(Piece(tensor, start, stop))
        before += section.count * words
    parts = codec.at(parts_theta(codec.theta))
    shares = Shares(tuple(map(tuple, pieces)), parts, codec)
    # Two collectives cost two latencies and a second encoding, which few bytes do not justify.
    payload_bytes = sum(codec.payload_bytes(n) for n in sizes)
    return shares if 2 * max(shares.means_bytes) < payload_bytes else None


def sections_in(piece: Piece, codec: FFTCodec, n: int) -> list[tuple[int, slice]]:
    """Return the sections of an n-element tensor that a piece covers: number, memory rows."""
    places = []
    for number, section in enumerate(codec.sections(n)):
        first, last = max(piece.start, section.start), min(piece.stop, section.stop)
        if first < last:
            block, start = section.layout.block, section.start
            places.append((number, slice((first - start) // block, -(-(last - start) // block))))
    return places


def rows_of(piece: Piece, codec: FFTCodec, n: int, memory: Sequence[Array]) -> list[Array]:
    """Return views of a piece's blocks in the memory of its n-element tensor."""
    return [memory[number][rows] for number, rows in sections_in(piece, codec, n)]


class Bucket:
    """Gradients that travel together, averaged in place in two rounds.

    Parameters
    ----------
    gradients : all of one dtype
    shares : of these gradients, from `shares_of`
    rank : number of this rank
    feedback : None for no error feedback
    encode : payloads.encode with all arguments bound except codec, gradients and feedback

    Attributes
    ----------
    parts_bytes, means_bytes : see Shares
    sent : what was encoded so far
    checks : to be concluded when the next step begins
    """

    def __init__(
        self,
        gradients: Sequence[Gradient],
        shares: Shares,
        rank: int,
        feedback: ErrorFeedback | None,
        encode: Callable[..., Sent],
    ) -> None:
        self.gradients, self.sent, self.checks = gradients, list[Sent](), list[DeferredCheck]()
        self._shares, self._rank, self._ranks = shares, rank, len(shares.pieces)
        self.parts_bytes, self.means_bytes = shares.parts_bytes, shares.means_bytes
        self._error: PayloadError | None = None
        self._mine, self._outgoing = shares.pieces[rank], shares.outgoing(rank)
        self._memories = None
        if feedback is not None:
            pieces = [*self._outgoing, *self._mine]
            self._memories = _Rows(shares.means, gradients, feedback, pieces)
        self._encode = partial(encode, feedback=self._memories)

    def begin(self) -> Array:
        """Return payloads of the pieces that others own, [bytes] uint8, in rank order."""
        if not self._outgoing:  # a single rank
            return self._nothing()
        return self._encoded(self._shares.parts, [self._view(other) for other in self._outgoing])

    def reduce(self, received: Array) -> Array:
        """Return the means of this rank's pieces, encoded, [bytes] uint8.

        received : [bytes] uint8, the others' parts of these pieces, in rank order
        """
        if not self._mine:
            return self._nothing()
        means = [self._room(piece, received) for piece in self._mine]
        if self._ranks > 1:
            try:
                self._read(self._shares.parts, received, means, self._ranks - 1)
            except PayloadError as error:
                # Raised in `end`, because all others wait for this rank's means.
                self._error = error
                return self._nothing(self.means_bytes[self._rank]) | _DAMAGED
        # Combine the others' mean with this rank's own gradient.
        for mean, piece in zip(means, self._mine, strict=True):
            xp = namespace(mean.values)
            mean.values[...] *= (self._ranks - 1) / self._ranks
            # No division: a TensorFlow graph multiplies by the inverse, which rounds differently.
            mine = xp.astype(self._view(piece).values, xp.float32) * (1 / self._ranks)
            mean.values[...] += mine
        # The memory is in units of this rank's gradient, which enters the mean divided by the
        # number of ranks. The error of encoding the mean goes there as well: scaled back, it counts
        # as an error of this rank alone.
        self._scale(means, 1 / self._ranks)
        encoded = self._encoded(self._shares.means, means)
        self._scale(means, self._ranks)
        return encoded

    def end(self, received: Array) -> None:
        """Write the means into the gradients.

        received : [bytes] uint8, from all owners, in order
        """
        if self._error is not None:
            raise self._error
        views = [self._view(piece) for pieces in self._shares.pieces for piece in pieces]
        try:
            self._read(self._shares.means, received, views, 1)
        except PayloadError as error:
            # An owner that could not decode its parts has sent only _DAMAGED.
            for rank, pieces in enumerate(split(received, self.means_bytes)):
                if pieces.shape[0] and bool(namespace(received).all(pieces == _DAMAGED)):
                    raise PayloadError(
                        f"rank {rank} received a corrupt payload; see its traceback. Retry from "
                        "the last checkpoint; if it happens again, suspect memory or the network."
                    ) from error
            raise

    def stats(self) -> list[PayloadStats]:
        """Return the statistics of each gradient's payloads."""
        by_tensor: list[list[Payload]] = [[] for _ in self.gradients]
        payloads = [payload for sent in self.sent for payload in sent.payloads]
        for piece, payload in zip([*self._outgoing, *self._mine], payloads, strict=True):
            by_tensor[piece.tensor].append(payload)
        return [PayloadStats.of(of_tensor) for of_tensor in by_tensor]

    def _view(self, piece: Piece) -> Gradient:
        """Return a piece as a gradient; its values are a view of the tensor's."""
        tensor = self.gradients[piece.tensor]
        values = tensor.values[piece.start : piece.stop]
        name = None if tensor.name is None else piece.name_in(tensor.name)
        return Gradient(name, (piece.elements,), values)

    def _room(self, piece: Piece, like: Array) -> Gradient:
        """Allocate the mean of a piece, in float32, as a gradient with the piece's name."""
        xp = namespace(like)
        values = xp.empty(piece.elements, dtype=xp.float32, device=device_of(like))
        return Gradient(self._view(piece).name, (piece.elements,), values)

    def _encoded(self, codec: FFTCodec, gradients: Sequence[Gradient]) -> Array:
        self.sent.append(self._encode(codec, gradients))
        return self.sent[-1].wire

    def _nothing(self, size: int = 0) -> Array:
        xp, like = namespace(self.gradients[0].values), self.gradients[0].values
        return xp.zeros(size, dtype=xp.uint8, device=device_of(like))

    def _read(self, codec: FFTCodec, wire: Array, means: Sequence[Gradient], ranks: int) -> None:
        if check := decode(codec, wire, means, ranks=ranks):
            self.checks.append(check)

    def _scale(self, gradients: Sequence[Gradient], factor: float) -> None:
        if self._memories is not None:
            with on_stream_of(self.gradients[0].values):
                self._memories.scale(gradients, factor)


class _Rows:
    """Memories of pieces: rows of their tensors' memories, which encoding updates in place."""

    def __init__(
        self,
        codec: FFTCodec,
        gradients: Sequence[Gradient],
        feedback: ErrorFeedback,
        pieces: Iterable[Piece],
    ) -> None:
        self._codec, self._gradients, self._feedback = codec, gradients, feedback
        self._memories: dict[int, Any] = {}
        self._pieces = {
            piece.name_in(name): piece
            for piece in pieces
            if (name := gradients[piece.tensor].name) is not None
        }

    @property
    def decay(self) -> float:
        """See ErrorFeedback."""
        return self._feedback.decay

    def memory_of(self, name: str, _: Any) -> list[Any]:
        """Return a piece's memory by name; moves the tensor's memory to the gradient's device."""
        piece = self._pieces[name]
        gradient = self._gradients[piece.tensor]
        if piece.tensor not in self._memories:
            memory = self._feedback.memory_of(str(gradient.name), gradient.values)
            self._memories[piece.tensor] = memory
        return rows_of(piece, self._codec, gradient.elements, self._memories[piece.tensor])

    def scale(self, gradients: Iterable[Gradient], factor: float) -> None:
        """Multiply the memories of pieces."""
        for gradient in gradients:
            if gradient.name is not None:
                for rows in self.memory_of(gradient.name, None):
                    rows *= factor
