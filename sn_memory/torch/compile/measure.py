"""Compiled steps: what each computes, holds, and takes.

A step is run as training runs it, on tensors that share the memory of parameters but are none, so
that it adds to no gradient of the model and runs no hook. What it writes to is copied before.
"""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..model.step import Measured, restore_rng_state
from ..model.tracker import AllocationTracker
from ..target.accelerator import synchronize
from ..trace.op_seconds import clock_of
from .partitioner import Run

# Rounds that are timed; fewer once so many seconds are spent. With seven rounds, of two steps of 27
# ms on a busy machine the one that takes 2 % longer was chosen.
ROUNDS = 30
_MOST_S = 10.0


def measured_step(run: Run, inputs: Sequence[Any]) -> Measured:
    """Run a step once, always with the same random numbers, and count what it holds; untimed.

    run : a compiled forward pass
    inputs : parameters, buffers and inputs, as a back end gets them: real ones. They count.
    """
    with _isolated():
        torch.manual_seed(0)
        inputs_now = _copied(inputs)
        known = [tensor for tensor in inputs_now if isinstance(tensor, torch.Tensor)]
        tracker = AllocationTracker(known, kernels=True, device=device_of(inputs))
        with tracker:
            outputs = _step(run, inputs_now)
        results = {f"output {place}": output.detach() for place, output in enumerate(outputs)}
        for place, tensor in enumerate(inputs_now):
            if isinstance(tensor, torch.Tensor):
                name = f"gradient of {place}" if tensor.requires_grad else f"buffer {place}"
                results[name] = tensor.grad if tensor.requires_grad else tensor
    return Measured(results, tracker.peak_bytes, tracker.peak_op, 0.0)


def step_seconds(runs: Sequence[Run], inputs: Sequence[Any], *, rounds: int) -> list[float]:
    """Return the least seconds that a step of each took, of rounds in which they alternate.

    runs, inputs : as in `measured_step`
    rounds : how many count, after one that does not
    """
    device = device_of(inputs)
    clock = clock_of(device)
    least = [float("inf")] * len(runs)
    began = time.perf_counter()
    with _isolated():
        for number in range(rounds + 1):
            for at, run in enumerate(runs):
                inputs_now = _copied(inputs)
                synchronize(device)
                start = clock()
                _step(run, inputs_now)
                synchronize(device)
                if number:
                    least[at] = min(least[at], clock() - start)
            if number and time.perf_counter() - began > _MOST_S:
                break
    return least


def device_of(inputs: Sequence[Any]) -> torch.device:
    """Return where a step runs: where its first tensor is."""
    return next(value.device for value in inputs if isinstance(value, torch.Tensor))


@contextmanager
def _isolated() -> Iterator[None]:
    # torch.compile calls a back end in fake tensor mode.
    with _disable_current_modes(), restore_rng_state(), torch.enable_grad():
        yield


def _copied(inputs: Sequence[Any]) -> list[Any]:
    # A step writes to statistics of batch norms; tensors that require a gradient it only reads.
    return [
        value.detach().requires_grad_()
        if isinstance(value, torch.Tensor) and value.requires_grad
        else value.detach().clone()
        if isinstance(value, torch.Tensor)
        else value
        for value in inputs
    ]


def _step(run: Run, inputs: Sequence[Any]) -> list[torch.Tensor]:
    outputs = [tensor for tensor in run(*inputs) if isinstance(tensor, torch.Tensor)]
    ends = [output for output in outputs if output.requires_grad]
    torch.autograd.backward(ends, [torch.ones_like(end) for end in ends])
    return outputs
