"""Which method loses least accuracy at equal received bytes? Eight ranks, two nets, three seeds.

    python -m benchmarks study            the missing runs of the whole study, hours on two cores
    python -m benchmarks study --quick    one short run of most methods: does it all run?
    python -m benchmarks study --long     few methods, four times the steps
    python -m benchmarks study --unseen --ranks 2 4 8       two nets that no setting was chosen on
    python -m benchmarks study --only auto --optimizers sgd --ratios 50 150 --json NEW.json
        --against benchmarks/results/study.json     two cells again, beside what they were

Every rank's gradient and every payload is real; the ranks are simulated (benchmarks/simulated.py).
Finished runs are saved at once and not repeated, so the study may be stopped and started at
will. The whole study also writes its tables into docs/accuracy.md and draws docs/study.png.
"""

from __future__ import annotations

import math
import multiprocessing
import os
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import _study_report as report
import numpy as np
import torch
from _study_methods import BUILD, DENSE, Shapes, build, matrix
from machine import origin
from nets import NETS, UNSEEN_NETS, fashion_mnist
from rows_file import flags, interruptible, load, missing, save
from simulated import SMALLEST, Exchange, Plain, exchange_gradients, rank_gradients
from tables import put_into

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/study.json"
LONG_RESULTS = ROOT / "benchmarks/results/study_long.json"
UNSEEN_RESULTS = ROOT / "benchmarks/results/study_unseen.json"
RANKS, IMAGES = 8, 64  # ranks, unless a run says otherwise; images a step, of all ranks
# Chosen on plain runs only, by the loss at the end of a run and by seed 3, which is not studied.
RATES = {("cnn", "sgd"): 0.05, ("cnn", "adam"): 2e-3, ("transformer", "adam"): 4e-3}
STEPS = {"cnn": 1500, "transformer": 1500}
UNSEEN_RATES = {"residual": 0.1, "wide": 0.1}  # both with SGD
# A step of these takes longer, so there are fewer.
UNSEEN_STEPS = {"residual": 1000, "wide": 600}
MAKE = NETS | UNSEEN_NETS


@dataclass(frozen=True)
class Run:
    """What one run is; two runs with equal fields give equal results."""

    net: str
    optimizer: str
    method: str
    ratio_asked: float | None
    seed: int
    steps: int
    rate: float
    ranks: int = RANKS


def learning_rate(step: int, steps: int) -> float:
    """Linear up over a thirtieth of the run, then down to zero along a cosine; the peak is 1."""
    warm = max(1, steps // 30)
    if step < warm:
        return (step + 1) / warm
    return 0.5 * (1 + math.cos(math.pi * (step - warm) / (steps - warm)))


def compressed(net: torch.nn.Module) -> Shapes:
    """The tensors that are compressed; the others travel plain with every method."""
    sizes = {name: tuple(p.shape) for name, p in net.named_parameters()}
    return {name: shape for name, shape in sizes.items() if math.prod(shape) >= SMALLEST}


def train(run: Run) -> dict[str, Any]:
    """Do one run and return it as a flat row."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    net = MAKE[run.net]().to(memory_format=torch.channels_last)
    momentum = 0.0 if run.method == "dgc" else 0.9  # DGC has it in its codec
    optimizer: torch.optim.Optimizer
    if run.optimizer == "sgd":
        optimizer = torch.optim.SGD(net.parameters(), lr=run.rate, momentum=momentum)
    else:
        optimizer = torch.optim.Adam(net.parameters(), lr=run.rate)
    shapes = compressed(net)
    ranks, batch = run.ranks, IMAGES // run.ranks
    exchanges = build(run.method, shapes, ranks, run.ratio_asked, run.steps)
    plain: dict[str, Exchange] = {name: Plain() for name in shapes}
    small: dict[str, Exchange] = {
        name: Plain() for name, _ in net.named_parameters() if name not in shapes
    }
    images, labels = fashion_mnist("train")
    shuffle = torch.Generator().manual_seed(run.seed)
    order = torch.empty(0, dtype=torch.long)
    losses = []
    start = time.process_time()
    for step in range(run.steps):
        if len(order) < IMAGES:
            order = torch.randperm(len(images), generator=shuffle)
        rows, order = order[:IMAGES], order[IMAGES:]
        x = images[rows].view(ranks, batch, *images.shape[1:])
        gradients, loss = rank_gradients(net, x, labels[rows].view(ranks, batch))
        losses.append(loss)
        if not math.isfinite(loss):
            break
        if step == DENSE:
            for exchange in exchanges.values():
                exchange.sent = exchange.received = 0.0
        # The shared exchange makes its dense steps itself: it learns from them.
        dense = step < DENSE and BUILD[run.method][0] != "shared"
        exchange_gradients(net, gradients, (plain if dense else exchanges) | small)
        for group in optimizer.param_groups:
            group["lr"] = run.rate * learning_rate(step, run.steps)
        optimizer.step()
    seconds = time.process_time() - start
    test_images, test_labels = fashion_mnist("t10k")
    net.eval()
    with torch.inference_mode():
        answers = torch.cat([net(part).argmax(1) for part in test_images.split(500)])
    received, sent = (sum(getattr(e, k) for e in exchanges.values()) for k in ("received", "sent"))
    taken = sum(map(math.isfinite, losses))
    share = (taken - DENSE) / taken
    others = sum(e.received for e in small.values()) * share
    elements = sum(math.prod(s) for s in shapes.values()) * (taken - DENSE)
    dense_received = 8 * (ranks - 1) / ranks * elements
    end = np.mean(losses[-(run.steps // 10) :])
    return asdict(run) | {
        "exchange": BUILD[run.method][0],
        "ratio_received": round(dense_received / received, 2),
        "ratio_sent": round(4 * elements / sent, 2),
        "ratio_with_small": round((dense_received + others) / (received + others), 2),
        "accuracy": round(100 * (answers == test_labels).double().mean().item(), 2),
        "train_loss": round(float(end), 4) if math.isfinite(end) else None,  # None: diverged
        "seconds": round(seconds, 1),  # of one core
    }


def powersgd_ratio(net: str, rank: int) -> float:
    """What PowerSGD of this rank comes out with, for ours to be set to the same bytes."""
    shapes = compressed(MAKE[net]())
    factors = sum(min(rank, *matrix(s)) * sum(matrix(s)) for s in shapes.values())
    return round(sum(map(math.prod, shapes.values())) / factors, 2)


def plan(seeds: Sequence[int], steps: int | None) -> list[Run]:
    """All runs: seed by seed the headline of two panels; what has one seed follows the first."""
    runs: list[Run] = []

    def add(
        net: str, optimizer: str, seed: int, methods: Sequence[tuple[str, float | None]]
    ) -> None:
        rate = RATES[net, optimizer]
        for method, ratio in methods:
            if method != "dgc" or optimizer == "sgd":  # its momentum is that of SGD
                runs.append(Run(net, optimizer, method, ratio, seed, steps or STEPS[net], rate))

    main = (("cnn", "sgd"), ("transformer", "adam"))
    for seed in seeds:
        for net, optimizer in main:
            add(net, optimizer, seed, headline(net) + NEARER)
        if seed == seeds[0]:
            for net, optimizer in reversed(main):
                add(net, optimizer, seed, MEMORY)
    for net, optimizer in main:
        add(net, optimizer, seeds[0], OTHERS)
    add("cnn", "sgd", seeds[0], OVER_TIME)
    add("cnn", "adam", seeds[0], headline("cnn") + MEMORY)
    return runs


def long_plan(seeds: Sequence[int], times: int) -> list[Run]:
    """The main rows once more, so many times as long: what is left of a difference then."""
    methods: list[tuple[str, float | None]] = [("plain", None), ("auto", 50.0), ("auto", 150.0)]
    methods += [("top-k", 50.0), ("top-k", 150.0), ("powersgd 1", None)]
    return [
        Run(net, optimizer, method, ratio, seed, times * STEPS[net], RATES[net, optimizer])
        for seed in seeds
        for net, optimizer in (("transformer", "adam"), ("cnn", "sgd"))
        for method, ratio in methods
    ]


def unseen_plan(seeds: Sequence[int], ranks: Sequence[int]) -> list[Run]:
    """The nets that no setting was chosen on, at some numbers of ranks: at 50, ours at 20, too."""
    methods: list[tuple[str, float | None]] = [("plain", None)]
    methods += [(name, ratio) for name in ("auto", "auto frequencies") for ratio in (50.0, 20.0)]
    methods += [("fft", 50.0), ("fft", 20.0), ("fft gathered", 50.0), ("fft by shape", 50.0)]
    methods += [("top-k", 50.0)]
    # The number of columns whose bytes are nearest to those of the others.
    columns = {"residual": "powersgd 1", "wide": "powersgd 4"}
    return [
        Run(net, "sgd", method, ratio, seed, UNSEEN_STEPS[net], rate, number)
        for seed in seeds
        for number in ranks
        for net, rate in UNSEEN_RATES.items()
        for method, ratio in [*methods, (columns[net], None)]
    ]


def headline(net: str) -> list[tuple[str, float | None]]:
    """Ours at the ratios aimed at and beside each rank of PowerSGD; the strongest rivals."""
    pairs: list[tuple[str, float | None]] = [("plain", None), ("auto", 50.0), ("auto", 150.0)]
    for rank in (1, 2, 4):
        ratio = powersgd_ratio(net, rank)
        pairs.append((f"powersgd {rank}", None))
        if abs(ratio - 50) > 1:  # else the run at 50 is beside it already
            pairs.append(("auto", ratio))
    pairs += [(name, 20.0) for name in ("fft", "fft gathered", "top-k")]
    return pairs + [
        (name, ratio)
        for name in (
            "fft",
            "fft gathered",
            "fft of blocks",
            "fft by shape",
            "dct of spans",
            "top-k",
            "demo",
        )
        for ratio in (50.0, 150.0)
    ]


MEMORY: list[tuple[str, float | None]] = [
    (name, ratio) for ratio in (50.0, 150.0) for name in ("auto, memory x 0.9", "auto, no memory")
]
OTHERS: list[tuple[str, float | None]] = [
    ("auto frequencies", 50.0),
    ("auto gather", 50.0),
    ("auto gather", 150.0),
    ("sparseloco", 50.0),
    ("sparseloco", 150.0),
    ("dgc", None),
    ("qsgd", None),
    ("terngrad", None),
    ("paper", None),
    ("fp16", None),
]
# What may lose less than FFTCompression as it is, at the same bytes (decision 52).
NEARER: list[tuple[str, float | None]] = [
    (name, ratio)
    for ratio in (50.0, 150.0)
    for name in ("fft, 2 bits", "fft, annealed", "fft, 2 bits, annealed")
]
# Theta over time, and what its convergence argument is about: without memory.
OVER_TIME: list[tuple[str, float | None]] = [
    ("fft, 8 bits", 50.0),
    ("fft by shape, warm-up", 50.0),
    ("fft by shape, no memory", 3.0),
    ("fft by shape, no memory, diminishing", 3.0),
]
QUICK = ("plain", "auto", "powersgd 1", "top-k", "qsgd", "auto gather")


def main() -> None:
    """Do the runs that are missing, then write what they say."""
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true", help="few methods, few steps")
    parser.add_argument("--long", action="store_true", help="few methods, four times the steps")
    parser.add_argument("--unseen", action="store_true", help="nets on which no setting was chosen")
    parser.add_argument(
        "--ranks", type=int, nargs="+", default=[RANKS], help="numbers of ranks, with --unseen"
    )
    parser.add_argument("--times", type=int, default=4, help="factor of the steps, with --long")
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="run only these methods")
    parser.add_argument("--nets", nargs="+", metavar="NET", help="run only these nets")
    parser.add_argument("--optimizers", nargs="+", metavar="NAME", help="run only these")
    parser.add_argument("--ratios", type=float, nargs="+", help="run only these ratios")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--workers", type=int, default=2, help="processes of one thread each")
    parser.add_argument("--png", type=Path, help="plot all rows")
    parser.add_argument("--against", type=Path, help="earlier rows, compared seed by seed")
    args = parser.parse_args()
    path, runs = RESULTS, plan(args.seeds, None)
    if args.quick:
        path, runs = ROOT / "benchmarks/out/study.json", plan([0], 40)
    elif args.long:
        path, runs = LONG_RESULTS, long_plan(args.seeds, args.times)
    elif args.unseen:
        path, runs = UNSEEN_RESULTS, unseen_plan(args.seeds, args.ranks)
    path = args.json or path
    runs = [r for r in runs if not args.only or r.method in args.only]
    runs = [r for r in runs if not args.nets or r.net in args.nets]
    runs = [r for r in runs if not args.optimizers or r.optimizer in args.optimizers]
    runs = [r for r in runs if not args.ratios or r.ratio_asked in (None, *args.ratios)]
    if args.quick:
        runs = [r for r in runs if r.method in QUICK and r.ratio_asked in (None, 50.0)]
    rows = [] if args.quick else [{"ranks": RANKS} | row for row in load(path)]
    if not runs:
        parser.error("no run of the study is left by --only, --nets, --optimizers and --ratios")
    fields = tuple(asdict(runs[0]))
    about = origin()
    # Without these a buffer of a few hundred kilobytes is returned to the system at every step and
    # comes back page by page: half of a step's time. The C library reads them as a process starts.
    for name in ("MALLOC_MMAP_THRESHOLD_", "MALLOC_TRIM_THRESHOLD_", "MALLOC_TOP_PAD_"):
        os.environ[name] = "1000000000" if name != "MALLOC_TOP_PAD_" else "200000000"
    with multiprocessing.get_context("spawn").Pool(args.workers) as pool:
        for row in pool.imap_unordered(train, missing(runs, rows)):
            rows.append(row | about)
            save(path, rows)
            cells = [str(row[f]) for f in (*fields[:5], "ratio_received", "accuracy", "train_loss")]
            print(" ".join(cells), f"({row['seconds']} s)", flush=True)
    text = report.text(rows, " --long" * args.long + " --unseen" * args.unseen)
    print(f"\n{text}\n\nrows: {path}")
    if args.against:
        print(f"\n{report.compared(rows, load(args.against))}")
    page = ROOT / "docs/accuracy.md"
    if path == LONG_RESULTS:
        put_into(page, "study-long", text)
    elif path == UNSEEN_RESULTS:
        put_into(page, "study-unseen", text)
    elif path == RESULTS:
        report.picture(rows, ROOT / "docs/study.png")
        put_into(page, "study", text)
    elif args.png:
        report.picture(rows, args.png)


if __name__ == "__main__":
    interruptible(main)
