"""Is AutoCompression ever slower than plain Horovod? Paired runs of small nets, no shaped links.

    OMP_NUM_THREADS=1 horovodrun --gloo -np 2 python -m benchmarks tuned [--json FILE]

On a link that is as fast as memory compression loses, and the tuner should see it. Two optimizers
train the same net in one process and take turns step by step: plain, tuned, tuned, plain, so that
what else runs on the machine meets both alike. A pair is the medians of so many steps of each; a
row has the median of the pairs' ratios. The tuner has settled before the first pair; what it took
until then is a column of its own. `--aa` measures plain against plain: how far a ratio can be from
1 for no reason at all.
"""

from __future__ import annotations

import logging
import os
import statistics
import time
from typing import Any

import horovod.torch as hvd
import torch
from machine import origin
from nets import NETS
from pairs import line_of, paired
from rows_file import flags, save
from torch import nn

from sn_compress import AutoCompression
from sn_compress.torch.under_horovod.memory import memory_of

PAIRS, STEPS, BATCH, LEARN = 9, 60, 32, 80


def mlp() -> nn.Module:
    """Three dense layers, 535,818 parameters."""
    return nn.Sequential(
        nn.Flatten(), nn.Linear(784, 512), nn.ReLU(), nn.Linear(512, 256), nn.ReLU(),
        nn.Linear(256, 10),
    )  # fmt: skip


def trainer(make: Any, compression: Any, *, rate: float = 0.01) -> Any:
    """A function that does a step and returns its seconds; the net and its optimizer."""
    torch.manual_seed(0)
    net = make()
    optimizer = hvd.DistributedOptimizer(
        torch.optim.SGD(net.parameters(), lr=rate),
        named_parameters=net.named_parameters(),
        compression=compression,
    )
    images, labels = torch.randn(BATCH, 1, 28, 28), torch.randint(0, 10, (BATCH,))

    def step() -> float:
        start = time.perf_counter()
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images), labels).backward()
        optimizer.step()
        return time.perf_counter() - start

    return step, net, optimizer


def same(value: float) -> float:
    """The mean over the ranks."""
    return float(hvd.allreduce(torch.tensor([value], dtype=torch.float64), name="bench")[0])


def compare(name: str, make: Any, *, pairs: int, steps: int, aa: bool) -> dict[str, Any]:
    """One row: the median of the pairs' ratios, and the middle half of them."""
    plain, _, _ = trainer(make, hvd.Compression.none)
    tuned, _, optimizer = trainer(make, hvd.Compression.none if aa else AutoCompression)
    step_s = statistics.median(plain() for _ in range(LEARN))
    learning_s = sum(tuned() for _ in range(LEARN)) - LEARN * step_s
    tuner = None if aa else memory_of(optimizer).engine.tuner
    if tuner is not None and not tuner.settled:
        raise SystemExit(f"{name}: the tuner has not settled after {LEARN} steps")
    return {
        "model": name,
        "ranks": hvd.size(),
        "against": "plain" if aa else "tuned",
        **paired(plain, tuned, pairs=pairs, steps=steps, mean=same),
        "methods": ["plain" if tuner is None else tuner.choice],
        "learning_s": learning_s,
        "load": os.getloadavg()[0],
        **origin(),
    }


def main() -> None:
    """A row for each net."""
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true", help="three short pairs of each")
    parser.add_argument("--pairs", type=int, default=PAIRS)
    parser.add_argument("--steps", type=int, default=STEPS, help="of each, in a pair")
    parser.add_argument("--aa", action="store_true", help="plain against plain as well")
    args = parser.parse_args()
    if args.quick:
        args.pairs, args.steps = 3, 8
    torch.set_num_threads(1)
    hvd.init()
    if hvd.rank() == 0:
        logging.basicConfig(format="%(message)s")
        logging.getLogger("sn_compress.prediction.tuning").setLevel(logging.INFO)
    rows = []
    for name, make in {"mlp": mlp, **NETS}.items():
        for aa in (False, True) if args.aa else (False,):
            rows.append(compare(name, make, pairs=args.pairs, steps=args.steps, aa=aa))
            if hvd.rank() == 0:
                print(line_of(rows[-1]), flush=True)
                save(args.json, rows)
    hvd.shutdown()


if __name__ == "__main__":
    main()
