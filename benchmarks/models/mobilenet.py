"""MobileNetV3-Small (Howard et al., 2019, table 2)."""

from __future__ import annotations

from torch import Tensor, nn

# Kernel, expanded channels, channels out, squeeze and excite, hard swish, stride.
BLOCKS = (
    (3, 16, 16, True, False, 2),
    (3, 72, 24, False, False, 2),
    (3, 88, 24, False, False, 1),
    (5, 96, 40, True, True, 2),
    (5, 240, 40, True, True, 1),
    (5, 240, 40, True, True, 1),
    (5, 120, 48, True, True, 1),
    (5, 144, 48, True, True, 1),
    (5, 288, 96, True, True, 2),
    (5, 576, 96, True, True, 1),
    (5, 576, 96, True, True, 1),
)


def _squeezed(channels: int) -> int:
    """A quarter of the channels, to a multiple of 8 (section 5.3 and the authors' code)."""
    return max(8, (channels // 4 + 4) // 8 * 8)


def _conv(
    channels: int, out: int, kernel: int, stride: int = 1, groups: int = 1
) -> list[nn.Module]:
    conv = nn.Conv2d(channels, out, kernel, stride, kernel // 2, groups=groups, bias=False)
    return [conv, nn.BatchNorm2d(out, eps=1e-3, momentum=0.01)]


class SqueezeExcite(nn.Module):
    """Channels scaled by a hard sigmoid of what their means say."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        between = _squeezed(channels)
        self.scale = nn.Sequential(
            nn.AdaptiveAvgPool2d(1),
            nn.Conv2d(channels, between, 1),
            nn.ReLU(inplace=True),
            nn.Conv2d(between, channels, 1),
            nn.Hardsigmoid(inplace=True),
        )

    def forward(self, x: Tensor) -> Tensor:
        return self.scale(x) * x


class Bottleneck(nn.Module):
    """Expand, depthwise, squeeze and excite, project; its input is added where shapes allow."""

    def __init__(
        self, channels: int, kernel: int, wide: int, out: int, squeeze: bool, swish: bool,
        stride: int,
    ) -> None:  # fmt: skip
        super().__init__()
        layers: list[nn.Module] = []
        if wide != channels:
            layers += [*_conv(channels, wide, 1), _activation(swish)]
        layers += [*_conv(wide, wide, kernel, stride, wide), _activation(swish)]
        if squeeze:
            layers.append(SqueezeExcite(wide))
        self.layers = nn.Sequential(*layers, *_conv(wide, out, 1))
        self.residual = stride == 1 and channels == out

    def forward(self, x: Tensor) -> Tensor:
        y = self.layers(x)
        return x + y if self.residual else y


def _activation(swish: bool) -> nn.Module:
    return nn.Hardswish(inplace=True) if swish else nn.ReLU(inplace=True)


def mobilenet_v3_small(*, classes: int = 1000) -> nn.Module:
    """Return the network for images of 3 channels; 2.5 million parameters."""
    channels, layers = 16, [*_conv(3, 16, 3, 2), nn.Hardswish(inplace=True)]
    for kernel, wide, out, squeeze, swish, stride in BLOCKS:
        layers.append(Bottleneck(channels, kernel, wide, out, squeeze, swish, stride))
        channels = out
    return nn.Sequential(
        *layers,
        *_conv(channels, 576, 1),
        nn.Hardswish(inplace=True),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(576, 1024),
        nn.Hardswish(inplace=True),
        nn.Dropout(0.2, inplace=True),
        nn.Linear(1024, classes),
    )
