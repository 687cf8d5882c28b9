"""The state of a walk over a traced graph: which group each value's channels belong to."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from torch import fx

from ..groups import Groups, Tag


class Refusal(Exception):  # noqa: N818 - an answer, which the walk takes, and no error
    """A rule does not know what a call does to channels."""


class Walk(Groups):
    """The state of one walk: tags by node, and the groups."""

    def __init__(self, program: Any) -> None:
        super().__init__()
        signature = program.graph_signature
        self.names: dict[str, str] = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
        }
        self.parameters = set(signature.inputs_to_parameters)
        self.tags: dict[fx.Node, Tag | None] = {}

    def tag(self, node: Any) -> Tag | None:
        return self.tags.get(node) if isinstance(node, fx.Node) else None

    def coarsen(self, tag: Tag, size: int) -> None:
        """Make each `size` neurons in a row one, in all values that hold them."""
        super().coarsen(tag, size)
        for node, other in self._holders(tag):
            self.tags[node] = replace(other, places=size * other.places)

    def cut(self, tag: Tag, parts: int) -> None:
        """Make neurons at the same place of equal parts one; nothing else may read them whole."""
        whole = any(len(node.users) != 1 for node, _ in self._holders(tag))
        if whole or self.group(tag).width % parts:
            raise Refusal("channels that are cut into parts are read whole, too")
        super().cut(tag, parts)

    def _holders(self, tag: Tag) -> list[tuple[fx.Node, Tag]]:
        """Return the values that hold channels of a tag's group, with the tags they have."""
        root = self.root(tag.group)
        held = [(node, other) for node, other in self.tags.items() if other is not None]
        return [(node, other) for node, other in held if self.root(other.group) == root]

    def parameter(self, node: Any) -> str | None:
        """Return the full name of a parameter or buffer used here and nowhere else."""
        if not isinstance(node, fx.Node) or node.name not in self.names or len(node.users) != 1:
            return None
        return self.names[node.name]


def shape(node: fx.Node) -> tuple[int, ...]:
    """Return the shape a node was traced with."""
    return tuple(int(size) for size in node.meta["val"].shape)
