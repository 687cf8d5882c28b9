"""What `estimate` of the frameworks returns: bytes of a training step by category."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..base.sizes import parse_bytes, show_bytes
from ..plan.plan import BudgetError


@dataclass(frozen=True)
class Estimate:
    """Bytes of a training step as its framework runs it, without a plan.

    Parameters
    ----------
    parameters_bytes, buffers_bytes, inputs_bytes, gradients_bytes, optimizer_bytes
        What is there between steps, or at their end. Of a step function that updates, the state of
        optimizers is among the buffers: variables that do not train.
    activations_bytes
        What the forward pass leaves for the backward pass, outputs included.
    step_bytes
        The peak of forward and backward, or of a whole step function, the optimizer's state
        included.
    update_bytes
        The peak of an optimizer's step that is counted by itself, else 0.
    peak_op
        The op that reaches `step_bytes`: its name in the graph, or the framework's own where
        tensors live longer than the graph says.
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
    update_bytes: int
    peak_op: str
    batch: int | None
    _step_of: Callable[[int], int] = field(repr=False, compare=False)

    @property
    def peak_bytes(self) -> int:
        """The most that is live at any one time."""
        return max(self.step_bytes, self.update_bytes)

    def fits(self, size: float | str) -> bool:
        """Whether the step fits into so many bytes, as a number or as "12GiB"."""
        return self.peak_bytes <= parse_bytes(size)

    def largest_batch(self, size: float | str) -> int:
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
        if max(one, self.update_bytes) > room:
            raise BudgetError(
                f"a batch of 1 needs {show_bytes(max(one, self.update_bytes))}; there are "
                f"{show_bytes(room)}. Make the model or the input smaller, or plan it.",
                peak_bytes=max(one, self.update_bytes),
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
