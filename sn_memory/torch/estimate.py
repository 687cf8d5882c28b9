"""estimate: what a training step will hold, by category, before anything is allocated."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..errors import BudgetError
from ..liveness import live_bytes, peak
from ..sizes import parse_bytes, show_bytes
from .optimizer import OptimizerMemory, optimizer_memory
from .trace import Trace, trace


@dataclass(frozen=True)
class Estimate:
    """Bytes of a training step as autograd runs it, without a plan.

    Parameters
    ----------
    parameters_bytes, buffers_bytes, inputs_bytes, gradients_bytes, optimizer_bytes
        What is there between steps, or at their end.
    activations_bytes
        What the forward pass leaves for the backward pass, outputs included.
    step_bytes
        The peak of forward and backward, the optimizer's state included.
    update_bytes
        The peak of the optimizer's step.
    peak_op
        The op that reaches `step_bytes`.
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


def estimate(model: torch.nn.Module, sample: Any, *, optimizer: Any = None) -> Estimate:
    """Tell what a training step will hold. Allocates nothing; the model may be on the meta device.

    Parameters
    ----------
    model, sample
        As in `trace`; a sample on the meta device will do.
    optimizer
        An optimizer, or a class that takes parameters alone, as torch.optim.AdamW.

    Raises
    ------
    TraceError
        For a model that cannot be traced.

    Examples
    --------
    >>> import torch
    >>> import sn_memory.torch
    >>> with torch.device("meta"):
    ...     model, sample = torch.nn.Linear(1000, 1000), torch.empty(64, 1000)
    >>> found = sn_memory.torch.estimate(model, sample, optimizer=torch.optim.Adam)
    >>> found.parameters_bytes, found.optimizer_bytes, found.fits("1GB")
    (4004000, 8008008, True)
    """
    traced = trace(model, sample, profile=False)
    if optimizer is None:
        held = OptimizerMemory(0, 0)
    else:
        held = optimizer_memory(model, optimizer)
    sums = _sums(traced)
    boundary = traced.captured.boundary
    between = sums["parameter"] + sums["state"]

    def step_of(batch: int) -> int:
        resized = tree_map_only(torch.Tensor, lambda it: _resized(it, batch), sample)
        return peak(trace(model, resized, profile=False).graph).bytes + held.state_bytes

    highest = peak(traced.graph)
    return Estimate(
        parameters_bytes=sums["parameter"],
        buffers_bytes=sums["state"],
        inputs_bytes=sums["input"],
        gradients_bytes=sums["gradient"],
        optimizer_bytes=held.state_bytes,
        activations_bytes=_left(traced, boundary),
        step_bytes=highest.bytes + held.state_bytes,
        update_bytes=between + sums["gradient"] + held.state_bytes + held.transient_bytes,
        peak_op=traced.graph.ops[highest.op].name,
        batch=_batch(sample),
        _step_of=step_of,
    )


def _sums(traced: Trace) -> dict[str, int]:
    """Bytes by role; of gradients those of the parameters."""
    graph, captured = traced.graph, traced.captured
    sums = dict.fromkeys(("parameter", "state", "input", "gradient"), 0)
    ours = {view.storage for _, view in captured.gradients if view is not None}
    for storage, size in zip(graph.storages, graph.arrays.bytes.tolist(), strict=True):
        number = traced.named.storage_of.get(storage.name)
        if storage.role in sums and (storage.role != "gradient" or number in ours):
            sums[storage.role] += size
    return sums


def _left(traced: Trace, boundary: int) -> int:
    """Bytes that are live at the loss and neither resident nor the loss's gradients."""
    graph = traced.graph
    made = sum(graph.arrays.bytes[number] for number in graph.arrays.outputs[boundary])
    return int(live_bytes(graph)[boundary] - graph.base_bytes - made)


def _batch(sample: Any) -> int | None:
    sizes = set()
    tree_map_only(torch.Tensor, lambda it: sizes.add(it.shape[0] if it.dim() else None), sample)
    return sizes.pop() if len(sizes) == 1 else None


def _resized(tensor: torch.Tensor, batch: int) -> torch.Tensor:
    """Return a tensor without memory like this one, of another batch."""
    size = (batch, *tensor.shape[1:])
    made = torch.empty(size, dtype=tensor.dtype, device="meta")
    return made.requires_grad_(tensor.requires_grad)


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
