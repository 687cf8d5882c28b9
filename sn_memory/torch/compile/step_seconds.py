"""Seconds and peaks of compiled steps that are compared: run on the inputs that are there.

Seconds of kernels that are reckoned one by one miss what fusion does to a changed partition. So
where a plan may measure, partitions that keep the budget are compiled and run. What loses costs its
compilation; what wins is compiled once more, without assertions, of kernels that are there.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch.utils._python_dispatch import _disable_current_modes

from ..model.allocations import AllocationTracker
from ..trace.op_seconds import clock_of

# Rounds that count; fewer once so many seconds are spent. With seven, of
# two steps of 27 ms on a busy machine the one that takes 2 % longer was taken.
ROUNDS = 30
_MOST_S = 10.0


def step_seconds(
    runs: Sequence[Callable[..., Any]], inputs: Sequence[Any], *, rounds: int = ROUNDS
) -> list[float]:
    """Return the least seconds that a step of each took, forward and backward pass, on the CPU.

    Parameters
    ----------
    runs
        What torch.compile's back ends return: they take `inputs`, and return a list of outputs.
    inputs
        As a back end is given them: parameters, buffers and inputs, real ones. They are not
        changed: what needs no gradient is handed over as a copy, and random numbers are put back.
    rounds
        How many steps of each count, behind one that does not.
    """
    least = [float("inf")] * len(runs)
    wanted = [it for it in inputs if isinstance(it, torch.Tensor) and it.requires_grad]
    began = time.perf_counter()
    with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        for number in range(rounds + 1):
            for at, run in enumerate(runs):
                took = _seconds(run, inputs, wanted)
                if number:
                    least[at] = min(least[at], took)
            if number and time.perf_counter() - began > _MOST_S:
                break
    return least


def step_peaks(runs: Sequence[Callable[..., Any]], inputs: Sequence[Any]) -> list[int]:
    """Return the most bytes that torch's CPU allocator had given out in a step of each.

    runs, inputs : as in `step_seconds`; the inputs count. RuntimeError where a profiler runs.
    """
    found = []
    wanted = [it for it in inputs if isinstance(it, torch.Tensor) and it.requires_grad]
    with _disable_current_modes(), torch.random.fork_rng(devices=[]), torch.enable_grad():
        for run in runs:
            given = _given(inputs)
            there = [it for it in given if isinstance(it, torch.Tensor)]
            tracker = AllocationTracker(there, kernels=True)
            with tracker:
                _step(run, given, wanted)
            found.append(tracker.peak_bytes)
    return found


def _given(inputs: Sequence[Any]) -> list[Any]:
    # Statistics of batch norms are written to.
    return [
        it.detach().clone() if isinstance(it, torch.Tensor) and not it.requires_grad else it
        for it in inputs
    ]


def _step(run: Callable[..., Any], given: Sequence[Any], wanted: list[torch.Tensor]) -> None:
    ends = [it for it in run(*given) if isinstance(it, torch.Tensor) and it.requires_grad]
    torch.autograd.grad(ends, wanted, [torch.ones_like(it) for it in ends], allow_unused=True)


def _seconds(run: Callable[..., Any], inputs: Sequence[Any], wanted: list[torch.Tensor]) -> float:
    given = _given(inputs)
    clock = clock_of(torch.device("cpu"))
    began = clock()
    _step(run, given, wanted)
    return clock() - began
