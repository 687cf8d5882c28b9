"""Seconds of the calls that reach the kernels, planned and unplanned steps in turn.

The sum of a step is that of the medians of its calls, so that what else the machine does, and what
Python does between calls, hardly counts. With one thread, its CPU seconds are taken.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from sn_memory.torch.model.step import restore_step, run_step


class CallSeconds(TorchDispatchMode):
    """Notes the seconds of each call, in order: of the thread's own time where it is alone."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[float] = []
        self.clock = time.thread_time if torch.get_num_threads() == 1 else time.perf_counter

    def __torch_dispatch__(
        self, func: Any, types: Any, args: tuple[Any, ...] = (), kwargs: Any = None
    ) -> Any:
        began = self.clock()
        result = func(*args, **(kwargs or {}))
        self.calls.append(self.clock() - began)
        return result


def in_turn(
    forwards: list[Callable[..., Any]], model: torch.nn.Module, sample: torch.Tensor, times: int
) -> list[float]:
    """Op seconds of a training step by each of several forward passes, run in turn."""
    steps: list[list[list[float]]] = [[] for _ in forwards]
    for _ in range(times):
        for forward, runs in zip(forwards, steps, strict=True):
            torch.manual_seed(0)
            with restore_step(model, sample):
                noted = CallSeconds()
                with noted:
                    run_step(forward, model, ((sample,), {}), count=False)
            runs.append(noted.calls)
    return [sum(statistics.median(call) for call in zip(*runs, strict=True)) for runs in steps]
