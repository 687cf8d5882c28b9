"""Ranks of resnet50_step.py with Horovod's torch optimizer, plain and ours alternating.

What is handed to Horovod is counted at the functions of its library, so fusion, which is Horovod's
own, is not in it: a collective is what Horovod agrees on by itself.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
import time
from functools import partial
from pathlib import Path
from typing import Any

import torch
from machine import ROOT
from resnet50_gradients import DENSE, OURS, RATIO, SETTLE, FixedGradients, gradients_of, in_layout
from timing import interleave

KINDS = {"allreduce": "allreduce", "allgather": "allgather"}


def ours() -> Any:
    """The one place where a compression is made."""
    from sn_compress import LowRankCompression

    return LowRankCompression.using(ratio=RATIO, warmup=DENSE)


def run_horovod(job: dict[str, Any], *, timeout_s: float) -> list[dict[str, Any]]:
    """What each rank found. Raises RuntimeError, with what they said, if one fails."""
    with tempfile.TemporaryDirectory() as folder:
        (Path(folder) / "job.json").write_text(json.dumps(job))
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
        env = {"OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, paths))}
        command = [sys.executable, "-m", "horovod.runner.launch", "--gloo"]
        command += ["-np", str(job["ranks"]), sys.executable, __file__, folder]
        done = subprocess.run(
            command, env=os.environ | env, stdin=subprocess.DEVNULL, stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT, text=True, timeout=timeout_s,
        )  # fmt: skip
        if done.returncode:
            raise RuntimeError(f"horovodrun ended with {done.returncode}:\n{done.stdout[-3000:]}")
        files = [Path(folder) / f"rank{rank}.json" for rank in range(job["ranks"])]
        return [json.loads(path.read_text()) for path in files]


class Sent:
    """Kind and bytes of every collective handed to Horovod while `on`.

    Raises ValueError for one whose bytes are not known here.
    """

    def __init__(self, library: Any) -> None:
        self.on = False
        self.calls: list[tuple[str, int]] = []
        for name in dir(library):
            if name.startswith("horovod_torch_") and "_async_" in name:
                setattr(library, name, self._around(name, getattr(library, name)))

    def _around(self, name: str, function: Any) -> Any:
        what = name.removeprefix("horovod_torch_").partition("_async_")[0]
        kind = KINDS.get(what.removeprefix("grouped_"))

        def counted(tensors: Any, *rest: Any) -> Any:
            if self.on:
                if kind is None:
                    raise ValueError(f"{name}: add what it sends to KINDS")
                sent = [tensors] if isinstance(tensors, torch.Tensor) else tensors
                self.calls.append((kind, sum(tensor.nbytes for tensor in sent)))
            return function(tensors, *rest)

        return counted


class Way:
    """One way's model and optimizer in a rank."""

    def __init__(self, name: str, gradients: list[torch.Tensor], hvd: Any) -> None:
        self.name, self.hvd, self.model = name, hvd, FixedGradients(gradients)
        compression = ours() if name == OURS else hvd.Compression.none
        self.optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(self.model.parameters(), lr=0.0),
            named_parameters=[(f"{name} {n}", p) for n, p in self.model.named_parameters()],
            compression=compression,
        )

    def steps(self, count: int) -> list[float]:
        """So many steps in a row."""
        return [self.step() for _ in range(count)]

    def step(self) -> float:
        """CPU seconds of a backward pass, and of all exchanges, that all ranks begin together."""
        self.optimizer.zero_grad()
        loss = self.model()
        self.hvd.barrier()
        start = time.process_time()
        loss.backward()
        self.optimizer.synchronize()
        return time.process_time() - start


def main() -> None:
    """One rank."""
    import horovod.torch as hvd
    from horovod.torch import mpi_ops

    folder = Path(sys.argv[1])
    job = json.loads((folder / "job.json").read_text())
    torch.set_num_threads(1)
    sent = Sent(mpi_ops.mpi_lib)
    hvd.init()
    gradients = gradients_of(job, hvd.rank())
    moved = [in_layout(gradient, job["layout"]) for gradient in gradients]
    ways = [Way(name, moved, hvd) for name in job["ways"]]
    facts: dict[str, Any] = {}
    for way in ways:
        for _ in range(SETTLE):
            way.step()
        sent.calls.clear()
        sent.on = True
        way.step()
        sent.on = False
        facts[way.name] = {"sent": list(sent.calls), "buckets": None, "ops_a_bucket": None}
    steps = {way.name: partial(way.steps, job["steps"]) for way in ways}
    taken = interleave(steps, job["rounds"], rotate=True)
    result = {
        "taken": taken,
        "facts": facts,
        "elements": sum(gradient.numel() for gradient in gradients),
    }
    (folder / f"rank{hvd.rank()}.json").write_text(json.dumps(result))
    hvd.shutdown()


if __name__ == "__main__":
    main()
