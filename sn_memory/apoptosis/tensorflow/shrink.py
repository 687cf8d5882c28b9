"""`Apoptosis` for Keras: look at the model every so often, merge what may go, say what was done."""

from __future__ import annotations

import json
import math
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ..groups import Group, Seen, Site, grid, offsets, same_padding
from ..merge import Choice
from ..pace import Alone, BaseApoptosis, Event, HorovodRanks, Ranks
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

Floats = NDArray[np.float64]


def _add(own: Seen, layer: Any, seen: Any, out: Any, share: int) -> None:
    """Add one batch: `seen` [rows, ..., places x n], what the reader put out [rows, ...]."""
    n = len(own.fit) - 1
    flat = tf.reshape(tf.cast(seen[0::2] if len(seen) > 1 else seen, tf.float64), [-1, n])
    flat = tf.concat([flat, tf.ones([len(flat), 1], tf.float64)], axis=1)
    own.fit += tf.matmul(flat, flat, transpose_a=True).numpy()
    # Rows that the fit leaves out: what least squares fitted by chance is no likeness.
    odd = slice(1, None, 2) if len(seen) > 1 else slice(None)
    inputs = np.asarray(seen[odd].numpy(), np.float32)
    outputs = np.asarray(out[odd].numpy(), np.float64)
    if kind_of(layer) == "Dense":
        samples = inputs.reshape(-1, inputs.shape[-1] // n, n)
        outputs = outputs.reshape(len(samples), -1)
        some = slice(None, None, -(-len(samples) // share))
        samples, outputs = samples[some], outputs[some]
    else:
        samples, outputs = _patches(layer, inputs, outputs, share)
    own.samples.append(samples)
    own.squares.append(np.square(outputs).sum(axis=1))


def _patches(
    layer: Any, seen: NDArray[np.float32], out: Floats, share: int
) -> tuple[NDArray[np.float32], Floats]:
    """Return inputs [samples, offsets, n] and outputs [samples, outputs] of a convolution.

    Outputs are taken on a grid of positions, so that there are about `share` of them.
    """
    kernel, stride, dilation = layer.kernel_size, layer.strides, layer.dilation_rate
    sides = [(0, 0)] * len(kernel)
    if layer.padding == "same":
        sides = same_padding(kernel, stride, dilation, seen.shape[1:-1])
    elif layer.padding == "causal":
        sides = [(dilation[0] * (kernel[0] - 1), 0)]
    padded = np.pad(seen, [(0, 0), *sides, (0, 0)])
    positions = grid(out.shape[1:-1], max(1, share // len(out)))
    rows = np.arange(len(out))
    parts = []
    for offset in offsets(kernel):
        places = [
            np.array(row) * step + o * spread
            for row, step, o, spread in zip(positions, stride, offset, dilation, strict=True)
        ]
        parts.append(padded[np.ix_(rows, *places)].reshape(-1, seen.shape[-1]))
    outputs = out[np.ix_(rows, *map(np.array, positions))]
    return np.stack(parts, 1), outputs.reshape(-1, out.shape[-1])


def measure(
    graph: Any, groups: Sequence[Group], batches: Sequence[Any], samples: int
) -> list[list[Seen]]:
    """Return what each reader of each group saw in batches of inputs.

    The recorded calls are run once more on them, in training mode: dropout is left out, so that
    chance is not taken for a difference, and moving averages are put back. Even rows of a batch are
    fitted, odd rows show the change. A batch of one row is used for both.

    About `samples` outputs of each reader are kept in all.
    """
    seen_by_group: list[list[Seen]] = []
    sites: dict[str, Seen] = {}
    share = math.ceil(samples / len(batches))
    for group in groups:
        row = [Seen(np.zeros((group.width + 1, group.width + 1))) for _ in group.sites]
        sites |= {site.call: own for site, own in zip(group.sites, row, strict=True)}
        seen_by_group.append(row)
    # By id of what Keras recorded: each call reads what earlier calls have left there.
    for batch in batches:
        values = {id(t): x for t, x in zip(graph.inputs, keras.tree.flatten(batch), strict=True)}
        for node in calls_of(graph):
            args, kwargs = node.arguments.fill_in(values)
            result = _run(node.operation, args, kwargs, sites, share)
            values |= {
                id(t): x for t, x in zip(node.outputs, keras.tree.flatten(result), strict=True)
            }
    return seen_by_group


def _run(operation: Any, args: Any, kwargs: Any, sites: dict[str, Seen], share: int) -> Any:
    if kind_of(operation).endswith("Dropout"):
        return args[0]
    if kind_of(operation) == "BatchNormalization":
        # In training it moves its averages, which are put back.
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
    _add(sites[operation.name], operation, args[0], out, share)
    return activation(out)


def write(model: Any, events: Sequence[Event], path: str | os.PathLike[str]) -> None:
    """Write `path`, a .keras file or else a SavedModel, and the same name with .json."""
    path = Path(path)
    if path.suffix == ".keras":
        model.save(path)
    else:
        model.export(path, verbose=False)
    record = {
        "format": "sn_memory.apoptosis",
        "version": 1,
        "shapes": [[held.path, list(held.shape)] for held in model.variables],
        "events": [event.to_json() for event in events if event],
    }
    path.with_suffix(".json").write_text(json.dumps(record, indent=1) + "\n")


def rebuild(model: Any, path: str | os.PathLike[str]) -> Any:
    """Shrink a freshly made model to what `Apoptosis.export` wrote, and load its weights.

    Parameters
    ----------
    model
        Made as it was before training, at full width; changed in place.
    path
        The .keras file. keras.models.load_model reads it just as well, where the code that made
        the model is not at hand.

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
    walk = find_groups(graph)
    for held, value in zip(model.variables, values, strict=True):
        if tuple(held.shape) == tuple(value.shape):
            held.assign(value.numpy())
        else:
            # `assign` refuses another shape.
            resize(held, np.asarray(value.numpy()))
    update_sizes(walk, Pruner(graph, None).layers)
    return model


class Apoptosis(BaseApoptosis):
    """Merges neurons of a Keras model while it trains, with all that its optimizer knows of them.

    Parameters
    ----------
    model
        A functional model, or a Sequential one that is built.
    optimizer
        Keras's optimizer of its variables; one that Horovod wraps is fine as well.
    tolerance
        The relative change of what each layer puts out that one event may cause, in (0, 1), at the
        largest learning rate there was. It falls as the rate does.
    every
        Steps from one look to the next; see `schedule`.
    min_width
        At least so many neurons are left in each group.
    round_to
        Widths that change become a multiple of this.
    schedule
        "quick", "adaptive" or "aggressive" (sn_memory.apoptosis.pace).
    overhead
        The share of training time that looks may take, in (0, 1): gaps grow until it holds. They
        then depend on the clock (of the slowest rank), and two runs may differ. None: they do not.

    Notes
    -----
    Give `observe` what the model is trained on, or train with `fit` and `callback`. A tf.function
    that was recorded before an event reads variables that are empty now, and fails: make it anew
    when `step` returns true. Functions of `fit` are made anew by themselves.
    """

    _no_batch = "no batch was seen; call observe(inputs) before step()"
    _walk: Walk

    def __init__(
        self,
        model: Any,
        optimizer: Any,
        *,
        tolerance: float = 0.02,
        every: int = 500,
        min_width: int = 8,
        round_to: int = 8,
        schedule: str = "adaptive",
        overhead: float | None = 0.02,
    ) -> None:
        super().__init__(
            tolerance=tolerance, every=every, min_width=min_width, round_to=round_to,
            schedule=schedule, overhead=overhead,
        )  # fmt: skip
        # Raises for a model without a graph: now, not at the first look, hours later.
        graph_of(model)
        self.model, self.optimizer = model, optimizer

    def observe(self, inputs: Any) -> None:
        """Keep what the model is trained on: a tensor, or a list in the order of model.inputs."""
        if self.is_near:
            self._batches.append([tf.convert_to_tensor(x) for x in keras.tree.flatten(inputs)])

    def callback(self, inputs: Any, *, batch: int = 64) -> Any:
        """Return a callback for `fit` that counts its batches.

        Parameters
        ----------
        inputs
            Inputs of training, an array [n, ...] or a list of them: `fit` shows a callback none.
            Each look takes eight batches from them, one after the other.
        batch
            Rows of a batch.
        """
        return _Callback(self, keras.tree.flatten(inputs), batch)

    def export(self, path: str | os.PathLike[str]) -> None:
        """Write a .keras file or a SavedModel to `path`, and what was merged to .json beside it."""
        write(self.model, self.events, path)

    def _rate(self) -> float:
        return float(self.optimizer.learning_rate)

    def _ranks(self) -> Ranks:
        # Horovod is not imported for this.
        hvd = sys.modules.get("horovod.tensorflow")
        if hvd is not None and hvd.is_initialized() and hvd.size() > 1:
            return HorovodRanks(hvd, tf.constant)
        return Alone()

    def _shapes(self, batch: Any) -> tuple[tuple[int, ...], ...]:
        return tuple(tuple(value.shape) for value in batch)

    def _groups(self, batch: Any) -> tuple[list[Group], str]:
        graph = graph_of(self.model)
        self._walk, pruner = find_groups(graph), Pruner(graph, self.optimizer)
        groups = list(self._walk.roots())
        for group in groups:
            for name in [piece.name for piece in group.slices] + [s.weight for s in group.sites]:
                if key := pruner.unknown_state(name):
                    group.refuse(f"the optimizer's {key!r} of {name} is not shaped like it")
        return groups, ""

    def _measure(
        self, groups: Sequence[Group], batches: Sequence[Any], samples: int
    ) -> list[list[Seen]]:
        return measure(graph_of(self.model), groups, batches, samples)

    def _offsets(self, site: Site, group: Group) -> NDArray[np.float64]:
        pruner = Pruner(graph_of(self.model), self.optimizer)
        return as_offsets(pruner.variable(site.weight).numpy(), group.width)

    def _weights(self) -> Iterator[NDArray[Any]]:
        for held in self.model.trainable_variables:
            yield held.numpy()

    def _merge(
        self, chosen: Sequence[tuple[Group, Choice]], batch: Any
    ) -> tuple[list[tuple[Group, Choice]], dict[str, str]]:
        pruner = Pruner(graph_of(self.model), self.optimizer)
        # Before anything shrinks: they have the shapes of now.
        pruner.take_residuals()
        for group, choice in chosen:
            merge_group(pruner, group, choice)
        pruner.renew()
        update_sizes(self._walk, pruner.layers)
        pruner.give_residuals()
        self._record_anew()
        return list(chosen), {}

    def _record_anew(self) -> None:
        """Let `fit`, `evaluate` and `predict` record the model again."""
        for kind in ("train", "test", "predict"):
            if getattr(self.model, f"{kind}_function", None) is not None:
                getattr(self.model, f"make_{kind}_function")(force=True)


class _Callback(keras.callbacks.Callback):  # type: ignore[misc,unused-ignore]  # Any
    def __init__(self, owner: Apoptosis, inputs: list[Any], batch: int) -> None:
        super().__init__()
        self.owner, self.inputs, self.batch = owner, inputs, batch
        # Of `inputs`, where the next batch for a look begins.
        self.row = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.owner.is_near:
            # `fit` does not tell which rows it took, so these are some of the same data.
            rows = np.arange(self.row, self.row + self.batch) % len(self.inputs[0])
            self.row = int(rows[-1]) + 1
            self.owner.observe([np.asarray(value)[rows] for value in self.inputs])
        self.owner.step()
