"""What `estimate` of the frameworks returns: bytes of a training step by category."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from ..base.sizes import parse_bytes, show_bytes, table
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
        The peak of an optimizer's step that is counted by itself, else 0; the batch counts, which
        the loop holds.
    peak_op
        The op that reaches `step_bytes`: its name in the graph, or the framework's own where
        tensors live longer than the graph says.
    batch
        The size of the sample's first dimension; None where its tensors differ in that.
    logits_bytes
        Of the activations, those as large as what the loss takes its logarithms of.
    device
        The device that was named, whose kernels these are; empty for the one that is here.
    room_bytes
        What torch's allocator can have there: all but the context of the driver.
    workspace_bytes
        Of the peak, what libraries keep from their first call on.
    reserved_bytes
        What the allocator of a card takes for the step, by its rules; 0 where none is modelled.
    pinned_bytes
        On the host, page-locked: 0 without a plan that moves something there.
    seconds
        Of a step with its update, by the device's figures: predicted, measured nowhere.
    notes
        What is estimated, or counted otherwise than the device would run it.
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
    logits_bytes: int = 0
    device: str = ""
    room_bytes: int | None = None
    workspace_bytes: int = 0
    reserved_bytes: int = 0
    pinned_bytes: int = 0
    seconds: float | None = None
    notes: tuple[str, ...] = ()

    @property
    def peak_bytes(self) -> int:
        """The most that is live at any one time."""
        return max(self.step_bytes, self.update_bytes)

    def fits(self, size: float | str | None = None) -> bool:
        """Whether the step fits into so many bytes, as a number or as "12GiB".

        None is the room of the device that was named.
        """
        return self.peak_bytes <= self._room(size)

    def largest_batch(self, size: float | str | None = None) -> int:
        """Return the largest batch whose step fits, without a plan; traces a few batches.

        size : as in `fits`

        Raises BudgetError if not even one sample fits, and ValueError if the sample has no batch.
        """
        if self.batch is None:
            raise ValueError(
                "the sample's tensors differ in their first dimension, so the batch is not known. "
                "Estimate samples of several sizes instead."
            )
        room = self._room(size)
        one = self._step_of(1)
        if one > room:
            raise BudgetError(
                f"a batch of 1 needs {show_bytes(one)}; there are "
                f"{show_bytes(room)}. Make the model or the input smaller, or plan it.",
                peak_bytes=one,
                budget_bytes=room,
                op=self.peak_op,
            )
        return _largest(self._step_of, room, one)

    def _room(self, size: float | str | None) -> int:
        if size is not None:
            return parse_bytes(size)
        if self.room_bytes is None:
            raise ValueError(
                'got no size, and no device was named: pass bytes, as "12GiB", or estimate with '
                'device="h100".'
            )
        return self.room_bytes

    def __str__(self) -> str:
        sizes = {
            "parameters": self.parameters_bytes,
            "buffers": self.buffers_bytes,
            "input": self.inputs_bytes,
            "gradients": self.gradients_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activations_bytes,
        }
        if self.logits_bytes:
            sizes["of which logits"] = self.logits_bytes
        sizes["allocated" if self.device else "peak"] = self.peak_bytes
        if self.device and self.reserved_bytes:
            sizes["reserved"] = self.reserved_bytes
        if self.device:
            sizes["pinned"] = self.pinned_bytes
        rows = [(name, show_bytes(size)) for name, size in sizes.items()]
        if self.seconds is not None:
            rows.append(("seconds, predicted", f"{self.seconds:.3g}"))
        lines = table(rows, right=True)
        return "\n".join([*lines, *(f"note: {it}" for it in self.notes)])


def _largest(step_of: Callable[[int], int], room: int, one: int) -> int:
    """Peaks grow almost linearly, so a straight line says where to look; bisection makes sure."""
    low, high = (1, one), (2, step_of(2))
    while high[1] <= room:
        grows = max(1, (high[1] - low[1]) // (high[0] - low[0]))
        low, batch = high, high[0] + (room - high[1]) // grows + 1
        high = batch, step_of(batch)
    by_line = True
    while high[0] - low[0] > 1:
        batch = (low[0] + high[0]) // 2
        # A line that bends leaves one end where it is, so every other time the middle is asked.
        if by_line:
            guess = low[0] + (room - low[1]) * (high[0] - low[0]) // max(1, high[1] - low[1])
            batch = min(max(guess, low[0] + 1), high[0] - 1)
        by_line = not by_line
        found = batch, step_of(batch)
        low, high = (found, high) if found[1] <= room else (low, found)
    return low[0]
