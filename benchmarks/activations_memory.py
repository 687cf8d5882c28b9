"""What the peak of a step falls by with compressed activations: predicted, measured, and its price.

    python benchmarks/activations_memory.py            all nets, a minute
    python benchmarks/activations_memory.py --quick    one

The nets of activations.py, and a transformer of eight layers. Budgets are an eighth and 1/13.5 of
what autograd saves. "held" is what a forward pass leaves behind; peaks are those of whole steps
beyond parameters, buffers and input, counted storage by storage. Predicted ones come from a step
without values. Seconds are processor time on one thread, the best of several steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _peaks import cells, columns, make_rows
from activations import BATCH, resnet, saved_bytes
from nets import NETS, Transformer
from tables import markdown
from torch import nn

import sn_memory.torch

ALL: dict[str, Callable[[], nn.Module]] = {
    **NETS,
    "resnet": resnet,
    "transformer, 8 layers": partial(Transformer, layers=8),
}
RATIOS = (8.0, 13.5)


def step_seconds(net: nn.Module, x: torch.Tensor, steps: int) -> float:
    """Seconds of forward and backward, the best: processor time, on a GPU by the clock."""
    best = float("inf")
    clock = time.perf_counter if x.is_cuda else time.process_time
    for _ in range(steps):
        settle(x)
        start = clock()
        net(x).sum().backward()
        settle(x)
        best = min(best, clock() - start)
    return best


def settle(x: torch.Tensor) -> None:
    """Wait for the device of a tensor."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def row_of(name: str, ratio: float, steps: int, device: str = "cpu") -> dict[str, Any]:
    """One net at one budget, as a flat row."""
    torch.manual_seed(0)
    net = ALL[name]().to(device)
    size = 14 if name == "resnet" else 28
    x = (torch.rand(BATCH, 1, size, size) * 2 - 1).to(device)
    plain_bytes = saved_bytes(net, x)
    plain_s = step_seconds(net, x, steps)
    with sn_memory.torch.compress_activations(net, budget=int(plain_bytes / ratio)) as compressed:
        step_seconds(net, x, 2)  # the first finds out what there is
        step_s = step_seconds(net, x, steps)
        found = compressed.verify(x)
        return {
            "net": name,
            "ratio_asked": ratio,
            "saved_bytes": compressed.saved.plain_bytes,
            "compressed_bytes": compressed.saved.compressed_bytes,
            "ratio": round(compressed.saved.ratio, 2),
            **columns(found),
            "again": sorted(compressed.controller.again),
            "work": round(compressed.controller.work or 0.0, 3),
            "plain_step_s": round(plain_s, 5),
            "step_s": round(step_s, 5),
        }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    head = (
        "net", "saved, times less", "runs again, of a forward pass",
        "peak, MiB: plain, predicted, measured", "of predicted saving",
        "step, ms: plain, compressed",
    )  # fmt: skip
    lines = []
    for row in rows:
        again = f"{len(row['again'])} modules, {row['work']:.0%}" if row["again"] else "nothing"
        ratio = f"{row['ratio']:.1f} (asked {row['ratio_asked']:g})"
        lines.append([row["net"], ratio, again, *cells(row)])
    return markdown(head, lines)


def main() -> None:
    """Make all rows and print the table."""
    torch.set_num_threads(1)
    purpose = __doc__.splitlines()[0]
    make_rows(purpose, "activations_memory.json", ALL, RATIOS, "transformer", row_of, table)


if __name__ == "__main__":
    main()
