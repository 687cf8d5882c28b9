"""Which dimensions of which parameters can only shrink together: read from the traced graph.

`torch.export` writes a model as ATen calls, whatever classes it was made of. A walk over them gives
each value a tag: the group its channels belong to, the axis they lie on, and how many consecutive
places one channel has there (a flattened image has height x width of them). Layers that make
channels start a group, element-wise calls hand it on, sums of two groups make them one, and layers
that mix channels read it. What a call does that is not in `rules.py` is not guessed: the groups it
touches are left as they are, with the reason.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import fx


@dataclass(frozen=True)
class Tag:
    """Where a value holds the channels of a group: `places` consecutive ones each, on `axis`."""

    group: int
    axis: int
    places: int = 1


@dataclass(frozen=True)
class Slice:
    """Dimension 0 of a parameter or buffer has one entry for each neuron; `call` uses it."""

    name: str
    call: str


@dataclass(frozen=True)
class Site:
    """A call that reads the group through dimension 1 of `weight`."""

    call: str
    weight: str
    bias: str | None
    places: int
    axis: int
    takes_constant: bool


@dataclass
class Group:
    """Neurons that can only shrink together; `reason` says why they cannot, if they cannot."""

    width: int
    slices: list[Slice] = field(default_factory=list)
    sites: list[Site] = field(default_factory=list)
    makers: list[str] = field(default_factory=list)
    reason: str | None = None

    @property
    def name(self) -> str:
        return " + ".join(self.makers)

    def refuse(self, reason: str) -> None:
        """Leave the group as it is; the first reason is the one that is told."""
        self.reason = self.reason or reason


class Walk:
    """The state of one walk: tags by node, groups joined as sums join them."""

    def __init__(self, program: Any) -> None:
        signature = program.graph_signature
        self.names: dict[str, str] = {
            **signature.inputs_to_parameters,
            **signature.inputs_to_buffers,
        }
        self.parameters = set(signature.inputs_to_parameters)
        self.tags: dict[fx.Node, Tag | None] = {}
        self.groups: list[Group] = []
        self._parent: list[int] = []

    def new_group(self, width: int, maker: str) -> int:
        self.groups.append(Group(width, makers=[maker]))
        self._parent.append(len(self._parent))
        return len(self._parent) - 1

    def root(self, group: int) -> int:
        while self._parent[group] != group:
            group = self._parent[group]
        return group

    def group(self, tag: Tag) -> Group:
        return self.groups[self.root(tag.group)]

    def join(self, first: Tag, second: Tag) -> None:
        """Make two groups one: a sum of both needs the same channels of both."""
        low, high = sorted((self.root(first.group), self.root(second.group)))
        if low == high:
            return
        kept, gone = self.groups[low], self.groups[high]
        kept.slices += gone.slices
        kept.sites += gone.sites
        kept.makers += gone.makers
        if gone.reason:
            kept.refuse(gone.reason)
        self._parent[high] = low

    def tag(self, node: Any) -> Tag | None:
        return self.tags.get(node) if isinstance(node, fx.Node) else None

    def parameter(self, node: Any) -> str | None:
        """Return the full name of a parameter or buffer used here and nowhere else."""
        if not isinstance(node, fx.Node) or node.name not in self.names or len(node.users) != 1:
            return None
        return self.names[node.name]

    def roots(self) -> Iterator[Group]:
        for index, group in enumerate(self.groups):
            if self.root(index) == index:
                yield group


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
