"""Shapes that depend on values, as they are on the sample.

Boolean masks, `tf.where` with one argument, `tf.unique` and all that is computed from them have
shapes that a trace leaves open. The ops of a plan take what comes, so a plan needs these shapes
only to count: the step's ops run once on the sample, unplanned and without their effects.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import tensorflow as tf

from ..errors import TraceError, first_line
from . import kernels
from .capture import Captured, put


def with_sample_shapes(captured: Captured, given: Callable[[], Sequence[Any] | None]) -> Captured:
    """Return a captured step that knows the shapes its trace left open, if there are any.

    Raises TraceError where the ops do not run on the sample, for want of memory, say.

    given : returns tensors for the arguments, or None, where the sample has no values
    """
    wanted = [
        value
        for node in captured.nodes
        for value in node.outputs
        if captured.tensors[value].dtype not in (tf.resource, tf.variant, tf.string)
        and kernels.nbytes(captured.tensors[value]) is None
    ]
    tensors = given() if wanted else None
    if tensors is None:
        return captured
    ancestors = captured.ancestors(wanted)

    @tf.function(autograph=False)
    def shapes(*tensors: Any) -> dict[str, Any]:
        values = dict(zip(captured.arguments, tensors, strict=True)) | captured.captures
        for at in sorted(ancestors):
            node = captured.nodes[at]
            if not kernels.has_effect(node.op) and all(value in values for value in node.inputs):
                made = put(node, [values[value] for value in node.inputs], []).outputs
                values.update(zip(node.outputs, made, strict=True))
        return {str(value): tf.shape(values[value]) for value in wanted if value in values}

    try:
        found = shapes(*tensors)
    except Exception as error:  # whatever TensorFlow raises, out of memory included
        raise TraceError(
            "shapes that depend on values are unknown, as the step did not run on the sample: "
            f"{first_line(error)}"
        ) from error
    return replace(
        captured, shapes={int(at): tuple(it.numpy().tolist()) for at, it in found.items()}
    )
