"""Encoding in the hook against encoding in a thread beside the backward pass (overlap=True).

    OMP_NUM_THREADS=1 horovodrun --gloo -np 2 python -m benchmarks beside [--json FILE]

Three nets, in hvd.DistributedOptimizer with the shared exchange. "replayed" computes as on an
accelerator: each of ten layers of a million parameters sleeps in its backward pass, and the cores
have nothing else to do than encode. "cnn" and "transformer" compute on the same cores. Two
optimizers take turns step by step, as in tuned.py; their weights have to stay equal to the bit.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import horovod.torch as hvd
import torch
from machine import commit, machine
from nets import NETS
from torch import nn
from tuned import same, trainer

from sn_compress import LowRankCompression
from sn_compress.torch import horovod as rim
from sn_compress.torch.under_horovod.memory import Pending

LAYERS, SIDE, LAYER_S = 10, 1000, 0.03
PAIRS, STEPS = 9, {"replayed": 2, "cnn": 15, "transformer": 8}
WARMUP, RATE = 2, 1e-4


class Asleep(torch.autograd.Function):
    """Passes on what it gets; its backward pass takes a while, and no processor."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, gradient: torch.Tensor) -> Any:
        ctx.gradient = gradient
        return x.clone()

    @staticmethod
    def backward(ctx: Any, above: torch.Tensor) -> Any:
        time.sleep(LAYER_S)
        return above, ctx.gradient, None


class Replayed(nn.Module):
    """Layers whose gradients are always the same, nearly of low rank."""

    def __init__(self) -> None:
        super().__init__()
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros(SIDE, SIDE)) for _ in range(LAYERS)
        )
        rows, columns = torch.randn(SIDE, 8), torch.randn(8, SIDE)
        self.register_buffer("gradient", rows @ columns + torch.randn(SIDE, SIDE))
        self.place = nn.Linear(28, 10)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        x = self.place(images[:, 0].mean(1))
        for weight in self.weights:
            x = Asleep.apply(x, weight, self.gradient)  # type: ignore[no-untyped-call]
        return x


def equal(one: nn.Module, other: nn.Module) -> bool:
    """Whether all weights are, to the bit."""
    pairs = zip(one.parameters(), other.parameters(), strict=True)
    return all(torch.equal(a, b) for a, b in pairs)


def compare(name: str, pairs: int) -> tuple[dict[str, Any], list[dict[str, Any]]]:
    """A row, and what happened in one step of each."""
    make = Replayed if name == "replayed" else NETS[name]
    way = LowRankCompression.using(warmup=WARMUP, every=10**9)
    hook, one, _ = trainer(make, way, rate=RATE)
    thread, other, _ = trainer(make, way.using(overlap=True), rate=RATE)
    for _ in range(WARMUP + 2):
        hook(), thread()
    found = []
    for _ in range(pairs):
        seconds: dict[Any, list[float]] = {hook: [], thread: []}
        for number in range(STEPS[name]):
            for turn in (hook, thread) if number % 2 else (thread, hook):
                seconds[turn].append(turn())
        found.append(tuple(same(statistics.median(seconds[turn])) for turn in (hook, thread)))
    if not equal(one, other):
        raise SystemExit(f"{name}: the thread has changed the result")
    ratios = sorted(b / a for a, b in found)
    low, _, high = statistics.quantiles(ratios, n=4)
    row = {
        "model": name, "ranks": hvd.size(), "pairs": len(found),
        "hook_s": statistics.median(a for a, _ in found),
        "thread_s": statistics.median(b for _, b in found),
        "thread_over_hook": statistics.median(ratios),
        "lower_quartile": low, "upper_quartile": high,
        "load": os.getloadavg()[0], "commit": commit(), "machine": machine(),
    }  # fmt: skip
    stamps = []
    for method, turn in (("codec in the hook", hook), ("codec in a thread", thread)):
        hvd.barrier()
        with stamped() as seen:
            start = time.perf_counter()
            turn()
        stamps.append(
            {
                "model": name, "method": method, "ranks": hvd.size(), "gbit": None,
                "replayed": name == "replayed",
                "overlap": turn is thread,
                "stamps": [(what, of, a - start, b - start) for what, of, a, b in seen],
            }
        )  # fmt: skip
    return row, stamps


@contextmanager
def stamped() -> Iterator[list[tuple[str, str, float, float]]]:
    """What computing, codec and exchange do meanwhile: (what, tensor, start, end)."""
    seen: list[tuple[str, str, float, float]] = []
    sent: dict[Any, tuple[str, float]] = {}

    def timed(what: str, call: Any, name: Any) -> Any:
        def timing(*args: Any, **options: Any) -> Any:
            start = time.perf_counter()
            try:
                return call(*args, **options)
            finally:
                seen.append((what, name(*args), start, time.perf_counter()))

        return timing

    def start(wire: Any, name: str, words: Any) -> Any:
        handles = real_start(wire, name, words)
        for _, number in handles:
            sent[number] = name, time.perf_counter()
        return handles

    def wait(wire: Any, handles: Any) -> Any:
        totals = real_wait(wire, handles)
        seen.extend(("link", *sent[number], time.perf_counter()) for _, number in handles)
        return totals

    real_start, real_wait = rim.Reducer.start, rim.Reducer.wait
    real_begin, real_advance, real_backward = Pending._first, Pending._advance, Asleep.backward
    rim.Reducer.start, rim.Reducer.wait = start, wait  # type: ignore[method-assign]
    Pending._first = timed("codec", real_begin, lambda self, name, *_: name)  # type: ignore[method-assign]
    Pending._advance = timed("codec", real_advance, lambda self, name: name)  # type: ignore[method-assign]
    Asleep.backward = staticmethod(timed("compute", real_backward, lambda *_: ""))  # type: ignore[method-assign]
    try:
        yield seen
    finally:
        rim.Reducer.start, rim.Reducer.wait = real_start, real_wait  # type: ignore[method-assign]
        Pending._first, Pending._advance = real_begin, real_advance  # type: ignore[method-assign]
        Asleep.backward = staticmethod(real_backward)  # type: ignore[method-assign]


def main() -> None:
    """A row for each net, and the stamps of the replayed one."""
    flags = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    flags.add_argument("--json", type=Path)
    flags.add_argument("--stamps", type=Path, help="for timeline.py")
    flags.add_argument("--models", nargs="+", choices=list(STEPS), default=list(STEPS))
    flags.add_argument("--quick", action="store_true", help="three pairs of each")
    args = flags.parse_args()
    torch.set_num_threads(1)
    hvd.init()
    rows = []
    for name in args.models:
        row, stamps = compare(name, 3 if args.quick else PAIRS)
        rows.append(row)
        if hvd.rank() == 0:
            print(
                f"{name}: hook {1e3 * row['hook_s']:.1f} ms, thread "
                f"{1e3 * row['thread_s']:.1f} ms, ratio {row['thread_over_hook']:.3f} "
                f"({row['lower_quartile']:.3f} to {row['upper_quartile']:.3f})",
                flush=True,
            )
            if args.json:
                args.json.write_text("[\n" + ",\n".join(map(json.dumps, rows)) + "\n]\n")
            if args.stamps and name == "replayed":
                args.stamps.write_text(json.dumps(stamps))
    hvd.shutdown()


if __name__ == "__main__":
    main()
