"""How much compressed activations lower the peak of a step, and at what cost.

    python -m benchmarks activations_memory                         small nets, a minute
    python -m benchmarks activations_memory --quick                 one of them
    python -m benchmarks activations_memory --nets resnet50 gpt2    at real shapes, 4 minutes

The nets of activations.py, and a transformer of eight layers; inputs of linear layers in 8 and in 4
bits. ResNet-50 has 4 images of 224 x 224, GPT-2 four layers of its width, 768, 2 x 512 tokens, its
vocabulary and its dropout; ResNet-50 also within an eighth of the plain bytes. Peaks are those of
whole steps beyond parameters, buffers and input, counted storage by storage. Seconds are processor
time on one thread, the best of several steps; at real shapes the median of steps in alternation.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from _peaks import cells, make_rows
from activations import BATCH, resnet
from models.resnet import resnet as bottlenecks
from models.transformers import Gpt2
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
# At real shapes, what they are given, and bits of inputs: GPT-2 needs fewer nowhere.
LARGE: dict[str, tuple[Callable[[], nn.Module], Callable[[], torch.Tensor], tuple[Any, ...]]] = {
    "resnet50": (
        lambda: bottlenecks(50),
        lambda: torch.randn(4, 3, 224, 224),
        (4, "eighth"),
    ),
    "gpt2": (partial(Gpt2, layers=4), lambda: torch.randint(50257, (2, 512)), (8, 4, "eighth")),
}
EIGHTH = 8.1  # of the plain bytes; what escapes is not foreseen


def loss_of(net: nn.Module, x: torch.Tensor) -> torch.Tensor:
    """Of numbers, those that follow; of images, some classes."""
    y = net(x)
    if x.is_floating_point():
        return nn.functional.cross_entropy(y, torch.arange(len(x), device=x.device))
    return nn.functional.cross_entropy(y[:, :-1].flatten(0, 1), x[:, 1:].flatten())


def large_row(name: str, level: int | str, steps: int, device: str = "cpu") -> dict[str, Any]:
    """One net at its real shape, with inputs in so many bits or within an eighth."""
    torch.manual_seed(0)
    make, sample, _ = LARGE[name]
    net, x = make().to(device), sample().to(device)
    loss = partial(loss_of, net, x)
    plain_peak_bytes = peak_bytes(net, x, loss)
    with sn_memory.torch.compress_activations(net, bits=8) as compressed:
        loss().backward()
        plain_bytes = compressed.saved.plain_bytes
    how = {"bits": level} if isinstance(level, int) else {"budget": int(plain_bytes / EIGHTH)}
    with sn_memory.torch.compress_activations(net, **how) as compressed:
        for _ in range(2):  # what runs again, and then bits, are chosen
            loss().backward()
        seconds: dict[bool, list[float]] = {False: [], True: []}
        for _ in range(max(1, steps // 3)):
            for compressed.active in (False, True):
                seconds[compressed.active].append(step_seconds(net, x, 1, loss))
        return row(
            name, level, compressed, plain_peak_bytes, peak_bytes(net, x, loss),
            *(statistics.median(seconds[which]) for which in (False, True)),
        )  # fmt: skip


def step_seconds(
    net: nn.Module, x: torch.Tensor, steps: int, loss: Callable[[], torch.Tensor] | None = None
) -> float:
    """Seconds of forward and backward, the best: processor time, on a GPU by the clock."""
    best = float("inf")
    clock = time.perf_counter if x.is_cuda else time.process_time
    for _ in range(steps):
        settle(x)
        start = clock()
        (net(x).sum() if loss is None else loss()).backward()
        settle(x)
        best = min(best, clock() - start)
    return best


def settle(x: torch.Tensor) -> None:
    """Wait for the device of a tensor."""
    if x.is_cuda:
        torch.cuda.synchronize(x.device)


def peak_bytes(
    net: nn.Module, x: torch.Tensor, loss: Callable[[], torch.Tensor] | None = None
) -> int:
    """The peak of a step beyond parameters, buffers and input."""
    net.zero_grad(set_to_none=True)
    with StorageTracker([x, *net.parameters(), *net.buffers()]) as tracker:
        (net(x).sum() if loss is None else loss()).backward()
    return tracker.peak_bytes - tracker.start_bytes


def row_of(name: str, bits: int, steps: int, device: str = "cpu") -> dict[str, Any]:
    """One net with inputs in so many bits, as a flat row."""
    if name in LARGE:
        return large_row(name, bits, steps, device)
    torch.manual_seed(0)
    net = ALL[name]().to(device)
    size = 14 if name == "resnet" else 28
    x = (torch.rand(BATCH, 1, size, size) * 2 - 1).to(device)
    plain_s, plain_peak_bytes = step_seconds(net, x, steps), peak_bytes(net, x)
    with sn_memory.torch.compress_activations(net, bits=bits) as compressed:
        step_s = step_seconds(net, x, steps)
        return row(name, bits, compressed, plain_peak_bytes, peak_bytes(net, x), plain_s, step_s)


def row(
    name: str, level: int | str, compressed: Any, plain_peak: int, peak: int, plain_s: float,
    step_s: float,
) -> dict[str, Any]:  # fmt: skip
    """What was measured of one net, flat."""
    return {
        "net": name,
        "bits": level,
        "saved_bytes": compressed.saved.plain_bytes,
        "compressed_bytes": compressed.saved.compressed_bytes,
        "ratio": round(compressed.saved.ratio, 2),
        "plain_peak_bytes": plain_peak,
        "peak_bytes": peak,
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
        (
            [
                row["net"],
                f"{row['bits']} bits" if row["bits"] != "eighth" else "bits of an eighth",
                f"{row['ratio']:.1f}",
                *cells(row),
            ]
            for row in rows
        ),
    )


def main() -> None:
    """Make all rows and print the table."""
    torch.set_num_threads(1)
    purpose = __doc__.splitlines()[0]
    large = {name: levels for name, (_, _, levels) in LARGE.items()}
    make_rows(purpose, "activations_memory.json", ALL, WIDTHS, "transformer", row_of, table, large)


if __name__ == "__main__":
    main()
