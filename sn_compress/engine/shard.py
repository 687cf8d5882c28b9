"""What of some gradients each rank of a node owns, and the node's mean of it.

A rank hands each owner the gradients that it owns, `parts`; an owner makes the node's mean of what
comes of all of them, which is exchanged between nodes; and it hands out what has become of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from ..arrays import Array, join, namespace, put_all, split
from ..collective import Gradient, dtype_name
from .hierarchy import Place


def wide(values: Array) -> Any:
    """The dtype in which such values are summed: single precision where theirs is less."""
    half = dtype_name(values) in ("float16", "bfloat16")
    return namespace(values).float32 if half else values.dtype


class Shard:
    """Of gradients of one dtype on one device, whose values become the means.

    Attributes
    ----------
    sizes : of each owner, the elements of what it owns; `mine` are this rank's
    values : [mine], the node's means that this rank owns, one behind the other
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
        """What this rank sends to others, for the node's means to be made."""
        return (sum(self.sizes) - self.mine) * self._itemsize

    @property
    def gather_bytes(self) -> int:
        """What this rank sends to others, for the means to be handed out."""
        return (self.place.layout.size - 1) * self.mine * self._itemsize

    def gradients(self, received: Sequence[Array]) -> list[Gradient]:
        """Return the node's means of what this rank owns; in place if that is one tensor.

        received : [mine] values of each other rank of the node, in order; overwritten
        """
        if not self.owned:
            self.values = self.none
            return []
        # In rank order, half precision in single precision. Nodes may sum in different orders: all
        # ranks receive what the owner computes.
        xp = namespace(self.none)
        single = wide(self.none)
        total = xp.astype(join([gradient.values for gradient in self.owned]), single, copy=False)
        before, after = received[: self.place.number], received[self.place.number :]
        if before:
            first = xp.astype(before[0], single, copy=False)
            for values in before[1:]:
                first += values
            total += first
        for values in after:
            total += values
        if self.owned[0].is_float:
            total /= self.place.layout.size
        else:
            total = total / self.place.layout.size
        self.values = xp.astype(total, self.dtype, copy=False)
        views = split(self.values, [gradient.elements for gradient in self.owned])
        pairs = zip(self.owned, views, strict=True)
        return [Gradient(gradient.name, gradient.shape, view) for gradient, view in pairs]

    def finish(self, means: Sequence[Array]) -> None:
        """Write the means into the gradients.

        means : final `values` of each other rank of the node, in order
        """
        all_means = [*means[: self.place.number], self.values, *means[self.place.number :]]
        for of_one, mean in zip(self._owned, all_means, strict=True):
            if of_one and mean is not of_one[0].values:
                means_of = split(mean, [gradient.elements for gradient in of_one])
                put_all([gradient.values for gradient in of_one], means_of)
