"""What the peak of a step falls by with compressed activations, and its price.

    python -m benchmarks activations_memory            all nets, a minute
    python -m benchmarks activations_memory --quick    one

The nets of activations.py, and a transformer of eight layers; inputs of linear layers in 8 and in 4
bits. Peaks are those of whole steps beyond parameters, buffers and input, counted storage by
storage. Seconds are processor time on one thread, the best of several steps.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _peaks import cells, make_rows
from activations import BATCH, resnet
from nets import NETS, Transformer
from tables import markdown
from torch import nn

import sn_memory.torch
from sn_memory.torch import StorageTracker

ALL: dict[str, Callable[[], nn.Module]] = {
    **NETS,
    "resnet": resnet,
    "transformer, 8 layers": partial(Transformer, layers=8),
}
WIDTHS = (8, 4)


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


def peak_bytes(net: nn.Module, x: torch.Tensor) -> int:
    """The peak of a step beyond parameters, buffers and input."""
    net.zero_grad(set_to_none=True)
    with StorageTracker([x, *net.parameters(), *net.buffers()]) as tracker:
        net(x).sum().backward()
    return tracker.peak_bytes - tracker.start_bytes


def row_of(name: str, bits: int, steps: int, device: str = "cpu") -> dict[str, Any]:
    """One net with inputs in so many bits, as a flat row."""
    torch.manual_seed(0)
    net = ALL[name]().to(device)
    size = 14 if name == "resnet" else 28
    x = (torch.rand(BATCH, 1, size, size) * 2 - 1).to(device)
    plain_s, plain_peak_bytes = step_seconds(net, x, steps), peak_bytes(net, x)
    with sn_memory.torch.compress_activations(net, bits=bits) as compressed:
        step_s = step_seconds(net, x, steps)
        return {
            "net": name,
            "bits": bits,
            "saved_bytes": compressed.saved.plain_bytes,
            "compressed_bytes": compressed.saved.compressed_bytes,
            "ratio": round(compressed.saved.ratio, 2),
            "plain_peak_bytes": plain_peak_bytes,
            "peak_bytes": peak_bytes(net, x),
            "plain_step_s": round(plain_s, 5),
            "step_s": round(step_s, 5),
        }


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    head = (
        "net", "inputs in", "saved, times less",
        "peak beyond parameters and input, MiB: plain, compressed", "less",
        "step, ms: plain, compressed",
    )  # fmt: skip
    return markdown(
        head,
        ([it["net"], f"{it['bits']} bits", f"{it['ratio']:.1f}", *cells(it)] for it in rows),
    )


def main() -> None:
    """Make all rows and print the table."""
    torch.set_num_threads(1)
    purpose = __doc__.splitlines()[0]
    make_rows(purpose, "activations_memory.json", ALL, WIDTHS, "transformer", row_of, table)


if __name__ == "__main__":
    main()
