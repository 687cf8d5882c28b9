"""U-Net (Ronneberger et al., 2015, figure 1); convolutions padded, so that any size will do."""

from __future__ import annotations

import torch
from torch import Tensor, nn


def _two(channels: int, width: int) -> nn.Module:
    return nn.Sequential(
        nn.Conv2d(channels, width, 3, padding=1),
        nn.ReLU(inplace=True),
        nn.Conv2d(width, width, 3, padding=1),
        nn.ReLU(inplace=True),
    )


class UNet(nn.Module):
    """Four times down, four times up, with skips; sides of images are multiples of 16."""

    def __init__(self, *, channels: int = 1, classes: int = 2, width: int = 64) -> None:
        super().__init__()
        widths = [width << level for level in range(5)]
        self.down = nn.ModuleList(
            _two(before, after)
            for before, after in zip([channels, *widths[:-1]], widths, strict=True)
        )
        self.pool = nn.MaxPool2d(2)
        self.widen = nn.ModuleList(
            nn.ConvTranspose2d(2 * width, width, 2, stride=2) for width in reversed(widths[:-1])
        )
        self.up = nn.ModuleList(_two(2 * width, width) for width in reversed(widths[:-1]))
        self.head = nn.Conv2d(width, classes, 1)

    def forward(self, x: Tensor) -> Tensor:
        skips = []
        for level, layers in enumerate(self.down):
            x = layers(self.pool(x) if level else x)
            skips.append(x)
        skips.pop()
        for widen, layers in zip(self.widen, self.up, strict=True):
            x = layers(torch.cat([skips.pop(), widen(x)], 1))
        return self.head(x)
