"""One rank of exchange_steps and host_waits: given gradients, through DDP, way by way.

One way lives at a time: a model of 1.1 billion parameters needs some 25 GB with all its memories.
"""

from __future__ import annotations

import gc
import statistics
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from ddp_ranks import as_rank, run_ranks
from ddp_ways import wrapped
from models import Gpt2, Llama, resnet
from resnet50_gradients import DENSE, SETTLE, FixedGradients, gradient
from torch import nn, profiler

from sn_compress import _cuda

SHAPES: dict[str, Callable[[], nn.Module]] = {
    "resnet50": lambda: resnet(50),
    "gpt2": Gpt2,
    "llama 1b": lambda: Llama(vocabulary=32000, width=2048, layers=16, heads=32, groups=8,
                              hidden=8192),
    "resnet50/8": lambda: resnet(50, width=8, classes=10),
    "gpt2/12": lambda: Gpt2(vocabulary=1000, length=128, width=64, layers=2, heads=4),
}  # fmt: skip
TUNED_WITHIN = 120  # steps in which AutoCompression has decided
LAUNCHES = ("cudaLaunchKernel", "cuLaunchKernel", "cudaLaunchKernelExC", "cuLaunchKernelEx")


# What a way ends with where device tensors are encoded by array code, though kernels are there.
BY_ARRAYS = " by array code"


@contextmanager
def coded_by(way: str) -> Iterator[str]:
    """Yield a way's name for `wrapped`; inside, device tensors go where the name says."""
    if not way.endswith(BY_ARRAYS):
        yield way
        return
    with mock.patch.object(_cuda, "takes", return_value=False):
        yield way.removesuffix(BY_ARRAYS)


def shapes_of(model: str) -> list[tuple[int, ...]]:
    """Those of a model's parameters."""
    with torch.device("meta"):
        return [tuple(parameter.shape) for parameter in SHAPES[model]().parameters()]


class Way:
    """A way's model in a rank, settled: sizes chosen, memories made."""

    def __init__(self, way: str, job: dict[str, Any], gradients: list[torch.Tensor]) -> None:
        self.device, self.ours = job["device"], not way.startswith(("plain", "fp16", "powersgd"))
        self.ddp, self.state = wrapped(way, FixedGradients(gradients), dense=DENSE)
        for _ in range(SETTLE):
            self.step()
        self.decided = True
        if way.startswith("auto"):
            steps = 0
            while steps < TUNED_WITHIN and not self.state.report().get("tuned"):
                self.step()
                steps += 1
            self.decided = bool(self.state.report().get("tuned"))

    def backward(self) -> Callable[[], object]:
        """The backward pass of a step, its forward pass done."""
        self.ddp.zero_grad()
        return self.ddp().backward  # type: ignore[no-any-return]

    def step(self) -> float:
        """Seconds of a backward pass that all ranks begin together, to its end on the device."""
        backward = self.backward()
        dist.barrier()
        self.settle()
        start = time.perf_counter()
        backward()
        self.settle()
        return time.perf_counter() - start

    def sent_bytes(self) -> float:
        """What this rank has brought to collectives so far, if it is a way of ours."""
        report = self.state.report() if self.ours else {"payload_bytes": 0, "steps": 0}
        return float(report["payload_bytes"] * report["steps"])

    def settle(self) -> None:
        """Wait for the device."""
        if self.device == "cuda":
            torch.cuda.synchronize()

    def launches(self) -> int | None:
        """Kernels that a step launches, those of all threads; None on the CPU."""
        if self.device != "cuda":
            return None
        activities = [profiler.ProfilerActivity.CPU, profiler.ProfilerActivity.CUDA]
        backward = self.backward()
        with profiler.profile(activities=activities) as seen:
            backward()
            self.settle()
        return sum(event.count for event in seen.key_averages() if event.key in LAUNCHES)

    def waited(self) -> str:
        """What a step waited for, or nothing; the CPU has nothing to wait for."""
        backward = self.backward()
        self.settle()
        return waits_of(backward, self.device)


def waits_of(step: Callable[[], object], device: str) -> str:
    """What torch says a step waited for, or nothing."""
    if device == "cpu":
        step()
        return ""
    torch.cuda.set_sync_debug_mode("error")
    try:
        step()
    except RuntimeError as error:
        return str(error)[:600]
    finally:
        torch.cuda.set_sync_debug_mode("default")
    torch.cuda.synchronize()
    return ""


def work(job: dict[str, Any]) -> dict[str, Any]:
    """In a rank: what each way took; with "waits" what its steps waited for."""
    if job["device"] == "cuda":
        torch.cuda.set_device(0)
    rank, by_way = dist.get_rank(), {}
    shapes = shapes_of(job["model"])
    gradients = [gradient(shape, seed, rank, job["device"]) for seed, shape in enumerate(shapes)]
    for name in job["ways"]:
        with coded_by(name) as plain_name:
            way = Way(plain_name, job, gradients)
            if job.get("waits"):
                # One step that raised leaves DDP in the middle of a pass: no other follows it.
                by_way[name] = {"waited": next(filter(None, (way.waited() for _ in range(3))), "")}
            else:
                by_way[name] = seconds_of(way, job["steps"])
        del way
        gc.collect()
        if job["device"] == "cuda":
            torch.cuda.empty_cache()
    return {"ways": by_way, "elements": sum(tensor.numel() for tensor in gradients)}


def seconds_of(way: Way, steps: int) -> dict[str, Any]:
    """What steps of a way took and brought."""
    before = way.sent_bytes()
    taken = [way.step() for _ in range(steps)]
    sent = (way.sent_bytes() - before) / steps
    return {
        "step_s": statistics.median(taken),
        "steps_s": taken,
        "launches": way.launches(),
        "sent_bytes": round(sent) if way.ours else None,
        "decided": way.decided,
        "bits": digest(way),
    }


def digest(way: Way) -> int:
    """The sum of the bits of all gradients as integers: equal ranks have equal ones."""
    sums = [parameter.grad.view(torch.int32).long().sum() for parameter in way.ddp.parameters()]
    return int(torch.stack(sums).sum())


def ranks(job: dict[str, Any], *, ranks: int, timeout_s: float) -> list[dict[str, Any]]:
    """What each rank of a job found."""
    return run_ranks(__file__, job, ranks=ranks, timeout_s=timeout_s)


if __name__ == "__main__":
    as_rank(work)
