"""estimate: the memory of a training step, by category, before anything is allocated.

Categories come from the traced graph. The peak comes from the step itself, run on tensors without
values, because a forward in Python holds tensors longer than it needs them.
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import torch
from torch.utils._pytree import tree_map_only

from ..cost.caching import ROUND_LARGE, CachingAllocator
from ..cost.devices import speeds
from ..graph.graph import rounded
from ..graph.liveness import live_bytes, peak
from ..graph.records import Device
from ..run.estimate import Estimate
from .errors import TraceError
from .model.signature import MOST_KNOWN, check_layout, tensors
from .model.step import Measured, device_of
from .model.wrapping import check_model, check_optimizer
from .target.capacity import allocator_settings
from .target.gpu import gpu_of
from .trace.fake import is_known
from .trace.fake_step import OptimizerMemory, fake_step, fake_step_on, optimizer_memory
from .trace.op_seconds import scratch_of_steps
from .trace.record import View
from .trace.trace import Trace, call_arguments, trace_unplanned


def estimate(
    model: torch.nn.Module,
    sample: Any,
    *,
    optimizer: Any = None,
    device: Device | str | None = None,
) -> Estimate:
    """Estimate the memory of a training step without a plan. Allocates nothing.

    Parameters
    ----------
    model, sample
        As in `trace`; both may be on the meta device.
    optimizer
        An optimizer, or a class whose only required argument is the parameters, e.g.
        torch.optim.AdamW.
    device
        A name such as "h100": estimate the step on that GPU of the table, as in `trace`, with its
        kernels' workspaces, what torch's allocator reserves, its capacity and predicted seconds. An
        `sn_memory.Device`: its speeds are used to predict the seconds. For autocast, estimate
        inside `torch.autocast("cpu", torch.bfloat16)`: "cuda" is disabled where there is no GPU.

    Raises
    ------
    TraceError
        For a model that cannot be traced, and for sparse or nested tensors in the sample.

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
    check_model(model)
    check_optimizer(optimizer)
    gpu = gpu_of(device, device_of(model))
    rates = speeds(device)
    for tensor in tensors(call_arguments(sample)):
        check_layout(tensor)
    # The step may run where the trace fails: there, small integers have values.
    traced = refusal = None
    try:
        traced = trace_unplanned(model, sample, rates, gpu)
    except TraceError as error:
        refusal = error
    held = OptimizerMemory(0, 0) if optimizer is None else optimizer_memory(model, optimizer, gpu)
    state = held.state_bytes
    if gpu is not None:
        state = int(rounded(np.array(held.sizes, np.int64), "torch").sum())
    kept = 0 if gpu is None else gpu.named.kept_bytes
    # Bytes by role; without a trace, each parameter that requires a gradient is assumed to get one.
    sums = _sums_of_model(model, sample) if traced is None else _sums(traced)
    between = sums["parameter"] + sums["state"]
    constants = [] if traced is None else list(traced.captured.recording.constants.values())
    memory = CachingAllocator(allocator_settings())
    scratch = scratch_of_steps(device_of(model), profile=False)

    def step(sample: Any, memory: CachingAllocator | None = None) -> Measured:
        arguments = call_arguments(sample)
        if gpu is None:
            return fake_step(model, arguments, constants, scratch=scratch)
        if memory is None:
            return fake_step_on(gpu, model, arguments)
        # Allocated before the step begins, so not reported by the step itself.
        memory.allocate("libraries", gpu.named.kept_bytes)
        for place, size in enumerate(held.sizes):
            memory.allocate(("optimizer", place), size)
        return fake_step_on(gpu, model, arguments, moved=memory.allocate)

    # The loop holds the batch while the optimizer updates.
    rest = between + sums["gradient"] + state + held.transient_bytes + kept

    def step_of(batch: int) -> int:
        inputs = sums["input"] * batch // (_batch(sample) or batch)
        return max(step(resized(sample, batch)).peak_bytes + state + kept, rest + inputs)

    try:
        measured = step(sample, memory)
    except Exception as error:
        if refusal is None:
            raise
        # Both failed; only the trace's message says what to do.
        raise refusal from error
    named = None if gpu is None else gpu.named
    step_bytes = measured.peak_bytes + state + kept
    update_bytes = rest + sums["input"]
    reserved = memory.peak_reserved_bytes
    if gpu is not None:
        # The update is not simulated block by block, but it, too, is reserved in whole segments.
        reserved = max(reserved, -(-update_bytes // ROUND_LARGE) * ROUND_LARGE)
    return Estimate(
        parameters_bytes=sums["parameter"],
        buffers_bytes=sums["state"],
        inputs_bytes=sums["input"],
        gradients_bytes=sums["gradient"],
        optimizer_bytes=state,
        activations_bytes=measured.left_bytes if traced is None else _left(traced),
        step_bytes=step_bytes,
        update_bytes=update_bytes,
        peak_op=_peak_op(traced, measured),
        batch=_batch(sample),
        _step_of=step_of,
        logits_bytes=0 if traced is None else _logits(traced),
        device="" if named is None else named.name,
        room_bytes=None if named is None else named.usable_bytes,
        workspace_bytes=kept,
        reserved_bytes=reserved,
        seconds=None if rates is None or traced is None else _seconds(traced, rates, sums, held),
        notes=() if traced is None else traced.notes,
    )


def _peak_op(traced: Trace | None, measured: Measured) -> str:
    if traced is not None:
        highest = peak(traced.graph)
        # The trace names the module as well, but its peak may be at another op than the step's.
        if highest.bytes == measured.peak_bytes:
            return traced.graph.ops[highest.op].name
    return measured.peak_op


def _sums_of_model(model: torch.nn.Module, sample: Any) -> dict[str, int]:
    """Bytes by role without a trace."""
    held = {
        "parameter": [*model.parameters()],
        "state": [*model.buffers()],
        "input": tensors(call_arguments(sample)),
        "gradient": [param for param in model.parameters() if param.requires_grad],
    }
    return {
        role: sum({id(tensor): tensor.nbytes for tensor in of_role}.values())
        for role, of_role in held.items()
    }


def _seconds(
    traced: Trace, rates: Device, sums: dict[str, int], held: OptimizerMemory
) -> float | None:
    """Seconds of forward, backward and update at the device's speeds."""
    if rates.bytes_per_s is None:
        return None
    # The update reads weights, gradients and state, and writes weights and state.
    moved = 2 * (sums["parameter"] + held.state_bytes) + sums["gradient"]
    update = moved / rates.bytes_per_s if held.sizes or held.state_bytes else 0.0
    return sum(ways[0] for ways in traced.graph.arrays.seconds) + update


def _logits(traced: Trace) -> int:
    """Bytes of storages with as many elements as the last log-softmax's input, live at the loss."""
    recording, boundary = traced.captured.recording, traced.captured.boundary
    calls = recording.calls[:boundary]
    last = next((call for call in reversed(calls) if call.name == "_log_softmax"), None)
    if last is None:
        return 0
    count = math.prod(next(arg.size for arg in last.flat if isinstance(arg, View)))
    graph, logit_bytes = traced.graph, 0
    names = {number: name for name, number in traced.named.storage_of.items()}
    # A storage that only the forward pass reads is gone by the loss.
    readers = {read for call in recording.calls[boundary:] for read in call.reads}
    outputs = {output.storage for output in traced.captured.outputs if isinstance(output, View)}
    for call in calls:
        for view in call.outputs:
            if view is None or view.storage not in call.makes or math.prod(view.size) != count:
                continue
            if view.storage in readers | outputs:
                place = graph.storage_index[names[view.storage]]
                logit_bytes += int(graph.arrays.bytes[place])
    return logit_bytes


def _sums(traced: Trace) -> dict[str, int]:
    """Bytes by role; as gradients, only those of parameters count."""
    graph, captured = traced.graph, traced.captured
    sums = dict.fromkeys(("parameter", "state", "input", "gradient"), 0)
    of_params = {view.storage for _, view in captured.gradients if view is not None}
    for storage, size in zip(graph.storages, graph.arrays.bytes.tolist(), strict=True):
        number = traced.named.storage_of.get(storage.name)
        if storage.role in sums and (storage.role != "gradient" or number in of_params):
            sums[storage.role] += size
    return sums


def _left(traced: Trace) -> int:
    """Bytes live at the loss, without resident storages and the loss's gradients."""
    graph, boundary = traced.graph, traced.captured.boundary
    output_bytes = sum(graph.arrays.bytes[number] for number in graph.arrays.outputs[boundary])
    return int(live_bytes(graph)[boundary] - graph.base_bytes - output_bytes)


def _batch(sample: Any) -> int | None:
    sizes = {tensor.shape[0] if tensor.dim() else None for tensor in tensors(sample)}
    return sizes.pop() if len(sizes) == 1 else None


def resized(sample: Any, batch: int) -> Any:
    """Return the sample with another batch size, the first dimension of each of its tensors."""

    def of_batch(tensor: torch.Tensor) -> torch.Tensor:
        size = (batch, *tensor.shape[1:])
        # A step may read the values of a few integers, so those keep values: rows are repeated.
        if is_known(tensor) and math.prod(size) <= MOST_KNOWN and len(tensor):
            return tensor[torch.arange(batch) % len(tensor)]
        resized = torch.empty(size, dtype=tensor.dtype, device="meta")
        return resized.requires_grad_(tensor.requires_grad)

    return tree_map_only(torch.Tensor, of_batch, sample)
