"""Buckets of a step in the graph: words that are summed, or payloads that are gathered.

Both run the engine's arithmetic while TensorFlow traces, on tensors instead of arrays: the
generator of `allreduce/bucket.py`, and the codec (compiled ops if available, else its array code).
Error memories are variables; those of payloads are coefficients, as in the codec's state.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from itertools import accumulate
from typing import Any

import numpy as np
import tensorflow as tf

from ..allreduce.bucket import bucket_of, traced_step
from ..allreduce.exchange import AllReduceExchange
from ..allreduce.methods.base import HEAD, StepOptions
from ..allreduce.state import TensorState
from ..arrays import to_host
from ..codecs import batched
from ..codecs.fft import FFTCodec
from ..consistency import digest
from ..engine.feedback import ErrorFeedback
from ..engine.payloads import Piece, Shares, rows_of, sections_in, shares_of
from ..ops import transforms
from ..ops.fixed_point import times_power
from ..report import TensorTraffic
from . import kernels
from . import namespace as _namespace  # noqa: F401 - it makes tensors known to the core
from .graph import FOR_EVER, Collectives, Undoable

Memories = list[list[Any]]  # for each tensor, the parts of its codec state

_DAMAGED_SUM = (
    "PayloadError: the checksum of the sum does not match the sum of the checksums: corrupt in "
    "transit, or ranks run with different settings. If it happens again, suspect memory or the "
    "network."
)
JOINED = (
    "another rank called hvd.join(), and FFTCompression gathers payloads, which Horovod cannot do "
    "without it; none was sent. Give all ranks the same number of batches (drop_remainder=True), "
    "or use LowRankCompression or AutoCompression, which allow hvd.join()."
)
_DAMAGED_PAYLOAD = (
    "PayloadError: the checksum, the header or a record of a payload is wrong: corrupt in transit, "
    "or ranks run with different settings. If it happens again, suspect memory or the network."
)


class SummedBucket:
    """Tensors sent as words that an all-reduce sums: low-rank factors, rows, whole tensors."""

    def __init__(
        self, exchange: AllReduceExchange, names: Sequence[str], *, undoable: bool = False
    ) -> None:
        self._of, self.names = exchange, tuple(names)
        summables = self.summables()
        # A bucket groups tensors by method; `order` has the index of the tensor at each position.
        self.bucket, self.order = bucket_of(tuple(one.part for one in summables))
        ordered = [summables[at] for at in self.order]
        # Tensors near the limits of float32 are divided by a power of two, or squared norms and
        # products with directions would overflow.
        self._exponents = [exchange.tensors[name].exponent for name in names]
        state = self.bucket.join(
            [{name: to_host(value) for name, value in one.state.items()} for one in ordered]
        )
        self._shared = list(state)  # names of the state shared by all ranks
        memories = [to_host(one.memory) for one in ordered]
        self.variables = Undoable([*memories, *state.values()], undoable)
        for one in ordered:  # free the engine's copy; `read` writes it back
            one.replace(np.broadcast_to(np.float32(0), (one.n,)))
        self._began = [exchange.tensors[name].step for name in names]
        self._until = until_dense(exchange, names)
        self._sent: list[int] = []  # words in each round, known once traced
        self._ranks = 1

    def summables(self) -> list[TensorState]:
        """Return the tensors' states in the exchange, in the order of the names."""
        states = [self._of.tensors[name].summable for name in self.names]
        return [one for one in states if one is not None]

    def _parts(self, values: Sequence[Any]) -> tuple[list[Any], dict[str, Any]]:
        """Split values into memories, in the order of the bucket, and shared state by name."""
        count = len(self.order)
        return list(values[:count]), dict(zip(self._shared, values[count:], strict=True))

    def step(
        self, number: int, vectors: Sequence[Any], by: Collectives, dropped: Any = None
    ) -> tuple[list[Any], Any]:
        """See GraphBucket."""

        def choose(before: Sequence[Any], now: Sequence[Any]) -> list[Any]:
            gone = [dropped[at] for at in self.order]
            (earlier, old), (latest, new) = self._parts(before), self._parts(now)
            shared = self.bucket.join(
                [
                    {name: tf.where(undone, one[name], other[name]) for name in one}
                    for undone, one, other in zip(
                        gone, self.bucket.split(old), self.bucket.split(new), strict=True
                    )
                ]
            )
            memories = [tf.where(*three) for three in zip(gone, earlier, latest, strict=True)]
            return [*memories, *(shared[name] for name in self._shared)]

        self._ranks = by.ranks
        memories, state = self._parts(self.variables.begin(dropped, choose))
        rounds = traced_step(
            self.bucket,
            state,
            memories,
            [times_power(vectors[at], -self._exponents[at]) for at in self.order],
            StepOptions(by.ranks, by.rank, self._of.decay, self._of.exact),
        )
        # The engine's own generator of rounds, on graph tensors instead of arrays.
        total, self._sent = None, []
        while True:
            try:
                words = rounds.send(total)  # type: ignore[arg-type]
            except StopIteration as end:
                result = end.value
                break
            self._sent.append(words.shape[0])
            total = by.total(words, number, len(self._sent))
            total.set_shape(words.shape)
        # Before anything is assigned: corruption ends the step and leaves the memories unchanged.
        sound = tf.debugging.Assert(result.numbers[1] == 0, [_DAMAGED_SUM])
        with tf.control_dependencies([sound]):
            shared = (result.state[name] for name in self._shared)
            self.variables.assign([*result.memories, *shared])
            placed = dict(zip(self.order, result.means, strict=True))
            energy, sent = tf.unstack(result.numbers[2:])
            # The loss is the remainder, which rounding may make negative.
            lost = tf.stack([energy, tf.maximum(energy - sent, 0), tf.zeros_like(energy)])
            powers = enumerate(self._exponents)
            return [tf.identity(times_power(placed[at], power)) for at, power in powers], lost

    def read(self, steps: int) -> None:
        """See GraphBucket."""
        summables = self.summables()
        now, before = self.variables.arrays()
        memories, state = self._parts(now)
        for at, memory, new in zip(self.order, memories, self.bucket.split(state), strict=True):
            summables[at].replace(memory)
            summables[at].state = new
        if before is not None:
            memories, state = self._parts(before)
            for at, memory, old in zip(self.order, memories, self.bucket.split(state), strict=True):
                self._of.tensors[self.names[at]].reopen(memory, old)
        # A graph may run for some more steps until it is traced again: these postpone a due dense
        # step or vote, but do not skip it.
        for name, first in zip(self.names, self._began, strict=True):
            self._of.tensors[name].step = first + min(steps, self._until)

    def ran(self, steps: int) -> list[TensorTraffic]:
        """See GraphBucket; the first tensor counts the heads, which belong to no tensor."""
        if not self._sent:
            return []
        sent = [sum(words - HEAD for words in one.words(self._ranks)) for one in self.summables()]
        sent[0] = sum(self._sent) - sum(sent[1:])
        return [
            TensorTraffic(name, n, 4 * n, 4 * words, self._of.method(name), steps)
            for name, words in zip(self.names, sent, strict=True)
            for n in [math.prod(self._of.tensors[name].shape)]
        ]


def until_dense(exchange: AllReduceExchange, names: Iterable[str]) -> int:
    """Return the steps until the next one that the engine must run; FOR_EVER without tensors.

    The engine runs dense steps and those with a vote, and every step while a tensor has no size, or
    its size waits for energy measurements.
    """
    steps = []
    for name in names:
        tensor = exchange.tensors.get(name)
        if tensor is None or tensor.summable is None or (tensor.size and tensor.size.waits):
            return 0
        steps.append((exchange.every - 1 - (tensor.step - exchange.warmup)) % exchange.every)
        if (vote := exchange.until_vote(name)) is not None:
            steps.append(vote)
    return min(steps, default=FOR_EVER)


class GatheredBucket:
    """Tensors sent as FFTCompression's payloads, which are gathered, or sent to block owners.

    codec : the same for all steps
    feedback : keeps the memories between graphs; None for no error feedback
    tensors : elements by name
    scatter : whether to send payloads to owners if that means fewer bytes per rank
    undoable : keep the memories from before the last step
    """

    def __init__(
        self,
        codec: FFTCodec,
        feedback: ErrorFeedback | None,
        tensors: Mapping[str, int],
        *,
        scatter: bool = False,
        undoable: bool = False,
    ) -> None:
        self.codec, self._feedback, self._scatter = codec, feedback, scatter
        self.names, self._sizes = tuple(tensors), list(tensors.values())
        self._traced = False
        self._shares: Shares | None = None
        self._rank = 0
        states: list[Sequence[Any]] = []
        if feedback is not None:
            zero = np.float32(0)
            for name, n in tensors.items():
                states.append(feedback.memory_of(name, np.broadcast_to(zero, (n,))))
                # Free the engine's copy; `read` writes it back.
                feedback.replace(name, [np.broadcast_to(zero, part.shape) for part in states[-1]])
            feedback.settled(self.names)
        self._tensor_of = [at for at, state in enumerate(states) for _ in state]
        self.variables = Undoable([part for state in states for part in state], undoable)

    def _parts(self, values: Sequence[Any]) -> Memories:
        """Group values into the memory of each tensor."""
        memories: Memories = [[] for _ in self.names]
        for at, value in zip(self._tensor_of, values, strict=True):
            memories[at].append(value)
        return memories

    def step(
        self, number: int, vectors: Sequence[Any], by: Collectives, dropped: Any = None
    ) -> tuple[list[Any], Any]:
        """See GraphBucket."""

        def choose(before: Sequence[Any], now: Sequence[Any]) -> list[Any]:
            pieces = zip(self._tensor_of, before, now, strict=True)
            return [tf.where(dropped[at], old, new) for at, old, new in pieces]

        self._traced = True
        memories, decay = None, 1.0
        if self._feedback is not None:
            memories = self._parts(self.variables.begin(dropped, choose))
            decay = self._feedback.decay
        nodes = PayloadNodes(self.codec, self._sizes, decay)
        self._shares, self._rank = None, by.rank
        present = by.present(vectors[0], number)
        if self._scatter:
            self._shares = shares_of(self.codec, tuple(self._sizes), by.ranks)
        if self._shares is None:
            # Two ranks, or blocks that cannot be divided: each rank decodes all payloads (decision
            # 40).
            words, updated, lost = nodes.encode(vectors, memories)
            words = _when_all_are_present(words, present, by.ranks)
            gathered = by.gather(words, [int(words.shape[0])] * by.ranks, number)
            means = nodes.decode(tf.reshape(gathered, [by.ranks, -1]), self._sizes)
        else:
            for_owners = PayloadNodes(self._shares.parts, self._sizes, decay)
            means, updated, lost = _through_owners(
                for_owners, nodes, self._shares, vectors, memories, number, present, by
            )
        # After all payloads are decoded: a corrupt one ends the step before memories change.
        with tf.control_dependencies(means):
            self.variables.assign([part for parts in updated for part in parts])
        return means, lost

    def read(self, steps: int) -> None:
        """See GraphBucket."""
        if self._feedback is None:
            return
        now, before = self.variables.arrays()
        for name, memory in zip(self.names, self._parts(now), strict=True):
            self._feedback.replace(name, memory)
        if before is not None:
            for name, memory in zip(self.names, self._parts(before), strict=True):
                self._feedback.reopen(name, memory)

    def ran(self, steps: int) -> list[TensorTraffic]:
        """See GraphBucket."""
        if not self._traced:
            return []
        sent = list(map(self.codec.payload_bytes, self._sizes))
        if self._shares is not None:
            sent = self._shares.sent(self._rank, len(sent))
        return [
            TensorTraffic(name, n, 4 * n, nbytes, "frequencies", steps)
            for name, n, nbytes in zip(self.names, self._sizes, sent, strict=True)
        ]


def serves(codec: FFTCodec, sizes: Sequence[int]) -> bool:
    """Whether there are graph ops for a codec and vectors of these sizes."""
    return kernels.serve(codec, sizes) or batched.serves(codec)


def decoding_digest(codec: FFTCodec) -> str:
    """Return a digest that is equal on ranks that decode to the same bits."""
    block = codec.block or 4096
    # The compiled op is bit-identical to FFTCodec on any processor.
    if kernels.serve(codec, [block]) or not serves(codec, [block]):
        return "as on a host"
    within = "identity" if codec.transform == "axes" else codec.transform
    # In a decoder everything except the transform is exact arithmetic.
    parts = block + 2 if within == "fft" else block  # block // 2 + 1 complex bins
    bins = np.random.default_rng(0).standard_normal((1, parts)).astype(np.float32)
    return digest(
        transforms.Transform(within, block, codec.span).inverse(tf.constant(bins)).numpy()
    )


class PayloadNodes:
    """Creates nodes that encode and decode one codec's payloads: compiled ops, else array code.

    sizes : elements of the tensors to encode
    decay : factor on the memories before they are added
    """

    def __init__(self, codec: FFTCodec, sizes: Sequence[int], decay: float) -> None:
        self.codec, self.decay = codec, decay
        self._compiled = kernels.serve(codec, sizes)

    def encode(
        self, vectors: Sequence[Any], memories: Sequence[Sequence[Any]] | None
    ) -> tuple[Any, Memories, Any]:
        """Return the payloads, [words] int32; the next memories; energy, error and saturated."""
        if not self._compiled:
            batch = batched.encode(self.codec, vectors, memories, decay=self.decay, tally=True)
            return batch.words, batch.memories or [], batch.numbers
        encoded = [
            kernels.encode(self.codec, vector, memory, decay=self.decay)
            for vector, memory in zip(vectors, memories or [[]] * len(vectors), strict=True)
        ]
        words, updated, lost = zip(*encoded, strict=True)
        return tf.concat(words, 0), list(updated) if memories else [], tf.add_n(lost)

    def decode(self, words: Any, sizes: Sequence[int]) -> list[Any]:
        """Return the means of tensors of these sizes; fails at run time if a payload is corrupt.

        words : [ranks, words] int32, each rank's payloads, concatenated
        """
        codec, ranks = self.codec, int(words.shape[0])
        if not self._compiled:
            batch = batched.decode(codec, words, sizes)
            sound = tf.debugging.Assert(~batch.damaged, [_DAMAGED_PAYLOAD])
            with tf.control_dependencies([sound]):
                return [tf.identity(mean) for mean in batch.means]
        flat = tf.reshape(words, [ranks * int(words.shape[1])])
        counts = [codec.payload_bytes(n) // 4 for n in sizes]
        return [
            kernels.decode(codec, flat, n, ranks=ranks, at=at)
            for n, at in zip(sizes, accumulate(counts, initial=0), strict=False)
        ]


def _when_all_are_present(words: Any, present: Any, ranks: Any) -> Any:
    """Return the words; fail at run time if a rank has joined, as a gather would end Horovod.

    present : [1] int32, the sum of the ranks' `one_of`, to which a joined rank adds nothing
    """
    all_are = tf.reduce_all(tf.equal(present, ranks))
    with tf.control_dependencies([tf.debugging.Assert(all_are, [f"CompressError: {JOINED}"])]):
        return tf.identity(words)


def _through_owners(
    parts: PayloadNodes,
    nodes: PayloadNodes,
    shares: Shares,
    vectors: Sequence[Any],
    memories: Memories | None,
    number: int,
    present: Any,
    by: Collectives,
) -> tuple[list[Any], Memories, Any]:
    """`payloads.Bucket`'s step as nodes; return means, next memories, and what was lost.

    parts, nodes : encode what owners receive, and the means that owners send
    """
    ranks, rank = by.ranks, by.rank
    mine, outgoing = shares.pieces[rank], shares.outgoing(rank)

    def rows(pieces: Sequence[Piece], factor: float = 1.0) -> Memories | None:
        if memories is None:
            return None
        rows_by_piece = (
            rows_of(piece, nodes.codec, int(vectors[piece.tensor].shape[0]), memories[piece.tensor])
            for piece in pieces
        )
        return [[row * factor for row in of] if factor != 1 else of for of in rows_by_piece]

    def values(piece: Piece) -> Any:
        return vectors[piece.tensor][piece.start : piece.stop]

    words, new, lost = parts.encode(list(map(values, outgoing)), rows(outgoing))
    words = _when_all_are_present(words, present, ranks)
    splits = [size // 4 for size in shares.parts_bytes]
    received = by.alltoall(
        words, [0 if owner == rank else n for owner, n in enumerate(splits)],
        [0 if source == rank else splits[rank] for source in range(ranks)], number,
    )  # fmt: skip
    # A rank that owns nothing sends nothing, but only after receiving: nothing else depends on it.
    with tf.control_dependencies([received]):
        wire = tf.zeros([0], tf.int32)
    if mine:
        others_means = parts.decode(
            tf.reshape(received, [ranks - 1, splits[rank]]), [piece.elements for piece in mine]
        )
        # The owner's own gradient was not encoded. The residual of encoding the mean goes into its
        # memory of that gradient, in whose units it is `ranks` times as large (decision 40).
        own_means = [
            mean * ((ranks - 1) / ranks) + values(piece) * (1 / ranks)
            for mean, piece in zip(others_means, mine, strict=True)
        ]
        wire, owned_memories, lost_again = nodes.encode(own_means, rows(mine, 1 / ranks))
        new += [[row * ranks for row in of_piece] for of_piece in owned_memories]
        lost += lost_again
    joined = by.gather(wire, [size // 4 for size in shares.means_bytes], number)
    pieces = [piece for of_owner in shares.pieces for piece in of_owner]
    decoded = nodes.decode(joined[None], [piece.elements for piece in pieces])
    means = [
        tf.concat(
            [mean for piece, mean in zip(pieces, decoded, strict=True) if piece.tensor == at], 0
        )
        for at in range(len(vectors))
    ]
    return means, _memories_of([*outgoing, *mine], new, nodes.codec, vectors) if new else [], lost


def _memories_of(
    pieces: Sequence[Piece], rows_of_pieces: Memories, codec: FFTCodec, vectors: Sequence[Any]
) -> Memories:
    """Assemble the tensors' memories, by codec section, from the rows of their pieces."""
    # This rank's own pieces and those sent to owners cover each tensor completely.
    ordered = sorted(zip(pieces, rows_of_pieces, strict=True), key=lambda pair: pair[0].start)
    sizes = [int(vector.shape[0]) for vector in vectors]
    memories: list[Memories] = [[[] for _ in codec.sections(n)] for n in sizes]
    for piece, rows in ordered:
        sections = sections_in(piece, codec, sizes[piece.tensor])
        for (number, _), part in zip(sections, rows, strict=True):
            memories[piece.tensor][number].append(part)
    return [[tf.concat(parts, 0) for parts in of_tensor] for of_tensor in memories]
