"""estimate: what a training step will hold, by category, before anything is allocated.

Categories are those of the traced graph; the peak is that of the step itself, run on tensors
without values, as a forward in Python holds more than it still needs.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from ..cost.caching import CachingAllocator
from ..cost.devices import speeds
from ..graph.liveness import live_bytes, peak
from ..graph.numbers import rounded
from ..graph.records import Device
from ..run.estimate import Estimate
from .elsewhere.gpu import Gpu, gpu_of
from .model.step import Measured, device_of
from .trace.fake_step import fake_step, fake_step_on
from .trace.optimizer import OptimizerMemory, optimizer_memory
from .trace.record import View
from .trace.trace import Trace, call_arguments, trace_unplanned


def estimate(
    model: torch.nn.Module,
    sample: Any,
    *,
    optimizer: Any = None,
    device: Device | str | None = None,
) -> Estimate:
    """Tell what a training step will hold without a plan. Allocates nothing.

    Parameters
    ----------
    model, sample
        As in `trace`; both may be on the meta device.
    optimizer
        An optimizer, or a class that takes parameters alone, as torch.optim.AdamW.
    device
        A name, as "h100": the step is that of a GPU of the table, as in `trace`, with its kernels'
        workspaces, what torch's allocator reserves, and the room there; seconds are predicted. Of
        an `sn_memory.Device`, its speeds for the seconds. For autocast, estimate inside
        `torch.autocast("cpu", torch.bfloat16)`: one for "cuda" is off where no GPU is.

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
    gpu = gpu_of(device, device_of(model))
    rates = speeds(device)
    traced = trace_unplanned(model, sample, rates, gpu)
    held = OptimizerMemory(0, 0) if optimizer is None else optimizer_memory(model, optimizer, gpu)
    state = _as_allocated(held.sizes) if gpu is not None else held.state_bytes
    kept = 0 if gpu is None else gpu.named.workspace_bytes
    sums = _sums(traced)
    boundary = traced.captured.boundary
    between = sums["parameter"] + sums["state"]
    constants = list(traced.captured.recording.constants.values())
    memory = CachingAllocator()

    def step(given: Any, memory: CachingAllocator | None = None) -> Measured:
        arguments = call_arguments(given)
        if gpu is None:
            return fake_step(model, arguments, constants)
        if memory is None:
            return fake_step_on(gpu, model, arguments)
        _take_all(memory, gpu, held)
        return fake_step_on(gpu, model, arguments, moved=memory.allocate)

    def step_of(batch: int) -> int:
        resized = tree_map_only(torch.Tensor, lambda it: _resized(it, batch), sample)
        return step(resized).peak_bytes + state + kept

    measured, highest = step(sample, memory), peak(traced.graph)
    named = None if gpu is None else gpu.named
    return Estimate(
        parameters_bytes=sums["parameter"],
        buffers_bytes=sums["state"],
        inputs_bytes=sums["input"],
        gradients_bytes=sums["gradient"],
        optimizer_bytes=state,
        activations_bytes=_left(traced, boundary),
        step_bytes=measured.peak_bytes + state + kept,
        update_bytes=between + sums["gradient"] + state + held.transient_bytes + kept,
        peak_op=(
            traced.graph.ops[highest.op].name
            if highest.bytes == measured.peak_bytes
            else measured.peak_op
        ),
        batch=_batch(sample),
        _step_of=step_of,
        logits_bytes=_logits(traced),
        device="" if named is None else named.name,
        room_bytes=None if named is None else named.usable_bytes,
        workspace_bytes=kept,
        reserved_bytes=memory.peak_reserved_bytes,
        seconds=None if rates is None else _seconds(traced, rates, sums, held),
        notes=traced.notes,
    )


def _as_allocated(sizes: tuple[int, ...]) -> int:
    return int(rounded(np.array(sizes, np.int64), "torch").sum())


def _take_all(memory: CachingAllocator, gpu: Gpu, held: OptimizerMemory) -> None:
    """Take what is there when a step begins, beside what the step itself tells."""
    memory.allocate("libraries", gpu.named.workspace_bytes)
    for place, size in enumerate(held.sizes):
        memory.allocate(("optimizer", place), size)


def _seconds(
    traced: Trace, rates: Device, sums: dict[str, int], held: OptimizerMemory
) -> float | None:
    """Seconds of forward, backward and update, each at the device's figures."""
    if rates.bytes_per_s is None:
        return None
    update = 0.0
    if held.sizes or held.state_bytes:
        # It reads weights, gradients and state, and writes weights and state.
        moved = 2 * (sums["parameter"] + held.state_bytes) + sums["gradient"]
        update = moved / rates.bytes_per_s
    return sum(ways[0] for ways in traced.graph.arrays.seconds) + update


def _logits(traced: Trace) -> int:
    """Bytes at the loss of storages as large as the input of the last logarithm of a softmax."""
    recording, boundary = traced.captured.recording, traced.captured.boundary
    calls = recording.calls[:boundary]
    last = next((it for it in reversed(calls) if it.name == "_log_softmax"), None)
    if last is None:
        return 0
    count = math.prod(next(it.size for it in last.flat if isinstance(it, View)))
    graph, found = traced.graph, 0
    names = {number: name for name, number in traced.named.storage_of.items()}
    readers = {it for call in recording.calls[boundary:] for it in call.reads}
    outputs = {it.storage for it in traced.captured.outputs if isinstance(it, View)}
    for call in calls:
        for view in call.outputs:
            if view is None or view.storage not in call.makes or math.prod(view.size) != count:
                continue
            if view.storage in readers | outputs:
                place = graph.storage_index[names[view.storage]]
                found += int(graph.arrays.bytes[place])
    return found


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
