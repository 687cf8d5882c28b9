"""ResNets (He et al., 2015, table 1); bottlenecks have their stride on the 3x3 as frameworks do."""

from __future__ import annotations

from collections.abc import Sequence

from torch import Tensor, nn

STAGES = {18: (2, 2, 2, 2), 50: (3, 4, 6, 3), 101: (3, 4, 23, 3), 152: (3, 8, 36, 3)}


class Basic(nn.Module):
    """Two 3x3 with a shortcut, which is a 1x1 where shapes differ."""

    growth = 1

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 3, stride, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, 1, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, width, 1, stride, bias=False), nn.BatchNorm2d(width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.bn2(self.conv2(self.relu(self.bn1(self.conv1(x)))))
        y += self.shortcut(x)
        return self.relu(y)


class Bottleneck(nn.Module):
    """1x1, 3x3, 1x1 with a shortcut, which is a 1x1 where shapes differ."""

    growth = 4

    def __init__(self, channels: int, width: int, stride: int) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(channels, width, 1, bias=False)
        self.bn1 = nn.BatchNorm2d(width)
        self.conv2 = nn.Conv2d(width, width, 3, stride, 1, bias=False)
        self.bn2 = nn.BatchNorm2d(width)
        self.conv3 = nn.Conv2d(width, 4 * width, 1, bias=False)
        self.bn3 = nn.BatchNorm2d(4 * width)
        self.relu = nn.ReLU(inplace=True)
        self.shortcut: nn.Module = nn.Identity()
        if stride != 1 or channels != 4 * width:
            self.shortcut = nn.Sequential(
                nn.Conv2d(channels, 4 * width, 1, stride, bias=False), nn.BatchNorm2d(4 * width)
            )

    def forward(self, x: Tensor) -> Tensor:
        y = self.relu(self.bn1(self.conv1(x)))
        y = self.relu(self.bn2(self.conv2(y)))
        y = self.bn3(self.conv3(y))
        y += self.shortcut(x)
        return self.relu(y)


class ResNet(nn.Module):
    """The whole network, for images of any size."""

    def __init__(
        self,
        stages: Sequence[int],
        *,
        width: int = 64,
        classes: int = 1000,
        block: type[Basic | Bottleneck] = Bottleneck,
    ) -> None:
        super().__init__()
        self.stem = nn.Sequential(
            nn.Conv2d(3, width, 7, 2, 3, bias=False),
            nn.BatchNorm2d(width),
            nn.ReLU(inplace=True),
            nn.MaxPool2d(3, 2, 1),
        )
        channels, blocks = width, []
        for stage, count in enumerate(stages):
            for place in range(count):
                stride = 2 if stage and not place else 1
                blocks.append(block(channels, width << stage, stride))
                channels = block.growth * (width << stage)
        self.blocks = nn.Sequential(*blocks)
        self.pool = nn.AdaptiveAvgPool2d(1)
        self.head = nn.Linear(channels, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.pool(self.blocks(self.stem(x))).flatten(1))


def resnet(depth: int = 50, *, width: int = 64, classes: int = 1000) -> ResNet:
    """ResNet-18, 50, 101 or 152; any other depth by SuperNeurons' rule n1, n2, n4 = 6, 32, 6."""
    stages = STAGES.get(depth) or (6, 32, -(-(depth - 2) // 3) - 44, 6)
    block = Basic if depth == 18 else Bottleneck
    return ResNet(stages, width=width, classes=classes, block=block)
