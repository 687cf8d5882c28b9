"""Gradients in ResNet-50's shapes with a decaying spectrum, in torch's and Keras's layout."""

from __future__ import annotations

from math import prod

import torch
from models import resnet
from torch import nn

LAYOUTS = ("torch", "keras")
RATIO = 100
OURS = f"low rank {RATIO}"
DENSE = 2  # uncompressed steps at first
SETTLE = DENSE + 4
FACTORS = 64  # of a gradient's matrix, before noise
NOISE = 0.3  # of a rank's own, to the sum of all factors as one


def shapes_of(width: int, classes: int) -> list[tuple[int, ...]]:
    """Those of ResNet-50's parameters, in torch's layout."""
    with torch.device("meta"):
        return [tuple(p.shape) for p in resnet(50, width=width, classes=classes).parameters()]


def gradient(shape: tuple[int, ...], seed: int, rank: int, device: str = "cpu") -> torch.Tensor:
    """In torch's layout, of unit scale: a decaying spectrum, and noise that ranks do not share.

    The numbers are those of the device's own generator.
    """
    common = torch.Generator(device).manual_seed(seed)
    own = torch.Generator(device).manual_seed(1000 * (rank + 1) + seed)

    def normal(*size: int, generator: torch.Generator) -> torch.Tensor:
        return torch.randn(size, generator=generator, device=device)

    noise = normal(*shape, generator=own)
    if len(shape) == 1:
        return normal(*shape, generator=common) + NOISE * noise
    rows, columns = shape[0], prod(shape[1:])
    strengths = 1 / torch.arange(1, 1 + min(FACTORS, rows, columns), device=device)
    left = normal(rows, len(strengths), generator=common) * strengths
    right = normal(len(strengths), columns, generator=common)
    return (left @ right).view(shape) / strengths.norm() + NOISE * noise


def in_layout(values: torch.Tensor, layout: str) -> torch.Tensor:
    """A gradient as a framework has it."""
    if layout == "keras" and values.dim() == 4:
        return values.permute(2, 3, 1, 0).contiguous()
    return values.t().contiguous() if layout == "keras" and values.dim() == 2 else values


class FixedGradients(nn.Module):
    """A model whose gradients are given."""

    def __init__(self, gradients: list[torch.Tensor]) -> None:
        super().__init__()
        self.gradients = gradients
        self.weights = nn.ParameterList(
            nn.Parameter(torch.zeros_like(gradient)) for gradient in gradients
        )

    def forward(self) -> torch.Tensor:
        """The loss."""
        pairs = zip(self.weights, self.gradients, strict=True)
        return torch.stack([(weight * gradient).sum() for weight, gradient in pairs]).sum()


def gradients_of(job: dict[str, object], rank: int) -> list[torch.Tensor]:
    """A rank's gradients, in torch's layout, of a job's width and classes."""
    shapes = shapes_of(job["width"], job["classes"])  # type: ignore[arg-type]
    return [gradient(shape, seed, rank) for seed, shape in enumerate(shapes)]
