"""Samples that circulate around a ring of ranks: in the next epoch they are on the next rank.

Ranks with fixed shards see only their own samples. Shuffling all samples would send most of them
across the network at once; here each batch is sent to the next rank while it is being computed on
(Daily et al. 2018). After as many epochs as ranks every sample has been on every rank, and in every
epoch each is used exactly once.

Does no communication itself: a Ring says what to send, and takes what has arrived; `epoch_of` gets
the function that sends.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from math import prod
from typing import Any

import numpy as np
import numpy.typing as npt

from ..codecs.base import Bytes
from ..errors import CompressError, PayloadError
from ..saved import count, held, reading

Array = npt.NDArray[Any]


class Ring:
    """The shard of one rank.

    Parameters
    ----------
    fields : arrays with the samples along their first axis, such as images and labels
    counts : number of samples in every rank's shard, in rank order
    rank : whose shard this is
    batch_size : largest number of samples in a batch
    seed : of the order within each epoch

    Attributes
    ----------
    epoch : number of finished epochs
    steps : batches per epoch, the same on all ranks: smaller shards have smaller batches
    """

    def __init__(
        self,
        fields: Sequence[Array],
        *,
        counts: Sequence[int],
        rank: int,
        batch_size: int,
        seed: int = 0,
    ) -> None:
        lengths = [len(field) for field in fields]
        if not fields or set(lengths) != {counts[rank]}:
            raise CompressError(
                f"got fields of {lengths} samples; expected one field or more, each of "
                f"{counts[rank]} samples, which this rank announced to the others"
            )
        if batch_size < 1 or min(counts) < 1:
            raise CompressError(
                f"batch_size={batch_size} and shards of {list(counts)}; expected 1 or more each"
            )
        self.fields = [np.ascontiguousarray(field) for field in fields]
        # Of all ranks: shards move, so the number this rank receives in an epoch is another's.
        self.counts, self.rank, self.seed = list(counts), rank, seed
        self.epoch = 0
        # From the largest shard, so that no batch exceeds batch_size. All ranks exchange at each
        # step, so all have the same number of steps.
        self.steps = -(-max(counts) // batch_size)
        if min(counts) < self.steps:
            raise CompressError(
                f"shards of {list(counts)} samples make up to {self.steps} batches; expected a "
                "sample for every batch. Make the shards more equal, or batch_size larger."
            )
        self._sample_bytes = [f.itemsize * prod(f.shape[1:]) for f in self.fields]
        # From the largest batch of any rank: all messages have the same size.
        self.wire_bytes = -(-max(counts) // self.steps) * sum(self._sample_bytes)
        self._parts: list[npt.NDArray[np.int64]] = []
        self._arrived: list[list[Array]] = []

    def epoch_of(self, send: Callable[[int, Bytes], Callable[[], Bytes]]) -> Iterator[list[Array]]:
        """Yield the batches of an epoch, each a list of fields; each is sent while it is used.

        An epoch that all ranks abandon at the same step leaves the shards unchanged.

        send : called with step and bytes, starts sending to the next rank; the function it returns
            waits for the previous rank's bytes
        """
        self.begin()
        wait = None
        try:
            for step in range(self.steps):
                batch = self.batch(step)
                # The previous batch was sent while the caller computed on it; only now send the
                # next one, so that at most one is in flight.
                if wait is not None:
                    self.take(step - 1, wait())
                wait = send(step, self.pack(batch))
                yield batch
            assert wait is not None
            # Cleared first: if it raised, `finally` would wait for it a second time.
            last, wait = wait, None
            self.take(self.steps - 1, last())
            self.end()
        finally:
            # The caller abandoned the epoch: complete the exchange that other ranks have started.
            if wait is not None:
                wait()

    def begin(self) -> None:
        """Shuffle the samples for this epoch; discard what an unfinished epoch has received."""
        generator = np.random.default_rng((self.seed, self.epoch, self.rank))
        self._parts = np.array_split(generator.permutation(len(self.fields[0])), self.steps)
        self._arrived = []

    def batch(self, step: int) -> list[Array]:
        """Return the samples of a step, a list of fields."""
        return [field[self._parts[step]] for field in self.fields]

    def pack(self, batch: Sequence[Array]) -> Bytes:
        """Return a batch as bytes for the next rank, [wire_bytes] uint8 on all ranks and steps."""
        wire = np.zeros(self.wire_bytes, np.uint8)
        start = 0
        for field in batch:
            wire[start : start + field.nbytes] = np.frombuffer(field.tobytes(), np.uint8)
            start += field.nbytes
        return wire

    def take(self, step: int, wire: Bytes) -> None:
        """Store, for the next epoch, what the previous rank sent at a step."""
        if wire.size != self.wire_bytes or step != len(self._arrived):
            raise PayloadError(
                f"{wire.size} bytes for step {step}; expected {self.wire_bytes} for step "
                f"{len(self._arrived)}. Check that all ranks iterate the same fields in the same "
                "order."
            )
        count = len(np.array_split(np.arange(self._samples(self.epoch + 1)), self.steps)[step])
        batch, start = [], 0
        for field, size in zip(self.fields, self._sample_bytes, strict=True):
            part = wire[start : start + count * size].tobytes()
            batch.append(np.frombuffer(part, field.dtype).reshape(count, *field.shape[1:]))
            start += count * size
        self._arrived.append(batch)

    def end(self) -> None:
        """End the epoch: the received samples become the shard."""
        if len(self._arrived) != self.steps:
            raise CompressError(
                f"the epoch ended after {len(self._arrived)} of {self.steps} batches had arrived"
            )
        self.fields = [np.concatenate(parts) for parts in zip(*self._arrived, strict=True)]
        self._arrived = []
        self.epoch += 1

    def _samples(self, epoch: int) -> int:
        """Return this rank's number of samples in an epoch; shards move on by one rank each."""
        return self.counts[(self.rank - epoch) % len(self.counts)]

    def state_dict(self) -> dict[str, Any]:
        """Return shard and epoch, as between epochs: an unfinished epoch is not saved."""
        return {"epoch": self.epoch, "fields": [field.copy() for field in self.fields]}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load a saved shard; CompressError, and no change, if it is not one of this ring."""
        with reading("the saved shard"):
            held(state)
            epoch = count(state["epoch"], "epoch")
            mine = self._samples(epoch)
            fields = [np.asarray(field) for field in state["fields"]]
            got = [(f.shape, f.dtype) for f in fields]
            expected = [((mine, *f.shape[1:]), f.dtype) for f in self.fields]
            if got != expected:
                raise CompressError(f"a saved shard of {got}; expected {expected} at that epoch")
        self.fields, self.epoch, self._arrived = fields, epoch, []
