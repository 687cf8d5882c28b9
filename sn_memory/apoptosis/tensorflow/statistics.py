"""What every reader of a group saw and put out, on the last batches of training.

The recorded calls are run once more on them, in training mode: dropout is left out, so that chance
is not taken for a difference, and moving averages are put back. Even rows of a batch give the
factors, odd rows the change. A batch of one row is used for both.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ..groups import Group, Site
from .groups import calls_of, kind_of

Floats = NDArray[np.float64]


class Moments:
    """Sums over samples of (h, 1) (h, 1)^T in float64, [n + 1, n + 1], and of squares put out."""

    def __init__(self, n: int) -> None:
        self.fit = np.zeros((n + 1, n + 1))
        self.check = np.zeros((n + 1, n + 1))
        self.squares = np.zeros(())

    def add(self, seen: Any, out: Any) -> None:
        """Add one batch: `seen` [rows, ..., places x n], what the reader put out [rows, ...]."""
        n = len(self.fit) - 1
        seen = tf.cast(seen, tf.float64)
        fit, check = (seen[0::2], seen[1::2]) if len(seen) > 1 else (seen, seen)
        for total, rows in ((self.fit, fit), (self.check, check)):
            flat = tf.reshape(rows, [-1, n])
            flat = tf.concat([flat, tf.ones([len(flat), 1], tf.float64)], axis=1)
            total += tf.matmul(flat, flat, transpose_a=True).numpy()
        odd = tf.cast(out[1::2] if len(out) > 1 else out, tf.float64)
        self.squares += tf.reduce_sum(tf.square(odd)).numpy()


def measure(graph: Any, groups: Sequence[Group], batches: Sequence[Any]) -> list[list[Moments]]:
    """Return the moments of each reader of each group, summed over batches of inputs."""
    found: list[list[Moments]] = []
    sites: dict[str, tuple[Site, Moments]] = {}
    for group in groups:
        row = [Moments(group.width) for _ in group.sites]
        sites |= {site.call: (site, own) for site, own in zip(group.sites, row, strict=True)}
        found.append(row)
    for batch in batches:
        values = {id(t): x for t, x in zip(graph.inputs, keras.tree.flatten(batch), strict=True)}
        for node in calls_of(graph):
            args, kwargs = node.arguments.fill_in(values)
            made = _run(node.operation, args, kwargs, sites)
            values |= {
                id(t): x for t, x in zip(node.outputs, keras.tree.flatten(made), strict=True)
            }
    return found


def _run(operation: Any, args: Any, kwargs: Any, sites: dict[str, tuple[Site, Moments]]) -> Any:
    if kind_of(operation).endswith("Dropout"):
        return args[0]
    if kind_of(operation) == "BatchNormalization":
        before = [held.numpy() for held in operation.non_trainable_variables]
        made = operation(*args, **{**kwargs, "training": True})
        for held, value in zip(operation.non_trainable_variables, before, strict=True):
            held.assign(value)
        return made
    if operation.name not in sites:
        return operation(*args, **kwargs)
    activation = operation.activation
    operation.activation = keras.activations.linear
    try:
        out = operation(*args, **kwargs)
    finally:
        operation.activation = activation
    sites[operation.name][1].add(args[0], out)
    return activation(out)
