"""What became of exchanged gradients, as nodes of a graph: applied, or dropped.

TensorFlow announces no steps of optimizers. But a variable whose gradient was applied is another
one at its next exchange; where it is the same, bit by bit, nobody applied the gradient, and what
compression left out of it must not be sent later. A variable that was never seen to change is
unknown, as where a loop only looks at gradients: its gradients count as applied.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from .variables import variable

# Digest of a variable at its last exchange, None before the first, or where what became of that is
# known; whether it was seen to change.
Mark = tuple[int | None, bool]
_NEVER, _EXCHANGED, _CHANGES = np.arange(3)  # int64


def digest_of(value: Any) -> Any:
    """Digest of all bits of a variable, [] int64."""
    with tf.device("CPU"):  # there is no other kernel
        return tf.reshape(tf.bitcast(tf.fingerprint(tf.reshape(value, [1, -1])), tf.int64), [])


class Outcomes:
    """Those of the last gradients of tensors, each with the mark of its variable."""

    def __init__(self, marks: Sequence[Mark]) -> None:
        self._digests = variable(np.array([digest or 0 for digest, _ in marks], np.int64))
        states = [
            _CHANGES if changes else _NEVER if digest is None else _EXCHANGED
            for digest, changes in marks
        ]
        self._states = variable(np.array(states, np.int64))

    def dropped(self, digests: Any) -> Any:
        """Whether the last gradient of each tensor was dropped, [tensors] bool.

        Called once a step, with the digests of the variables, [tensors] int64.
        """
        before, states = self._digests.read_value(), self._states.read_value()
        changed = digests != before
        seen = changed & (states != _NEVER)
        self._digests.assign(digests)
        self._states.assign(tf.where(seen, _CHANGES, tf.maximum(states, _EXCHANGED)))
        return (states == _CHANGES) & ~changed

    def marks(self) -> list[Mark]:
        """As of now."""
        pairs = zip(self._digests.numpy().tolist(), self._states.numpy().tolist(), strict=True)
        return [(None if state == _NEVER else it, state == _CHANGES) for it, state in pairs]


def restored(dropped: Any, now: Sequence[Any], before: Callable[[], Sequence[Any]]) -> list[Any]:
    """What is remembered when a step begins: `now`, or `before()` where a gradient was dropped.

    Ordinary steps take `now` as it is.
    """
    found = tf.cond(
        tf.reduce_any(dropped),
        lambda: [tf.identity(it) for it in before()],
        lambda: [tf.identity(it) for it in now],
    )
    for it, like in zip(found, now, strict=True):
        it.set_shape(like.shape)
    return list(found)
