"""estimate: what a training step will hold, by category, before anything is allocated.

Categories are those of the traced graph; the peak is that of the step itself, run on tensors
without values, as a forward in Python holds more than it still needs.
"""

from __future__ import annotations

from typing import Any

import torch
from torch.utils._pytree import tree_map_only

from ..graph.liveness import live_bytes, peak
from ..run.estimate import Estimate
from .trace.fake_step import fake_step
from .trace.optimizer import OptimizerMemory, optimizer_memory
from .trace.trace import Trace, call_arguments, trace_unplanned


def estimate(model: torch.nn.Module, sample: Any, *, optimizer: Any = None) -> Estimate:
    """Tell what a training step will hold without a plan. Allocates nothing.

    Parameters
    ----------
    model, sample
        As in `trace`; both may be on the meta device.
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
    traced = trace_unplanned(model, sample)
    if optimizer is None:
        held = OptimizerMemory(0, 0)
    else:
        held = optimizer_memory(model, optimizer)
    sums = _sums(traced)
    boundary = traced.captured.boundary
    between = sums["parameter"] + sums["state"]

    def step_of(batch: int) -> int:
        resized = tree_map_only(torch.Tensor, lambda it: _resized(it, batch), sample)
        return fake_step(model, call_arguments(resized), constants).peak_bytes + held.state_bytes

    constants = list(traced.captured.recording.constants.values())
    measured, highest = fake_step(model, call_arguments(sample), constants), peak(traced.graph)
    return Estimate(
        parameters_bytes=sums["parameter"],
        buffers_bytes=sums["state"],
        inputs_bytes=sums["input"],
        gradients_bytes=sums["gradient"],
        optimizer_bytes=held.state_bytes,
        activations_bytes=_left(traced, boundary),
        step_bytes=measured.peak_bytes + held.state_bytes,
        update_bytes=between + sums["gradient"] + held.state_bytes + held.transient_bytes,
        peak_op=(
            traced.graph.ops[highest.op].name
            if highest.bytes == measured.peak_bytes
            else measured.peak_op
        ),
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
