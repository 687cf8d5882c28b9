"""Does training with compressed activations end as well? Three nets, compared with rivals.

    python -m benchmarks activations            the missing runs of the study
    python -m benchmarks activations --quick    one short run of each method: does it all run?

Fashion-MNIST; each method trains the same net from the same start on the same batches.

plain              what autograd saves
ours               compress_activations with a budget of the plain bytes over the ratio asked for
nearest 2, 4       groups of 256, rounded to nearest between their extremes; relu, dropout and
                   pooling as ours. Simulated: rounded at once, its bytes counted
fp8                float8_e4m3 with a scale per tensor, likewise
recompute          the planner's recomputation at the least budget it can keep; bit-equal to plain

"held" is what a forward pass leaves behind, "peak" the most in a step, both by StorageTracker on a
step after training; seconds of a step are processor time on one thread. Finished runs
are saved at once and not repeated.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable
from contextlib import nullcontext
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import numpy as np
import torch
from machine import origin
from nets import NETS, fashion_mnist
from rows_file import flags, interruptible, load, missing, path_of, save
from tables import markdown
from torch import nn
from torch.nn.functional import avg_pool2d, cross_entropy, relu

import sn_memory.torch
from sn_memory import BudgetError
from sn_memory.torch import StorageTracker
from sn_memory.torch.activations import treatments

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks/results/activations.json"
BATCH = 64
STEPS = {"cnn": 1500, "resnet": 1500, "transformer": 1500}
RATES = {"cnn": 0.05, "resnet": 0.05, "transformer": 4e-3}
RIVALS: list[tuple[str, float | None]] = [
    ("nearest 2", None),
    ("nearest 4", None),
    ("fp8", None),
    ("recompute", None),
]
HEADLINE = ("plain", "ours")
# Most of what the CNN saves is signs and indices, so that 8 bits suffice for 13.5 times less. What
# norms and attention save takes 8 bits in any case, and is most of it in the others.
RATIOS = {"cnn": (8.0, 13.5, 20.0), "transformer": (3.5,), "resnet": (3.5,)}


class Block(nn.Module):
    """Two convolutions with batch norm and a skip (He et al. 2016, for CIFAR)."""

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(width)
        self.skip = nn.Conv2d(channels, width, 1, stride, bias=False) if stride > 1 else None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return relu(f(x) + x)."""
        y = self.norm2(self.conv2(relu(self.norm1(self.conv1(x)))))
        return relu(y + (x if self.skip is None else self.skip(x)))


def resnet() -> nn.Module:
    """Twenty layers as ResNet-20, of half its width, in three stages."""
    layers: list[nn.Module] = [nn.Conv2d(1, 8, 3, 1, 1, bias=False), nn.BatchNorm2d(8), nn.ReLU()]
    channels = 8
    for width, stride in ((8, 1), (16, 2), (32, 2)):
        blocks = [Block(channels, width, stride), Block(width, width, 1), Block(width, width, 1)]
        layers.append(nn.Sequential(*blocks))
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10))


@dataclass(frozen=True)
class Run:
    """What one run is; two runs with equal fields give equal results."""

    net: str
    method: str
    ratio_asked: float | None
    seed: int
    steps: int


class Rounded:
    """What only pretends to compress: values come back as `nearest` or `fp8` would leave them."""

    def __init__(self, method: str) -> None:
        self.method = method
        self.bits = 8 if method == "fp8" else int(method.split()[1])

    def lossy(self, values: np.ndarray) -> np.ndarray:
        """Return the values as they come back."""
        if self.method == "fp8":
            scale = 448 / max(float(np.abs(values).max()), 1e-30)  # the largest number of e4m3
            small = torch.from_numpy(values * np.float32(scale)).to(torch.float8_e4m3fn)
            return small.float().numpy() / np.float32(scale)
        rows = np.pad(values, (0, -values.size % 256), mode="edge").reshape(-1, 256)
        low, high = rows.min(axis=1, keepdims=True), rows.max(axis=1, keepdims=True)
        step = np.maximum((high - low) / (2**self.bits - 1), np.float32(1e-30))
        return (np.rint((rows - low) / step) * step + low).reshape(-1)[: values.size]


class RoundedTensor:
    """What stands for treatments.OnHost; only its bytes are those of a compressed tensor."""

    fits, by_rows = True, False
    codec: Rounded

    def __init__(self, values: torch.Tensor, *_: Any, look: bool) -> None:
        codec = self.codec
        run = np.ascontiguousarray(values.numpy()).reshape(-1)
        self.kept, self.bits = codec.lossy(run), codec.bits
        self.variance = float(np.square(self.kept - run).mean())
        self.nonzero = float(np.count_nonzero(run)) / run.size
        grids = 4 if codec.method == "fp8" else 8 * -(-run.size // 256)
        self.nbytes = run.size * codec.bits // 8 + grids

    def restore(self, layout: treatments.Layout) -> torch.Tensor:
        """Return what the codec left."""
        return layout.restore(torch.from_numpy(self.kept))

    def fill(self, out: torch.Tensor) -> None:
        """Write what the codec left to a tensor of the axes that were given."""
        out.copy_(torch.from_numpy(self.kept).view(out.shape))


def rounded(method: str) -> type[RoundedTensor]:
    """The tensors of a method."""
    return type("Rounded by method", (RoundedTensor,), {"codec": Rounded(method)})


def seen(net: str, part: tuple[torch.Tensor, torch.Tensor]) -> tuple[torch.Tensor, torch.Tensor]:
    """Images and labels as a net is shown them: the ResNet at half the resolution."""
    images, labels = part
    return (avg_pool2d(images, 2) if net == "resnet" else images), labels


def compressing(run: Run, net: nn.Module, optimizer: Any, plain_bytes: int) -> Any:
    """The context in which a run trains."""
    if run.method == "ours":
        budget = int(plain_bytes / run.ratio_asked)
        return sn_memory.torch.compress_activations(
            net, budget=budget, optimizer=optimizer, seed=run.seed, every=100
        )
    if run.method in ("plain", "recompute"):
        return nullcontext()
    bits = Rounded(run.method).bits
    return sn_memory.torch.compress_activations(net, bits=bits, nonlinear_bits=bits)


def saved_bytes(net: nn.Module, x: torch.Tensor) -> int:
    """What autograd would hold of a forward pass, in training mode and without a trace left."""
    state = {name: value.clone() for name, value in net.state_dict().items()}
    with sn_memory.torch.compress_activations(net, bits=8) as compressed:
        net(x)
    net.load_state_dict(state)
    return compressed.saved.plain_bytes


def planned(net: nn.Module, x: torch.Tensor) -> nn.Module:
    """The net with recomputation at the least budget that a plan was found for."""
    try:
        return sn_memory.torch.plan(net, x, 1, profile=False)
    except BudgetError as error:
        # Searches are limited in time, and may not find the same twice.
        budget = int(1.02 * error.peak_bytes)
        return sn_memory.torch.plan(net, x, budget, profile=False)


def measured(net: nn.Module, x: torch.Tensor, y: torch.Tensor) -> tuple[int, int]:
    """Bytes beyond parameters and input after a forward pass, and at the step's peak."""
    for parameter in net.parameters():
        parameter.grad = None
    with StorageTracker([x, y, *net.parameters(), *net.buffers()]) as tracker:
        loss = cross_entropy(net(x), y)
        held = tracker.live_bytes - tracker.start_bytes
        loss.backward()
    return held, tracker.peak_bytes - tracker.start_bytes


def train(run: Run, data: dict[str, Any]) -> dict[str, Any]:
    """Do one run and return it as a flat row."""
    torch.set_num_threads(1)
    torch.manual_seed(run.seed)
    net = (NETS | {"resnet": resnet})[run.net]()
    rate = RATES[run.net]
    make: Callable[..., Any] = torch.optim.Adam if run.net == "transformer" else torch.optim.SGD
    settings = {} if run.net == "transformer" else {"momentum": 0.9}
    optimizer = make(net.parameters(), lr=rate, **settings)
    images, labels = seen(run.net, data["train"])
    shuffle = torch.Generator().manual_seed(run.seed)
    order = torch.empty(0, dtype=torch.long)
    plain_bytes = saved_bytes(net, images[:BATCH])
    model = planned(net, images[:BATCH]) if run.method == "recompute" else net
    simulated = run.method == "fp8" or run.method.startswith("nearest")
    before = treatments.OnHost
    if simulated:
        treatments.OnHost = rounded(run.method)
    losses, seconds = [], []
    try:
        with compressing(run, net, optimizer, plain_bytes) as compressed:
            for step in range(run.steps):
                if len(order) < BATCH:
                    order = torch.randperm(len(images), generator=shuffle)
                rows, order = order[:BATCH], order[BATCH:]
                for group in optimizer.param_groups:
                    group["lr"] = rate * 0.5 * (1 + math.cos(math.pi * step / run.steps))
                start = time.process_time()
                optimizer.zero_grad()
                loss = cross_entropy(model(images[rows]), labels[rows])
                loss.backward()
                optimizer.step()
                seconds.append(time.process_time() - start)
                losses.append(loss.item())
            held, peak = measured(model, images[:BATCH], labels[:BATCH])
    finally:
        treatments.OnHost = before
    ratio = compressed.saved.ratio if compressed is not None else 1.0
    net.eval()
    test_images, test_labels = seen(run.net, data["t10k"])
    with torch.inference_mode():
        answers = torch.cat([net(part).argmax(1) for part in test_images.split(500)])
    exact = compressed is None
    return asdict(run) | {
        "accuracy": round(100 * (answers == test_labels).double().mean().item(), 2),
        "train_loss": round(float(np.mean(losses[-(run.steps // 10 + 1) :])), 4),
        "ratio": None if run.method == "recompute" else round(ratio, 2),
        # Of float32 and of what is counted with it: a 64-bit index that shrinks counts as well.
        "bits_per_32": None if run.method == "recompute" else round(32 / ratio, 2),
        "plain_bytes": plain_bytes,
        "held_bytes": None if simulated else held,
        "peak_bytes": None if simulated else peak,
        "step_s": round(float(np.median(seconds)), 5),
        "bits": None if exact else {row.key: row.bits for row in compressed.controller.rows()},
    }


def methods(net: str) -> list[tuple[str, float | None]]:
    """All methods that a net is trained with, each with the ratio asked of it."""
    return [("plain", None), *(("ours", ratio) for ratio in RATIOS[net]), *RIVALS]


def plan(seeds: list[int], nets: list[str], steps: int | None) -> list[Run]:
    """All runs: the headline with each seed, what else there is with the first."""
    return [
        Run(net, method, ratio, seed, steps or STEPS[net])
        for seed in seeds
        for net in nets
        for method, ratio in methods(net)
        if seed == seeds[0] or method in HEADLINE
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown, seeds together."""
    head = (
        "net", "method", "activations", "bits per 32", "accuracy", "less than plain", "held, MiB",
        "peak, MiB", "step, ms",
    )  # fmt: skip
    lines = []
    groups: dict[tuple[Any, ...], list[dict[str, Any]]] = {}
    for row in rows:
        key = row["net"], row["steps"], row["method"], row["ratio_asked"]
        groups.setdefault(key, []).append(row)
    for (net, steps, method, asked), group in groups.items():
        plain = {r["seed"]: r["accuracy"] for r in groups.get((net, steps, "plain", None), [])}
        lost = [plain[r["seed"]] - r["accuracy"] for r in group if r["seed"] in plain]

        def mean(field: str, scale: float = 1.0, group: Any = group) -> str:
            values = [row[field] for row in group if row[field] is not None]
            return f"{np.mean(values) / scale:.2f}" if values else "-"

        lines.append(
            [
                f"{net}, {steps:,} steps",
                f"{method} {asked:g}x" if asked else method,
                f"{mean('ratio')} times less",
                mean("bits_per_32"),
                f"{mean('accuracy')} ({len(group)})",
                f"{np.mean(lost):+.2f}" if lost else "-",
                mean("held_bytes", 2**20),
                mean("peak_bytes", 2**20),
                mean("step_s", 1e-3),
            ]
        )
    return markdown(head, lines)


def main() -> None:
    """Do the runs that are missing, then print what they say."""
    parser = flags(__doc__)
    parser.add_argument("--quick", action="store_true", help="one seed, few steps")
    parser.add_argument("--nets", nargs="+", default=list(STEPS), choices=list(STEPS))
    parser.add_argument("--only", nargs="+", metavar="METHOD", help="run only these methods")
    parser.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    parser.add_argument("--steps", type=int, help="instead of each net's own number")
    args = parser.parse_args()
    path = path_of(args, RESULTS)
    runs = plan(
        args.seeds[:1] if args.quick else args.seeds, args.nets, 12 if args.quick else args.steps
    )
    runs = [run for run in runs if not args.only or run.method in args.only]
    rows = [] if args.quick else load(path)
    fields = tuple(asdict(runs[0]))
    data = {part: fashion_mnist(part) for part in ("train", "t10k")}
    if args.quick:
        data["t10k"] = tuple(part[:500] for part in data["t10k"])
    about = origin()
    for run in missing(runs, rows):
        start = time.perf_counter()
        rows.append(train(run, data) | about)
        save(path, rows)
        cells = [str(rows[-1][field]) for field in (*fields, "ratio", "accuracy", "train_loss")]
        print(" ".join(cells), f"({time.perf_counter() - start:.0f} s)", flush=True)
    print(f"\n{table(rows)}\n\nrows: {path}")


if __name__ == "__main__":
    interruptible(main)
