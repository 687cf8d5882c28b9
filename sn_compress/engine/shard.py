"""The gradients that each rank of a node owns, and their mean over the node.

A rank sends each owner the gradients that it owns, `parts`. An owner averages what it receives to
the node's mean, which is exchanged between nodes, and sends the result to the ranks of its node.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays import Array, join, namespace, put_all, split
from ..collective import Gradient, dtype_name
from .hierarchy import Place


def wide(values: Array) -> Any:
    """Return the dtype in which values are summed: float32 for half precision, else their own."""
    half = dtype_name(values) in ("float16", "bfloat16")
    return namespace(values).float32 if half else values.dtype


class Shard:
    """Gradients of one dtype on one device, by owner; their values become the means.

    Attributes
    ----------
    sizes : elements owned by each rank of the node; `mine` is this rank's number
    values : [mine], the node's means that this rank owns, concatenated
    """

    def __init__(self, place: Place, gradients: Sequence[Gradient]) -> None:
        self.place = place
        owned: list[list[Gradient]] = [[] for _ in range(place.layout.size)]
        for gradient in gradients:
            owned[place.owners.of(str(gradient.name), gradient.elements)].append(gradient)
        self._owned, like = owned, gradients[0].values
        self.sizes = [sum(gradient.elements for gradient in of_one) for of_one in owned]
        self.mine = self.sizes[place.number]
        self.dtype, self.none = like.dtype, like[:0]
        self._itemsize: int = like.dtype.itemsize

    @property
    def owned(self) -> list[Gradient]:
        """Gradients that this rank owns."""
        return self._owned[self.place.number]

    @property
    def parts(self) -> list[list[Array]]:
        """Values of this rank's gradients, by the rank of the node that owns them."""
        return [[gradient.values for gradient in of_one] or [self.none] for of_one in self._owned]

    @property
    def scatter_bytes(self) -> int:
        """Bytes that this rank sends to owners of its node."""
        return (sum(self.sizes) - self.mine) * self._itemsize

    @property
    def gather_bytes(self) -> int:
        """Bytes that this rank sends, as an owner, to the others of its node."""
        return (self.place.layout.size - 1) * self.mine * self._itemsize

    def gradients(self, received: Sequence[Array]) -> list[Gradient]:
        """Return the node's means of what this rank owns; in place if that is a single tensor.

        received : [mine] values from each other rank of the node, in order; overwritten
        """
        if not self.owned:
            self.values = self.none
            return []
        # In rank order, so that runs are reproducible. Nodes need not use the same order: all ranks
        # receive what the owner computes.
        xp = namespace(self.none)
        single = wide(self.none)
        total = xp.astype(join([gradient.values for gradient in self.owned]), single, copy=False)
        before, after = received[: self.place.number], received[self.place.number :]
        # `total` may be this rank's gradient itself, which is summed into in place. So the ranks
        # before this one are summed first, and added to it: a + b is b + a.
        if before:
            first = xp.astype(before[0], single, copy=False)
            for values in before[1:]:
                first += values
            total += first
        for values in after:
            total += values
        if self.owned[0].is_float:
            total /= self.place.layout.size
        else:  # integers, which libraries do not divide in place
            total = total / self.place.layout.size
        self.values = xp.astype(total, self.dtype, copy=False)
        views = split(self.values, [gradient.elements for gradient in self.owned])
        pairs = zip(self.owned, views, strict=True)
        return [Gradient(gradient.name, gradient.shape, view) for gradient, view in pairs]

    def finish(self, means: Sequence[Array]) -> None:
        """Write the means into the gradients.

        means : final `values` from each other rank of the node, in order
        """
        all_means = [*means[: self.place.number], self.values, *means[self.place.number :]]
        for of_one, mean in zip(self._owned, all_means, strict=True):
            # The values of a single tensor may have been received in place.
            if of_one and mean is not of_one[0].values:
                means_of = split(mean, [gradient.elements for gradient in of_one])
                put_all([gradient.values for gradient in of_one], means_of)
