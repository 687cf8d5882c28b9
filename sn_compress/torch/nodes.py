"""Hierarchical process groups of torch: collectives within a node, and between nodes.

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
    """Groups of this node's ranks, and of the ranks with the same local number in each node.

    layout : of the ranks of `collectives`; all of them create this at once

    Attributes
    ----------
    inside, between : the collectives of these two groups
    """

    def __init__(self, collectives: Collectives, layout: NodeLayout) -> None:
        super().__init__(layout, collectives.rank)
        inside, between = _groups(collectives.group or dist.group.WORLD, layout, collectives.rank)
        self.inside, self.between = Collectives(inside), Collectives(between)
        self.inside.waiting = self.between.waiting = collectives.waiting

    def sum(self, gradients: Sequence[Gradient]) -> NodeSum:
        """Return the sum of gradients of one dtype and device, not started yet."""
        return NodeSum(self, gradients)


# By parent group. Created once, because each group has its own threads and connections.
_groups_of: WeakKeyDictionary[Any, tuple[Any, Any]] = WeakKeyDictionary()


def _groups(group: Any, layout: NodeLayout, rank: int) -> tuple[Any, Any]:
    """Return the process groups inside a rank's node and between nodes; creating them blocks."""
    if group not in _groups_of:
        node, number = layout.place(rank)
        # new_group takes global ranks.
        numbers = dist.get_process_group_ranks(group)
        # Only members synchronize, because the group may lack some ranks of the program. Use the
        # group's timeout: by default ranks would wait half an hour for one that was killed.
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
    """A reduce-scatter of gradients to their owners in the node, and the all-gather of the means.

    Call `scatter`, `gradients`, `gather`, `finish` in this order, on all ranks of the node.
    """

    def __init__(self, groups: NodeGroups, gradients: Sequence[Gradient]) -> None:
        self._groups, self.shard = groups, Shard(groups, gradients)
        self._work: tuple[dist.Work, torch.Tensor] | None = None
        self._sizes: Sequence[int] = ()

    def scatter(self) -> None:
        """Start sending each owner its gradients."""
        shard, peers = self.shard, self._groups.layout.size - 1
        self._begin(self._waiting(), self._of_others(), [shard.mine] * peers, shard.scatter_bytes)

    def gradients(self) -> list[Gradient]:
        """Wait for and return the node's mean of the gradients this rank owns."""
        return self.shard.gradients(self._wait())

    def gather(self) -> None:
        """Start sending the current means to all ranks of the node."""
        shard, peers = self.shard, self._groups.layout.size - 1
        of_others = self._of_others()
        # A single tensor is received in place.
        waiting = self._waiting()
        into = waiting[0] if len(waiting) == 1 else None
        sizes = [shard.mine] * peers
        self._begin([shard.values] * peers, sizes, of_others, shard.gather_bytes, into)

    def finish(self) -> None:
        """Write all owners' means into the flat tensor."""
        self.shard.finish(self._wait())

    def _waiting(self) -> list[torch.Tensor]:
        """Return the gradients that others own."""
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
        """Start exchanging words with the other ranks of the node."""
        number = self._groups.number
        to, of = ([*sizes[:number], 0, *sizes[number:]] for sizes in (to_others, of_others))
        sent = join(words) if words else self.shard.none
        self._work, self._sizes = self._groups.inside.all_to_all(sent, to, of, into), of_others
        self._groups.sent_bytes += nbytes

    def _wait(self) -> list[torch.Tensor]:
        """Wait for and return the words of each other rank."""
        assert self._work is not None
        work, self._work = self._work, None
        return split(self._groups.inside.result(*work), self._sizes)
