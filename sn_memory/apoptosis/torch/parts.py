"""Values cut into parts: fused queries, keys and values, and fused gates.

Parts along the channels have to stay equal, as the call that cuts says how many there are, or how
wide they are. So the neurons at one place of all parts go together.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from torch import fx

from ..groups import Tag
from .walk import Refusal, Walk, shape


def _split(walk: Walk, node: fx.Node) -> Tag | None:
    """Equal parts along one axis; the value is a list of them, and the tag holds for each."""
    source: Any = node.args[0]
    tag = walk.tag(source)
    if tag is None:
        return None
    axis = _axis(node, 2, 0)
    sizes = {int(part.shape[axis]) for part in node.meta["val"]}
    if axis == tag.axis:
        if len(sizes) != 1:
            raise Refusal(f"{node.name} cuts the channels into parts of {sorted(sizes)}")
        walk.cut(tag, len(node.meta["val"]))
    return tag


def _glu(walk: Walk, node: fx.Node) -> Tag | None:
    """One half times a function of the other."""
    source: Any = node.args[0]
    tag = walk.tag(source)
    if tag is not None and _axis(node, 1, -1) == tag.axis:
        walk.cut(tag, 2)
    return tag


def _one(walk: Walk, node: fx.Node) -> Tag | None:
    """One value of a list."""
    source: Any = node.args[0]
    return walk.tag(source)


def _without(walk: Walk, node: fx.Node) -> Tag | None:
    """One place on an axis, or a list of all: the axis itself is gone."""
    source: Any = node.args[0]
    tag = walk.tag(source)
    if tag is None:
        return None
    axis = _axis(node, 1, 0)
    if axis == tag.axis:
        raise Refusal(f"{node.name} takes the channels apart")
    return Tag(tag.group, tag.axis - (axis < tag.axis), tag.places)


def _axis(node: fx.Node, place: int, default: int) -> int:
    arguments: Any = node.args
    axis = arguments[place] if len(arguments) > place else default
    return int(axis) % len(shape(arguments[0]))


PARTS: dict[str, Callable[[Walk, fx.Node], Tag | None]] = {
    "chunk": _split,
    "split": _split,
    "split_with_sizes": _split,
    "glu": _glu,
    "getitem": _one,
    "unbind": _without,
    "select": _without,
}
