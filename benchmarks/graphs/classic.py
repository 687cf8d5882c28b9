"""AlexNet, VGG-16 and U-Net."""

from __future__ import annotations

from typing import Any

from .layers import classify, concat, conv, dropout, flatten, linear, lrn, max_pool, relu, upconv
from .net import Net


def alexnet(batch: int, *, groups: int = 1, optimizer: str = "sgd", **settings: Any) -> Net:
    """AlexNet (Krizhevsky et al., 2012, section 3.5 and figure 2), local response norm included.

    groups=2 is the paper's split over two cards; 1 joins them, as single-card frameworks do.
    """
    net = Net("AlexNet", batch, **settings)
    x = net.input(batch, 3, 227, 227)
    x = max_pool(lrn(relu(conv(x, 96, 11, stride=4, bias=True))), 3, 2)
    x = max_pool(lrn(relu(conv(x, 256, 5, pad=2, groups=groups, bias=True))), 3, 2)
    x = relu(conv(x, 384, 3, pad=1, bias=True))
    x = relu(conv(x, 384, 3, pad=1, groups=groups, bias=True))
    x = relu(conv(x, 256, 3, pad=1, groups=groups, bias=True))
    x = flatten(max_pool(x, 3, 2))
    for _ in range(2):
        x = dropout(relu(linear(x, 4096)))
    return net.finish(classify(linear(x, 1000)), optimizer)


def vgg16(batch: int, *, optimizer: str = "sgd", **settings: Any) -> Net:
    """VGG-16 (Simonyan and Zisserman, 2014, table 1, column D)."""
    net = Net("VGG-16", batch, **settings)
    x = net.input(batch, 3, 224, 224)
    for channels, repeats in ((64, 2), (128, 2), (256, 3), (512, 3), (512, 3)):
        for _ in range(repeats):
            x = relu(conv(x, channels, 3, pad=1, bias=True))
        x = max_pool(x, 2, 2)
    x = flatten(x)
    for _ in range(2):
        x = dropout(relu(linear(x, 4096)))
    return net.finish(classify(linear(x, 1000)), optimizer)


def unet(batch: int, *, side: int = 572, optimizer: str = "sgd", **settings: Any) -> Net:
    """U-Net (Ronneberger et al., 2015, figure 1): unpadded 3x3, skips cropped, two classes."""
    net = Net("U-Net", batch, **settings)
    x = net.input(batch, 1, side, side)
    skips = []
    for channels in (64, 128, 256, 512):
        for _ in range(2):
            x = relu(conv(x, channels, 3, bias=True))
        skips.append(x)
        x = max_pool(x, 2, 2)
    # The paper's figure leaves dropout out of the table: "at the end of the contracting path".
    for _ in range(2):
        x = relu(conv(x, 1024, 3, bias=True))
    for channels in (512, 256, 128, 64):
        x = concat([skips.pop(), upconv(x, channels)], crop=True)
        for _ in range(2):
            x = relu(conv(x, channels, 3, bias=True))
    return net.finish(classify(conv(x, 2, 1, bias=True)), optimizer)
