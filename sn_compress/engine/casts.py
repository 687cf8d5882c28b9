"""Gradients in 16 or 8 bits, summed in float32 by an all-to-all and an all-gather.

A ring all-reduce of 16-bit floats rounds the sum at every rank it passes. Here the elements of a
bucket are divided among the ranks. Each rank casts its gradients and sends every owner its share
(an all-to-all); the owner sums the shares of all ranks in float32, in rank order, and casts the
mean; and all gather the means. That is as many bytes as in a ring, with a single rounding of each
gradient and of the mean. An owner rounds its own share as well, so that the mean does not depend on
who owns what.

For fp8 both rounding errors go to the error memory, that of the mean at its owner, times the number
of ranks: so the mean over the ranks of what is sent and remembered is that of the gradients.
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
    """Gradients that travel together, averaged in place in two rounds.

    Parameters
    ----------
    cast : for gradients and means
    ranks, rank : number of ranks, and the number of this one
    feedback : None for no error feedback
    looks : detect zero gradients, whose memory must not be sent; this waits for a device

    Attributes
    ----------
    parts_bytes : for each owner, the bytes that each other rank sends it
    means_bytes : for each owner, the bytes that it sends to all
    checks : empty, as there is no checksum, like in plain all-reduces
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
        # Each gradient starts a new fp8 block, or two layers would share a scale. Shares consist of
        # whole blocks, as a block is encoded by one rank.
        self._sizes = [cast.padded(gradient.elements) for gradient in gradients]
        blocks = sum(self._sizes) // cast.block
        self._cuts = [blocks * owner // ranks * cast.block for owner in range(ranks + 1)]
        shares = (self._cuts[owner + 1] - self._cuts[owner] for owner in range(ranks))
        self.parts_bytes = self.means_bytes = tuple(map(cast.nbytes, shares))
        self._share = slice(self._cuts[rank], self._cuts[rank + 1])
        self._memories: list[Array] = []  # of each gradient with a name
        self._unsent: Array = None  # residuals of all blocks, float32; None without feedback

    def begin(self) -> Array:
        """Return this rank's parts of the others' shares, [bytes] uint8, in rank order."""
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

        received : [bytes] uint8, the others' parts of this share, in rank order
        """
        xp, size = namespace(self._like), self.parts_bytes[self._rank]
        parts = split(received, [size] * (self._ranks - 1)) if self._ranks > 1 else []
        elements = self._share.stop - self._share.start
        mean = xp.zeros(elements, dtype=xp.float32, device=device_of(self._like))
        # In rank order, whoever owns the share, as float32 sums depend on the order.
        for part in (*parts[: self._rank], self._mine, *parts[self._rank :]):
            mean += self._cast.decode(part)
        mean /= self._ranks
        words = self._cast.encode(mean)
        if self._unsent is not None:
            # Times the number of ranks: one rank's residual enters a later mean divided by that.
            lost = (mean - self._cast.decode(words)) * self._ranks
            self._unsent[self._share] += xp.where(xp.isfinite(lost), lost, 0)
            if self._memories:
                put_all(self._memories, self._named(self._unsent))
        return words

    def end(self, received: Array) -> None:
        """Write the means into the gradients.

        received : [bytes] uint8, from all owners, in order
        """
        means = self._pieces(self._cast.decode(received))
        put_all([gradient.values for gradient in self.gradients], means)

    def stats(self) -> list[PayloadStats]:
        """Return the bytes that this rank sends for each gradient: others' shares, own means."""
        return [PayloadStats(self._cast.nbytes(n), 0, None, None, "cast") for n in self._sizes]

    def _remembering(self, values: Array, feedback: ErrorFeedback) -> Array:
        """Encode the values plus their residuals of earlier steps; store the new residuals."""
        xp, old = namespace(values), self._cast.room(sum(self._sizes), self._like)
        for gradient in self.gradients:
            if gradient.name is not None:
                # The codec works on the host and leaves the memory there.
                memory = feedback.memory_of(gradient.name, gradient.values)
                placed = [asarray_like(part, gradient.values) for part in memory]
                feedback.replace(gradient.name, placed)
                self._memories += placed
        if self._memories:
            put_all(self._named(old), self._memories)
        # The memory of an unused parameter is not sent and does not change: see payloads.encode.
        adds = old * feedback.decay
        waits = [self._looks and not is_used(gradient.values) for gradient in self.gradients]
        for piece in compress(self._pieces(adds), waits):
            piece[...] = 0
        values += adds
        words = self._cast.encode(values)
        unsent = values - self._cast.decode(words)
        # If a gradient is NaN or Inf, so is the mean, and the step is not applied.
        self._unsent = xp.where(xp.isfinite(unsent), unsent, old)
        both = zip(self._pieces(self._unsent), self._pieces(old), strict=True)
        for piece, before in compress(both, waits):
            piece[...] = before
        return words

    def _named(self, flat: Array) -> list[Array]:
        """Return the pieces of gradients that have a name."""
        return list(compress(self._pieces(flat), [g.name is not None for g in self.gradients]))

    def _pieces(self, flat: Array) -> list[Array]:
        """Return views of each gradient's elements, without padding, in a vector of all blocks."""
        pieces = zip(split(flat, self._sizes), self.gradients, strict=True)
        return [piece[: gradient.elements] for piece, gradient in pieces]
