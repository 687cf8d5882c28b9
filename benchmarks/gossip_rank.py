"""One rank of benchmarks/gossip_links.py: a replayed model under a real optimizer."""

from __future__ import annotations

import os
import statistics
import time
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed as dist

import sn_compress
from sn_compress.prediction.cost import BACKWARD, layers
from sn_compress.torch.gossip import GossipOptimizer

_PORT = 29_717


class _Layer(torch.autograd.Function):
    """A layer that takes its time and has a constant gradient."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, seconds: float) -> torch.Tensor:
        ctx.weight, ctx.seconds = weight, seconds
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[Any, ...]:  # type: ignore[override]
        time.sleep(ctx.seconds)
        return grad, torch.full_like(ctx.weight, 1e-3), None


def gossiped(run: dict[str, Any]) -> dict[str, Any]:
    """Steps of a model whose layers sleep; the slow rank sleeps `slow` times as long."""
    if not dist.is_initialized():
        os.environ["GLOO_SOCKET_IFNAME"] = "eth0"
        first = hvd.broadcast_object(os.environ["HOROVOD_HOSTNAME"], root_rank=0)
        dist.init_process_group(
            "gloo", init_method=f"tcp://{first}:{_PORT}", rank=hvd.rank(), world_size=hvd.size()
        )
    compute_s = run["compute_s"] * (run["slow"] if hvd.rank() == 1 else 1.0)
    weights = [torch.nn.Parameter(torch.zeros(t.shape)) for t in layers(run["model"])]
    optimizer: Any = torch.optim.SGD(weights, lr=1e-3)
    if run["method"] == "all-reduce":
        names = [(str(number), weight) for number, weight in enumerate(weights)]
        optimizer = hvd.DistributedOptimizer(optimizer, named_parameters=names)
    else:
        top = {"codec": lambda shape: sn_compress.codec("topk", theta=0.98)}
        GossipOptimizer(
            optimizer, group=dist.group.WORLD, every=0, **(top if "top-k" in run["method"] else {})
        )
    seconds: list[float] = []
    for step in range(run["warm"] + run["steps"]):
        if step == run["warm"]:
            hvd.barrier()
        start = time.perf_counter()
        optimizer.zero_grad()
        time.sleep((1 - BACKWARD) * compute_s)
        x = torch.zeros(1, requires_grad=True)
        for weight in weights:
            x = _Layer.apply(x, weight, BACKWARD * compute_s / len(weights))
        x.backward()
        optimizer.step()
        seconds.append(time.perf_counter() - start)
    timed = seconds[run["warm"] :]
    sent = None if run["method"] == "all-reduce" else optimizer.report()["bytes_per_step"]
    hvd.barrier()
    return {"step_s": statistics.fmean(timed), "steps_s": timed, "sent_bytes": sent}
