"""estimate: what a training step will hold, by category, before anything of it is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import keras
import tensorflow as tf

from ..errors import BudgetError
from ..liveness import live_bytes, peak
from ..sizes import parse_bytes, show_bytes
from .model import call_arguments
from .trace import Trace, optimizer_bytes, trace


@dataclass(frozen=True)
class Estimate:
    """Bytes of a training step as TensorFlow runs it, without a plan.

    Parameters
    ----------
    parameters_bytes, buffers_bytes, inputs_bytes, gradients_bytes, optimizer_bytes
        What is there between steps, or at their end. Of a step function the state of optimizers
        is among the buffers: variables that do not train.
    activations_bytes
        What the forward pass leaves for the backward pass, outputs included.
    step_bytes
        The peak of the step, the optimizer's state included.
    peak_op
        The op that reaches it.
    batch
        The size of the sample's first dimension; None where its tensors differ in that.
    """

    parameters_bytes: int
    buffers_bytes: int
    inputs_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    activations_bytes: int
    step_bytes: int
    peak_op: str
    batch: int | None
    _step_of: Callable[[int], int] = field(repr=False, compare=False)

    @property
    def peak_bytes(self) -> int:
        """The most that is live at any one time."""
        return self.step_bytes

    def fits(self, size: int | str) -> bool:
        """Whether the step fits into so many bytes, as a number or as "12GiB"."""
        return self.peak_bytes <= parse_bytes(size)

    def largest_batch(self, size: int | str) -> int:
        """Return the largest batch whose step fits, without a plan; traces a few batches.

        Raises BudgetError if not even one sample fits, and ValueError if the sample has no batch.
        """
        if self.batch is None:
            raise ValueError(
                "the sample's tensors differ in their first dimension, so the batch is not known. "
                "Estimate samples of several sizes instead."
            )
        room = parse_bytes(size)
        one = self._step_of(1)
        if one > room:
            raise BudgetError(
                f"a batch of 1 needs {show_bytes(one)}; there are {show_bytes(room)}. Make the "
                "model or the input smaller, or plan it.",
                peak_bytes=one,
                budget_bytes=room,
                op=self.peak_op,
            )
        return _largest(self._step_of, room, one)

    def __str__(self) -> str:
        rows = {
            "parameters": self.parameters_bytes,
            "buffers": self.buffers_bytes,
            "input": self.inputs_bytes,
            "gradients": self.gradients_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activations_bytes,
            "peak": self.peak_bytes,
        }
        return "\n".join(f"{name:<12}{show_bytes(size):>12}" for name, size in rows.items())


def estimate(model: Any, sample: Any, *, optimizer: Any = None) -> Estimate:
    """Tell what a training step will hold. The model's variables exist; nothing else is allocated.

    Parameters
    ----------
    model, sample
        As in `trace`; a tf.TensorSpec as sample will do.
    optimizer
        A Keras optimizer or its name, for a model.

    Raises
    ------
    TraceError
        For a model or step that cannot be traced.

    Examples
    --------
    >>> import keras
    >>> import tensorflow as tf
    >>> import sn_memory.tensorflow
    >>> model = keras.Sequential([keras.Input((1000,)), keras.layers.Dense(1000)])
    >>> sample = tf.TensorSpec((64, 1000))
    >>> found = sn_memory.tensorflow.estimate(model, sample, optimizer="adam")
    >>> found.parameters_bytes, found.gradients_bytes, found.fits("1GB")
    (4004000, 4004000, True)
    """
    traced = trace(model, sample, profile=False)
    held = optimizer_bytes(model, optimizer) if optimizer is not None else 0
    args = call_arguments(sample)

    def step_of(batch: int) -> int:
        resized = tf.nest.map_structure(lambda it: _resized(it, batch), args)
        return peak(trace(model, resized, profile=False).graph).bytes + held

    highest = peak(traced.graph)
    roles = dict.fromkeys(("parameter", "state", "input"), 0)
    for value in (*traced.captured.arguments, *traced.captured.captures):
        role = "input" if value in traced.captured.arguments else "state"
        if value in traced.captured.variables:
            role = "parameter" if traced.captured.variables[value].trainable else "state"
        roles[role] += traced.named.buffers.sizes[value]
    gradients = {traced.named.buffers.root[value] for value in traced.captured.gradients}
    return Estimate(
        parameters_bytes=roles["parameter"],
        buffers_bytes=roles["state"],
        inputs_bytes=roles["input"],
        gradients_bytes=sum(traced.named.buffers.sizes[root] for root in gradients),
        optimizer_bytes=held,
        activations_bytes=_left(traced),
        step_bytes=highest.bytes + held,
        peak_op=traced.graph.ops[highest.op].name,
        batch=_batch(args) if isinstance(model, keras.Model) or args else None,
        _step_of=step_of,
    )


def _left(traced: Trace) -> int:
    """Bytes live beside the resident ones when the last forward op has run."""
    graph = traced.graph
    last = max(at for at, op in enumerate(graph.ops) if op.phase == "forward")
    return int(live_bytes(graph)[last] - graph.base_bytes)


def _batch(args: tuple[Any, ...]) -> int | None:
    specs = [it for it in tf.nest.flatten(args) if isinstance(it, tf.TensorSpec)]
    sizes = {it.shape[0] if it.shape.rank else None for it in specs}
    return sizes.pop() if len(sizes) == 1 else None


def _resized(spec: Any, batch: int) -> Any:
    if not isinstance(spec, tf.TensorSpec):
        return spec
    return tf.TensorSpec([batch, *spec.shape.as_list()[1:]], spec.dtype)


def _largest(step_of: Callable[[int], int], room: int, one: int) -> int:
    """Bisect; peaks grow almost linearly, so a straight line says where to look."""
    low, low_bytes = 1, one
    high, high_bytes = 2, step_of(2)
    while high_bytes <= room:
        grows = max(1, (high_bytes - low_bytes) // (high - low))
        low, low_bytes = high, high_bytes
        high = low + (room - low_bytes) // grows + 1
        high_bytes = step_of(high)
    while high - low > 1:
        middle = (low + high) // 2
        middle_bytes = step_of(middle)
        if middle_bytes <= room:
            low, low_bytes = middle, middle_bytes
        else:
            high = middle
    return low
