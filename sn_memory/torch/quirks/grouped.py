"""Grouped matrix products, as used by mixtures of experts.

The kernel takes any floating-point type and pads rows of its result to multiples of 16 bytes. The
rule for fake tensors accepts only bfloat16, and pads no rows if torch is built without CUDA.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch

# None where torch has no such op.
PRODUCT = getattr(getattr(torch.ops.aten, "_grouped_mm", None), "default", None)
_ROW = 16


def fake_product(
    first: torch.Tensor,
    second: torch.Tensor,
    offs: torch.Tensor | None = None,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
) -> torch.Tensor:
    """Return a fake result; `offs` has the end of each group in the dimension that is divided.

    A 2-dimensional factor is divided into groups, a 3-dimensional one has a matrix per group. The
    rows of the first or the columns of the second factor are divided; if both have two dimensions,
    the one that they share.
    """
    del bias  # the kernel raises if it is given
    rows, columns = first.size(-2), second.size(-1)
    dtype = out_dtype or first.dtype
    padded = -(-columns * dtype.itemsize // _ROW) * _ROW // dtype.itemsize
    size: tuple[int, ...] = (rows, columns)
    stride: tuple[int, ...] = (padded, 1)
    if first.dim() == second.dim():
        groups = first.size(0) if offs is None else offs.size(0)
        size, stride = (groups, *size), (rows * padded, *stride)
    return torch.empty_strided(size, stride, dtype=dtype, device=first.device)


def flops(sizes: Sequence[tuple[int, ...]]) -> float:
    """Return the FLOPs of a product; `sizes` are those of its tensors, in order."""
    first, second = sizes[:2]
    groups = first[0] if len(first) == len(second) == 3 else 1
    return 2.0 * groups * first[-2] * first[-1] * second[-1]
