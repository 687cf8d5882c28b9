"""chunked_cross_entropy: the projection to the vocabulary and its loss, in chunks of rows.

Logits over a large vocabulary and their gradient are live at one op, so no plan of ops can reduce
them. Neither TensorFlow nor Keras has a chunked loss, and splitting the rows by hand, with or
without recomputation, holds a full kernel gradient for each part. Here the loss of a chunk and its
gradient (up to the factor that arrives in the backward pass) are computed from its logits, which
are freed before those of the next chunk are computed. The equivalent in torch is
`torch.nn.functional.linear_cross_entropy`.
"""

from __future__ import annotations

from typing import Any

import tensorflow as tf


def chunked_cross_entropy(
    hidden: Any,
    kernel: Any,
    labels: Any,
    *,
    bias: Any = None,
    chunks: int = 8,
    ignore_class: int | None = None,
    reduction: str = "mean",
) -> Any:
    """Return the sparse cross entropy of `hidden @ kernel + bias` without holding all logits.

    Parameters
    ----------
    hidden
        [..., h] floats; rows are all dimensions but the last.
    kernel, bias
        [h, v] and [v], as in a Dense layer; they are cast to the dtype of `hidden`.
    labels
        [...] integers, one for each row, in [0, v) or `ignore_class`.
    chunks
        Rows are split into this many equal parts (the last may be smaller), which run one after the
        other. The number of rows must be known when the step is traced.
    ignore_class
        Rows with this label count neither in the sum nor in the mean.
    reduction
        `mean` over the rows that count, or `sum`.

    Returns
    -------
    A scalar of the dtype of `hidden`; float32 if that is half precision, as the loss is computed
    from float32 logits, like in Keras.

    Raises
    ------
    ValueError
        For sizes that do not match, or an unknown number of rows.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from sn_memory.tensorflow import chunked_cross_entropy
    >>> hidden, kernel = tf.random.normal((64, 16)), tf.random.normal((16, 1000))
    >>> labels = tf.random.uniform((64,), 0, 1000, tf.int32)
    >>> loss = chunked_cross_entropy(hidden, kernel, labels, chunks=4)
    >>> plain = tf.nn.sparse_softmax_cross_entropy_with_logits(labels, hidden @ kernel)
    >>> bool(abs(loss - tf.reduce_mean(plain)) < 1e-5)
    True
    """
    if reduction not in ("mean", "sum"):
        raise ValueError(f"got reduction {reduction!r}, expected mean or sum.")
    if isinstance(chunks, bool) or not isinstance(chunks, int) or chunks < 1:
        raise ValueError(f"got chunks {chunks!r}, expected a whole number of 1 or more.")
    hidden = tf.convert_to_tensor(hidden)
    kernel = tf.cast(tf.convert_to_tensor(kernel), hidden.dtype)
    labels = tf.convert_to_tensor(labels)
    if hidden.shape[-1] != kernel.shape[0] or kernel.shape.rank != 2:
        raise ValueError(
            f"got hidden {tuple(hidden.shape)} and kernel {tuple(kernel.shape)}, expected [..., h] "
            "and [h, v]."
        )
    rows = tf.reshape(hidden, (-1, hidden.shape[-1]))
    wanted = tf.reshape(labels, (-1,))
    count = rows.shape[0] if rows.shape[0] is not None else wanted.shape[0]
    if count is None or wanted.shape[0] not in (None, count):
        raise ValueError(
            f"got hidden {tuple(hidden.shape)} and labels {tuple(labels.shape)}, expected as many "
            "labels as rows, and known sizes. Give the batch a fixed size."
        )
    has_bias = bias is not None
    inputs = [rows, kernel]
    if has_bias:
        inputs.append(tf.cast(tf.convert_to_tensor(bias), hidden.dtype))
    size = max(1, -(-count // chunks))
    wide = tf.float32 if rows.dtype in (tf.float16, tf.bfloat16) else rows.dtype
    if ignore_class is None:
        counted = tf.ones_like(wanted, wide)
    else:
        counted = tf.cast(wanted != ignore_class, wide)
        # The op checks labels, so use an existing class; the row does not count.
        wanted = tf.where(wanted == ignore_class, tf.zeros_like(wanted), wanted)
    # For a mean, each row's share is divided. In half precision that may underflow before the loss
    # scale arrives, so there the sums are divided at the end.
    divisor = tf.reduce_sum(counted) if reduction == "mean" else tf.ones((), wide)
    last_divisor = tf.ones((), wide)
    if wide != rows.dtype:
        divisor, last_divisor = last_divisor, divisor
    row_share = counted / divisor

    @tf.custom_gradient
    def loss_of(*inputs: Any) -> Any:
        rows, kernel = inputs[:2]
        total = tf.zeros((), wide)
        of_rows = []
        # Accumulated in the wider dtype: half precision would round after each chunk.
        of_kernel = tf.zeros_like(kernel, wide)
        of_bias = tf.zeros_like(inputs[2], wide) if has_bias else None
        before: list[Any] = []
        # At least once, even without rows: tf.concat needs a part.
        for begin in range(0, max(1, count), size):
            # Serialized: otherwise TensorFlow would hold the logits of several chunks at once.
            with tf.control_dependencies(before):
                some = tf.identity(rows[begin : begin + size])
                target, share = wanted[begin : begin + size], row_share[begin : begin + size]
                logits = tf.matmul(some, kernel)
                if has_bias:
                    logits = tf.nn.bias_add(logits, inputs[2])
                losses, slope = tf.raw_ops.SparseSoftmaxCrossEntropyWithLogits(
                    features=tf.cast(logits, wide), labels=target
                )
                slope = tf.cast(slope * share[:, None], rows.dtype)
                total = total + tf.reduce_sum(losses * share)
                of_rows.append(tf.matmul(slope, kernel, transpose_b=True))
                of_kernel += tf.cast(tf.matmul(some, slope, transpose_a=True), wide)
                if has_bias:
                    of_bias += tf.cast(tf.reduce_sum(slope, 0), wide)
                before = [total, of_rows[-1], of_kernel, *([of_bias] if has_bias else [])]
        gradients = [tf.concat(of_rows, 0), of_kernel, *([of_bias] if has_bias else [])]

        def slopes(arrived: Any) -> list[Any]:
            return [
                tf.cast(tf.cast(slope, wide) * (arrived / last_divisor), to.dtype)
                for slope, to in zip(gradients, inputs, strict=True)
            ]

        return total / last_divisor, slopes

    return loss_of(*inputs)
