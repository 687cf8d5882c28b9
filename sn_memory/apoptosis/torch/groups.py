"""Which dimensions of which parameters can only shrink together: read from the traced graph.

`torch.export` writes a model as ATen calls, whatever classes it was made of. A walk over them gives
each value a tag: the group its channels belong to, the axis they lie on, and how many consecutive
places one channel has there (a flattened image has height x width of them). Layers that make
channels start a group, element-wise calls hand it on, sums of two groups make them one, and layers
that mix channels read it. What a call does that is not in `rules.py` is not guessed: the groups it
touches are left as they are, with the reason.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import torch
from torch import fx

from ..groups import Group, Groups, Tag


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


def find_groups(program: Any, model: torch.nn.Module) -> list[Group]:
    """Return all groups of a traced model, those that cannot shrink included."""
    from .rules import follow

    walk = Walk(program)
    for node in program.graph.nodes:
        if node.op == "call_function":
            walk.tags[node] = follow(walk, node)
        elif node.op == "output":
            for used in node.all_input_nodes:
                if tag := walk.tag(used):
                    walk.group(tag).refuse("the model puts it out")
    groups = list(walk.roots())
    for group in groups:
        if not group.sites:
            group.refuse("no layer reads it")
        _refuse_unusual(group, model)
    return groups


def _refuse_unusual(group: Group, model: torch.nn.Module) -> None:
    """Refuse groups with parameters that surgery does not know how to replace."""
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    mine = {piece.name for piece in group.slices} | {site.weight for site in group.sites}
    for name in sorted(mine):
        owner, _, last = name.rpartition(".")
        value = getattr(model.get_submodule(owner), last)
        if len(names.get(id(value), [])) > 1:
            group.refuse(f"{name} is shared: {', '.join(names[id(value)])}")
        if name in {site.weight for site in group.sites} and not value.is_floating_point():
            group.refuse(f"{name} is of {value.dtype}")
        if type(value) not in (torch.nn.Parameter, torch.Tensor):
            group.refuse(f"{name} is a {type(value).__name__}, not a plain parameter")
