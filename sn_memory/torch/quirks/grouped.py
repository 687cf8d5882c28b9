"""Products of groups of rows with a matrix each, as mixtures of experts compute them.

The kernel takes any floating-point type, and rows of its result begin at whole multiples of 16
bytes. torch's rule for fake tensors refuses all but bfloat16, and where torch is built without CUDA
it pads no rows.
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
    """Return a fake result: `offs` says where each group ends, in the dimension that is shared.

    A factor of two dimensions is cut into groups, one of three has a matrix a group. Cut are rows
    of the first or columns of the second; where both have two dimensions, the one they share.
    """
    del bias  # refused by the kernel
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
    """Return the arithmetic of a product; sizes are those of its tensors, in order."""
    first, second = sizes[:2]
    groups = first[0] if len(first) == len(second) == 3 else 1
    return 2.0 * groups * first[-2] * first[-1] * second[-1]
