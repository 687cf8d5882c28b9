"""CPU ms of a rank in a step of the small net, by thread, without a link between ranks.

    OMP_NUM_THREADS=1 horovodrun --gloo -np 4 python -m benchmarks rank_cpu shared powersgd none

Ways take turns in blocks of steps, in the same processes; means over ranks. `none` is the net
alone, rivals are in the loop of training_rank.py. The second column is all but the main thread:
Horovod's own, mostly.
"""

from __future__ import annotations

import os
import sys
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from nets import NETS, fashion_mnist
from torch import nn
from travel import Travel
from wire_methods import method

from sn_compress import LowRankCompression

BLOCK, BLOCKS, WARM, BATCH = 25, 4, 20, 16
SHARED = LowRankCompression.using(ratio=20, warmup=3)


class Way:
    """A net that is trained in one way."""

    def __init__(self, name: str) -> None:
        torch.manual_seed(0)
        self.name, self.steps = name, 0
        self.net = NETS["cnn"]()
        self.optimizer: Any = torch.optim.SGD(self.net.parameters(), lr=0.05, momentum=0.9)
        self.spent = [0.0, 0.0, 0.0]  # s of the main thread, of all others, and passed
        if name == "shared":
            self.optimizer = hvd.DistributedOptimizer(
                self.optimizer, named_parameters=self.net.named_parameters(), compression=SHARED
            )
        elif name != "none":
            self.travel = Travel(hvd)
            self.method = method(name, ranks=hvd.size(), rank=hvd.rank())

    def step(self, images: torch.Tensor, labels: torch.Tensor) -> None:
        at = (self.steps * hvd.size() + hvd.rank()) * BATCH % (len(images) - BATCH)
        self.steps += 1
        self.optimizer.zero_grad()
        logits = self.net(images[at : at + BATCH])
        nn.functional.cross_entropy(logits, labels[at : at + BATCH]).backward()
        if self.name not in ("shared", "none"):
            named = list(self.net.named_parameters())
            for key, parameter in reversed(named):
                grad = parameter.grad.numpy()
                self.travel.begin(key, self.method(key, grad.shape, grad.reshape(-1)))
            means = self.travel.wait()
            for key, parameter in named:
                parameter.grad.copy_(torch.from_numpy(means[key]).view_as(parameter))
        self.optimizer.step()


def worked() -> list[float]:
    """Seconds that the main thread and all others have worked, and the time."""
    by_process = {
        int(task.parent.name): int(task.read_text().split()[0]) / 1e9
        for task in Path("/proc/self/task").glob("*/schedstat")
    }
    main = by_process[os.getpid()]
    return [main, sum(by_process.values()) - main, time.perf_counter()]


def main() -> None:
    """Measure the ways that are named."""
    torch.set_num_threads(1)
    hvd.init()
    images, labels = (array[:8000] for array in fashion_mnist("train"))
    ways = [Way(name) for name in sys.argv[1:] or ["shared", "powersgd", "none"]]
    for block in range(BLOCKS + 1):
        for way in ways:
            hvd.barrier()
            before = worked()
            for _ in range(BLOCK if block else WARM):
                way.step(images, labels)
            if block:
                more = zip(way.spent, before, worked(), strict=True)
                way.spent = [spent + end - start for spent, start, end in more]
    for way in ways:
        spent = torch.tensor(way.spent, dtype=torch.float64) * 1e3 / (BLOCK * BLOCKS)
        main_ms, others_ms, wall_ms = hvd.allreduce(spent, name=way.name).tolist()
        if hvd.rank() == 0:
            print(
                f"{way.name:9s} main {main_ms:5.1f}  others {others_ms:5.1f}  "
                f"all {main_ms + others_ms:5.1f}  wall {wall_ms:5.1f} ms a step",
                flush=True,
            )


if __name__ == "__main__":
    main()
