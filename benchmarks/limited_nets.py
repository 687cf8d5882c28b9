"""Networks whose step takes 150 to 500 MiB, for hard_limits.py and process_bytes.py.

Sizes are such that ten of them train on two cores in minutes. Random weights; nothing is fetched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from architectures import _of
from models.densenet import densenet121
from models.resnet import resnet
from models.transformers import Gpt2
from models.unet import UNet
from models.vgg import vgg16
from torch import nn


class Recurrent(nn.Module):
    """Two layers of an LSTM over a sequence, and a head on its last row."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.cells = nn.LSTM(width, width, 2, batch_first=True)
        self.head = nn.Linear(width, 10)

    def forward(self, rows: torch.Tensor) -> torch.Tensor:
        scores: torch.Tensor = self.head(self.cells(rows)[0][:, -1])
        return scores


class WithLoss(nn.Module):
    """A network and its loss, the mean of squares of its outputs: a plan has all of a step."""

    def __init__(self, net: nn.Module) -> None:
        super().__init__()
        self.net = net

    def forward(self, sample: torch.Tensor) -> torch.Tensor:
        outputs: torch.Tensor = self.net(sample)
        return outputs.square().mean()


def build(name: str) -> tuple[nn.Module, torch.Tensor]:
    """Return a network with its loss, and a sample, of random numbers that are always the same."""
    torch.manual_seed(0)
    model, sample = NETS[name]
    return WithLoss(model()), sample()


def _images(batch: int, side: int) -> Callable[[], torch.Tensor]:
    return lambda: torch.randn(batch, 3, side, side)


class Logits(nn.Module):
    """A classifier of images from transformers, and of its outputs the logits alone."""

    def __init__(self, family: str, **settings: Any) -> None:
        super().__init__()
        self.net = _of(f"{family}ForImageClassification", f"{family}Config", **settings)

    def forward(self, images: torch.Tensor) -> torch.Tensor:
        logits: torch.Tensor = self.net(images).logits
        return logits


def _vision(family: str, **settings: Any) -> Callable[[], nn.Module]:
    return lambda: Logits(family, **settings)


Net = tuple[Callable[[], nn.Module], Callable[[], torch.Tensor]]
NETS: dict[str, Net] = {
    "ResNet-50": (lambda: resnet(50), _images(4, 128)),
    "VGG-16, convolutions": (lambda: vgg16(size=128).append(nn.Identity())[:31], _images(4, 128)),
    "U-Net": (lambda: UNet(channels=3, width=16), _images(8, 160)),
    "DenseNet-121": (lambda: densenet121(), _images(8, 128)),
    "MobileNetV2": (_vision("MobileNetV2"), _images(8, 128)),
    "ConvNeXt": (
        _vision("ConvNext", depths=[2, 2, 4, 2], hidden_sizes=[64, 128, 256, 512]),
        _images(8, 128),
    ),
    "Swin": (
        _vision("Swin", image_size=112, embed_dim=64, depths=[2, 4], num_heads=[2, 4]),
        _images(16, 112),
    ),
    "SegFormer": (_vision("Segformer"), _images(16, 128)),
    "ViT": (
        _vision(
            "ViT", image_size=128, hidden_size=256, num_hidden_layers=6, num_attention_heads=4,
            intermediate_size=1024, patch_size=8,
        ),
        _images(8, 128),
    ),
    "GPT-2": (
        lambda: Gpt2(vocabulary=4096, length=256, width=256, layers=6, heads=4, dropout=0.0),
        lambda: torch.randint(0, 4096, (4, 256)),
    ),
    "LSTM": (lambda: Recurrent(256), lambda: torch.randn(32, 256, 256)),
}  # fmt: skip
