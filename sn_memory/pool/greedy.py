"""First fit in several orders: seconds for 100,000 buffers, no promise on the height.

Each rule sorts the buffers and puts them one by one at the lowest free offset. No rule is best
everywhere: `size` (large first) wins on scattered lives, `start` (what an allocator does at run
time) and `length` (long-lived first) on lives that nest, as activations do in training.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Final

import numpy as np

from ..base import native
from .problem import Ints, Problem

# Each rule gives the keys of a sort, the most important one last as np.lexsort wants it.
RULES: Final[dict[str, Callable[[Problem], tuple[Ints, ...]]]] = {
    "size": lambda p: (-(p.upper - p.lower), -p.size),
    "length": lambda p: (-p.size, -(p.upper - p.lower)),
    "start": lambda p: (-p.size, p.lower),
    # As a product this may pass 64 bits; the sum of logarithms sorts the same.
    "area": lambda p: (
        -p.size,
        -np.rint((np.log2(np.maximum(p.size, 1)) + np.log2(p.upper - p.lower)) * 2**40).astype(
            np.int64
        ),
    ),
    "end": lambda p: (-p.size, -p.upper),
}


def order_by(problem: Problem, rule: str) -> Ints:
    """Return the buffer numbers in the order of a rule: [n] int64."""
    return np.lexsort(RULES[rule](problem)).astype(np.int64)


def first_fit(problem: Problem, order: Ints) -> Ints:
    """Put each buffer, in this order, at the lowest aligned offset free for its life: [n] int64."""
    offsets = np.zeros(len(problem), np.int64)
    native.core().first_fit(
        problem.first,
        problem.last,
        problem.size,
        problem.align,
        problem.sections,
        np.ascontiguousarray(order, np.int64),
        offsets,
    )
    return offsets
