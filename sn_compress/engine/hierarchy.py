"""Ranks by nodes: gradients are summed inside a node, and exchanged compressed between nodes.

Inside a node the links are fast, and its network card is shared. So the ranks of a node first sum
their gradients, each tensor at one of them, its *owner*; owners of the same number in all nodes
exchange their tensors, as if they were all the ranks there are; and each sends its means to the
others of its node. The card carries one exchange in place of one for each rank, and a rank encodes
its share alone. A tensor is never cut: low rank needs whole matrices, and to a shared card it is
all the same who sends what (docs/decisions/0098).
"""

from __future__ import annotations

import hashlib
import logging
import os
import socket
from collections import Counter
from collections.abc import Callable, Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..consistency import Total
from ..errors import CompressError
from ..settings import Settings

_log = logging.getLogger(__name__)


@dataclass(frozen=True)
class NodeLayout:
    """Which ranks are on which node; all nodes have the same number.

    nodes : the ranks of each, in order; nodes in order of their first rank
    """

    nodes: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Ranks of a node."""
        return len(self.nodes[0])

    def place(self, rank: int) -> tuple[int, int]:
        """The number of a rank's node, and its own number in it."""
        for number, ranks in enumerate(self.nodes):
            if rank in ranks:
                return number, ranks.index(rank)
        raise ValueError(f"rank {rank} is on none of {self.nodes}")

    def across(self) -> tuple[tuple[int, ...], ...]:
        """For each number inside a node, the ranks that have it, in order of the nodes."""
        return tuple(zip(*self.nodes, strict=True))


def layout_of(ids: Sequence[int]) -> NodeLayout | str:
    """The layout of ranks, from the id of the node of each; or why there is no hierarchy.

    >>> layout_of([7, 7, 9, 9]).nodes
    ((0, 1), (2, 3))
    >>> layout_of([7, 7, 7, 9])
    'nodes have 3 and 1 ranks'
    """
    nodes: dict[int, list[int]] = {}
    for rank, node in enumerate(ids):
        nodes.setdefault(node, []).append(rank)
    if len(nodes) == 1:
        return "all ranks are on one node"
    if len(nodes) == len(ids):
        return "each rank is alone on its node"
    sizes = Counter(len(ranks) for ranks in nodes.values())
    if len(sizes) > 1:
        return f"nodes have {' and '.join(map(str, sorted(sizes, reverse=True)))} ranks"
    return NodeLayout(tuple(tuple(ranks) for ranks in nodes.values()))


def find_layout(total: Total, node: str, *, rank: int, ranks: int) -> NodeLayout | str:
    """The layout of all ranks, or why there is no hierarchy, the same on every rank; blocks.

    node : the name of the one that this rank is on
    """
    # A sum in which each rank has a place of its own gathers; of 7 bytes, as int64 has a sign.
    ids = np.zeros(ranks, np.int64)
    ids[rank] = int.from_bytes(hashlib.sha256(node.encode()).digest()[:7], "big")
    return layout_of([int(node_id) for node_id in total("sn.nodes", ids)])


def may_have_nodes(settings: Settings, process_set: Any) -> bool:
    """Whether ranks of a process set of Horovod may go by nodes; the same answer on all."""
    elastic = os.environ.get("HOROVOD_ELASTIC") == "1"  # nodes would come and go
    # A tuner compares with Horovod's own all-reduce of all ranks. By nodes each collective is of
    # all ranks (docs/decisions/0098), so a process set of some has none. Fewer than four ranks are
    # no two nodes of two.
    return settings.hierarchy == "auto" and not (
        settings.tune or elastic or process_set.process_set_id or process_set.size() < 4
    )


def horovods_layout(total: Total, process_set: Any) -> NodeLayout | None:
    """The layout of Horovod's ranks, or None, for which rank 0 logs the reason; blocks.

    Ranks with the same host name, as horovodrun was given it, are on one node.
    """
    # The launcher's name: whoever lists a machine by name and by address asks for two nodes.
    node = os.environ.get("HOROVOD_HOSTNAME") or socket.gethostname()
    rank = process_set.rank()
    layout = find_layout(total, node, rank=rank, ranks=process_set.size())
    if isinstance(layout, NodeLayout):
        return layout
    if rank == 0:
        level = logging.WARNING if layout.startswith("nodes have") else logging.DEBUG
        _log.log(level, "%s: all ranks exchange with all others", layout)
    return None


@dataclass
class Owners:
    """Which of a node's ranks owns each tensor; the same on all nodes, and it never changes.

    When a tensor is first seen it goes to the rank that owns the fewest elements so far. All ranks
    see tensors in the same order.
    """

    size: int
    of_name: dict[str, int] = field(default_factory=dict)
    _elements: Counter[int] = field(default_factory=Counter)

    def of(self, name: str, elements: int) -> int:
        """The owner's number inside its node."""
        if name not in self.of_name:
            owner = min(range(self.size), key=self._elements.__getitem__)
            self.of_name[name] = owner
            self._elements[owner] += elements
        return self.of_name[name]


class Place:
    """Where a rank is in a layout, and the owners of its node's tensors.

    Attributes
    ----------
    node, number : the number of its node, and its own inside
    owners : of tensors, by their numbers inside a node
    sent_bytes : by this rank to others of its node so far
    """

    def __init__(self, layout: NodeLayout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.node, self.number = layout.place(rank)
        self.owners = Owners(layout.size)
        self.sent_bytes = 0

    def owned_names(self, tensors: Iterable[tuple[str, int]]) -> list[str]:
        """Return which tensors this rank owns, of all (name, elements), in their order."""
        owners = [(name, self.owners.of(name, elements)) for name, elements in tensors]
        return [name for name, owner in owners if owner == self.number]

    def state(self) -> dict[str, Any]:
        """What a saved state has of it."""
        nodes = [list(ranks) for ranks in self.layout.nodes]
        return {"nodes": nodes, "owners": dict(self.owners.of_name)}

    def report(self, steps: int) -> dict[str, float]:
        """What a report has of it."""
        nodes = len(self.layout.nodes)
        return {"nodes": nodes, "inside_bytes": self.sent_bytes / max(1, steps)}


def saved_elsewhere(state: Mapping[str, Any], place: Place | None) -> bool:
    """Return whether a state was saved with other nodes than this rank's."""
    saved = state.get("hierarchy")
    return (saved and saved["nodes"]) != (place and place.state()["nodes"])


def states_to_load(
    states: Sequence[Mapping[str, Any]], place: Place | None, tensors: Iterable[tuple[str, int]]
) -> list[dict[str, Any]] | None:
    """Return the states whose mean this rank resumes from; None: from its own, unchanged.

    states : the one that was saved on this rank, or those of all ranks, in order of rank
    tensors : see Place.owned_names

    Raises CompressError where one state is not enough.
    """
    saved = states[0].get("hierarchy")
    if place is None:
        return None if saved is None else whole_states(states)
    # Of the same nodes: a rank needs the state of an owner of its number, on whatever node.
    if saved is not None and saved["nodes"] == place.state()["nodes"]:
        at = states[0]["rank"]
        if len(states) > 1 or place.layout.place(at)[1] == place.number:
            place.owners.of_name.update(saved["owners"])
            return None
    names = set(place.owned_names(tensors))
    # Each node begins with the mean of all memories: the mean over the nodes stays what it was.
    return [state_of(saved_state, names) for saved_state in whole_states(states)]


def loadable(states: Any, ranks: int) -> Any:
    """A saved state, or all ranks', as it can be loaded on so many ranks before nodes are known."""
    first = states[0] if isinstance(states, list | tuple) and len(states) > 1 else None
    if isinstance(first, dict) and first.get("hierarchy") and first["ranks"] != ranks:
        return whole_states(states)
    return states


def whole_states(states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge the states of all ranks into one for each node: with all tensors, as without nodes.

    Raises CompressError unless these are the states of all ranks, in order of rank.
    """
    ranks = [state["rank"] for state in states]
    if not states or ranks != list(range(states[0]["ranks"])):
        raise CompressError(
            f"got the states of ranks {ranks} of {states[0]['ranks'] if states else 0}, which were "
            "saved with other nodes; expected those of all ranks, in order. Load the list of them."
        )
    saved = states[0].get("hierarchy")
    if saved is None:
        return [dict(state) for state in states]
    nodes = saved["nodes"]
    return [
        {**_merged([states[rank] for rank in node]), "ranks": len(nodes), "rank": number}
        for number, node in enumerate(nodes)
    ]


def with_rest(
    state: dict[str, Any], mine: Mapping[str, Any], gather: Callable[[Any], Iterable[Any]]
) -> dict[str, Any]:
    """Complete the state that a root has sent by tensors that other ranks of its node own.

    mine : this rank's state; gather : collects an object of every rank
    """
    keys = [key for keys in _BY_TENSOR.values() for key in keys if key in state]
    owned = {key: {n: v for n, v in mine[key].items() if n not in state[key]} for key in keys}
    # Owners of one number have the same on all nodes, so it does not matter whose is kept.
    for other in gather(owned):
        state = state | {key: other[key] | state[key] for key in keys}
    return state


# The keys, in each part of an engine's state, under which there is an entry for each tensor.
_BY_TENSOR = {"feedback": ("memory",), "shared": ("tensors", "left_out")}


def _changed(state: Mapping[str, Any], entries: Callable[[str, str], Any]) -> dict[str, Any]:
    """Replace what a state has by tensor: entries(part, key) for each key of _BY_TENSOR."""
    parts = {
        part: {**state[part], **{key: entries(part, key) for key in keys}}
        for part, keys in _BY_TENSOR.items()
    }
    return {**state, **parts}


def _merged(states: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    """Merge states whose tensors are disjoint."""
    return _changed(
        states[0], lambda part, key: {n: v for s in states for n, v in s[part][key].items()}
    )


def state_of(state: Mapping[str, Any], names: Collection[str]) -> dict[str, Any]:
    """Return a state restricted to these tensors."""
    return _changed(
        state, lambda part, key: {n: v for n, v in state[part][key].items() if n in names}
    )
