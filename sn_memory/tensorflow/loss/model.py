"""chunk_loss: a Keras model and its loss as one model, the last layer and the loss in chunks."""

from __future__ import annotations

from typing import Any

import keras
import tensorflow as tf
from keras.src.backend import AutocastScope  # has no public name

from ..errors import TraceError
from .function import chunked_cross_entropy


class LossInChunks(keras.Model):  # type: ignore[misc]
    """Takes (inputs, labels) and returns the loss; see `chunk_loss`."""

    def __init__(
        self, model: Any, chunks: int, *, ignore_class: int | None = None, name: str | None = None
    ) -> None:
        super().__init__(name=name or f"{model.name}_with_loss", dtype=model.dtype_policy)
        last = model.layers[-1]
        if not isinstance(last, keras.layers.Dense):
            raise TraceError(
                f"the last layer is a {type(last).__name__}, expected a Dense that makes logits. "
                "Call chunked_cross_entropy in the step."
            )
        if keras.activations.get(last.activation) is not keras.activations.linear:
            raise TraceError(
                f"the last layer has the activation {last.activation.__name__}, expected logits. "
                "Leave the softmax to the loss (from_logits=True)."
            )
        self.model, self.chunks, self.ignore_class = model, chunks, ignore_class
        self.body = keras.Model(model.inputs, last.input)
        self.last = last

    def call(self, inputs: Any, training: bool | None = None) -> Any:
        """Return the mean loss of (inputs, labels)."""
        given, labels = inputs
        hidden = self.body(given, training=training)
        kind = self.last.compute_dtype
        # The last layer computes in a type of its own, whatever this model's is.
        with AutocastScope(kind):
            kernel, bias = self.last.kernel, self.last.bias
            bias = None if bias is None else tf.convert_to_tensor(bias)
            kernel = tf.convert_to_tensor(kernel)
        return chunked_cross_entropy(
            tf.cast(hidden, kind),
            kernel,
            labels,
            bias=bias,
            chunks=self.chunks,
            ignore_class=self.ignore_class,
        )


def chunk_loss(model: Any, chunks: int, *, ignore_class: int | None = None) -> LossInChunks:
    """Return a model of (inputs, labels) that returns the mean sparse cross entropy.

    The same number as `SparseCategoricalCrossentropy(from_logits=True)` of the model's output, but
    for the order of sums; its last layer and the loss run in chunks of rows. It shares layers and
    variables with the model, and is planned by `plan` as any other.

    Parameters
    ----------
    model
        Built, functional or sequential, whose last layer is a Dense that makes logits.
    chunks, ignore_class
        As in `chunked_cross_entropy`.

    Raises
    ------
    TraceError
        For a model that ends otherwise.

    Examples
    --------
    >>> import keras
    >>> import tensorflow as tf
    >>> from sn_memory.tensorflow import chunk_loss
    >>> model = keras.Sequential([keras.Input((8,)), keras.layers.Dense(500)])
    >>> x, labels = tf.random.normal((32, 8)), tf.random.uniform((32,), 0, 500, tf.int32)
    >>> plain = keras.losses.SparseCategoricalCrossentropy(from_logits=True)(labels, model(x))
    >>> bool(abs(chunk_loss(model, 4)((x, labels)) - plain) < 1e-5)
    True
    """
    return LossInChunks(model, chunks, ignore_class=ignore_class)
