"""One rank of gossip_steps: an optimizer's step, plain and with gossip."""

from __future__ import annotations

import statistics
import time
from typing import Any

import torch
import torch.distributed as dist
from ddp_ranks import as_rank, run_ranks

import sn_compress
from gpu.exchange_ranks import shapes_of
from sn_compress.gossip import consensus_distance
from sn_compress.torch.gossip import GossipOptimizer

WAYS: dict[str, dict[str, Any] | None] = {
    "plain": None,
    "gossip": {},
    "gossip, top-k": {"codec": lambda shape: sn_compress.codec("topk", theta=0.98)},
}


def work(job: dict[str, Any]) -> dict[str, Any]:
    """In a rank: seconds of a step by way, and how far ranks are apart at the end."""
    device, by_way = job["device"], {}
    for name, settings in WAYS.items():
        torch.manual_seed(0)
        weights = [
            torch.nn.Parameter(torch.randn(shape).to(device)) for shape in shapes_of(job["model"])
        ]
        torch.manual_seed(1 + dist.get_rank())
        for weight in weights:
            weight.grad = torch.randn(weight.shape).to(device)
        optimizer: Any = torch.optim.SGD(weights, lr=1e-3)
        if settings is not None:
            GossipOptimizer(optimizer, group=dist.group.WORLD, every=0, **settings)
        taken = []
        for _ in range(2 + job["steps"]):
            dist.barrier()
            start = time.perf_counter()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        flat = torch.cat([weight.detach().flatten() for weight in weights]).cpu()
        gathered = [torch.empty_like(flat) for _ in range(dist.get_world_size())]
        dist.all_gather(gathered, flat)
        by_way[name] = {
            "step_s": statistics.median(taken[2:]),
            "distance": float(consensus_distance([vector.numpy() for vector in gathered])),
            "finite": bool(flat.isfinite().all()),
        }
    return by_way


def ranks(job: dict[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
    """What both ranks found."""
    return run_ranks(__file__, job, ranks=2, timeout_s=timeout_s)


if __name__ == "__main__":
    as_rank(work)
