"""Gradients in 16 or 8 bits that are summed in float32: by an all-to-all and a gather.

A ring all-reduce of 16-bit floats rounds the sum at each rank that it passes. Here the elements of
a bucket are divided among the ranks. Each casts its gradients and sends every owner its share (an
all-to-all), the owner adds the shares of all ranks in float32, in order of rank, casts the mean,
and all gather the means: as many bytes as in a ring, for one rounding of each gradient and one of
the mean. An owner rounds its own share, too, so that the mean does not depend on who owns what.

Of fp8 both rounding errors are remembered, that of the mean by its owner, times the number of
ranks: the mean over the ranks of what is sent and what is remembered stays that of the gradients.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

from ..arrays import Array, asarray_like, device_of, is_used, namespace, put_all, split
from ..collective import Gradient
from ..ops.casts import Cast
from ..report import PayloadStats
from .feedback import ErrorFeedback


class CastBucket:
    """Gradients that travel together, averaged in their place in two rounds.

    Parameters
    ----------
    cast : of gradients and means
    ranks, rank : how many there are, and the number of this one
    feedback : None to remember nothing
    looks : look for gradients of zeros, whose memory must not travel; this waits for a device

    Attributes
    ----------
    parts_bytes : of each owner, what each of the others sends it
    means_bytes : of each owner, what it sends on
    checks : none, as there is no checksum, like in plain all-reduces
    """

    checks = ()

    def __init__(
        self,
        cast: Cast,
        gradients: Sequence[Gradient],
        *,
        ranks: int,
        rank: int,
        feedback: ErrorFeedback | None,
        looks: bool,
    ) -> None:
        self.gradients, self._cast, self._ranks, self._rank = gradients, cast, ranks, rank
        self._feedback, self._looks = feedback, looks
        self._like = gradients[0].values
        # Each gradient begins a block of fp8, or two layers would share a scale. Shares are whole
        # blocks, too, as a block is encoded by one rank.
        self._sizes = [cast.padded(gradient.elements) for gradient in gradients]
        blocks = sum(self._sizes) // cast.block
        self._cuts = [blocks * owner // ranks * cast.block for owner in range(ranks + 1)]
        shares = (self._cuts[owner + 1] - self._cuts[owner] for owner in range(ranks))
        self.parts_bytes = self.means_bytes = tuple(map(cast.nbytes, shares))
        self._share = slice(self._cuts[rank], self._cuts[rank + 1])
        self._memories: list[Array] = []  # of each gradient that has a name
        self._unsent: Array = None  # the same of all blocks, float32; None if nothing is remembered

    def begin(self) -> Array:
        """Return this rank's parts of the others' shares, [bytes] uint8, in order of rank."""
        values = self._cast.room(sum(self._sizes), self._like)
        put_all(self._pieces(values), [gradient.values for gradient in self.gradients])
        if self._feedback is not None:
            words = self._remembering(values, self._feedback)
        else:
            words = self._cast.encode(values)
        start, stop = (self._cast.nbytes(at) for at in (self._share.start, self._share.stop))
        self._mine = words[start:stop]
        return namespace(words).concat([words[:start], words[stop:]])

    def reduce(self, received: Array) -> Array:
        """Return the means of this rank's share, [bytes] uint8.

        received : [bytes] uint8, the others' parts of this share, in order of rank
        """
        xp, size = namespace(self._like), self.parts_bytes[self._rank]
        parts = split(received, [size] * (self._ranks - 1)) if self._ranks > 1 else []
        elements = self._share.stop - self._share.start
        mean = xp.zeros(elements, dtype=xp.float32, device=device_of(self._like))
        # In order of rank, whoever owns the share: float32 sums depend on the order.
        for part in (*parts[: self._rank], self._mine, *parts[self._rank :]):
            mean += self._cast.decode(part)
        mean /= self._ranks
        words = self._cast.encode(mean)
        if self._unsent is not None:
            # Times the ranks: what one rank remembers has a ranks-th part in a later mean.
            lost = (mean - self._cast.decode(words)) * self._ranks
            self._unsent[self._share] += xp.where(xp.isfinite(lost), lost, 0)
            if self._memories:
                put_all(self._memories, self._named(self._unsent))
        return words

    def end(self, received: Array) -> None:
        """Write the means into the gradients.

        received : [bytes] uint8, of all owners in their order
        """
        means = self._pieces(self._cast.decode(received))
        put_all([gradient.values for gradient in self.gradients], means)

    def stats(self) -> list[PayloadStats]:
        """Return for each gradient the bytes that this rank sends: others' shares, own means."""
        return [PayloadStats(self._cast.nbytes(n), 0, None, None, "cast") for n in self._sizes]

    def _remembering(self, values: Array, feedback: ErrorFeedback) -> Array:
        """Encode the values plus their residuals of earlier steps; store the new residuals."""
        xp, held = namespace(values), self._cast.room(sum(self._sizes), self._like)
        for gradient in self.gradients:
            if gradient.name is not None:
                # The codec itself works on the host and leaves the memory on it.
                memory = feedback.memory_of(gradient.name, gradient.values)
                placed = [asarray_like(part, gradient.values) for part in memory]
                feedback.replace(gradient.name, placed)
                self._memories += placed
        if self._memories:
            put_all(self._named(held), self._memories)
        # The memory of an unused parameter neither travels nor changes: see payloads.encode.
        adds = held * feedback.decay
        waits = [self._looks and not is_used(gradient.values) for gradient in self.gradients]
        for piece in compress(self._pieces(adds), waits):
            piece[...] = 0
        values += adds
        words = self._cast.encode(values)
        unsent = values - self._cast.decode(words)
        # Where a gradient is NaN or Inf the mean is, too: the step is not applied.
        self._unsent = xp.where(xp.isfinite(unsent), unsent, held)
        both = zip(self._pieces(self._unsent), self._pieces(held), strict=True)
        for piece, before in compress(both, waits):
            piece[...] = before
        return words

    def _named(self, flat: Array) -> list[Array]:
        """The pieces of gradients that have a name."""
        return list(compress(self._pieces(flat), [g.name is not None for g in self.gradients]))

    def _pieces(self, flat: Array) -> list[Array]:
        """Views of each gradient's elements, without padding, in a vector of all blocks."""
        pieces = zip(split(flat, self._sizes), self.gradients, strict=True)
        return [piece[: gradient.elements] for piece, gradient in pieces]
