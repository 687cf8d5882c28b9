"""A process group of torch by nodes: sums inside them, and the group between them.

See `engine/hierarchy.py`. What nodes are is asked of all ranks, once: a rank is on the node of its
host and, under torchrun, of its agent (GROUP_RANK), which tells nodes apart that share a host name.
"""

from __future__ import annotations

import hashlib
import os
import socket
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any
from weakref import WeakKeyDictionary

import numpy as np
import torch
import torch.distributed as dist

from ..collective import Gradient
from ..engine.hierarchy import NodeLayout, Owners, layout_of
from .layout import BucketSlice
from .process_group import Collectives

_WIDE = {torch.float16: torch.float32, torch.bfloat16: torch.float32}


def node_id() -> int:
    """That of the node this process is on, the same for all of its ranks."""
    name = f"{socket.gethostname()} {os.environ.get('GROUP_RANK', '')}"
    return int.from_bytes(hashlib.sha256(name.encode()).digest()[:7], "big")


def find_layout(total: Callable[[str, Any], Any], *, rank: int, ranks: int) -> NodeLayout | str:
    """The layout of a group's nodes, or why it has none, the same on every rank; blocks."""
    ids = np.zeros(ranks, np.int64)
    ids[rank] = node_id()
    return layout_of([int(each) for each in total("nodes", ids)])


class NodeGroups:
    """Of one group: the ranks of this node, and the rank of the same number in each node.

    layout : of the ranks of `collectives`, on all of which this is made at once

    Attributes
    ----------
    inside, between : their collectives
    owners : who sums which tensor inside the node
    sent_bytes : by this rank to others of its node so far
    """

    def __init__(self, collectives: Collectives, layout: NodeLayout) -> None:
        self.layout = layout
        self.node, self.number = layout.place(collectives.rank)
        self.owners = Owners(layout.size)
        self.sent_bytes = 0
        inside, between = _groups(collectives.group or dist.group.WORLD, layout, collectives.rank)
        self.inside, self.between = Collectives(inside), Collectives(between)
        self.inside.waiting = self.between.waiting = collectives.waiting


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


class Shard:
    """What of a flat tensor of gradients this rank owns: it is summed here, and handed out.

    Used in this order: `scatter`, `gradients`, `gather`, `finish`, each on all ranks of the node.
    """

    def __init__(
        self, groups: NodeGroups, flat: torch.Tensor, parts: Sequence[BucketSlice]
    ) -> None:
        self._groups, self._flat = groups, flat
        owned: list[list[BucketSlice]] = [[] for _ in range(groups.layout.size)]
        for part in parts:
            owned[groups.owners.of(part.name, part.elements)].append(part)
        self._owned = owned
        self._sizes = [sum(part.elements for part in of_one) for of_one in owned]
        self._begun: tuple[dist.Work, torch.Tensor] | None = None

    def _by_owner(self) -> list[torch.Tensor]:
        return [part.of(self._flat) for of_one in self._owned for part in of_one]

    def scatter(self) -> None:
        """Begin to hand each owner its gradients."""
        groups, size = self._groups, self._groups.layout.size
        mine = self._sizes[groups.number]
        words = torch.cat(self._by_owner())
        self._begun = groups.inside.all_to_all(words, self._sizes, [mine] * size)
        groups.sent_bytes += (words.numel() - mine) * words.element_size()

    def gradients(self) -> list[Gradient]:
        """The node's mean of what this rank owns, once it is here."""
        came = self._wait()
        size = self._groups.layout.size
        # In order of the ranks, and in single precision where it is less: a sum of its own order
        # in each node would do as well, as all ranks get what the owner makes of it.
        wide = came.view(size, self._sizes[self._groups.number]).to(
            _WIDE.get(came.dtype, came.dtype)
        )
        self._mean = (wide.sum(0) / size).to(came.dtype)
        mine = self._owned[self._groups.number]
        views = self._mean.split([part.elements for part in mine])
        return [
            Gradient(part.name, part.shape, view) for part, view in zip(mine, views, strict=True)
        ]

    @property
    def elsewhere(self) -> list[str]:
        """Names of the gradients that other ranks of the node own."""
        mine = self._groups.number
        return [p.name for at, of_one in enumerate(self._owned) if at != mine for p in of_one]

    @property
    def values(self) -> torch.Tensor:
        """All gradients that this rank owns, one behind the other."""
        return self._mean

    def gather(self) -> None:
        """Begin to hand out what `values` are now."""
        groups = self._groups
        self._begun = groups.inside.gather(self._mean, self._sizes)
        others = groups.layout.size - 1
        groups.sent_bytes += others * self._mean.numel() * self._mean.element_size()

    def finish(self) -> None:
        """Write all owners' means into the flat tensor."""
        came = self._wait()
        views = self._by_owner()
        for view, mean in zip(views, came.split([view.numel() for view in views]), strict=True):
            view.copy_(mean)

    def _wait(self) -> torch.Tensor:
        assert self._begun is not None
        begun, self._begun = self._begun, None
        return self._groups.inside.result(*begun)
