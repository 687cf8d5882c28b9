"""`Apoptosis` for Keras: measure the model periodically, merge neurons, report the merges."""

from __future__ import annotations

import math
import os
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ..groups import FITTED, Group, Seen, Site, empty_statistics, held_out, patches, same_padding
from ..merge import Choice
from ..pace import BaseApoptosis, Ranks, StateShapes, horovod_ranks
from .surgery import (
    Pruner,
    Walk,
    as_offsets,
    calls_of,
    find_groups,
    graph_of,
    kind_of,
    merge_group,
    resize,
    update_sizes,
)


def _add(own: Seen, layer: Any, seen: Any, out: Any, share: int) -> None:
    """Add one batch: inputs `seen` [rows, ..., places x n], and the reader's output [rows, ...]."""
    n = len(own.fit) - 1
    flat = tf.reshape(tf.cast(seen[FITTED], tf.float64), [-1, n])
    flat = tf.concat([flat, tf.ones([len(flat), 1], tf.float64)], axis=1)
    own.fit += tf.matmul(flat, flat, transpose_a=True).numpy()
    rows = held_out(len(seen))
    inputs, outputs = np.asarray(seen[rows].numpy(), np.float32), out[rows].numpy()
    if kind_of(layer) == "Dense":
        samples = inputs.reshape(-1, inputs.shape[-1] // n, n)
        outputs = outputs.reshape(len(samples), -1)
        some = slice(None, None, -(-len(samples) // share))
        samples, outputs = samples[some], outputs[some]
    else:
        parts, outputs = patches(
            _padded(layer, inputs), outputs, share,
            kernel=layer.kernel_size, stride=layer.strides, dilation=layer.dilation_rate,
        )  # fmt: skip
        samples = np.stack(parts, 1)
    own.add(samples, outputs)


def _padded(layer: Any, seen: NDArray[np.float32]) -> NDArray[np.float32]:
    """Return the input of a convolution with its zero padding."""
    kernel, stride, dilation = layer.kernel_size, layer.strides, layer.dilation_rate
    sides = [(0, 0)] * len(kernel)
    if layer.padding == "same":
        sides = same_padding(kernel, stride, dilation, seen.shape[1:-1])
    elif layer.padding == "causal":
        sides = [(dilation[0] * (kernel[0] - 1), 0)]
    return np.pad(seen, [(0, 0), *sides, (0, 0)])


def measure(
    graph: Any, groups: Sequence[Group], batches: Sequence[Any], samples: int
) -> list[list[Seen]]:
    """Return statistics of each reader of each group in batches of inputs.

    The recorded calls are run again on them, in training mode: dropout is left out, so that
    randomness is not taken for a difference, and moving averages are restored.

    About `samples` outputs of each reader are kept in total.
    """
    seen_by_group, sites = empty_statistics(groups, lambda size: np.zeros((size, size)))
    share = math.ceil(samples / len(batches))
    # By id of Keras's recorded tensors: each call reads results of earlier calls.
    for batch in batches:
        values = {id(t): x for t, x in zip(graph.inputs, keras.tree.flatten(batch), strict=True)}
        for node in calls_of(graph):
            args, kwargs = node.arguments.fill_in(values)
            result = _run(node.operation, args, kwargs, sites, share)
            values |= {
                id(t): x for t, x in zip(node.outputs, keras.tree.flatten(result), strict=True)
            }
    return seen_by_group


def _run(
    operation: Any, args: Any, kwargs: Any, sites: dict[str, tuple[Site, Seen]], share: int
) -> Any:
    if kind_of(operation).endswith("Dropout"):
        return args[0]
    if kind_of(operation) == "BatchNormalization":
        # In training mode it updates its averages, which are restored.
        before = [held.numpy() for held in operation.non_trainable_variables]
        output = operation(*args, **{**kwargs, "training": True})
        for held, value in zip(operation.non_trainable_variables, before, strict=True):
            held.assign(value)
        return output
    if operation.name not in sites:
        return operation(*args, **kwargs)
    activation = operation.activation
    # What a reader puts out is measured before its activation.
    operation.activation = keras.activations.linear
    try:
        out = operation(*args, **kwargs)
    finally:
        operation.activation = activation
    _add(sites[operation.name][1], operation, args[0], out, share)
    return activation(out)


def rebuild(model: Any, path: str | os.PathLike[str]) -> Any:
    """Shrink a freshly made model to what `Apoptosis.export` wrote, and load its weights.

    Parameters
    ----------
    model
        Constructed as before training, at full width; changed in place.
    path
        The .keras file. keras.models.load_model also reads it, if the code that made the model is
        not available.

    Returns
    -------
    keras.Model
        The model. Make its optimizer after this call.
    """
    values = keras.models.load_model(path, compile=False).variables
    if [len(held.shape) for held in values] != [len(held.shape) for held in model.variables]:
        raise ValueError(
            f"rebuild: {Path(path).name} has {len(values)} variables and the model "
            f"{len(model.variables)}, or their ranks differ; expected the same. Make the model "
            "with the code that was trained."
        )
    graph = graph_of(model)
    walk, _ = find_groups(graph)
    for held, value in zip(model.variables, values, strict=True):
        if tuple(held.shape) == tuple(value.shape):
            held.assign(value.numpy())
        else:
            # `assign` refuses another shape.
            resize(held, np.asarray(value.numpy()))
    update_sizes(walk, Pruner(graph, None).layers)
    return model


class Apoptosis(BaseApoptosis):
    """Merges neurons of a Keras model while it trains, together with their optimizer state.

    The model is a functional one, or a built Sequential one; the optimizer is a Keras optimizer of
    its variables, wrapped by Horovod or not. Settings: see `__init__`.

    Notes
    -----
    Pass training inputs to `observe`, or train with `fit` and `callback`. A tf.function traced
    before an event reads variables that are empty now, and fails: recreate it when `step` returns
    true. The functions of `fit` are recreated automatically. `export` writes a .keras file, or a
    SavedModel for a path with another suffix.
    """

    _no_batch = "no batch was seen; call observe(inputs) before step()"
    _walk: Walk

    def _begin(self) -> None:
        # Raises for a model without a graph now, not hours later at the first look.
        graph_of(self.model)

    def observe(self, inputs: Any) -> None:
        """Keep a training input: a tensor, or a list in the order of model.inputs."""
        if self.is_near:
            self._batches.append([tf.convert_to_tensor(x) for x in keras.tree.flatten(inputs)])

    def callback(self, inputs: Any, *, batch: int = 64) -> Any:
        """Return a callback for `fit` that counts its batches.

        Parameters
        ----------
        inputs
            Training inputs, an array [n, ...] or a list of them, as `fit` passes none to a
            callback. Each look takes the next eight batches from them.
        batch
            Rows of a batch.
        """
        return _Callback(self, keras.tree.flatten(inputs), batch)

    def _write(self, path: Path) -> dict[str, Any]:
        if path.suffix == ".keras":
            self.model.save(path)
        else:
            self.model.export(path, verbose=False)
        shapes = [[held.path, list(held.shape)] for held in self.model.variables]
        return {"version": 1, "shapes": shapes}

    def _rate(self) -> float:
        return float(self.optimizer.learning_rate)

    def _ranks(self) -> Ranks:
        return horovod_ranks("horovod.tensorflow", tf.constant)

    def _shapes(self, batch: Any) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(value.shape) for value in batch)

    def _groups(self, batch: Any) -> tuple[list[Group], str]:
        self._walk, groups = find_groups(graph_of(self.model))
        return groups, ""

    def _state_shapes(self, name: str) -> tuple[Sequence[int], StateShapes]:
        pruner = self._pruner()
        variable = pruner.variable(name)
        return variable.shape, [(key, held.shape) for key, held in pruner.state(variable)]

    def _pruner(self) -> Pruner:
        return Pruner(graph_of(self.model), self.optimizer)

    def _measure(
        self, groups: Sequence[Group], batches: Sequence[Any], samples: int
    ) -> list[list[Seen]]:
        return measure(graph_of(self.model), groups, batches, samples)

    def _offsets(self, site: Site, group: Group) -> NDArray[np.float64]:
        return as_offsets(self._pruner().variable(site.weight).numpy(), group.width)

    def _weights(self) -> Iterator[NDArray[Any]]:
        for held in self.model.trainable_variables:
            yield held.numpy()

    def _merge(
        self, chosen: Sequence[tuple[Group, Choice]], batch: Any
    ) -> tuple[list[tuple[Group, Choice]], dict[str, str]]:
        pruner = self._pruner()
        # Before anything shrinks: they have the current shapes.
        pruner.take_residuals()
        for group, choice in chosen:
            merge_group(pruner, group, choice)
        pruner.renew()
        update_sizes(self._walk, pruner.layers)
        pruner.give_residuals()
        self._record_anew()
        return list(chosen), {}

    def _record_anew(self) -> None:
        """Make `fit`, `evaluate` and `predict` trace the model again."""
        for kind in ("train", "test", "predict"):
            if getattr(self.model, f"{kind}_function", None) is not None:
                getattr(self.model, f"make_{kind}_function")(force=True)


class _Callback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]  # Any
    def __init__(self, owner: Apoptosis, inputs: list[Any], batch: int) -> None:
        super().__init__()
        self.owner, self.inputs, self.batch = owner, inputs, batch
        # The row of `inputs` where the next batch for a look begins.
        self.row = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.owner.is_near:
            # `fit` does not say which rows it used, so these are other rows of the same data.
            rows = np.arange(self.row, self.row + self.batch) % len(self.inputs[0])
            self.row = int(rows[-1]) + 1
            self.owner.observe([np.asarray(value)[rows] for value in self.inputs])
        self.owner.step()
