"""One rank of training.py or gossip_links.py: runs a job file, writes a row for each run.

python training_rank.py JOB.json     (started by rank_jobs.py, in a namespace of its own)
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
import torch.distributed as dist
from nets import NETS, fashion_mnist
from torch import nn
from travel import Script, Travel, play
from wire_methods import OURS, PAPER, method

import sn_compress
from sn_compress import FFTCompression, LowRankCompression
from sn_compress.consistency import WAIT_S, result_of
from sn_compress.prediction.cost import BACKWARD, layers, wire_bytes
from sn_compress.torch.gossip import GossipOptimizer
from sn_compress.torch.under_horovod.memory import memory_of

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


COUNTER = Path("/sys/class/net/eth0/statistics/tx_bytes")
TESTED = 2000  # images
IDLE_S = 1.0  # for which is counted what ranks tell each other when there is nothing to do
SETTLE_S = 0.2
WARM = 10  # steps of training before bytes and seconds of a step are counted


def sent_bytes() -> int:
    """Bytes that have left this namespace, headers included."""
    return int(COUNTER.read_text()) if COUNTER.exists() else 0


class Idle:
    """Bytes a second that leave while no rank has anything to send.

    How often ranks talk depends on what else the machine does, so a replayed step counts while it
    computes, and the same seconds are measured as predicted.
    """

    def __init__(self) -> None:
        self.bytes, self.seconds = 0, 0.0

    def sleep(self, seconds: float) -> None:
        """Wait, and count, but not at first, when the link may still have something to send."""
        settling = min(SETTLE_S, seconds / 4)
        time.sleep(settling)
        before, start = sent_bytes(), time.perf_counter()
        time.sleep(seconds - settling)
        self.bytes += sent_bytes() - before
        self.seconds += time.perf_counter() - start

    def rate(self) -> float:
        """Counted so far, and for a second from now on."""
        hvd.barrier()
        self.sleep(IDLE_S)
        return self.bytes / self.seconds


def on_wire(sent: list[tuple[str, int]]) -> float:
    """What the collectives of a rank should send."""
    return sum(wire_bytes(kind, size, hvd.size()) for kind, size in sent)  # type: ignore[arg-type]


def replay(run: dict[str, Any]) -> dict[str, Any]:
    """Timed steps with compute and codec replaced by sleeps, collectives real."""
    scripts = [Script(**entry) for entry in run["scripts"]]
    forward = (1 - BACKWARD) * run["compute_s"]
    backward = BACKWARD * run["compute_s"] / len(scripts)
    travel, idle = Travel(hvd, overlap=run["overlap"]), Idle()

    def step(*, timed: bool) -> None:
        if timed:
            idle.sleep(forward)
        held = []
        for script in reversed(scripts):
            if timed:  # with overlap the link is in use from the first tensor on
                (time.sleep if run["overlap"] else idle.sleep)(backward)
            if run["overlap"]:
                travel.begin(script.name, play(script, free=run["free"] or not timed))
            else:
                held.append(script)
        for script in held:
            travel.begin(script.name, play(script, free=run["free"] or not timed))
        travel.wait()

    step(timed=False)  # names are negotiated, buffers made
    travel.sent.clear()
    hvd.barrier()
    before, seconds = sent_bytes(), []
    for _ in range(run["steps"]):
        start = time.perf_counter()
        step(timed=True)
        seconds.append(time.perf_counter() - start)
    hvd.barrier()
    after, steps = sent_bytes(), run["steps"]
    return {
        "step_s": statistics.median(seconds),
        "steps_s": seconds,
        "bytes_per_step": (after - before) / steps,
        "idle_bytes_per_s": idle.rate(),
        "reported_bytes_per_step": on_wire(travel.sent) / steps,
        "sent_bytes": sum(size for _, size in travel.sent) / steps,
    }


def train(run: dict[str, Any]) -> dict[str, Any]:
    """Real training of a small net: what accuracy, after how many seconds."""
    torch.manual_seed(run["seed"])
    net = NETS[run["model"]]()
    images, labels = fashion_mnist("train")
    test_images, test_labels = (part[:TESTED] for part in fashion_mnist("t10k"))
    if run["model"] == "cnn":
        optimizer: Any = torch.optim.SGD(net.parameters(), lr=0.05, momentum=0.9)
    else:
        optimizer = torch.optim.Adam(net.parameters(), lr=2e-3)
    stock = {"plain": hvd.Compression.none, "fp16": hvd.Compression.fp16}
    ours = {
        "gather": FFTCompression,
        "paper": FFTCompression.using(mode="paper", theta=PAPER.theta),
        "shared": LowRankCompression.using(ratio=run["ratio_asked"], warmup=run["warmup"]),
    }
    name = run["method"]
    horovod = name in stock or name in ours
    if horovod:
        optimizer = hvd.DistributedOptimizer(
            optimizer, named_parameters=net.named_parameters(), compression={**stock, **ours}[name]
        )
    else:
        travel = Travel(hvd)
        way = method(name, ranks=hvd.size(), rank=hvd.rank())
    last = last_counted(optimizer) if name in OURS else {}
    batch, steps = run["batch"], run["steps"]
    order = torch.randperm(len(images), generator=torch.Generator().manual_seed(run["seed"]))
    order = order.repeat(1 + steps * batch * hvd.size() // len(order))
    clock, curve, reached = 0.0, [], None
    counted = 0  # bytes while the clock runs
    for step in range(steps):
        if step == WARM:
            hvd.barrier()
            counted, warm_s = 0, clock
        rows = order[(step * hvd.size() + hvd.rank()) * batch :][:batch]
        before, start = sent_bytes(), time.perf_counter()
        optimizer.zero_grad()
        loss = nn.functional.cross_entropy(net(images[rows]), labels[rows])
        loss.backward()
        if not horovod:
            named = list(net.named_parameters())
            for key, parameter in reversed(named):
                grad = parameter.grad.numpy()
                travel.begin(key, way(key, grad.shape, grad.reshape(-1)))
            means = travel.wait()
            for key, parameter in named:
                parameter.grad.copy_(torch.from_numpy(means[key]).view_as(parameter))
        optimizer.step()
        clock += time.perf_counter() - start
        counted += sent_bytes() - before
        if (step + 1) % run["every"] == 0 or step + 1 == steps:
            if hvd.rank() == 0:  # all have the same net; the others wait asleep, and not in a step
                with torch.inference_mode():
                    right = net(test_images).argmax(1) == test_labels
                accuracy = 100 * right.double().mean().item()
                curve.append((step + 1, clock, accuracy))
                if reached is None and accuracy >= run["target"]:
                    reached = clock
            looked = hvd.allreduce_async(torch.zeros(1), name="looked")
            result_of(hvd, looked, limit_s=WAIT_S, what="a look at the accuracy")
    timed = steps - WARM
    sent = sent_of(optimizer, name, last) if horovod else travel.sent[-len(travel.sent) // steps :]
    return {
        "step_s": (clock - warm_s) / timed,
        "bytes_per_step": counted / timed,
        "idle_bytes_per_s": Idle().rate(),
        "reported_bytes_per_step": on_wire(sent),
        "sent_bytes": sum(size for _, size in sent),
        "accuracy": curve[-1][2] if curve else None,
        "seconds_to_target": reached,
        "curve": curve,
    }


def last_counted(optimizer: Any) -> dict[str, tuple[int, bool]]:
    """Of each tensor, from now on, bytes in its last step and whether it was compressed.

    The report has means over all steps, the dense ones too.
    """
    last: dict[str, tuple[int, bool]] = {}
    traffic = memory_of(optimizer).engine.traffic
    count = traffic._count

    def noted(tensor: str | None, elements: int, nbytes: int, **how: Any) -> None:
        last[tensor or ""] = nbytes, how["compressed"]
        count(tensor, elements, nbytes, **how)

    traffic._count = noted  # type: ignore[method-assign]
    return last


def sent_of(optimizer: Any, name: str, last: dict[str, tuple[int, bool]]) -> list[tuple[str, int]]:
    """Collective and bytes of what an optimizer of Horovod sends in a step."""
    if name not in OURS:
        width = 2 if name == "fp16" else 4
        return [("allreduce", width * p.numel()) for p in optimizer._requires_update]
    gathers = optimizer._compression.settings.exchange == "gather"
    return [
        ("allgather" if gathers and compressed else "allreduce", nbytes)
        for nbytes, compressed in last.values()
    ]


def main() -> None:
    """Do all runs of the job; this rank's results go beside the job file."""
    job_path = Path(sys.argv[1])
    job = json.loads(job_path.read_text())
    torch.set_num_threads(1)
    hvd.init()
    out = job_path.with_name(f"rank{hvd.rank()}.jsonl")
    with out.open("w") as file:
        for number, run in enumerate(job["runs"]):
            if "scripts" in run:
                run["scripts"] = json.loads(Path(run["scripts"]).read_text())
                result = replay(run)
            else:
                result = gossiped(run) if "gossip" in run else train(run)
            file.write(json.dumps({"number": number, **result}) + "\n")
            file.flush()
    hvd.shutdown()


if __name__ == "__main__":
    main()
