"""`Apoptosis` for Keras: look at the model every so often, merge what may go, say what was done."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ..groups import Group, Site
from ..merge import Choice
from ..pace import BaseApoptosis, Event
from ..ranks import Alone, HorovodRanks, Ranks
from ..samples import Seen
from .groups import Walk, find_groups, graph_of
from .statistics import measure
from .surgery import Pruner, as_offsets, merge_group, resize, update_sizes


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
            f"rebuild: {Path(path).name} has {len(values)} variables, the model "
            f"{len(model.variables)}, or of other ranks; expected the same. Make the model with "
            "the code that was trained."
        )
    graph = graph_of(model)
    walk = find_groups(graph)
    for held, value in zip(model.variables, values, strict=True):
        if tuple(held.shape) == tuple(value.shape):
            held.assign(value.numpy())
        else:
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
            tolerance=tolerance,
            every=every,
            min_width=min_width,
            round_to=round_to,
            schedule=schedule,
            overhead=overhead,
        )
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
        self.row = 0

    def on_train_batch_end(self, batch: int, logs: Any = None) -> None:
        if self.owner.is_near:
            rows = np.arange(self.row, self.row + self.batch) % len(self.inputs[0])
            self.row = int(rows[-1]) + 1
            self.owner.observe([np.asarray(value)[rows] for value in self.inputs])
        self.owner.step()
