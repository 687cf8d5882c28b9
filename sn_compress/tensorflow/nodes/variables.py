"""Variables of what graphs remember."""

from __future__ import annotations

from typing import Any

import tensorflow as tf
from tensorflow.python.ops.resource_variable_ops import ResourceVariable


def variable(value: Any) -> Any:
    """A variable made in any trace: tf.function lets tf.Variable be made in its first only."""
    with tf.init_scope():
        return ResourceVariable(value, trainable=False)
