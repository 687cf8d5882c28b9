"""What each ATen call does to the channels of what it is given; one small function a kind."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import fx

from ..groups import Site, Slice, Tag
from .heads import HEADS, is_one_for_all
from .parts import PARTS
from .walk import Refusal, Walk, shape

# One number in, one number out, the same function for every channel.
_ELEMENTWISE = frozenset(
    {
        "relu",
        "relu6",
        "leaky_relu",
        "gelu",
        "silu",
        "mish",
        "tanh",
        "sigmoid",
        "elu",
        "selu",
        "celu",
        "softplus",
        "softsign",
        "hardtanh",
        "hardswish",
        "hardsigmoid",
        "log_sigmoid",
        "dropout",
        "feature_dropout",
        "clone",
        "contiguous",
        "detach",
        "abs",
        "neg",
        "square",
        "sqrt",
        "exp",
        "clamp",
        "clamp_min",
        "clamp_max",
        "pow",
    }
)
_TWO_SIDED = frozenset({"add", "sub", "mul", "div", "maximum", "minimum"})
_POOLS = frozenset(
    {
        "max_pool1d",
        "max_pool2d",
        "max_pool3d",
        "avg_pool1d",
        "avg_pool2d",
        "avg_pool3d",
        "adaptive_avg_pool1d",
        "adaptive_avg_pool2d",
        "adaptive_avg_pool3d",
    }
)
_RESHAPES = frozenset(
    {"flatten", "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "unflatten"}
)


def follow(walk: Walk, node: fx.Node) -> Tag | None:
    """Return where the channels lie in what a call gives; refuse the groups it does not keep."""
    name = _name(node)
    rule = _RULES.get(name)
    if name in _ELEMENTWISE:
        rule = _elementwise
    elif name in _TWO_SIDED:
        rule = _two_sided
    elif name in _POOLS:
        rule = _pool
    elif name in _RESHAPES:
        rule = _reshape
    try:
        if rule is None:
            raise Refusal(f"{name} is not understood")
        return rule(walk, node)
    except Refusal as refusal:
        for used in node.all_input_nodes:
            if tag := walk.tag(used):
                walk.group(tag).refuse(f"{refusal} (at {node.name})")
        return None


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = str(target._schema.name).rpartition("::")[2]
        return name.removesuffix("_")  # in place or not is the same to channels
    return str(getattr(target, "__name__", target))


def _elementwise(walk: Walk, node: fx.Node) -> Tag | None:
    if any(walk.tag(used) for used in node.all_input_nodes if used is not node.args[0]):
        raise Refusal(f"{_name(node)} by a value of a group is not understood")
    return walk.tag(node.args[0])


def _two_sided(walk: Walk, node: fx.Node) -> Tag | None:
    first, second = node.args[:2]
    if not isinstance(first, fx.Node) or not isinstance(second, fx.Node):
        return walk.tag(first) or walk.tag(second)
    left, right = walk.tag(first), walk.tag(second)
    if left is None and right is None:
        return None
    if left and right is None and is_one_for_all(first, left, second):
        return left
    if right and left is None and is_one_for_all(second, right, first):
        return right
    same = shape(first) == shape(second)
    if left and right and same and (left.axis, left.places) == (right.axis, right.places):
        walk.join(left, right)
        return left
    raise Refusal(f"{_name(node)} with a value of other channels")


def _pool(walk: Walk, node: fx.Node) -> Tag | None:
    tag = walk.tag(node.args[0])
    spatial = int(_name(node)[-2])
    if tag and tag.axis >= len(shape(node)) - spatial:
        raise Refusal(f"{_name(node)} over the channels")
    return tag


def _reshape(walk: Walk, node: fx.Node) -> Tag | None:
    source: Any = node.args[0]
    tag = walk.tag(source)
    if tag is None:
        return None
    before, after = shape(source), shape(node)
    channels = before[tag.axis] // tag.places
    for axis, size in enumerate(after):
        lead = math.prod(after[:axis]) == math.prod(before[: tag.axis])
        if lead and size % channels == 0 and (size > 1 or channels == 1):
            return Tag(tag.group, axis, size // channels)
        heads, parts = after[axis : axis + 2], after[axis : axis + 3]
        if not lead or size == 1 or tag.places != 1:
            continue
        if math.prod(heads) == channels:
            # Channels in rows of one size: heads. They go together or not at all.
            walk.coarsen(tag, heads[1])
            return Tag(tag.group, axis)
        if len(parts) == 3 and math.prod(parts) == channels:
            # Parts of so many heads each: queries, keys and values.
            walk.cut(tag, size)
            walk.coarsen(tag, parts[2])
            return Tag(tag.group, axis + 1)
    raise Refusal(f"{_name(node)} from {before} to {after} splits the channels")


def _move(walk: Walk, node: fx.Node) -> Tag | None:
    source: Any = node.args[0]
    tag = walk.tag(source)
    if tag is None:
        return None
    order = list(range(len(shape(source))))
    arguments: Any = node.args
    if _name(node) == "permute":
        order = [axis % len(order) for axis in arguments[1]]
    elif _name(node) == "transpose":
        one, two = (axis % len(order) for axis in arguments[1:3])
        order[one], order[two] = order[two], order[one]
    else:
        order.reverse()
    return Tag(tag.group, order.index(tag.axis), tag.places)


def _mean(walk: Walk, node: fx.Node) -> Tag | None:
    source: Any = node.args[0]
    tag = walk.tag(source)
    if tag is None:
        return None
    rank = len(shape(source))
    arguments: Any = node.args
    axes = {axis % rank for axis in (arguments[1] if len(arguments) > 1 else None) or range(rank)}
    if tag.axis in axes:
        raise Refusal(f"{_name(node)} over the channels")
    keeps = len(shape(node)) == rank
    return Tag(tag.group, tag.axis - (0 if keeps else sum(a < tag.axis for a in axes)), tag.places)


def _batch_norm(walk: Walk, node: fx.Node) -> Tag | None:
    tag = walk.tag(node.args[0])
    if tag is None:
        return None
    if tag.axis != 1 or tag.places != 1:
        raise Refusal("batch_norm over places of a channel")
    for used in node.args[1:5]:
        if used is None:
            continue
        name = walk.parameter(used)
        if name is None:
            raise Refusal("batch_norm with a shared or computed parameter")
        walk.group(tag).slices.append(Slice(name, node.name))
    return tag


def _linear(walk: Walk, node: fx.Node) -> Tag | None:
    source: Any = node.args[0]
    return _layer(walk, node, axis=len(shape(source)) - 1, padded=False)


def _convolution(walk: Walk, node: fx.Node) -> Tag | None:
    arguments: Any = node.args
    padding = arguments[4] if len(arguments) > 4 else 0
    padded = isinstance(padding, str) or any([padding] if isinstance(padding, int) else padding)
    groups = arguments[6] if len(arguments) > 6 else 1
    if len(shape(node)) != int(_name(node)[-2]) + 2:
        raise Refusal("a convolution of one image without a batch")
    if groups == 1:
        return _layer(walk, node, axis=1, padded=padded)
    source, tag = arguments[0], walk.tag(arguments[0])
    depthwise = groups == shape(source)[1] == shape(node)[1]
    names = [walk.parameter(used) for used in arguments[1:3] if used is not None]
    if tag is None:
        return None
    if not depthwise or None in names or tag.axis != 1 or tag.places != 1:
        raise Refusal(f"a convolution of {groups} groups is not understood")
    walk.group(tag).slices += [Slice(str(name), node.name) for name in names]
    # How many groups there are is a setting of the module, which surgery sets with the width.
    return tag


def _layer(walk: Walk, node: fx.Node, *, axis: int, padded: bool) -> Tag | None:
    """A layer that mixes what it reads on `axis` and makes channels of its own there."""
    arguments: Any = node.args
    weight = walk.parameter(arguments[1])
    has_bias = len(arguments) > 2 and arguments[2] is not None
    bias = walk.parameter(arguments[2]) if has_bias else None
    if weight is None or (has_bias and bias is None):
        held = walk.names.get(arguments[1].name, node.name)
        made = walk.new_group(shape(node)[axis], held)
        walk.groups[made].refuse("its weight or bias is shared, or computed from others")
        raise Refusal(f"{_name(node)} with a shared or computed parameter")
    if tag := walk.tag(arguments[0]):
        flat = tag.places != 1 and _name(node) != "linear"
        if tag.axis != axis or flat:
            raise Refusal(f"{_name(node)} along another axis than the channels'")
        constant = has_bias and not padded
        site = Site(node.name, weight, bias, tag.places, axis, constant)
        walk.group(tag).sites.append(site)
    made = walk.new_group(shape(node)[axis], weight)
    names = [weight, bias] if bias else [weight]
    walk.groups[made].slices += [Slice(name, node.name) for name in names]
    return Tag(made, axis)


_RULES: dict[str, Callable[[Walk, fx.Node], Tag | None]] = {
    "linear": _linear,
    "conv1d": _convolution,
    "conv2d": _convolution,
    "conv3d": _convolution,
    "batch_norm": _batch_norm,
    "mean": _mean,
    **HEADS,
    **PARTS,
    "transpose": _move,
    "permute": _move,
    "t": _move,
    "numpy_T": _move,
}
