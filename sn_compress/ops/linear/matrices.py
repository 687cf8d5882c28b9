"""A tensor as a matrix: its axes cut in two.

The obvious cut is the first axis against all others, as PowerSGD has it. It suits kernels that lie
as (out, in, height, width). Keras keeps (height, width, in, out), of which it makes a matrix of
three rows; stacks of experts and the (heads, d, D) kernels of attention fare no better. A factor of
rank r has r (rows + columns) numbers, so the cut is made where that sum is least.
"""

from __future__ import annotations

import math
from collections.abc import Sequence


def cut(shape: Sequence[int]) -> tuple[int, int]:
    """Rows and columns of a tensor as a matrix, by a plain reshape.

    shape : sizes of the axes, 0 or more; () is a scalar
    Returns (prod(left), prod(right)) of the cut with the least sum; of equal ones, the earliest. A
    vector is one row.

    >>> cut((3, 3, 256, 256)), cut((256, 64, 3, 3)), cut((12, 64, 768)), cut((1000,))
    ((2304, 256), (256, 576), (768, 768), (1, 1000))
    """
    cuts = ((math.prod(shape[:at]), math.prod(shape[at:])) for at in range(len(shape) + 1))
    return min(cuts, key=sum)
