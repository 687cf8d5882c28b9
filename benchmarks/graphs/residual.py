"""ResNets: for ImageNet (bottlenecks), for CIFAR (basic blocks), and of any depth."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from .layers import add, avg_pool, classify, conv, flatten, linear, max_pool, norm, relu, shrink
from .net import Net, Tensor

STAGES = {50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


def resnet(
    batch: int,
    depth: int = 50,
    *,
    stages: Sequence[int] | None = None,
    optimizer: str = "sgd",
    **settings: Any,
) -> Net:
    """ResNet with bottlenecks (He et al., 2015, table 1), stride on the 3x3 as frameworks have it.

    Parameters
    ----------
    depth : int
        50, 101 or 152; any other takes `stages`, or `deep_stages(depth)`.
    stages : four ints
        Blocks per stage; depth = 3 * sum + 2.
    """
    if stages is None:
        stages = STAGES[depth] if depth in STAGES else deep_stages(depth)
    net = Net(f"ResNet-{3 * sum(stages) + 2}", batch, **settings)
    x = relu(norm(conv(net.input(batch, 3, 224, 224), 64, 7, stride=2, pad=3)))
    x = max_pool(x, 3, 2, pad=1)
    for stage, blocks in enumerate(stages):
        for block in range(blocks):
            x = _bottleneck(x, 64 << stage, stride=2 if stage and not block else 1)
    x = flatten(avg_pool(x, x.shape[2], 1))
    return net.finish(classify(linear(x, 1000)), optimizer)


def deep_stages(depth: int) -> tuple[int, int, int, int]:
    """Blocks per stage by SuperNeurons' rule, n1, n2, n4 = 6, 32, 6 and n3 as the depth asks.

    The depth is 3 * (n1 + n2 + n3 + n4) + 2; what does not fit the rule is rounded up.
    """
    third = -(-(depth - 2) // 3) - 44
    if third < 1:
        raise ValueError(
            f"depth {depth}: the rule n1, n2, n4 = 6, 32, 6 starts at 137; give `stages`"
        )
    return 6, 32, third, 6


def cifar_resnet(batch: int, depth: int = 1202, *, optimizer: str = "sgd", **settings: Any) -> Net:
    """ResNet for 32x32 images (He et al., 2015, section 4.2): 6n + 2 layers, plain shortcuts."""
    if (depth - 2) % 6:
        raise ValueError(f"depth {depth} is not 6n + 2; 20, 56, 110 and 1202 are")
    net = Net(f"ResNet-{depth} (CIFAR)", batch, **settings)
    x = relu(norm(conv(net.input(batch, 3, 32, 32), 16, 3, pad=1)))
    for stage in range(3):
        for block in range((depth - 2) // 6):
            channels, stride = 16 << stage, 2 if stage and not block else 1
            y = relu(norm(conv(x, channels, 3, stride=stride, pad=1)))
            y = norm(conv(y, channels, 3, pad=1))
            x = relu(add(y, x if stride == 1 else shrink(x, channels)))
    x = flatten(avg_pool(x, 8, 1))
    return net.finish(classify(linear(x, 10)), optimizer)


def _bottleneck(x: Tensor, width: int, *, stride: int) -> Tensor:
    y = relu(norm(conv(x, width, 1)))
    y = relu(norm(conv(y, width, 3, stride=stride, pad=1)))
    y = norm(conv(y, 4 * width, 1))
    if x.shape != y.shape:
        x = norm(conv(x, 4 * width, 1, stride=stride))
    return relu(add(y, x))
