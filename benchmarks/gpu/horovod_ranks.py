"""Horovod ranks with CUDA tensors: one over NCCL where it was built in, two over Gloo.

Gradients of ResNet-50's shapes through hvd.DistributedOptimizer, as benchmarks/resnet50_horovod.py
runs them on the host.
"""

from __future__ import annotations

import json
import os
import statistics
import sys
import tempfile
import time
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from gpu.section import CannotError, Section, main, run

WAYS = ("plain", "low rank", "fft")


def rank_work(job: dict[str, Any]) -> dict[str, Any]:
    """In a rank: seconds of a step by way, and whether gradients ended on the device."""
    import horovod.torch as hvd
    import torch
    from resnet50_gradients import DENSE, SETTLE, FixedGradients, gradient

    from gpu.exchange_ranks import shapes_of
    from sn_compress import FFTCompression, LowRankCompression

    hvd.init()
    if hvd.size() == 1:
        os.environ["HOROVOD_ELASTIC"] = "1"  # else Horovod leaves one rank's gradients alone
    device, by_way = job["device"], {}
    shapes = shapes_of(job["model"])
    gradients = [gradient(shape, at, hvd.rank(), device) for at, shape in enumerate(shapes)]
    ours = {
        "low rank": LowRankCompression.using(ratio=100, warmup=DENSE),
        "fft": FFTCompression,
    }
    for way in WAYS:
        model = FixedGradients(gradients)
        options = {"compression": ours[way]} if way in ours else {}
        optimizer = hvd.DistributedOptimizer(
            torch.optim.SGD(model.parameters(), lr=1e-3),
            named_parameters=model.named_parameters(), **options,
        )  # fmt: skip
        taken = []
        for _ in range(SETTLE + job["steps"]):
            optimizer.zero_grad()
            loss = model()
            start = time.perf_counter()
            loss.backward()
            optimizer.step()
            if device == "cuda":
                torch.cuda.synchronize()
            taken.append(time.perf_counter() - start)
        weights = torch.cat(
            [parameter.detach().flatten().double() for parameter in model.parameters()]
        )
        by_way[way] = {
            "step_s": statistics.median(taken[SETTLE:]),
            "sum": float(weights.sum()),
            "finite": bool(weights.isfinite().all()),
        }
    return by_way


def timed(section: Section, number: int) -> None:
    """Rows of a number of ranks."""
    job = {"device": section.device, "model": "gpt2/12" if section.dry else "resnet50"}
    with tempfile.TemporaryDirectory() as folder:
        Path(folder, "job.json").write_text(json.dumps(job | {"steps": 2 if section.dry else 15}))
        command = [sys.executable, "-m", "horovod.runner.launch", "--gloo", "-np", str(number)]
        code, output = run(
            [*command, sys.executable, "-m", "gpu.horovod_ranks", "--rank", folder],
            timeout_s=max(5.0, section.left_s() - 1),
        )
        if code:
            raise RuntimeError(f"horovodrun ended with {code}:\n{output}")
        files = [Path(folder, f"rank{rank}.json") for rank in range(number)]
        by_rank = [json.loads(file.read_text()) for file in files]
    for way in WAYS:
        facts = [rank[way] for rank in by_rank]
        equal = len({rank["sum"] for rank in facts}) == 1
        section.row(
            way=way, ranks=number, step_ms=1e3 * max(rank["step_s"] for rank in facts),
            equal_ranks=equal, finite=all(rank["finite"] for rank in facts),
        )  # fmt: skip
        if not equal or not all(rank["finite"] for rank in facts):
            raise RuntimeError(f"{way}: ranks ended apart, or not finite")


def measure(section: Section) -> None:
    """What the build can do, then both."""
    if find_spec("horovod") is None:
        raise CannotError("no Horovod; scripts/build_horovod.py builds it, --carry for elsewhere")
    check = [sys.executable, "-m", "horovod.runner.launch", "--check-build"]
    _, output = run(check, timeout_s=60)
    nccl = "[X] NCCL" in output
    section.row(nccl=nccl)
    if nccl or section.dry:
        section.part("1 rank", lambda: timed(section, 1), least_s=5)
    else:
        section.leave_out("1 rank over NCCL", "this Horovod was built without NCCL")
    section.part("2 ranks", lambda: timed(section, 2), least_s=5)


if __name__ == "__main__":
    if "--rank" in sys.argv:
        folder = Path(sys.argv[2])
        result = rank_work(json.loads((folder / "job.json").read_text()))
        (folder / f"rank{os.environ['HOROVOD_RANK']}.json").write_text(json.dumps(result))
    else:
        main("horovod_ranks", measure)
