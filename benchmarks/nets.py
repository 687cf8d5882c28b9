"""The networks the studies train, and the real data they train on."""

from __future__ import annotations

import gzip
import sys
from pathlib import Path

import torch
from torch import nn

sys.path.insert(0, str(Path(__file__).resolve().parent.parent / "scripts"))

import fetch_fashion_mnist


def fashion_mnist(part: str) -> tuple[torch.Tensor, torch.Tensor]:
    """Images [n, 1, 28, 28] float32 in [-1, 1] and labels [n] of "train" or "t10k"."""
    folder = fetch_fashion_mnist.find()
    if folder is None:
        raise SystemExit("Fashion-MNIST is missing; run: python scripts/fetch_fashion_mnist.py")

    def read(name: str, head: int) -> torch.Tensor:
        raw = bytearray(gzip.decompress((folder / name).read_bytes()))
        return torch.frombuffer(raw, dtype=torch.uint8, offset=head)

    images = read(f"{part}-images-idx3-ubyte.gz", 16).view(-1, 1, 28, 28) / 127.5 - 1
    return images, read(f"{part}-labels-idx1-ubyte.gz", 8).long()


def convolutional() -> nn.Module:
    """Three convolutions and two dense layers, 170,858 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 24, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(24, 48, 3, padding=1), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(48, 64, 3, stride=2, padding=1), nn.ReLU(), nn.Flatten(),
        nn.Linear(1024, 128), nn.ReLU(), nn.Linear(128, 10),
    )  # fmt: skip


class Transformer(nn.Module):
    """Reads an image as 28 rows: each is projected, and looked up by a hash of its bright pixels.

    Two layers, width 64; the hash table of 2**bits rows gives the sparse gradients of an embedding.
    """

    def __init__(self, width: int = 64, layers: int = 2, bits: int = 10) -> None:
        super().__init__()
        self.rows = nn.Linear(28, width)
        self.place = nn.Parameter(0.02 * torch.randn(28, width))
        self.table = nn.Embedding(2**bits, width)
        layer = nn.TransformerEncoderLayer(
            width,
            nhead=4,
            dim_feedforward=4 * width,
            dropout=0.0,
            batch_first=True,
            norm_first=True,
        )
        self.layers = nn.TransformerEncoder(layer, layers, enable_nested_tensor=False)
        self.head = nn.Linear(width, 10)
        planes = torch.randn(28, bits, generator=torch.Generator().manual_seed(0))
        self.register_buffer("planes", planes)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        rows = images[:, 0]  # [batch, 28, 28]
        bits = (rows @ self.planes > 0).long()  # [batch, 28, bits], a locality-sensitive hash
        codes = (bits << torch.arange(bits.shape[-1], device=bits.device)).sum(-1)
        x = self.rows(rows) + self.place + self.table(codes)
        return self.head(self.layers(x).mean(1))


class Block(nn.Module):
    """Two convolutions with batch norm beside a shortcut, a convolution of one by one."""

    def __init__(self, before: int, after: int, stride: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(before, after, 3, stride, padding=1, bias=False)
        self.second = nn.Conv2d(after, after, 3, padding=1, bias=False)
        self.norms = nn.ModuleList([nn.BatchNorm2d(after), nn.BatchNorm2d(after)])
        self.shortcut: nn.Module = nn.Identity()
        if (before, stride) != (after, 1):
            self.shortcut = nn.Conv2d(before, after, 1, stride, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        inner = nn.functional.relu(self.norms[0](self.first(x)))
        return nn.functional.relu(self.norms[1](self.second(inner)) + self.shortcut(x))


def residual() -> nn.Module:
    """Three residual blocks of 16, 32 and 64 channels with batch norm, 77,546 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 16, 3, stride=2, padding=1), nn.ReLU(),
        Block(16, 16, 1), Block(16, 32, 2), Block(32, 64, 2),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(64, 10),
    )  # fmt: skip


def wide() -> nn.Module:
    """Four convolutions of stride two and two dense layers, 1,050,250 parameters."""
    return nn.Sequential(
        nn.Conv2d(1, 32, 3, 2, 1), nn.ReLU(), nn.Conv2d(32, 64, 3, 2, 1), nn.ReLU(),
        nn.Conv2d(64, 128, 3, 2, 1), nn.ReLU(), nn.Conv2d(128, 256, 3, 2, 1), nn.ReLU(),
        nn.Flatten(), nn.Linear(1024, 640), nn.ReLU(), nn.Linear(640, 10),
    )  # fmt: skip


NETS = {"cnn": convolutional, "transformer": Transformer}
# What no setting of ours was chosen on: how a method does on a net it does not know.
UNSEEN_NETS = {"residual": residual, "wide": wide}
