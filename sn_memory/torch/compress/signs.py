"""A ReLU whose backward pass reads bits.

Hooks of saved tensors give autograd's own backward pass of a ReLU what it asks for: a number per
element. Decompressed, these are as large as the gradient, and often what a step's peak is made of.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import torch

_CHUNK = 1 << 16  # elements, a multiple of 8


class SignRelu(torch.autograd.Function):
    """relu(x); `keep` is given the result and returns what is kept of it, and its layout."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, keep: Callable[..., Any]) -> torch.Tensor:
        """Return relu(x)."""
        y = x.relu()
        ctx.kept = keep(y)
        return y

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Return the gradient where a bit is set, and 0 elsewhere."""
        kept, layout = ctx.kept
        return _Masked.apply(gradient, kept.mask(), layout), None


class _Masked(torch.autograd.Function):
    """A gradient through a ReLU, which is linear in it."""

    @staticmethod
    def forward(ctx: Any, gradient: torch.Tensor, mask: Any, layout: Any) -> torch.Tensor:
        ctx.kept = mask, layout
        return torch.as_tensor(mask.through(gradient, layout))

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return _Masked.apply(gradient, *ctx.kept), None, None


def masked(gradient: torch.Tensor, bits: np.ndarray[Any, Any], layout: Any) -> torch.Tensor:
    """Return a gradient with zeros where a bit is not set.

    Parameters
    ----------
    bits
        [n / 8] uint8, in the order of the memory of `layout`.
    """
    made = torch.empty_strided(
        layout.shape, layout.stride, dtype=gradient.dtype, device=gradient.device
    )
    made.copy_(gradient)
    flat = made.as_strided((layout.numel,), (1,))
    # As integers: an AND is ten times faster than to select, and what goes is +0, NaN too.
    whole = flat.view({2: torch.int16, 4: torch.int32, 8: torch.int64}[flat.element_size()])
    host = whole.numpy() if whole.device.type == "cpu" else None
    for start in range(0, layout.numel, _CHUNK):
        count = min(_CHUNK, layout.numel - start)
        on = np.unpackbits(bits[start // 8 :][: -(-count // 8)], count=count, bitorder="little")
        ones = np.negative(on.view(np.int8))
        if host is not None:
            part = host[start : start + count]
            np.bitwise_and(part, ones.astype(part.dtype), out=part)
        else:
            part = whole[start : start + count]
            part &= torch.from_numpy(ones).to(part.device, part.dtype)
    return made
