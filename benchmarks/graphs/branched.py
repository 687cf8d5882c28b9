"""DenseNet-121 and Inception-v4: nets whose layers have many readers."""

from __future__ import annotations

from functools import partial
from typing import Any

from .layers import avg_pool, classify, concat, conv, dropout, flatten, linear, max_pool, norm, relu
from .net import Net, Tensor


def densenet121(batch: int, *, optimizer: str = "sgd", **settings: Any) -> Net:
    """DenseNet-121 (Huang et al., 2016, table 1): growth 32, each layer reads all before it.

    Every layer concatenates anew, as the common implementations do: memory grows with the square
    of the depth, and a planner that rebuilds the concatenations wins most of it back.
    """
    net = Net("DenseNet-121", batch, **settings)
    x = relu(norm(conv(net.input(batch, 3, 224, 224), 64, 7, stride=2, pad=3)))
    x = max_pool(x, 3, 2, pad=1)
    for stage, layers in enumerate((6, 12, 24, 16)):
        if stage:
            x = avg_pool(conv(relu(norm(x)), x.shape[1] // 2, 1), 2, 2)
        features = [x]
        for _ in range(layers):
            y = features[0] if len(features) == 1 else concat(features)
            y = conv(relu(norm(y)), 128, 1)
            features.append(conv(relu(norm(y)), 32, 3, pad=1))
        x = concat(features)
    x = relu(norm(x))
    x = flatten(avg_pool(x, x.shape[2], 1))
    return net.finish(classify(linear(x, 1000)), optimizer)


def inception_v4(batch: int, *, optimizer: str = "sgd", **settings: Any) -> Net:
    """Inception-v4 (Szegedy et al., 2016, figures 3 to 9)."""
    net = Net("Inception-v4", batch, **settings)
    x = _cbr(_cbr(net.input(batch, 3, 299, 299), 32, 3, stride=2), 32, 3)
    x = _cbr(x, 64, 3, pad=1)
    x = concat([max_pool(x, 3, 2), _cbr(x, 96, 3, stride=2)])
    long = _cbr(_cbr(_cbr(x, 64, 1), 64, (1, 7)), 64, (7, 1))
    x = concat([_cbr(_cbr(x, 64, 1), 96, 3), _cbr(long, 96, 3)])
    x = concat([_cbr(x, 192, 3, stride=2), max_pool(x, 3, 2)])
    for _ in range(4):
        x = _inception_a(x)
    x = _reduce(x, [(384, 3)], [(192, 1), (224, 3), (256, 3)])
    for _ in range(7):
        x = _inception_b(x)
    x = _reduce(x, [(192, 1), (192, 3)], [(256, 1), (256, (1, 7)), (320, (7, 1)), (320, 3)])
    for _ in range(3):
        x = _inception_c(x)
    x = dropout(flatten(avg_pool(x, 8, 1)))
    return net.finish(classify(linear(x, 1000)), optimizer)


def _cbr(
    x: Tensor,
    channels: int,
    kernel: int | tuple[int, int],
    *,
    stride: int = 1,
    pad: int | None = None,
) -> Tensor:
    # Oblong kernels keep the size, as do those of the inner blocks; the stem pads where it says so.
    if isinstance(kernel, tuple):
        return relu(norm(conv(x, channels, kernel, pad=(kernel[0] // 2, kernel[1] // 2))))
    return relu(norm(conv(x, channels, kernel, stride=stride, pad=pad or 0)))


_same = partial(_cbr, pad=1)


def _inception_a(x: Tensor) -> Tensor:
    pool = _cbr(avg_pool(x, 3, 1, pad=1), 96, 1)
    double = _same(_same(_cbr(x, 64, 1), 96, 3), 96, 3)
    return concat([pool, _cbr(x, 96, 1), _same(_cbr(x, 64, 1), 96, 3), double])


def _inception_b(x: Tensor) -> Tensor:
    pool = _cbr(avg_pool(x, 3, 1, pad=1), 128, 1)
    seven = _cbr(_cbr(_cbr(x, 192, 1), 224, (1, 7)), 256, (7, 1))
    y = _cbr(_cbr(_cbr(x, 192, 1), 192, (1, 7)), 224, (7, 1))
    double = _cbr(_cbr(y, 224, (1, 7)), 256, (7, 1))
    return concat([pool, _cbr(x, 384, 1), seven, double])


def _inception_c(x: Tensor) -> Tensor:
    pool = _cbr(avg_pool(x, 3, 1, pad=1), 256, 1)
    y = _cbr(x, 384, 1)
    z = _cbr(_cbr(_cbr(x, 384, 1), 448, (1, 3)), 512, (3, 1))
    split = [_cbr(t, 256, k) for t in (y, z) for k in ((1, 3), (3, 1))]
    return concat([pool, _cbr(x, 256, 1), *split])


def _reduce(x: Tensor, *branches: list[tuple[int, int | tuple[int, int]]]) -> Tensor:
    # Every branch ends in a stride of two without padding; 3x3 before the end keep the size.
    ends = [max_pool(x, 3, 2)]
    for branch in branches:
        y = x
        for channels, kernel in branch[:-1]:
            y = _cbr(y, channels, kernel, pad=1 if kernel == 3 else 0)
        ends.append(_cbr(y, branch[-1][0], 3, stride=2))
    return concat(ends)
