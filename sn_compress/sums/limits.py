"""What the shared exchange asks of its settings, and of a tensor: known before there is one."""

from __future__ import annotations

import math
from collections.abc import Sequence
from functools import lru_cache

from ..base.errors import CompressError

# Elements of a vector, such as a bias or the weights of a norm, from which on it is compressed. A
# vector has no low rank, models have many small ones, and all together they are little: travelling
# plain with the others costs less than what would be saved.
VECTOR = 2**16


def check_settings(ratio: float, warmup: int, every: int) -> None:
    """Raise CompressError unless they are as SharedExchange describes them."""
    if not ratio > 1 or warmup < 1 or every < 1:
        raise CompressError(
            f"ratio={ratio!r}, warmup={warmup!r}, every={every!r}; expected a ratio above 1 "
            "and at least one step each"
        )


def is_large(shape: Sequence[int], min_elements: int) -> bool:
    """Whether a tensor is worth compressing: the rule of every class and every seam."""
    return _is_large(tuple(shape), min_elements)


@lru_cache(maxsize=4096)
def _is_large(shape: tuple[int, ...], min_elements: int) -> bool:
    is_vector = sum(side > 1 for side in shape) <= 1
    return math.prod(shape) >= (max(VECTOR, min_elements) if is_vector else min_elements)
