"""Is tune=True ever slower than plain Horovod? Paired runs of small nets, no shaped links.

    horovodrun -np 2 python benchmarks/tuned.py [--json FILE]

On a link that is as fast as memory compression loses, and the tuner should see it. Two optimizers
train the same net in one process: blocks of plain steps and of tuned ones take turns, so that what
else runs on the machine meets both. The tuner has settled before the first pair.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from machine import commit, machine
from nets import NETS
from torch import nn

from sn_compress import FFTCompression
from sn_compress.horovod import torch as rim

PAIRS, STEPS, BATCH = 9, 20, 32


def mlp() -> nn.Module:
    """Three dense layers, 535,818 parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
        nn.Linear(256, 10),
    )  # fmt: skip


def trainer(make: Any, compression: Any) -> Any:
    """A function that does steps and returns the seconds of one, and its optimizer."""
    torch.manual_seed(0)
    net = make()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=0.01),
        named_parameters=net.named_parameters(),
        compression=compression,
    )
    images, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))

    def steps(count: int) -> float:
        start = time.perf_counter()
        for _ in range(count):
            optimizer.zero_grad()
            nn.functional.cross_entropy(net(images), labels).backward()
            optimizer.step()
        return (time.perf_counter() - start) / count

    return steps, optimizer


def compare(name: str, make: Any, pairs: int) -> dict[str, Any]:
    """One row: the median of the pairs' ratios."""
    plain, _ = trainer(make, hvd.Compression.none)
    tuned, optimizer = trainer(make, FFTCompression.using(tune=True))
    plain(10)
    tuned(60)  # plain steps, a trial with the dense steps of the shared exchange, and some more
    tuner = rim._memory_of(optimizer).tuner
    assert tuner is not None
    assert tuner.settled
    found = []
    for number in range(pairs):
        order = (plain, tuned) if number % 2 else (tuned, plain)
        seconds = {way: way(STEPS) for way in order}
        found.append((seconds[plain], seconds[tuned]))
    methods = sorted(set(tuner._methods.values()) or {"plain"})
    return {
        "model": name,
        "ranks": hvd.size(),
        "pairs": pairs,
        "plain_s": statistics.median(a for a, _ in found),
        "tuned_s": statistics.median(b for _, b in found),
        "tuned_over_plain": statistics.median(b / a for a, b in found),
        "methods": methods,
        "commit": commit(),
        "machine": machine(),
    }


def main() -> None:
    """A row for each net."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--json", type=Path)
    flags.add_argument("--quick", action="store_true", help="three pairs of each")
    args = flags.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    rows = []
    for name, make in {"mlp": mlp, **NETS}.items():
        rows.append(compare(name, make, 3 if args.quick else PAIRS))
        if hvd.rank() == 0:
            row = rows[-1]
            print(
                f"{name}: plain {1e3 * row['plain_s']:.1f} ms, tuned {1e3 * row['tuned_s']:.1f} "
                f"ms, ratio {row['tuned_over_plain']:.3f}, {', '.join(row['methods'])}",
                flush=True,
            )
    if args.json and hvd.rank() == 0:
        args.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
    hvd.shutdown()


if __name__ == "__main__":
    main()
