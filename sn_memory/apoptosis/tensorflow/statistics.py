"""What every reader of a group saw and put out, on the last batches of training.

The recorded calls are run once more on them, in training mode: dropout is left out, so that chance
is not taken for a difference, and moving averages are put back. Even rows of a batch are fitted,
odd rows show the change. A batch of one row is used for both.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import keras
import numpy as np
import tensorflow as tf
from numpy.typing import NDArray

from ..groups import Group
from ..samples import Seen, grid, offsets, same_padding
from .groups import calls_of, kind_of

Floats = NDArray[np.float64]


def _add(own: Seen, layer: Any, seen: Any, out: Any, share: int) -> None:
    """Add one batch: `seen` [rows, ..., places x n], what the reader put out [rows, ...]."""
    n = len(own.fit) - 1
    flat = tf.reshape(tf.cast(seen[0::2] if len(seen) > 1 else seen, tf.float64), [-1, n])
    flat = tf.concat([flat, tf.ones([len(flat), 1], tf.float64)], axis=1)
    own.fit += tf.matmul(flat, flat, transpose_a=True).numpy()
    odd = slice(1, None, 2) if len(seen) > 1 else slice(None)
    inputs = np.asarray(seen[odd].numpy(), np.float32)
    made = np.asarray(out[odd].numpy(), np.float64)
    if kind_of(layer) == "Dense":
        samples = inputs.reshape(-1, inputs.shape[-1] // n, n)
        made = made.reshape(len(samples), -1)
        some = slice(None, None, -(-len(samples) // share))
        samples, made = samples[some], made[some]
    else:
        samples, made = _patches(layer, inputs, made, share)
    own.samples.append(samples)
    own.squares.append(np.square(made).sum(axis=1))


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
    made = out[np.ix_(rows, *map(np.array, positions))]
    return np.stack(parts, 1), made.reshape(-1, out.shape[-1])


def measure(
    graph: Any, groups: Sequence[Group], batches: Sequence[Any], samples: int
) -> list[list[Seen]]:
    """Return what each reader of each group saw in batches of inputs.

    About `samples` outputs of each reader are kept in all.
    """
    found: list[list[Seen]] = []
    sites: dict[str, Seen] = {}
    share = math.ceil(samples / len(batches))
    for group in groups:
        row = [Seen(np.zeros((group.width + 1, group.width + 1))) for _ in group.sites]
        sites |= {site.call: own for site, own in zip(group.sites, row, strict=True)}
        found.append(row)
    for batch in batches:
        values = {id(t): x for t, x in zip(graph.inputs, keras.tree.flatten(batch), strict=True)}
        for node in calls_of(graph):
            args, kwargs = node.arguments.fill_in(values)
            made = _run(node.operation, args, kwargs, sites, share)
            values |= {
                id(t): x for t, x in zip(node.outputs, keras.tree.flatten(made), strict=True)
            }
    return found


def _run(operation: Any, args: Any, kwargs: Any, sites: dict[str, Seen], share: int) -> Any:
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
    _add(sites[operation.name], operation, args[0], out, share)
    return activation(out)
