"""`Apoptosis` for Keras: look at the model every so often, merge what may go, say what was done."""

from __future__ import annotations

import os
from collections import deque
from typing import Any

import keras
import numpy as np
import tensorflow as tf

from ..batches import most_alike
from ..events import Merged, merged
from ..groups import Group
from ..merge import Choice
from ..pace import BATCHES, Paced
from ..patches import SAMPLES
from ..reader import Reader
from .agree import (
    fingerprint,
    largest_of_ranks,
    place,
    require_same,
    stack_over_ranks,
    sum_over_ranks,
)
from .export import write
from .groups import find_groups, graph_of
from .statistics import measure
from .surgery import Patient, as_offsets, operate, tell


class Apoptosis(Paced):
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
        "quick", "adaptive" or "aggressive" (sn_memory.apoptosis.schedule).
    overhead
        The share of training time that looks may take, in (0, 1): gaps grow until it holds. They
        then depend on the clock (of the slowest rank), and two runs may differ. None: they do not.

    Notes
    -----
    Give `observe` what the model is trained on, or train with `fit` and `callback`. A tf.function
    that was recorded before an event reads variables that are empty now, and fails: make it anew
    when `step` returns true. Functions of `fit` are made anew by themselves.
    """

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
        self._batches: deque[Any] = deque(maxlen=BATCHES)

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

    def _largest_of_ranks(self, value: float) -> float:
        return largest_of_ranks([value])[0]

    def _look(self) -> tuple[tuple[Merged, ...], dict[str, str]]:
        graph = graph_of(self.model)
        batches = most_alike(self._batches, _shapes)
        walk = find_groups(graph)
        patient = Patient(graph, self.optimizer)
        groups = list(walk.roots())
        for group in groups:
            for name in [piece.name for piece in group.slices] + [s.weight for s in group.sites]:
                if key := patient.unknown_state(name):
                    group.refuse(f"the optimizer's {key!r} of {name} is not shaped like it")
        # A rank that cannot look says so in the hash: the others would wait for it otherwise.
        failure = "" if batches else "no batch was seen; call observe(inputs) before step()"
        described = [f"{group.name}: {group.width} {group.reason or ''}" for group in groups]
        require_same("the model", failure + "; ".join(described))
        if failure:
            return (), {"the model": failure}
        able = [group for group in groups if group.reason is None]
        refused = {group.name: group.reason for group in groups if group.reason is not None}
        choices = self._decide(graph, patient, able, batches)
        weights = fingerprint(self.model.trainable_variables)
        decided = [choice and choice.text() for choice in choices]
        require_same("weights or decision", f"{weights} {decided}")
        done = []
        if any(choice is not None and choice.merges for choice in choices):
            patient.take()
        for group, choice in zip(able, choices, strict=True):
            if choice is None:
                refused[group.name] = "its activations are not finite"
            elif choice.merges:
                operate(patient, group, choice)
                done.append(merged(group, choice))
        if done:
            patient.renew()
            tell(walk, patient.layers)
            patient.give()
            self._record_anew()
        return tuple(done), refused

    def _decide(
        self, graph: Any, patient: Patient, groups: list[Group], batches: list[Any]
    ) -> list[Choice | None]:
        ranks, _ = place()
        found = measure(graph, groups, batches, samples=SAMPLES // ranks)
        every = [own for row in found for own in row]
        if not every:
            return []
        # What each rank adds has to be of one size; rows of the last batch may be fewer on one.
        sizes = largest_of_ranks([-sum(map(len, own.squares)) for own in every])
        cuts = [int(-size) for size in sizes]
        cut = [np.concatenate(own.samples)[:n] for own, n in zip(every, cuts, strict=True)]
        squares = [
            np.concatenate(own.squares)[:n].sum() for own, n in zip(every, cuts, strict=True)
        ]
        *fits, totals = sum_over_ranks([*(own.fit for own in every), np.array(squares)])
        told = zip(fits, stack_over_ranks(cut), np.sqrt(totals), strict=True)
        choices = []
        for group in groups:
            readers = []
            for site in group.sites:
                fit, samples, norm = next(told)
                weights = as_offsets(patient.variable(site.weight).numpy(), group.width)
                constant = site.takes_constant
                readers.append(Reader(site.call, weights, fit, samples, float(norm), constant))
            choices.append(self._choose(readers, group.block))
        return choices

    def _record_anew(self) -> None:
        """Let `fit`, `evaluate` and `predict` record the model again."""
        for kind in ("train", "test", "predict"):
            if getattr(self.model, f"{kind}_function", None) is not None:
                getattr(self.model, f"make_{kind}_function")(force=True)


def _shapes(batch: list[Any]) -> tuple[tuple[int, ...], ...]:
    return tuple(tuple(value.shape) for value in batch)


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
