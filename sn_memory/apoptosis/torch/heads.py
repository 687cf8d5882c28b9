"""Heads of attention: what calls do to them, and where a module says how many it has."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import fx

from ..groups import Group, Tag
from .walk import Refusal, Walk, shape

# By these names modules know their number of heads, and that of all channels of all heads.
_COUNTS = frozenset({"heads", "num_heads", "n_heads", "n_head", "nhead", "num_attention_heads"})
_CHANNELS = frozenset({"inner_dim", "all_head_size", "attention_dim", "attn_dim"})


def counts_in(model: torch.nn.Module) -> dict[str, int]:
    """Return the numbers of heads, and of their channels, that modules say they have."""
    return {
        f"{path}.{name}".removeprefix("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name in _COUNTS | _CHANNELS and isinstance(value, int)
    }


def counts_of(model: torch.nn.Module, group: Group) -> Iterator[tuple[str, str, int]]:
    """Yield (module, attribute, channels for each) where a number follows that of a group's heads.

    Looked for in the modules that own the layers which make the heads.
    """
    owners = {piece.name.rpartition(".")[0].rpartition(".")[0] for piece in group.slices}
    for owner in sorted(owners):
        for name, value in vars(model.get_submodule(owner)).items():
            if name in _COUNTS and value == group.width:
                yield owner, name, 1
            elif name in _CHANNELS and value == group.width * group.block:
                yield owner, name, group.block


def is_one_for_all(value: fx.Node, tag: Tag, other: fx.Node) -> bool:
    """Say whether a value is the same number for every channel that `value` has."""
    rank, size = len(shape(value)), shape(other)
    axis = tag.axis - rank + len(size)
    return len(size) <= rank and (axis < 0 or size[axis] == 1)


def _attention(walk: Walk, node: fx.Node) -> Tag | None:
    """Heads read heads of the same number, whatever they attend to."""
    arguments: Any = node.args
    parts = arguments[:3]
    tags = [walk.tag(part) for part in parts]
    if not any(tags):
        return None
    first, *others = [tag for tag in tags if tag is not None]
    axis = len(shape(node)) - 3
    same = len(others) == 2 and len({shape(part)[axis] for part in parts}) == 1
    if not same or any((tag.axis, tag.places) != (axis, 1) for tag in (first, *others)):
        raise Refusal("attention whose queries, keys and values have other heads")
    mask = arguments[3] if len(arguments) > 3 else None
    if mask is not None and not is_one_for_all(parts[0], first, mask):
        raise Refusal("attention with a mask for each head")
    for other in others:
        walk.join(first, other)
    return first


def _matmul(walk: Walk, node: fx.Node) -> Tag | None:
    """A product for each head."""
    arguments: Any = node.args
    left, right = (walk.tag(part) for part in arguments[:2])
    if left is None and right is None:
        return None
    ranks = {len(shape(part)) for part in (*arguments[:2], node)}
    same = left and right and (left.axis, left.places) == (right.axis, right.places)
    if left and right and same and len(ranks) == 1 and left.axis < min(ranks) - 2:
        walk.join(left, right)
        return left
    raise Refusal("matmul along the channels, or with a value of other channels")


def _along(walk: Walk, node: fx.Node) -> Tag | None:
    """A call along one axis: softmax."""
    arguments: Any = node.args
    tag = walk.tag(arguments[0])
    if tag and arguments[1] % len(shape(node)) == tag.axis:
        raise Refusal("softmax over the channels")
    return tag


def _masked(walk: Walk, node: fx.Node) -> Tag | None:
    source, mask, value = node.args[:3]
    tag = walk.tag(source)
    if not isinstance(source, fx.Node) or not isinstance(mask, fx.Node) or tag is None:
        return tag
    if isinstance(value, fx.Node) or not is_one_for_all(source, tag, mask):
        raise Refusal("a mask for each channel")
    return tag


HEADS: dict[str, Callable[[Walk, fx.Node], Tag | None]] = {
    "scaled_dot_product_attention": _attention,
    "matmul": _matmul,
    "softmax": _along,
    "masked_fill": _masked,
}
