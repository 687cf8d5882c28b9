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

from ..arrays import join, split
from ..collective import Gradient
from ..engine.hierarchy import NodeLayout, Place
from ..engine.shard import Shard
from .process_group import Collectives


class NodeGroups(Place):
    """A group's ranks by nodes: those of this node, and the rank of the same number in each node.

    layout : of the ranks of `collectives`; all of them create this at once

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
        """Gradients of one dtype on one device, on their way to owners and back."""
        return NodeSum(self, gradients)


# By group: created once, as each group has threads and connections of its own.
_groups_of: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()


def _groups(group: Any, layout: NodeLayout, rank: int) -> tuple[Any, Any]:
    """Return the process groups inside a rank's node and between nodes; creating them blocks."""
    if group not in _groups_of:
        node, number = layout.place(rank)
        # Numbers of the ranks in the program, which groups are made of.
        numbers = dist.get_process_group_ranks(group)
        # Only members synchronize, as a group need not have all ranks of the program. With the
        # group's timeout: by default the others would wait half an hour for a rank that was killed.
        options = {"timeout": _timeout(group), "use_local_synchronization": True}
        inside, between = (
            dist.new_group([numbers[member] for member in members], **options)
            for members in (layout.nodes[node], layout.across()[number])
        )
        _groups_of[group] = inside, between
    return _groups_of[group]


def _timeout(group: Any) -> timedelta:
    device = "cuda" if dist.get_backend(group) == "nccl" else "cpu"
    timeout: timedelta = group._get_backend(torch.device(device)).options._timeout
    return timeout


class NodeSum:
    """A flat tensor of gradients on its way: summed at owners of the node, and handed out again.

    Used in this order: `scatter`, `gradients`, `gather`, `finish`, each on all ranks of the node.
    """

    def __init__(self, groups: NodeGroups, gradients: Sequence[Gradient]) -> None:
        self._groups, self.shard = groups, Shard(groups, gradients)
        self._work: tuple[dist.Work, torch.Tensor] | None = None
        self._sizes: Sequence[int] = ()

    def scatter(self) -> None:
        """Start to send each owner its gradients."""
        shard, peers = self.shard, self._groups.layout.size - 1
        self._begin(self._waiting(), self._of_others(), [shard.mine] * peers, shard.scatter_bytes)

    def gradients(self) -> list[Gradient]:
        """The node's mean of what this rank owns, once it is here."""
        return self.shard.gradients(self._wait())

    def gather(self) -> None:
        """Start to send the current means to all ranks of the node."""
        shard, peers = self.shard, self._groups.layout.size - 1
        of_others = self._of_others()
        # If all of it is one tensor, it is received in place.
        waiting = self._waiting()
        into = waiting[0] if len(waiting) == 1 else None
        sizes = [shard.mine] * peers
        self._begin([shard.values] * peers, sizes, of_others, shard.gather_bytes, into)

    def finish(self) -> None:
        """Write all owners' means into the flat tensor."""
        self.shard.finish(self._wait())

    def _waiting(self) -> list[torch.Tensor]:
        """Gradients that others own."""
        parts = [*self.shard.parts]
        del parts[self._groups.number]
        return [values for part in parts for values in part if len(values)]

    def _of_others(self) -> list[int]:
        number = self._groups.number
        return [size for at, size in enumerate(self.shard.sizes) if at != number]

    def _begin(
        self,
        words: Sequence[torch.Tensor],
        to_others: Sequence[int],
        of_others: Sequence[int],
        nbytes: int,
        into: torch.Tensor | None = None,
    ) -> None:
        """Exchange words with the other ranks of the node; a rank sends itself nothing."""
        number = self._groups.number
        to, of = ([*sizes[:number], 0, *sizes[number:]] for sizes in (to_others, of_others))
        sent = join(words) if words else self.shard.none
        self._work, self._sizes = self._groups.inside.all_to_all(sent, to, of, into), of_others
        self._groups.sent_bytes += nbytes

    def _wait(self) -> list[torch.Tensor]:
        """Return the words of each other rank."""
        assert self._work is not None
        work, self._work = self._work, None
        return split(self._groups.inside.result(*work), self._sizes)
