"""A process group of torch by nodes: collectives inside them, and the group between them.

See `engine/hierarchy.py`.
"""

from __future__ import annotations

from collections.abc import Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import torch
import torch.distributed as dist

from ..collective import Gradient
from ..engine.hierarchy import NodeLayout, Place
from ..engine.shard import Shard
from .process_group import Collectives


class NodeGroups(Place):
    """Of one group: the ranks of this node, and the rank of the same number in each node.

    layout : of the ranks of `collectives`, on all of which this is made at once

    Attributes
    ----------
    inside, between : their collectives
    """

    def __init__(self, collectives: Collectives, layout: NodeLayout) -> None:
        super().__init__(layout, collectives.rank)
        inside, between = _groups(collectives.group or dist.group.WORLD, layout, collectives.rank)
        self.inside, self.between = Collectives(inside), Collectives(between)
        self.inside.waiting = self.between.waiting = collectives.waiting

    def sum(self, gradients: Sequence[Gradient]) -> NodeSum:
        """The way of gradients, of one dtype on one device, to owners and back."""
        return NodeSum(self, gradients)


# Of each group that has nodes: made once, as a group has threads and connections of its own.
_made: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()


def _groups(group: Any, layout: NodeLayout, rank: int) -> tuple[Any, Any]:
    """Those of a rank inside its node and between nodes; blocks where they are made."""
    if group not in _made:
        node, number = layout.place(rank)
        # Numbers of the ranks in the program, which groups are made of.
        numbers = dist.get_process_group_ranks(group)
        # On its own members alone, as a group need not be of all ranks of the program; and with its
        # patience, or the others would wait half an hour for a rank that was killed.
        options = {"timeout": _timeout(group), "use_local_synchronization": True}
        inside, between = (
            dist.new_group([numbers[each] for each in members], **options)
            for members in (layout.nodes[node], layout.across()[number])
        )
        _made[group] = inside, between
    return _made[group]


def _timeout(group: Any) -> timedelta:
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    found: timedelta = group._get_backend(torch.device(device)).options._timeout
    return found


class NodeSum:
    """A flat tensor of gradients on its way: summed at owners of the node, and handed out again.

    Used in this order: `scatter`, `gradients`, `gather`, `finish`, each on all ranks of the node.
    """

    def __init__(self, groups: NodeGroups, gradients: Sequence[Gradient]) -> None:
        self._groups, self.shard = groups, Shard(groups, gradients)
        self._begun: tuple[dist.Work, torch.Tensor] | None = None

    def scatter(self) -> None:
        """Begin to hand each owner its gradients."""
        shard, groups = self.shard, self._groups
        words = torch.cat([values for part in shard.parts for values in part])
        of_ranks = [shard.mine] * groups.layout.size
        self._begun = groups.inside.all_to_all(words, shard.sizes, of_ranks)
        groups.sent_bytes += shard.scatter_bytes

    def gradients(self) -> list[Gradient]:
        """The node's mean of what this rank owns, once it is here."""
        size = self._groups.layout.size
        return self.shard.gradients(self._wait().view(size, self.shard.mine))

    def gather(self) -> None:
        """Begin to hand out what the means are now."""
        groups, shard = self._groups, self.shard
        self._begun = groups.inside.gather(shard.values, shard.sizes)
        groups.sent_bytes += shard.gather_bytes

    def finish(self) -> None:
        """Write all owners' means into the flat tensor."""
        self.shard.finish(self._wait().split(self.shard.sizes))

    def _wait(self) -> torch.Tensor:
        assert self._begun is not None
        begun, self._begun = self._begun, None
        return self._groups.inside.result(*begun)
