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
        rows = {
            "parameters": self.parameters_bytes,
            "buffers": self.buffers_bytes,
            "input": self.inputs_bytes,
            "gradients": self.gradients_bytes,
            "optimizer": self.optimizer_bytes,
            "activations": self.activations_bytes,
            **({"of which logits": self.logits_bytes} if self.logits_bytes else {}),
            "peak": self.peak_bytes,
        }
        if self.device:
            del rows["peak"]
            rows |= {
                "allocated": self.peak_bytes,
                **({"reserved": self.reserved_bytes} if self.reserved_bytes else {}),
                "pinned": self.pinned_bytes,
            }
        wide = max(map(len, rows))
        lines = [f"{name:<{wide}}  {show_bytes(size):>12}" for name, size in rows.items()]
        if self.seconds is not None:
            lines.append(f"{'seconds':<{wide}}  {self.seconds:>12.3g}  predicted, unmeasured")
        return "\n".join([*lines, *(f"note: {it}" for it in self.notes)])


def _largest(step_of: Callable[[int], int], room: int, one: int) -> int:
    """Peaks grow almost linearly, so a straight line says where to look; bisection makes sure."""
    low, low_bytes = 1, one
    high, high_bytes = 2, step_of(2)
    while high_bytes <= room:
        grows = max(1, (high_bytes - low_bytes) // (high - low))
        low, low_bytes = high, high_bytes
        high = low + (room - low_bytes) // grows + 1
        high_bytes = step_of(high)
    while high - low > 1:
        guess = low + (room - low_bytes) * (high - low) // max(1, high_bytes - low_bytes)
        middle = min(max(guess, low + 1), high - 1)
        middle_bytes = step_of(middle)
        if middle_bytes <= room:
            low, low_bytes = middle, middle_bytes
        else:
            high, high_bytes = middle, middle_bytes
        # A line that bends leaves one end where it is: then the middle is asked as well.
        if high - low > 2:
            middle = (low + high) // 2
            if (middle_bytes := step_of(middle)) <= room:
                low, low_bytes = middle, middle_bytes
            else:
                high, high_bytes = middle, middle_bytes
    return low
