"""One group shrinks: kernels, biases, norms, and what the optimizer keeps of each, in one go.

The objects that Keras knows a variable by stay; what they hold is a new tf.Variable, of the new
shape. A function that was recorded before still holds the old ones, and would train a model that
nobody has any more. So the old ones are emptied: such a function fails at once.
"""

from __future__ import annotations

from typing import Any, Final, Literal

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ..groups import Group, Site
from ..merge import Choice, add_up, fold, scales
from .groups import Walk, calls_of

Floats = NDArray[np.float64]
# Gradients that are still to be applied, while neurons merge.
_CARRIED: Final = "carried"
# What Keras's optimizers call their lists of means (or sums) of gradients, and of their squares.
_KINDS: Final[dict[str, Literal["mean", "square"]]] = {
    _CARRIED: "mean",
    "momentums": "mean",
    "_momentums": "mean",
    "_m": "mean",
    "_average_gradients": "mean",
    "_accumulated_gradients": "mean",
    "_velocities": "square",
    "_velocity_hats": "square",
    "_accumulators": "square",
}


class Pruner:
    """A graph of layers and its optimizer that is being pruned."""

    def __init__(self, graph: Any, optimizer: Any) -> None:
        operations = [node.operation for node in calls_of(graph)]
        self.layers = {one.name: one for one in operations if hasattr(one, "variables")}
        self.optimizer = optimizer
        self._carried: dict[str, Any] = {}

    def take_residuals(self) -> None:
        """Take from the optimizer what it has yet to send, to be cut like a mean of gradients.

        That of sn_compress has `residuals` and `restart`; others send all they have.
        """
        if hasattr(self.optimizer, "restart"):
            self._carried = {
                path: keras.Variable(value, trainable=False, name="left")
                for path, value in self.optimizer.residuals().items()
            }

    def give_residuals(self) -> None:
        """Let the optimizer go on with what `take_residuals` took, as it is now."""
        if hasattr(self.optimizer, "restart"):
            left = {path: held.numpy() for path, held in self._carried.items()}
            self.optimizer.restart(left)

    def variable(self, name: str) -> Any:
        layer, _, last = name.rpartition("/")
        return next(held for held in self.layers[layer].variables if held.name == last)

    def state(self, variable: Any) -> list[tuple[str, Any]]:
        """Return (name of the list, variable) of all that the optimizer keeps of a variable."""
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
        return left + [(name, held[place]) for name, held in lists]

    def _own(self, held: Any) -> set[str]:
        """Return the names under which the optimizer has a list of variables of its own."""
        mine = {id(variable) for variable in self.optimizer.variables}
        if not all(id(variable) in mine for variable in held):
            return set()
        return {name for name, value in vars(self.optimizer).items() if value is held}

    def renew(self) -> None:
        """Let the optimizer find its state by the tensors that variables hold now."""
        trained = getattr(self.optimizer, "_trainable_variables", [])
        places = {self.optimizer._var_key(held): place for place, held in enumerate(trained)}
        if places:
            self.optimizer._trainable_variables_indices = places

    def unknown_state(self, name: str) -> str | None:
        """Return the name of state that is neither one number nor shaped like the variable."""
        variable = self.variable(name)
        for key, held in self.state(variable):
            if tuple(held.shape) != tuple(variable.shape) and np.prod(held.shape) > 1:
                return key
        return None


def resize(variable: Any, value: Any) -> None:
    """Let a Keras variable hold a tensor of another shape."""
    old = variable.value
    variable._shape = tuple(np.shape(value))
    variable._initialize(tf.cast(value, old.dtype))
    nothing = tf.zeros([0], old.dtype)
    tf.raw_ops.AssignVariableOp(resource=old.handle, value=nothing, validate_shape=False)


def as_offsets(kernel: Any, width: int) -> Floats:
    """Return a reader's kernel as [offsets, outputs, n]."""
    flat = np.asarray(kernel, np.float64)
    found: Floats = flat.reshape(-1, width, flat.shape[-1]).transpose(0, 2, 1)
    return found


def merge_group(pruner: Pruner, group: Group, choice: Choice) -> None:
    """Shrink one group as was chosen."""
    for place, site in enumerate(group.sites):
        _read_less(pruner, site, choice, place)
    calls: dict[str, list[str]] = {}
    for piece in group.slices:
        calls.setdefault(piece.call, []).append(piece.name)
    pairs = [(merge.neuron, merge.survivor) for merge in choice.merges]
    for names in calls.values():
        held = [pruner.variable(name) for name in names]
        trained = [np.asarray(one.numpy(), np.float64) for one in held if one.trainable]
        rows = [np.moveaxis(value, -1, 0).reshape(choice.width, -1) for value in trained]
        merges = scales(np.concatenate(rows, axis=1), pairs) if rows else []
        for one in held:
            for key, state in pruner.state(one):
                if tuple(state.shape) != tuple(one.shape):
                    continue
                value = np.moveaxis(state.numpy(), -1, 0).copy()
                if key in _KINDS:
                    add_up(_KINDS[key], value, merges)
                resize(state, np.moveaxis(value[choice.kept], 0, -1))
            resize(one, one.numpy()[..., choice.kept])


def _read_less(pruner: Pruner, site: Site, choice: Choice, place: int) -> None:
    kernel = pruner.variable(site.weight)
    bias = None if site.bias is None else pruner.variable(site.bias)
    before = kernel.numpy()
    plain = None if bias is None else np.asarray(bias.numpy(), np.float64)
    folded, moved = fold(as_offsets(before, choice.width), plain, choice, place)
    *outer, inputs, outputs = before.shape
    shape = (*outer, inputs // choice.width * len(choice.kept), outputs)
    for _, state in pruner.state(kernel):
        if tuple(state.shape) == before.shape:
            value = state.numpy().reshape(-1, choice.width, outputs)[:, choice.kept]
            resize(state, value.reshape(shape))
    resize(kernel, folded.transpose(0, 2, 1).reshape(shape))
    if bias is not None and moved is not None:
        bias.assign(moved)


def update_sizes(walk: Walk, layers: dict[str, Any]) -> None:
    """Make what layers and recorded values say of their size true again."""
    for layer in layers.values():
        update_layer(layer)
    for key, tag in walk.tags.items():
        value, group = walk.tensors[key], walk.group(tag)
        held = layers[group.slices[0].call].variables[0]
        value._shape = (*value.shape[:-1], int(held.shape[-1]) * tag.places)


def update_layer(layer: Any) -> None:
    """Make what one layer says of its size that of its variables."""
    kernel = next((held for held in layer.variables if held.name == "kernel"), None)
    if kernel is not None and hasattr(layer, "filters"):
        layer.filters, inputs = int(kernel.shape[-1]), int(kernel.shape[-2])
    elif kernel is not None and hasattr(layer, "units"):
        layer.units, inputs = int(kernel.shape[-1]), int(kernel.shape[-2])
    elif type(layer).__name__ == "BatchNormalization":
        inputs = int(layer.moving_mean.shape[-1])
    else:
        return
    axes = layer.input_spec.axes
    axes.update(dict.fromkeys(axes, inputs))
    shapes = layer._build_shapes_dict
    for name, shape in (shapes or {}).items():
        shapes[name] = (*shape[:-1], inputs)
