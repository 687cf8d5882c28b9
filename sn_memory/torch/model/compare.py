"""Two training steps side by side: what is not bit-equal, and how far apart that is.

A relative error of each tensor alone says nothing where a gradient is zero but for rounding, as is
that of the bias of attention's keys: there it is of the order of 1. So a gradient's difference is
held against the gradient and against its share of all gradients.
"""

from __future__ import annotations

import math
from collections.abc import Mapping

import torch

# Part of a gradient's share of all gradients that counts as its size at least.
_SHARE = 0.1

Results = Mapping[str, torch.Tensor | None]


def differences(expected: Results, got: Results) -> dict[str, float]:
    """Return what is not bit-equal by name, with how far apart it is.

    That is the norm of the difference over the norm expected; for gradients over at least a tenth
    of what the gradient would be were all gradients equally large. Infinite where one is missing,
    of another type or shape, or NaN in other places.
    """
    gradients = [it for name, it in expected.items() if _is_gradient(name) and it is not None]
    size = math.sqrt(sum(_norm(it) ** 2 for it in gradients))
    count = sum(it.numel() for it in gradients)
    found = {}
    for name in sorted({*expected, *got}):
        left, right = expected.get(name), got.get(name)
        if same_bits(left, right):
            continue
        share = _SHARE * size * math.sqrt(left.numel() / count) if left is not None and count else 0
        found[name] = _distance(left, right, share if _is_gradient(name) else 0.0)
    return found


def same_bits(left: torch.Tensor | None, right: torch.Tensor | None) -> bool:
    """Whether two results are equal to the bit, or both absent."""
    if left is None or right is None:
        return left is right
    return left.dtype == right.dtype and torch.equal(
        left.detach().contiguous().view(-1).view(torch.uint8) if left.numel() else left,
        right.detach().contiguous().view(-1).view(torch.uint8) if right.numel() else right,
    )


def _is_gradient(name: str) -> bool:
    return name.startswith("gradient of ")


def _norm(tensor: torch.Tensor) -> float:
    # Complex numbers count by their two parts.
    plain = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    return float(plain.detach().double().nan_to_num().norm())


def _distance(left: torch.Tensor | None, right: torch.Tensor | None, least: float) -> float:
    if left is None or right is None or left.dtype != right.dtype or left.shape != right.shape:
        return math.inf
    left, right = left.detach(), right.detach()
    if not torch.equal(left.isfinite(), right.isfinite()):
        return math.inf
    apart, size = _norm(left.double() - right.double()), max(_norm(left), least)
    return apart / size if size else (math.inf if apart else 0.0)
