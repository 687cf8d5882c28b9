"""VGG-16, configuration D (Simonyan and Zisserman, 2014, table 1)."""

from __future__ import annotations

from torch import nn

LAYERS = (64, 64, 0, 128, 128, 0, 256, 256, 256, 0, 512, 512, 512, 0, 512, 512, 512, 0)


def vgg16(
    *, size: int = 224, shrink: int = 1, hidden: int = 4096, classes: int = 1000
) -> nn.Module:
    """The network for images of `size`; `shrink` divides all channels. 0 in LAYERS is a pooling."""
    channels, layers = 3, []
    for width in LAYERS:
        if not width:
            layers.append(nn.MaxPool2d(2))
            continue
        layers += [nn.Conv2d(channels, width // shrink, 3, padding=1), nn.ReLU(inplace=True)]
        channels = width // shrink
    return nn.Sequential(
        *layers,
        nn.Flatten(),
        nn.Linear(channels * (size // 32) ** 2, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(hidden, hidden),
        nn.ReLU(inplace=True),
        nn.Dropout(),
        nn.Linear(hidden, classes),
    )
