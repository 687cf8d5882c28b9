"""Which dimensions of which variables can only shrink together: read from Keras's own graph.

Keras 3 keeps the calls that made a functional or Sequential model. A walk over them gives each
value a tag; what a call does that is not named here is not guessed. Channels are always last.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from ..groups import Groups, Site, Slice, Tag

# Activations that give one number for one number, by the names Keras gives the functions.
_FUNCTIONS = frozenset(
    {
        "linear", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish",
        "tanh", "sigmoid", "softplus", "softsign", "hard_sigmoid", "hard_silu", "hard_tanh",
        "exponential"
    }
)  # fmt: skip
# Layers, and calls of keras.ops, that do the same.
_ELEMENTWISE = frozenset(
    {
        "ReLU", "LeakyReLU", "ELU", "Dropout", "Identity", "Relu", "Relu6", "LeakyRelu", "Elu",
        "Selu", "Celu", "Gelu", "Silu", "Mish", "Tanh", "Sigmoid", "Softplus", "Softsign",
        "HardSigmoid", "HardSilu", "HardTanh", "Square", "Abs", "Negative"
    }
)  # fmt: skip
_TWO_SIDED = frozenset({"Add", "Subtract", "Multiply", "Maximum", "Minimum"})
_POOLS = frozenset(f"{kind}Pooling{d}D" for kind in ("Max", "Average") for d in (1, 2, 3))
_GLOBAL = frozenset(f"Global{kind}" for kind in _POOLS)


class _Refusal(Exception):  # noqa: N818 - an answer, caught below, and no error
    """A rule does not know what a call does to channels."""


class Walk(Groups):
    """The state of one walk: where the channels of each value lie, and the groups."""

    def __init__(self, graph: Any) -> None:
        super().__init__()
        self.tags: dict[int, Tag] = {}
        self.tensors: dict[int, Any] = {}
        calls = [id(node.operation) for node in calls_of(graph)]
        self.shared = {call for call in calls if calls.count(call) > 1}

    def tag(self, value: Any) -> Tag | None:
        return self.tags.get(id(value))


def graph_of(model: Any) -> Any:
    """Return the recorded calls of a functional or built Sequential model."""
    graph = getattr(model, "_functional", model)
    if not hasattr(graph, "_nodes_by_depth"):
        raise ValueError(
            f"Apoptosis: got a {type(model).__name__} without a graph of layers, expected a "
            "functional model, or a Sequential one that is built. Start it with keras.Input."
        )
    return graph


def calls_of(graph: Any) -> list[Any]:
    """Return the calls of a graph in an order in which they can be run."""
    depths = sorted(graph._nodes_by_depth, reverse=True)
    return [node for depth in depths for node in graph._nodes_by_depth[depth] if not node.is_input]


def kind_of(operation: Any) -> str:
    """Return the name of a class of Keras's own; "" for anybody else's, which may do anything."""
    kind = type(operation)
    return kind.__name__ if kind.__module__.startswith("keras.") else ""


def find_groups(graph: Any) -> Walk:
    """Return the walk with all groups of a model, those that cannot shrink included."""
    walk = Walk(graph)
    for node in calls_of(graph):
        tag = _follow(walk, node)
        for made in node.outputs:
            if tag is not None:
                walk.tags[id(made)], walk.tensors[id(made)] = tag, made
    for out in graph.outputs:
        if tag := walk.tag(out):
            walk.group(tag).refuse("the model puts it out")
    for group in walk.roots():
        if not group.sites:
            group.refuse("no layer reads it")
    return walk


def _follow(walk: Walk, node: Any) -> Tag | None:
    operation, kind = node.operation, kind_of(node.operation)
    try:
        rule = _RULES.get(kind)
        if kind in _ELEMENTWISE:
            return walk.tag(node.input_tensors[0])
        if rule is None:
            raise _Refusal(f"{type(operation).__name__} is not understood")
        return rule(walk, node)
    except _Refusal as refusal:
        for used in node.input_tensors:
            if tag := walk.tag(used):
                walk.group(tag).refuse(f"{refusal} (at {operation.name})")
        return None


def _activation(walk: Walk, node: Any) -> Tag | None:
    name = getattr(node.operation.activation, "__name__", "")
    if name not in _FUNCTIONS:
        raise _Refusal(f"activation {name or node.operation.activation!r} is not understood")
    return walk.tag(node.input_tensors[0])


def _two_sided(walk: Walk, node: Any) -> Tag | None:
    tags = [walk.tag(used) for used in node.input_tensors]
    if not any(tags):
        return None
    if len({used.shape for used in node.input_tensors}) > 1 or len({_place(t) for t in tags}) > 1:
        raise _Refusal(f"{kind_of(node.operation)} with a value of other channels")
    first, *others = [tag for tag in tags if tag is not None]
    for other in others:
        walk.join(first, other)
    return first


def _place(tag: Tag | None) -> tuple[int, int] | None:
    return None if tag is None else (tag.axis, tag.places)


def _pool(walk: Walk, node: Any) -> Tag | None:
    tag = walk.tag(node.input_tensors[0])
    if tag and node.operation.data_format != "channels_last":
        raise _Refusal("channels that are not last")
    return Tag(tag.group, len(node.outputs[0].shape) - 1, tag.places) if tag else None


def _flatten(walk: Walk, node: Any) -> Tag | None:
    tag = walk.tag(node.input_tensors[0])
    if tag is None:
        return None
    between = node.input_tensors[0].shape[1:-1]
    if None in between or node.operation.data_format != "channels_last":
        raise _Refusal("Flatten of an unknown size, or of channels that are not last")
    return Tag(tag.group, 1, tag.places * math.prod(between))


def _batch_norm(walk: Walk, node: Any) -> Tag | None:
    layer, used = node.operation, node.input_tensors[0]
    tag = walk.tag(used)
    if tag is None:
        return None
    if layer.axis not in (-1, len(used.shape) - 1) or tag.places != 1 or id(layer) in walk.shared:
        raise _Refusal("BatchNormalization of places, along another axis, or of a shared layer")
    for held in layer.variables:
        walk.group(tag).slices.append(Slice(f"{layer.name}/{held.name}", layer.name))
    return tag


def _layer(walk: Walk, node: Any) -> Tag | None:
    """A layer that mixes what it reads and makes channels of its own."""
    layer, used = node.operation, node.input_tensors[0]
    convolution = kind_of(layer) != "Dense"
    last = len(node.outputs[0].shape) - 1
    plain = {held.name for held in layer.variables} <= {"kernel", "bias"}
    known = getattr(layer.activation, "__name__", "") in _FUNCTIONS
    if convolution:
        plain = plain and layer.groups == 1 and layer.data_format == "channels_last"
    tag = walk.tag(used)
    if not plain or id(layer) in walk.shared:
        reason = f"{kind_of(layer)} that is shared, quantized, grouped or not channels-last"
        made = walk.new_group(node.outputs[0].shape[last], f"{layer.name}/kernel")
        walk.groups[made].refuse(reason)
        raise _Refusal(reason)
    if tag:
        if tag.axis != len(used.shape) - 1 or (convolution and tag.places != 1):
            raise _Refusal(f"{kind_of(layer)} along another axis than the channels'")
        bias = f"{layer.name}/bias" if layer.use_bias else None
        constant = layer.use_bias and not (convolution and layer.padding != "valid")
        site = Site(layer.name, f"{layer.name}/kernel", bias, tag.places, tag.axis, constant)
        walk.group(tag).sites.append(site)
    made = walk.new_group(node.outputs[0].shape[last], f"{layer.name}/kernel")
    names = ["kernel", "bias"] if layer.use_bias else ["kernel"]
    walk.groups[made].slices += [Slice(f"{layer.name}/{name}", layer.name) for name in names]
    if not known:
        walk.groups[made].refuse(f"the activation of {layer.name} is not understood")
    return Tag(made, last)


_RULES: dict[str, Callable[[Walk, Any], Tag | None]] = {
    "Activation": _activation,
    "BatchNormalization": _batch_norm,
    "Dense": _layer,
    "Flatten": _flatten,
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D"), _layer),
    **dict.fromkeys(_POOLS | _GLOBAL, _pool),
    **dict.fromkeys(_TWO_SIDED, _two_sided),
}
