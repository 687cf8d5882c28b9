"""Which dimensions of which parameters must shrink together, from the traced graph.

`torch.export` represents a model as ATen calls, whatever classes it is made of. A walk over them
gives each value a tag: the group its channels belong to, their axis, and how many consecutive
elements one channel has there (height x width in a flattened image). Layers that produce channels
start a group, elementwise calls pass it on, sums join two groups, and layers that mix channels are
its readers. Nothing is guessed: groups touched by a call without a rule below are left unchanged,
with the reason.

Parts of a fused value (queries, keys and values; gates) along the channels have to stay equal,
because the call that splits it states their number or size. So neurons at the same position of all
parts are removed together. Attention heads are removed as a whole.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import fx

from ..groups import Group, Groups, Refusal, Site, Slice, Tag


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
        """Make each `size` consecutive neurons one, in all values that hold them."""
        super().coarsen(tag, size)
        for node, other in self._holders(tag):
            self.tags[node] = replace(other, places=size * other.places)

    def cut(self, tag: Tag, parts: int) -> None:
        """Make neurons at the same position of equal parts one; nothing may read the whole."""
        # An op that reads all parts together would need them contiguous as before.
        indivisible = any(len(node.users) != 1 for node, _ in self._holders(tag))
        if indivisible or self.group(tag).width % parts:
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


# Attributes in which modules keep their number of heads, and the number of channels of all heads.
_COUNTS = frozenset({"heads", "num_heads", "n_heads", "n_head", "nhead", "num_attention_heads"})
_CHANNELS = frozenset({"inner_dim", "all_head_size", "attention_dim", "attn_dim"})


def counts_in(model: torch.nn.Module) -> dict[str, int]:
    """Return the numbers of heads, and of their channels, stated by modules' attributes."""
    return {
        f"{path}.{name}".removeprefix("."): value
        for path, module in model.named_modules()
        for name, value in vars(module).items()
        if name in _COUNTS | _CHANNELS and isinstance(value, int)
    }


def counts_of(model: torch.nn.Module, group: Group) -> Iterator[tuple[str, str, int]]:
    """Yield (module, attribute, channels for each) for attributes that count a group's heads.

    Searched in the modules that own the layers that produce the heads.
    """
    # From the weight to its layer, and from that to the module which has the layer.
    owners = {piece.name.rpartition(".")[0].rpartition(".")[0] for piece in group.slices}
    for owner in sorted(owners):
        for name, value in vars(model.get_submodule(owner)).items():
            if name in _COUNTS and value == group.width:
                yield owner, name, 1
            elif name in _CHANNELS and value == group.width * group.block:
                yield owner, name, group.block


def is_one_for_all(value: fx.Node, tag: Tag, other: fx.Node) -> bool:
    """Whether `other` has the same number for every channel of `value`."""
    rank, size = len(shape(value)), shape(other)
    # Axes are counted from the back where shapes are broadcast.
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
    # Heads lie before positions and features.
    axis = len(shape(node)) - 3
    same = len(others) == 2 and len({shape(part)[axis] for part in parts}) == 1
    if not same or any((tag.axis, tag.places) != (axis, 1) for tag in (first, *others)):
        raise Refusal("attention whose queries, keys and values have other heads")
    mask = arguments[3] if len(arguments) > 3 else None
    if mask is not None and not is_one_for_all(parts[0], first, mask):
        raise Refusal("attention with a mask for each head")
    return walk.join(first, *others)


def _matmul(walk: Walk, node: fx.Node) -> Tag | None:
    """A product for each head."""
    arguments: Any = node.args
    left, right = (walk.tag(part) for part in arguments[:2])
    if left is None and right is None:
        return None
    ranks = {len(shape(part)) for part in (*arguments[:2], node)}
    # Not on the last two axes: those are multiplied, and mix.
    outer = left is not None and len(ranks) == 1 and left.axis < min(ranks) - 2
    if left and right and outer and left.lies_as(right):
        return walk.join(left, right)
    raise Refusal("matmul along the channels, or with a value of other channels")


Rule = Callable[[Walk, fx.Node], Tag | None]


def of_channels(rule: Callable[[Walk, fx.Node, Tag], Tag | None]) -> Rule:
    """Return a rule for calls that matter only if their first argument holds channels."""

    def applied(walk: Walk, node: fx.Node) -> Tag | None:
        tag = walk.tag(node.args[0])
        return None if tag is None else rule(walk, node, tag)

    return applied


@of_channels
def _along(walk: Walk, node: fx.Node, tag: Tag) -> Tag:
    """A call along one axis: softmax."""
    arguments: Any = node.args
    if arguments[1] % len(shape(node)) == tag.axis:
        raise Refusal("softmax over the channels")
    return tag


@of_channels
def _masked(walk: Walk, node: fx.Node, tag: Tag) -> Tag:
    arguments: Any = node.args
    source, mask, value = arguments[:3]
    if isinstance(value, fx.Node) or not is_one_for_all(source, tag, mask):
        raise Refusal("a mask for each channel")
    return tag


@of_channels
def _split(walk: Walk, node: fx.Node, tag: Tag) -> Tag:
    """Equal parts along one axis; the value is a list of them, and the tag applies to each."""
    axis = _axis(node, 2, 0)
    sizes = {int(part.shape[axis]) for part in node.meta["val"]}
    if axis == tag.axis:
        if len(sizes) != 1:
            raise Refusal(f"{node.name} cuts the channels into parts of {sorted(sizes)}")
        walk.cut(tag, len(node.meta["val"]))
    return tag


@of_channels
def _glu(walk: Walk, node: fx.Node, tag: Tag) -> Tag:
    """One half times a function of the other."""
    if _axis(node, 1, -1) == tag.axis:
        walk.cut(tag, 2)
    return tag


@of_channels
def _without(walk: Walk, node: fx.Node, tag: Tag) -> Tag:
    """One position on an axis, or a list of all: the axis itself is removed."""
    axis = _axis(node, 1, 0)
    if axis == tag.axis:
        raise Refusal(f"{node.name} takes the channels apart")
    return Tag(tag.group, tag.axis - (axis < tag.axis), tag.places)


def _axis(node: fx.Node, place: int, default: int) -> int:
    arguments: Any = node.args
    axis = arguments[place] if len(arguments) > place else default
    return int(axis) % len(shape(arguments[0]))


# One number in, one number out, the same function for every channel.
_ELEMENTWISE = frozenset(
    {
        "relu", "relu6", "leaky_relu", "gelu", "silu", "mish", "tanh", "sigmoid", "elu",
        "selu", "celu", "softplus", "softsign", "hardtanh", "hardswish", "hardsigmoid",
        "log_sigmoid", "dropout", "feature_dropout", "clone", "contiguous", "detach", "abs",
        "neg", "square", "sqrt", "exp", "clamp", "clamp_min", "clamp_max", "pow"
    }
)  # fmt: skip
_TWO_SIDED = frozenset({"add", "sub", "mul", "div", "maximum", "minimum"})
_POOLS = frozenset(
    {
        "max_pool1d", "max_pool2d", "max_pool3d", "avg_pool1d", "avg_pool2d", "avg_pool3d",
        "adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"
    }
)  # fmt: skip
_RESHAPES = frozenset(
    {
        "flatten", "view", "reshape", "_unsafe_view", "squeeze", "unsqueeze", "unflatten"
    }
)  # fmt: skip


def _name(node: fx.Node) -> str:
    target = node.target
    if isinstance(target, torch._ops.OpOverload):
        name = str(target._schema.name).rpartition("::")[2]
        # In place or not makes no difference for channels.
        return name.removesuffix("_")
    return str(getattr(target, "__name__", target))


def _elementwise(walk: Walk, node: fx.Node) -> Tag | None:
    # Such as the exponent of a power: the groups of both would depend on each other.
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
    if left and right and shape(first) == shape(second) and left.lies_as(right):
        return walk.join(left, right)
    raise Refusal(f"{_name(node)} with a value of other channels")


@of_channels
def _pool(walk: Walk, node: fx.Node, tag: Tag) -> Tag:
    # The 2 of `max_pool2d`.
    spatial = int(_name(node)[-2])
    if tag.axis >= len(shape(node)) - spatial:
        raise Refusal(f"{_name(node)} over the channels")
    return tag


@of_channels
def _reshape(walk: Walk, node: fx.Node, tag: Tag) -> Tag:
    source: Any = node.args[0]
    before, after = shape(source), shape(node)
    channels = before[tag.axis] // tag.places
    for axis, size in enumerate(after):
        # Rows before the channels stay what they were, so the channels begin on this axis.
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


@of_channels
def _move(walk: Walk, node: fx.Node, tag: Tag) -> Tag:
    arguments: Any = node.args
    order = list(range(len(shape(arguments[0]))))
    if _name(node) == "permute":
        order = [axis % len(order) for axis in arguments[1]]
    elif _name(node) == "transpose":
        one, two = (axis % len(order) for axis in arguments[1:3])
        order[one], order[two] = order[two], order[one]
    else:
        order.reverse()
    return Tag(tag.group, order.index(tag.axis), tag.places)


@of_channels
def _mean(walk: Walk, node: fx.Node, tag: Tag) -> Tag:
    arguments: Any = node.args
    rank = len(shape(arguments[0]))
    axes = {axis % rank for axis in (arguments[1] if len(arguments) > 1 else None) or range(rank)}
    if tag.axis in axes:
        raise Refusal(f"{_name(node)} over the channels")
    # With keepdim the axes stay, as ones.
    keeps = len(shape(node)) == rank
    return Tag(tag.group, tag.axis - (0 if keeps else sum(a < tag.axis for a in axes)), tag.places)


@of_channels
def _batch_norm(walk: Walk, node: fx.Node, tag: Tag) -> Tag:
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
    # Padding sees zeros where a constant would be added, so no bias makes up for it.
    padded = isinstance(padding, str) or any([padding] if isinstance(padding, int) else padding)
    groups = arguments[6] if len(arguments) > 6 else 1
    if len(shape(node)) != int(_name(node)[-2]) + 2:
        raise Refusal("a convolution of one image without a batch")
    if groups == 1:
        return _layer(walk, node, axis=1, padded=padded)
    source, tag = arguments[0], walk.tag(arguments[0])
    if tag is None:
        return None
    # One filter a channel: nothing is mixed, so its filters go with their channels.
    depthwise = groups == shape(source)[1] == shape(node)[1]
    names = [walk.parameter(used) for used in arguments[1:3] if used is not None]
    if not depthwise or None in names or tag.axis != 1 or tag.places != 1:
        raise Refusal(f"a convolution of {groups} groups is not understood")
    walk.group(tag).slices += [Slice(str(name), node.name) for name in names]
    # How many groups there are is a setting of the module, which surgery sets with the width.
    return tag


def _layer(walk: Walk, node: fx.Node, *, axis: int, padded: bool) -> Tag | None:
    """A layer that mixes the channels on `axis` and produces its own there."""
    arguments: Any = node.args
    weight = walk.parameter(arguments[1])
    has_bias = len(arguments) > 2 and arguments[2] is not None
    bias = walk.parameter(arguments[2]) if has_bias else None
    if weight is None or (has_bias and bias is None):
        held = walk.names.get(arguments[1].name, node.name)
        # Added nevertheless, so that the report names it.
        reason = "its weight or bias is shared, or computed from others"
        walk.add(Group(shape(node)[axis], makers=[held], reason=reason))
        raise Refusal(f"{_name(node)} with a shared or computed parameter")
    if tag := walk.tag(arguments[0]):
        # Only a linear layer reads flattened channels.
        flat = tag.places != 1 and _name(node) != "linear"
        if tag.axis != axis or flat:
            raise Refusal(f"{_name(node)} along another axis than the channels'")
        constant = has_bias and not padded
        site = Site(node.name, weight, bias, tag.places, axis, constant)
        walk.group(tag).sites.append(site)
    slices = [Slice(name, node.name) for name in (weight, bias) if name]
    return Tag(walk.add(Group(shape(node)[axis], slices, makers=[weight])), axis)


_RULES: dict[str, Rule] = {
    "linear": _linear,
    **dict.fromkeys(("conv1d", "conv2d", "conv3d"), _convolution),
    "batch_norm": _batch_norm,
    "mean": _mean,
    "scaled_dot_product_attention": _attention,
    "matmul": _matmul,
    "softmax": _along,
    "masked_fill": _masked,
    **dict.fromkeys(("chunk", "split", "split_with_sizes"), _split),
    "glu": _glu,
    "getitem": _elementwise,  # one value of a list, which holds the channels as the list does
    **dict.fromkeys(("unbind", "select"), _without),
    **dict.fromkeys(("transpose", "permute", "t", "numpy_T"), _move),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_TWO_SIDED, _two_sided),
    **dict.fromkeys(_POOLS, _pool),
    **dict.fromkeys(_RESHAPES, _reshape),
}


def _reads(sizes: tuple[int, ...]) -> int:
    """Return how many channels a parameter of this shape reads; 0 if none."""
    return sizes[1] if len(sizes) > 1 else sum(sizes)


def find_groups(program: Any, model: torch.nn.Module) -> list[Group]:
    """Return all groups of a traced model, including those that cannot shrink."""
    walk = Walk(program)
    for node in program.graph.nodes:
        if node.op == "call_function":
            kind = _name(node)
            rule = partial(_RULES[kind], walk, node) if kind in _RULES else None
            used = node.all_input_nodes
            walk.tags[node] = walk.follow(rule, used, kind=kind, call=node.name)
    groups = walk.finished(program.graph.output_node().all_input_nodes)
    unused = {
        walk.names[node.name]: _reads(shape(node))
        for node in program.graph.nodes
        if node.name in walk.parameters and not node.users
    }
    for group in groups:
        for name, size in unused.items():
            # The head of another task, say: with fewer channels its next call would raise.
            if size and size % (group.width * group.block) == 0:
                group.refuse(f"{name}, which this call did not use, may read it in others")
        _refuse_unusual(group, model)
    return groups


def _refuse_unusual(group: Group, model: torch.nn.Module) -> None:
    """Refuse groups with parameters that surgery does not know how to replace."""
    # All names of each parameter: `named_parameters` gives one of a shared one by default.
    names: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        names.setdefault(id(parameter), []).append(name)
    for name in sorted({*group.parameters}):
        owner, _, last = name.rpartition(".")
        value = getattr(model.get_submodule(owner), last)
        if len(names.get(id(value), [])) > 1:
            group.refuse(f"{name} is shared: {', '.join(names[id(value)])}")
        if name in {site.weight for site in group.sites} and not value.is_floating_point():
            group.refuse(f"{name} is of {value.dtype}")
        if type(value) not in (torch.nn.Parameter, torch.Tensor):
            group.refuse(f"{name} is a {type(value).__name__}, not a plain parameter")
