"""Inception-v3 (Szegedy et al., 2015, table 1), without the auxiliary classifier."""

from __future__ import annotations

import torch
from torch import Tensor, nn


class Conv(nn.Sequential):
    """Convolution, batch norm, ReLU."""

    def __init__(
        self,
        channels: int,
        width: int,
        kernel: int | tuple[int, int],
        stride: int = 1,
        padding: int | tuple[int, int] = 0,
    ) -> None:
        super().__init__(
            nn.Conv2d(channels, width, kernel, stride, padding, bias=False),
            nn.BatchNorm2d(width, eps=0.001),
            nn.ReLU(inplace=True),
        )


class Branches(nn.Module):
    """Branches side by side, their outputs concatenated."""

    def __init__(self, *branches: nn.Module) -> None:
        super().__init__()
        self.branches = nn.ModuleList(branches)

    def forward(self, x: Tensor) -> Tensor:
        return torch.cat([branch(x) for branch in self.branches], 1)


def _pooled(channels: int, width: int) -> nn.Module:
    return nn.Sequential(nn.AvgPool2d(3, 1, 1), Conv(channels, width, 1))


def _a(channels: int, pool: int) -> nn.Module:
    """Figure 5 of the paper, with a 5x5 left in, as its code has it."""
    return Branches(
        Conv(channels, 64, 1),
        nn.Sequential(Conv(channels, 48, 1), Conv(48, 64, 5, padding=2)),
        nn.Sequential(
            Conv(channels, 64, 1), Conv(64, 96, 3, padding=1), Conv(96, 96, 3, padding=1)
        ),
        _pooled(channels, pool),
    )


def _b(channels: int, w: int) -> nn.Module:
    """Figure 6: 7x7 as 1x7 and 7x1."""
    flat, tall = {"kernel": (1, 7), "padding": (0, 3)}, {"kernel": (7, 1), "padding": (3, 0)}
    return Branches(
        Conv(channels, 192, 1),
        nn.Sequential(Conv(channels, w, 1), Conv(w, w, **flat), Conv(w, 192, **tall)),
        nn.Sequential(
            Conv(channels, w, 1),
            Conv(w, w, **tall),
            Conv(w, w, **flat),
            Conv(w, w, **tall),
            Conv(w, 192, **flat),
        ),
        _pooled(channels, 192),
    )


def _c(channels: int) -> nn.Module:
    """Figure 7: 3x3 as 1x3 beside 3x1."""

    def fork() -> nn.Module:
        return Branches(
            Conv(384, 384, (1, 3), padding=(0, 1)), Conv(384, 384, (3, 1), padding=(1, 0))
        )

    return Branches(
        Conv(channels, 320, 1),
        nn.Sequential(Conv(channels, 384, 1), fork()),
        nn.Sequential(Conv(channels, 448, 1), Conv(448, 384, 3, padding=1), fork()),
        _pooled(channels, 192),
    )


class InceptionV3(nn.Sequential):
    """The whole network, for images of 75 pixels and more; the paper's have 299."""

    def __init__(self, *, classes: int = 1000) -> None:
        super().__init__(
            Conv(3, 32, 3, 2),
            Conv(32, 32, 3),
            Conv(32, 64, 3, padding=1),
            nn.MaxPool2d(3, 2),
            Conv(64, 80, 1),
            Conv(80, 192, 3),
            nn.MaxPool2d(3, 2),
            _a(192, 32),
            _a(256, 64),
            _a(288, 64),
            Branches(
                Conv(288, 384, 3, 2),
                nn.Sequential(Conv(288, 64, 1), Conv(64, 96, 3, padding=1), Conv(96, 96, 3, 2)),
                nn.MaxPool2d(3, 2),
            ),
            _b(768, 128),
            _b(768, 160),
            _b(768, 160),
            _b(768, 192),
            Branches(
                nn.Sequential(Conv(768, 192, 1), Conv(192, 320, 3, 2)),
                nn.Sequential(
                    Conv(768, 192, 1),
                    Conv(192, 192, (1, 7), padding=(0, 3)),
                    Conv(192, 192, (7, 1), padding=(3, 0)),
                    Conv(192, 192, 3, 2),
                ),
                nn.MaxPool2d(3, 2),
            ),
            _c(1280),
            _c(2048),
            nn.AdaptiveAvgPool2d(1),
            nn.Flatten(),
            nn.Dropout(),
            nn.Linear(2048, classes),
        )
