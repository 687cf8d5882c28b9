"""The networks of the paper on compressed activations, at real shapes, compared with rivals.

    python -m benchmarks activations_networks           eight minutes
    python -m benchmarks activations_networks --quick   AlexNet, few methods

AlexNet, VGG-16, ResNet-18 and ResNet-50 on synthetic images. Bytes are those of the CPU's
allocator: at the end of the forward pass, and the most of a step, kernels' scratch included and
weights' gradients left out. Seconds are processor time on one thread, the median of steps in
alternation.

plain           torch
checkpoint      torch.utils.checkpoint_sequential, the square root of the layers' number of segments
nearest         groups of 256 floats rounded to nearest in 4 bits, each saved tensor once
fp8             floats cast to torch.float8_e4m3fn, each saved tensor once
dct             images as JPEG has them: 8 bits a channel, the cosine transform of blocks of 8 x 8,
                divided by its table of luminance, and what is not zero with a bit mask (the idea of
                JPEG-ACT, Evans et al., ISCA 2020, without its coder and its tables); signs of a
                ReLU are those of what comes back. Other floats 8 bits a row. Each tensor once
paper           compress_activations(model, error=0.01, form="paper"): rounded to nearest, predicted
                and entropy coded, as Jin et al. do it (one step is timed)
ours            compress_activations(model, bits=4)
ours, eighth    compress_activations(model, budget=...) of 1 / 8.1 of what plain torch saves
"""

from __future__ import annotations

import argparse
import math
import statistics
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from _peaks import activation_bytes, make_nets
from activations_memory import EIGHTH
from models.alexnet import alexnet
from models.resnet import ResNet, resnet
from models.vgg import vgg16
from rows_file import flags
from tables import markdown
from torch import nn
from torch.utils.checkpoint import checkpoint_sequential

from sn_memory.torch import compress_activations

NETS: dict[str, tuple[Callable[[], nn.Module], tuple[int, ...]]] = {
    "AlexNet": (alexnet, (16, 3, 227, 227)),
    "VGG-16": (vgg16, (4, 3, 224, 224)),
    "ResNet-18": (partial(resnet, 18), (8, 3, 224, 224)),
    "ResNet-50": (partial(resnet, 50), (4, 3, 224, 224)),
}
METHODS = ("plain", "ours", "ours, eighth", "checkpoint", "nearest", "fp8", "dct", "paper")
ROUNDS = 3
LEAST = 1024  # elements of a tensor that rivals compress


class Nearest:
    """Floats in groups of 256, four bits each, rounded to nearest."""

    def __init__(self, x: torch.Tensor) -> None:
        self.shape, self.dtype = x.shape, x.dtype
        rows = nn.functional.pad(x.reshape(-1), (0, -x.numel() % 256)).view(-1, 256)
        self.low, high = rows.amin(1, keepdim=True), rows.amax(1, keepdim=True)
        self.step = ((high - self.low) / 15).clamp(min=1e-30)
        codes = ((rows - self.low) / self.step).round_().to(torch.uint8)
        self.codes = codes[:, ::2] << 4 | codes[:, 1::2]

    def restore(self) -> torch.Tensor:
        """Return the tensor."""
        codes = torch.stack([self.codes >> 4, self.codes & 15], 2).view(-1, 256)
        rows = torch.addcmul(self.low, codes.to(self.dtype), self.step)
        return rows.view(-1)[: self.shape.numel()].view(self.shape)


class Float8:
    """Floats of four bits of exponent and three of mantissa."""

    def __init__(self, x: torch.Tensor) -> None:
        self.dtype, self.held = x.dtype, x.to(torch.float8_e4m3fn)

    def restore(self) -> torch.Tensor:
        """Return the tensor."""
        return self.held.to(self.dtype)


# Of luminance (ITU-T T.81, table K.1): what each of 8 x 8 coefficients is divided by.
LUMINANCE = torch.tensor([
    16, 11, 10, 16, 24, 40, 51, 61, 12, 12, 14, 19, 26, 58, 60, 55, 14, 13, 16, 24, 40, 57, 69, 56,
    14, 17, 22, 29, 51, 87, 80, 62, 18, 22, 37, 56, 68, 109, 103, 77, 24, 35, 55, 64, 81, 104, 113,
    92, 49, 64, 78, 87, 103, 121, 120, 101, 72, 92, 95, 98, 112, 100, 103, 99,
]).view(8, 8)  # fmt: skip
WAVES = torch.cos(torch.arange(8).mul(math.pi / 8)[:, None] * (torch.arange(8) + 0.5)) / 2
WAVES[0] /= 2**0.5


class Cosines:
    """Images in blocks of 8 x 8: cosine transform, JPEG's table, a mask and what is not zero."""

    def __init__(self, x: torch.Tensor) -> None:
        self.shape, self.dtype = x.shape, x.dtype
        self.images = x.dim() == 4 and min(x.shape[2:]) >= 8
        rows = x.flatten(0, 1) if self.images else x.reshape(len(x), -1)
        self.scale = rows.flatten(1).abs().amax(1).clamp(min=1e-30) / 127
        if not self.images:
            self.codes = (rows / self.scale[:, None]).round_().to(torch.int8)
            return
        high, wide = x.shape[2:]
        rows = nn.functional.pad(rows / self.scale[:, None, None], (0, -wide % 8, 0, -high % 8))
        self.padded = rows.shape
        blocks = rows.round_().unflatten(2, (-1, 8)).unflatten(1, (-1, 8)).transpose(2, 3)
        codes = (WAVES @ blocks @ WAVES.T / LUMINANCE).round_().clamp_(-128, 127).to(torch.int8)
        nonzero = codes.flatten() != 0
        self.codes = codes.flatten()[nonzero]
        self.mask = (nonzero.view(-1, 8) * (1 << torch.arange(8))).sum(1).to(torch.uint8)

    def restore(self) -> torch.Tensor:
        """Return the tensor."""
        if not self.images:
            return (self.codes.to(self.dtype) * self.scale[:, None]).view(self.shape)
        nonzero = (self.mask[:, None] >> torch.arange(8)).bitwise_and_(1).flatten().bool()
        codes = torch.zeros(nonzero.shape, dtype=self.dtype)
        codes[nonzero] = self.codes.to(self.dtype)
        rows, high, wide = self.padded
        blocks = codes.view(rows, high // 8, wide // 8, 8, 8).mul_(LUMINANCE)
        images = (WAVES.T @ blocks @ WAVES).transpose(2, 3).reshape(self.padded)
        images = images[:, : self.shape[2], : self.shape[3]] * self.scale[:, None, None]
        return images.reshape(self.shape)


FORMS = {"nearest": Nearest, "fp8": Float8, "dct": Cosines}


@contextmanager
def packed(
    form: type[Nearest | Float8 | Cosines], net: nn.Module, x: torch.Tensor
) -> Iterator[None]:
    """What autograd saves in a form, each tensor once; weights and the input as they are."""
    excluded = {
        tensor.untyped_storage()._cdata for tensor in (x, *net.parameters(), *net.buffers())
    }
    seen: dict[Any, Any] = {}

    def pack(tensor: torch.Tensor) -> Any:
        storage = tensor.untyped_storage()
        if storage._cdata in excluded or not tensor.is_floating_point() or tensor.numel() < LEAST:
            return tensor
        key = (
            storage._cdata,
            tensor.storage_offset(),
            tensor._version,
            tensor.shape,
            tensor.stride(),
        )
        before = seen.get(key)
        if before is None or before[0]() is None:
            seen[key] = weakref.ref(storage), form(tensor.detach())
        return seen[key][1]

    def unpack(saved: Any) -> torch.Tensor:
        return saved if isinstance(saved, torch.Tensor) else saved.restore()

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        yield
    seen.clear()


def losses(net: nn.Module, x: torch.Tensor, methods: tuple[str, ...]) -> dict[str, Any]:
    """The loss by each method, as something to call."""
    labels = torch.arange(len(x)) % 10
    layers = [*net] if isinstance(net, nn.Sequential) else [net.stem, *net.blocks, net.pool]
    if isinstance(net, ResNet):
        layers += [nn.Flatten(), net.head]
    segments = round(len(layers) ** 0.5)
    # What writes over its input cannot be the first of a segment, which runs again from that.
    firsts: list[nn.Module] = []
    for layer in layers:
        if firsts and getattr(layer, "inplace", False):
            firsts[-1] = nn.Sequential(firsts[-1], layer)
        else:
            firsts.append(layer)

    def plain() -> torch.Tensor:
        return nn.functional.cross_entropy(net(x), labels)

    def checkpoint() -> torch.Tensor:
        y = checkpoint_sequential(firsts, segments, x, use_reentrant=False)
        return nn.functional.cross_entropy(y, labels)

    def by(form: type[Nearest | Float8 | Cosines]) -> torch.Tensor:
        with packed(form, net, x):
            return plain()

    def ours(compressed: Any) -> torch.Tensor:
        compressed.active = True
        loss = plain()
        compressed.active = False
        return loss

    by_method: dict[str, Any] = {
        "plain": plain,
        "checkpoint": checkpoint,
    } | {name: partial(by, form) for name, form in FORMS.items()}

    def add(method: str, **how: Any) -> Any:
        compressed = compress_activations(net, **how)
        compressed.active = False
        by_method[method] = partial(ours, compressed)
        return compressed

    if {"ours", "ours, eighth"} & {*methods}:
        four = add("ours", bits=4)
        by_method["ours"]().backward()
        if "ours, eighth" in methods:
            add("ours, eighth", budget=int(four.saved.plain_bytes / EIGHTH))
    if "paper" in methods:
        add("paper", error=0.01, form="paper")
    return {method: by_method[method] for method in methods}


def rows_of(name: str, args: argparse.Namespace) -> list[dict[str, Any]]:
    """One network by the methods asked for."""
    methods, rounds = (METHODS[:2], 1) if args.quick else (args.methods, ROUNDS)
    torch.manual_seed(0)
    make, shape = NETS[name]
    net, x = make(), torch.randn(shape)
    weights = list(net.parameters())
    calls = losses(net, x, methods)
    sizes = {}
    for method, loss in calls.items():
        for _ in range(2):  # what runs again, and then bits, are chosen
            loss().backward()
        sizes[method] = activation_bytes(loss, weights)
    seconds: dict[str, list[float]] = {method: [] for method in methods}
    for number in range(rounds):
        for method, loss in calls.items():
            if method == "paper" and number:
                continue  # a step of minutes
            net.zero_grad()
            start = time.process_time()
            loss().backward()
            seconds[method].append(time.process_time() - start)
    return [
        {
            "net": name,
            "method": method,
            "images": shape[0],
            "held_bytes": sizes[method][0],
            "peak_bytes": sizes[method][1],
            "step_s": round(statistics.median(seconds[method]), 4),
        }
        for method in methods
    ]


def table(rows: list[dict[str, Any]]) -> str:
    """The rows as Markdown."""
    plain = {row["net"]: row for row in rows if row["method"] == "plain"}
    head = (
        "net", "method", "held after the forward pass, MiB", "times less", "peak, MiB",
        "times less", "step, times plain",
    )  # fmt: skip
    lines = []
    for row in rows:
        of = plain[row["net"]]
        lines.append(
            [
                f"{row['net']}, {row['images']} images" if row is of else "",
                row["method"],
                f"{row['held_bytes'] / 2**20:.1f}",
                f"{of['held_bytes'] / row['held_bytes']:.1f}",
                f"{row['peak_bytes'] / 2**20:.1f}",
                f"{of['peak_bytes'] / row['peak_bytes']:.1f}",
                f"{row['step_s'] / of['step_s']:.2f}",
            ]
        )
    return markdown(head, lines)


def main() -> None:
    """Make all rows and print the table."""
    torch.set_num_threads(1)
    parser = flags(__doc__)
    parser.add_argument("--methods", nargs="+", choices=METHODS, default=METHODS)
    make_nets(parser, "activations_networks.json", NETS, METHODS, rows_of, table)


if __name__ == "__main__":
    main()
