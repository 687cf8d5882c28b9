"""Which dimensions of which parameters can only shrink together: read from the traced graph.

`torch.export` writes a model as ATen calls, whatever classes it was made of. A walk over them gives
each value a tag: the group its channels belong to, the axis they lie on, and how many consecutive
places one channel has there (a flattened image has height x width of them). Layers that make
channels start a group, element-wise calls hand it on, sums of two groups make them one, and layers
that mix channels read it. What a call does that is not in `rules.py` is not guessed: the groups it
touches are left as they are, with the reason.
"""

from __future__ import annotations

from typing import Any

import torch

from ..groups import Group
from .rules import follow
from .walk import Walk


def find_groups(program: Any, model: torch.nn.Module) -> list[Group]:
    """Return all groups of a traced model, those that cannot shrink included."""
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
