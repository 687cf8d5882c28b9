"""Shrink one group: kernels, biases, norms, and their optimizer state, all at once.

Keras's variable objects stay; each gets a new tf.Variable of the new shape. A function traced
before still holds the old ones, and would train a model that is no longer used. So the old ones are
emptied, and such a function fails immediately.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import partial
from typing import Any, Final, Literal

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ..groups import Group, Groups, Refusal, Site, Slice, Tag
from ..merge import Choice, add_up, fold, scales

# Elementwise activations, by Keras's function names.
_FUNCTIONS = frozenset(
    {
        "linear", "relu", "relu6", "leaky_relu", "elu", "selu", "celu", "gelu", "silu", "mish",
        "tanh", "sigmoid", "softplus", "softsign", "hard_sigmoid", "hard_silu", "hard_tanh",
        "exponential"
    }
)  # fmt: skip
# Elementwise layers and calls of keras.ops.
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


class Walk(Groups):
    """The state of one walk: where the channels of each value lie, and the groups."""

    def __init__(self, graph: Any) -> None:
        super().__init__()
        self.tags: dict[int, Tag] = {}
        # Values are identified by id, which stays unique as long as they are held here.
        self.tensors: dict[int, Any] = {}
        # A layer that is called twice would have to shrink for both calls.
        calls = [id(node.operation) for node in calls_of(graph)]
        self.shared = {call for call in calls if calls.count(call) > 1}

    def tag(self, value: Any) -> Tag | None:
        return self.tags.get(id(value))


def graph_of(model: Any) -> Any:
    """Return the recorded calls of a functional or built Sequential model."""
    # A Sequential model keeps its graph in this attribute.
    graph = getattr(model, "_functional", model)
    if not hasattr(graph, "_nodes_by_depth"):
        raise ValueError(
            f"Apoptosis: got a {type(model).__name__} without a graph of layers, expected a "
            "functional model, or a built Sequential one. Start it with keras.Input."
        )
    return graph


def calls_of(graph: Any) -> list[Any]:
    """Return the calls of a graph in topological order."""
    # Keras counts depth from the outputs.
    depths = sorted(graph._nodes_by_depth, reverse=True)
    return [node for depth in depths for node in graph._nodes_by_depth[depth] if not node.is_input]


def kind_of(operation: Any) -> str:
    """Return the class name of Keras's own operations; "" for others, which may do anything."""
    kind = type(operation)
    return kind.__name__ if kind.__module__.startswith("keras.") else ""


def find_groups(graph: Any) -> tuple[Walk, list[Group]]:
    """Return the walk, and all groups of a model, including those that cannot shrink.

    Keras 3 keeps the calls of a functional or Sequential model. A walk over them gives each value a
    tag; unknown calls are not guessed. Channels are always last.
    """
    walk = Walk(graph)
    for node in calls_of(graph):
        operation, kind = node.operation, kind_of(node.operation)
        rule = partial(_RULES[kind], walk, node) if kind in _RULES else None
        named, used = kind or type(operation).__name__, node.input_tensors
        tag = walk.follow(rule, used, kind=named, call=operation.name)
        for output in node.outputs:
            if tag is not None:
                walk.tags[id(output)], walk.tensors[id(output)] = tag, output
    return walk, walk.finished(graph.outputs)


def _elementwise(walk: Walk, node: Any) -> Tag | None:
    return walk.tag(node.input_tensors[0])


def _activation(walk: Walk, node: Any) -> Tag | None:
    name = getattr(node.operation.activation, "__name__", "")
    if name not in _FUNCTIONS:
        raise Refusal(f"activation {name or node.operation.activation!r} is not understood")
    return walk.tag(node.input_tensors[0])


def _two_sided(walk: Walk, node: Any) -> Tag | None:
    held = [walk.tag(used) for used in node.input_tensors]
    tags = [tag for tag in held if tag is not None]
    if not tags:
        return None
    # With broadcasting, one side would have a single channel for all of the other's.
    alike = len({used.shape for used in node.input_tensors}) == 1 and len(tags) == len(held)
    if not alike or not all(map(tags[0].lies_as, tags)):
        raise Refusal(f"{kind_of(node.operation)} with a value of other channels")
    return walk.join(*tags)


def _pool(walk: Walk, node: Any) -> Tag | None:
    tag = walk.tag(node.input_tensors[0])
    if tag and node.operation.data_format != "channels_last":
        raise Refusal("channels that are not last")
    # Global pooling removes the axes between, and channels stay last.
    return Tag(tag.group, len(node.outputs[0].shape) - 1, tag.places) if tag else None


def _flatten(walk: Walk, node: Any) -> Tag | None:
    tag = walk.tag(node.input_tensors[0])
    if tag is None:
        return None
    between = node.input_tensors[0].shape[1:-1]
    if None in between or node.operation.data_format != "channels_last":
        raise Refusal("Flatten of an unknown size, or of channels that are not last")
    # Channels are last, so a channel has as many elements as there are positions.
    return Tag(tag.group, 1, tag.places * math.prod(between))


def _batch_norm(walk: Walk, node: Any) -> Tag | None:
    layer, used = node.operation, node.input_tensors[0]
    tag = walk.tag(used)
    if tag is None:
        return None
    if layer.axis not in (-1, len(used.shape) - 1) or tag.places != 1 or id(layer) in walk.shared:
        raise Refusal("BatchNormalization of places, along another axis, or of a shared layer")
    for held in layer.variables:
        walk.group(tag).slices.append(Slice(f"{layer.name}/{held.name}", layer.name))
    return tag


def _layer(walk: Walk, node: Any) -> Tag | None:
    """A layer that mixes its input's channels and produces its own."""
    layer, used = node.operation, node.input_tensors[0]
    convolution = kind_of(layer) != "Dense"
    kernel = f"{layer.name}/kernel"
    bias = f"{layer.name}/bias" if layer.use_bias else None
    last = len(node.outputs[0].shape) - 1
    # Quantized layers and LoRA have further variables, which would have to be cut as well.
    plain = {held.name for held in layer.variables} <= {"kernel", "bias"}
    known = getattr(layer.activation, "__name__", "") in _FUNCTIONS
    if convolution:
        plain = plain and layer.groups == 1 and layer.data_format == "channels_last"
    tag = walk.tag(used)
    if not plain or id(layer) in walk.shared:
        reason = f"{kind_of(layer)} that is shared, quantized, grouped or not channels-last"
        walk.add(Group(node.outputs[0].shape[last], makers=[kernel], reason=reason))
        raise Refusal(reason)
    if tag:
        if tag.axis != len(used.shape) - 1 or (convolution and tag.places != 1):
            raise Refusal(f"{kind_of(layer)} along another axis than the channels'")
        # Padding sees zeros where a constant would be added, so no bias makes up for it.
        constant = layer.use_bias and not (convolution and layer.padding != "valid")
        site = Site(layer.name, kernel, bias, tag.places, tag.axis, constant)
        walk.group(tag).sites.append(site)
    slices = [Slice(name, layer.name) for name in (kernel, bias) if name]
    outputs = Group(node.outputs[0].shape[last], slices, makers=[kernel])
    if not known:
        outputs.refuse(f"the activation of {layer.name} is not understood")
    return Tag(walk.add(outputs), last)


_RULES: dict[str, Callable[[Walk, Any], Tag | None]] = {
    "Activation": _activation,
    "BatchNormalization": _batch_norm,
    "Dense": _layer,
    "Flatten": _flatten,
    **dict.fromkeys(("Conv1D", "Conv2D", "Conv3D"), _layer),
    **dict.fromkeys(_ELEMENTWISE, _elementwise),
    **dict.fromkeys(_POOLS | _GLOBAL, _pool),
    **dict.fromkeys(_TWO_SIDED, _two_sided),
}


Floats = NDArray[np.float64]
# Key of gradients that are still to be applied, while neurons merge.
_CARRIED: Final = "carried"
# Name in Keras's optimizers of the weight averages of use_ema=True.
_AVERAGES: Final = "_model_variables_moving_average"
# Names in Keras's optimizers of the lists of means (or sums) of gradients, and of their squares.
_KINDS: Final[dict[str, Literal["mean", "square"]]] = {
    _CARRIED: "mean",
    "momentums": "mean",
    "_momentums": "mean",
    "_m": "mean",
    "_average_gradients": "mean",
    "_accumulated_gradients": "mean",
    "_velocities": "square",
    "_velocity_hats": "square",
    "adam_velocities": "square",
    "_accumulators": "square",
}


class Pruner:
    """A graph of layers and its optimizer that is being pruned."""

    def __init__(self, graph: Any, optimizer: Any) -> None:
        operations = [node.operation for node in calls_of(graph)]
        self.layers = {one.name: one for one in operations if hasattr(one, "variables")}
        # A LossScaleOptimizer keeps all state of variables in the optimizer inside.
        self.optimizer = getattr(optimizer, "inner_optimizer", optimizer)
        self._outer = optimizer
        self._carried: dict[str, Any] = {}

    def take_residuals(self) -> None:
        """Take the optimizer's residuals, to be cut like a mean of gradients.

        The optimizer of sn_compress has `residuals` and `restart`; others have no residuals.
        """
        if hasattr(self.optimizer, "restart"):
            self._carried = {
                path: keras.Variable(value, trainable=False, name="left")
                for path, value in self.optimizer.residuals().items()
            }

    def give_residuals(self) -> None:
        """Return the residuals of `take_residuals` to the optimizer, in their new shapes."""
        if hasattr(self.optimizer, "restart"):
            left = {path: held.numpy() for path, held in self._carried.items()}
            self.optimizer.restart(left)

    def variable(self, name: str) -> Any:
        layer, _, last = name.rpartition("/")
        return next(held for held in self.layers[layer].variables if held.name == last)

    def state(self, variable: Any) -> list[tuple[str, Any]]:
        """Return (name of the list, variable) of a variable's whole optimizer state."""
        # Residuals are cut like all other optimizer state.
        carried = self._carried.get(variable.path)
        left = [] if carried is None else [(_CARRIED, carried)]
        trained = getattr(self.optimizer, "_trainable_variables", [])
        place = next((i for i, held in enumerate(trained) if held is variable), None)
        if place is None:
            return left
        lists = [
            (name, held)
            for name, held in vars(self.optimizer).items()
            if isinstance(held, list) and len(held) == len(trained) and name in self._own(held)
        ]
        return left + [(name, held[place]) for name, held in lists if held[place] is not None]

    def _own(self, held: Any) -> set[str]:
        """Return the names under which the optimizer has a list of variables of its own."""
        mine = {id(variable) for variable in self.optimizer.variables}
        # Lists of the same length that hold the model's own variables are not state. Muon's lists
        # have None for variables without state.
        if not all(one is None or id(one) in mine for one in held):
            return set()
        return {name for name, value in vars(self.optimizer).items() if value is held}

    def renew(self) -> None:
        """Make the optimizer find its state by the variables' current tensors."""
        for optimizer in (self.optimizer, self._outer):
            trained = getattr(optimizer, "_trainable_variables", [])
            places = {optimizer._var_key(held): place for place, held in enumerate(trained)}
            if places:
                optimizer._trainable_variables_indices = places


def resize(variable: Any, value: Any) -> None:
    """Give a Keras variable a value of another shape."""
    old = variable.value
    # Private, as Keras has no call that gives a variable another shape.
    variable._shape = tuple(np.shape(value))
    variable._initialize(tf.cast(value, old.dtype))
    nothing = tf.zeros([0], old.dtype)
    tf.raw_ops.AssignVariableOp(resource=old.handle, value=nothing, validate_shape=False)


def as_offsets(kernel: Any, width: int) -> Floats:
    """Return a reader's kernel as [offsets, outputs, n]."""
    flat = np.asarray(kernel, np.float64)
    offsets: Floats = flat.reshape(-1, width, flat.shape[-1]).transpose(0, 2, 1)
    return offsets


def merge_group(pruner: Pruner, group: Group, choice: Choice) -> None:
    """Shrink one group as chosen."""
    for place, site in enumerate(group.sites):
        _read_less(pruner, site, choice, place)
    calls: dict[str, list[str]] = {}
    for piece in group.slices:
        calls.setdefault(piece.call, []).append(piece.name)
    for names in calls.values():
        held = [pruner.variable(name) for name in names]
        trained = [np.asarray(one.numpy(), np.float64) for one in held if one.trainable]
        rows = [np.moveaxis(value, -1, 0).reshape(choice.width, -1) for value in trained]
        merges = scales(np.concatenate(rows, axis=1), choice.merges) if rows else []
        for one in held:
            for key, state in pruner.state(one):
                if tuple(state.shape) != tuple(one.shape):
                    continue
                # Copied: TensorFlow's own memory must not be written.
                value = np.moveaxis(state.numpy(), -1, 0).copy()
                if key in _KINDS:
                    add_up(_KINDS[key], value, merges)
                resize(state, np.moveaxis(value[choice.kept], 0, -1))
            resize(one, one.numpy()[..., choice.kept])


def _read_less(pruner: Pruner, site: Site, choice: Choice, place: int) -> None:
    kernel = pruner.variable(site.weight)
    bias = None if site.bias is None else pruner.variable(site.bias)
    of_kernel = dict(pruner.state(kernel))
    of_bias = {} if bias is None else dict(pruner.state(bias))
    # Averages of weights are folded like weights; of gradients, only kept neurons' stay.
    average = of_kernel.pop(_AVERAGES, None)
    for state in of_kernel.values():
        if tuple(state.shape) == tuple(kernel.shape):
            *outer, _, outputs = state.shape
            value = state.numpy().reshape(-1, choice.width, outputs)[:, choice.kept]
            resize(state, value.reshape(*outer, -1, outputs))
    _fold(kernel, bias, choice, place)
    if average is not None:
        _fold(average, of_bias.get(_AVERAGES), choice, place)


def _fold(kernel: Any, bias: Any, choice: Choice, place: int) -> None:
    *outer, _, outputs = kernel.shape
    plain = None if bias is None else np.asarray(bias.numpy(), np.float64)
    folded, moved = fold(as_offsets(kernel.numpy(), choice.width), plain, choice, place)
    resize(kernel, folded.transpose(0, 2, 1).reshape(*outer, -1, outputs))
    if bias is not None and moved is not None:
        bias.assign(moved)


def update_sizes(walk: Walk, layers: dict[str, Any]) -> None:
    """Update the sizes stated by layers and recorded values to those of the variables."""
    for layer in layers.values():
        update_layer(layer)
    for key, tag in walk.tags.items():
        value, group = walk.tensors[key], walk.group(tag)
        held = layers[group.slices[0].call].variables[0]
        value._shape = (*value.shape[:-1], int(held.shape[-1]) * tag.places)


def update_layer(layer: Any) -> None:
    """Update the sizes stated by a layer to those of its variables."""
    kernel = next((held for held in layer.variables if held.name == "kernel"), None)
    if kernel is not None and hasattr(layer, "filters"):
        layer.filters, inputs = int(kernel.shape[-1]), int(kernel.shape[-2])
    elif kernel is not None and hasattr(layer, "units"):
        layer.units, inputs = int(kernel.shape[-1]), int(kernel.shape[-2])
    elif type(layer).__name__ == "BatchNormalization":
        inputs = int(layer.moving_mean.shape[-1])
    else:
        return
    # Keras checks it in each call, and would refuse an input of the new width.
    axes = layer.input_spec.axes
    axes.update(dict.fromkeys(axes, inputs))
    # Saved with the model; the loaded model is built from it.
    shapes = layer._build_shapes_dict
    for name, shape in (shapes or {}).items():
        shapes[name] = (*shape[:-1], inputs)
