"""What of some gradients each rank of a node owns, and the node's mean of it.

A rank hands each owner the gradients that it owns, `parts`; an owner makes the node's mean of what
comes of all of them, which is exchanged between nodes; and it hands out what has become of it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

from ..collective import Gradient
from ..engine.hierarchy import Place

WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


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
        self.dtype: torch.dtype = like.dtype
        self.device: torch.device = like.device
        self.none = like[:0]

    @property
    def parts(self) -> list[list[torch.Tensor]]:
        """Of this rank's gradients what each rank of the node owns, one behind the other."""
        return [[it.values for it in of_one] or [self.none] for of_one in self._owned]

    @property
    def scatter_bytes(self) -> int:
        """What this rank sends to others, for the node's means to be made."""
        return (sum(self.sizes) - self.mine) * self.dtype.itemsize

    @property
    def gather_bytes(self) -> int:
        """What this rank sends to others, for the means to be handed out."""
        return (self.place.layout.size - 1) * self.mine * self.dtype.itemsize

    def gradients(self, came: Sequence[torch.Tensor] | torch.Tensor) -> list[Gradient]:
        """The node's means of what this rank owns.

        came : of each rank of the node, in order, its values of that, [mine]
        """
        # In this order, and in single precision where it is less: a sum of its own order in each
        # node would do as well, as all ranks get what the owner makes of it.
        wide = WIDE.get(self.dtype, self.dtype)
        total = came[0].to(wide, copy=True)
        for each in came[1:]:
            total += each
        self.values = (total / len(came)).to(self.dtype)
        mine = self._owned[self.place.number]
        views = self.values.split([gradient.elements for gradient in mine])
        return [Gradient(it.name, it.shape, view) for it, view in zip(mine, views, strict=True)]

    def finish(self, means: Sequence[torch.Tensor]) -> None:
        """Write all owners' means into the gradients.

        means : of each owner, in order, what `values` were in the end
        """
        for of_one, mean in zip(self._owned, means, strict=True):
            sizes = [gradient.elements for gradient in of_one]
            for gradient, values in zip(of_one, mean.split(sizes), strict=True):
                gradient.values.copy_(values)
