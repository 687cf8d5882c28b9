"""Samples made up for a model that must not be run on a whole one: values, and fewer rows."""

from __future__ import annotations

from typing import Any

import tensorflow as tf

# What the rows of a sample that may not fit are divided by.
SHARE = 4


def made_up(leaf: Any) -> Any:
    """Return values for a tf.TensorSpec: numbers drawn at random, zeros or True."""
    if not isinstance(leaf, tf.TensorSpec):
        return leaf
    if leaf.dtype.is_floating:
        return tf.random.stateless_normal(leaf.shape, (1, 2), dtype=leaf.dtype)
    return tf.cast(tf.fill(leaf.shape, leaf.dtype == tf.bool), leaf.dtype)


def fewer_rows(args: tuple[Any, ...]) -> tuple[Any, ...] | None:
    """Return a quarter of the rows, where all tensors have equally many."""
    rows = {it.shape[0] if it.shape.rank else 0 for it in tf.nest.flatten(args)}
    count = rows.pop() if len(rows) == 1 else 0
    if count < SHARE:
        return None
    few: tuple[Any, ...] = tf.nest.map_structure(lambda it: it[: count // SHARE], args)
    return few
