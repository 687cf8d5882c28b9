"""AlexNet (Krizhevsky et al., 2012, section 3.5) for one device, with its response norms."""

from __future__ import annotations

from torch import nn


def alexnet(*, classes: int = 1000) -> nn.Module:
    """The network for images of 227 x 227."""
    return nn.Sequential(
        nn.Conv2d(3, 96, 11, 4), nn.ReLU(inplace=True), nn.LocalResponseNorm(5), nn.MaxPool2d(3, 2),
        nn.Conv2d(96, 256, 5, 1, 2), nn.ReLU(inplace=True), nn.LocalResponseNorm(5),
        nn.MaxPool2d(3, 2),
        nn.Conv2d(256, 384, 3, 1, 1), nn.ReLU(inplace=True),
        nn.Conv2d(384, 384, 3, 1, 1), nn.ReLU(inplace=True),
        nn.Conv2d(384, 256, 3, 1, 1), nn.ReLU(inplace=True), nn.MaxPool2d(3, 2),
        nn.Flatten(),
        nn.Linear(256 * 6 * 6, 4096), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(4096, 4096), nn.ReLU(inplace=True), nn.Dropout(),
        nn.Linear(4096, classes),
    )  # fmt: skip
