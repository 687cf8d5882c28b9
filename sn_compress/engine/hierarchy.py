"""Hierarchical exchange: sums gradients within a node, exchanges them compressed between nodes.

Links within a node are fast, but its ranks share a network card. So the ranks of a node first sum
their gradients, each tensor on one of them, its *owner*; then owners with the same local number on
all nodes exchange their tensors as if they were all the ranks; and each sends its means to the
other ranks of its node. The card carries a single exchange rather than one per rank, and a rank
encodes only its share. Tensors are never split: low rank needs whole matrices, and for a shared
card it does not matter which rank sends (docs/decisions/0098).
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
    """Which ranks are on which node; all nodes have the same number of ranks.

    nodes : the ranks of each node, in order; nodes are in order of their first rank
    """

    nodes: tuple[tuple[int, ...], ...]

    @property
    def size(self) -> int:
        """Number of ranks in a node."""
        return len(self.nodes[0])

    def place(self, rank: int) -> tuple[int, int]:
        """Return the number of a rank's node, and the rank's local number in it."""
        for number, ranks in enumerate(self.nodes):
            if rank in ranks:
                return number, ranks.index(rank)
        raise ValueError(f"rank {rank} is on none of the nodes {self.nodes}")

    def across(self) -> tuple[tuple[int, ...], ...]:
        """Return the ranks with each local number, in order of the nodes."""
        return tuple(zip(*self.nodes, strict=True))


def layout_of(ids: Sequence[int]) -> NodeLayout | str:
    """Return the layout, given the id of each rank's node; or the reason why there is none.

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
    """Return the layout, or the reason why there is none, the same on every rank; blocks.

    node : name of this rank's node
    """
    # A sum in which each rank has its own slot is a gather; 7 bytes, as int64 has a sign.
    ids = np.zeros(ranks, np.int64)
    ids[rank] = int.from_bytes(hashlib.sha256(node.encode()).digest()[:7], "big")
    return layout_of([int(node_id) for node_id in total("sn.nodes", ids)])


def may_have_nodes(settings: Settings, process_set: Any) -> bool:
    """Whether ranks of a Horovod process set may use a hierarchy; the same on all ranks."""
    elastic = os.environ.get("HOROVOD_ELASTIC") == "1"  # nodes would join and leave
    # A tuner compares with Horovod's own all-reduce of all ranks. Hierarchical collectives involve
    # all ranks (docs/decisions/0098), so other process sets have none. Fewer than four ranks cannot
    # be two nodes of two.
    return settings.hierarchy == "auto" and not (
        settings.tune or elastic or process_set.process_set_id or process_set.size() < 4
    )


def horovods_layout(total: Total, process_set: Any) -> NodeLayout | None:
    """Return the layout of Horovod's ranks; if None, rank 0 logs the reason; blocks.

    Ranks with the same host name, as passed to horovodrun, are on one node.
    """
    # The launcher's name: a machine listed both by name and by address counts as two nodes.
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
    """Assigns each tensor to one of a node's ranks; the same on all nodes, and never changes.

    When a tensor is first seen it goes to the rank that owns the fewest elements so far. All ranks
    see tensors in the same order.
    """

    size: int
    of_name: dict[str, int] = field(default_factory=dict)
    _elements: Counter[int] = field(default_factory=Counter)

    def of(self, name: str, elements: int) -> int:
        """Return the owner's local number in its node."""
        if name not in self.of_name:
            owner = min(range(self.size), key=self._elements.__getitem__)
            self.of_name[name] = owner
            self._elements[owner] += elements
        return self.of_name[name]


class Place:
    """A rank's position in a layout, and the owners of its node's tensors.

    Attributes
    ----------
    node, number : the number of its node, and the rank's local number in it
    owners : of tensors, by local number
    sent_bytes : bytes sent by this rank to others of its node so far
    """

    def __init__(self, layout: NodeLayout, rank: int) -> None:
        self.layout, self.rank = layout, rank
        self.node, self.number = layout.place(rank)
        self.owners = Owners(layout.size)
        self.sent_bytes = 0

    def owned_names(self, tensors: Iterable[tuple[str, int]]) -> list[str]:
        """Return the names of the tensors, given as (name, elements), that this rank owns."""
        owners = [(name, self.owners.of(name, elements)) for name, elements in tensors]
        return [name for name, owner in owners if owner == self.number]

    def state(self) -> dict[str, Any]:
        """Return the entries for a saved state."""
        nodes = [list(ranks) for ranks in self.layout.nodes]
        return {"nodes": nodes, "owners": dict(self.owners.of_name)}

    def report(self, steps: int) -> dict[str, float]:
        """Return the entries for a report."""
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

    states : the one saved on this rank, or those of all ranks, in rank order
    tensors : see Place.owned_names

    Raises CompressError if one state is not enough.
    """
    same_nodes = not saved_elsewhere(states[0], place)
    if place is None:
        return None if same_nodes else whole_states(states)
    # With the same nodes, a rank needs the state of an owner with its local number, from any node.
    if same_nodes:
        at = states[0]["rank"]
        if len(states) > 1 or place.layout.place(at)[1] == place.number:
            place.owners.of_name.update(states[0]["hierarchy"]["owners"])
            return None
    names = set(place.owned_names(tensors))
    # Each node starts from the mean of all memories, which preserves the mean over the nodes.
    return [state_of(saved_state, names) for saved_state in whole_states(states)]


def loadable(states: Any, ranks: int) -> Any:
    """Convert a saved state, or all ranks', to load on `ranks` ranks before nodes are known."""
    first = states[0] if isinstance(states, list | tuple) and len(states) > 1 else None
    if isinstance(first, dict) and first.get("hierarchy") and first["ranks"] != ranks:
        return whole_states(states)
    return states


def whole_states(states: Sequence[Mapping[str, Any]]) -> list[dict[str, Any]]:
    """Merge the states of all ranks into one per node, with all tensors, as without hierarchy.

    Raises CompressError unless these are the states of all ranks, in rank order.
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
    """Complete the root's state with the tensors that other ranks of its node own.

    mine : this rank's state; gather : collects an object from every rank
    """
    keys = [key for keys in _BY_TENSOR.values() for key in keys if key in state]
    owned = {key: {n: v for n, v in mine[key].items() if n not in state[key]} for key in keys}
    # Owners with the same local number are equal on all nodes, so it does not matter whose is kept.
    for other in gather(owned):
        state = state | {key: other[key] | state[key] for key in keys}
    return state


# The keys in each part of an engine's state whose values are dicts by tensor name.
_BY_TENSOR = {"feedback": ("memory",), "shared": ("tensors", "left_out")}


def _changed(state: Mapping[str, Any], entries: Callable[[str, str], Any]) -> dict[str, Any]:
    """Replace a state's entries by tensor with entries(part, key), for each key of _BY_TENSOR."""
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
