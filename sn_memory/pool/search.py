"""What looks for packings: first fit in several orders, and depth-first search within a capacity.

First fit takes seconds for 100,000 buffers and promises nothing of the height. Each rule sorts the
buffers and puts them one by one at the lowest free offset. No rule is best everywhere: `size`
(large first) wins on scattered lives, `start` (what an allocator does at run time) and `length`
(long-lived first) on lives that nest, as activations do in training.

The search is that of csrc/memory/pool_search.cpp.

The ideas are MiniMalloc's (Moffitt, ASPLOS 2023): only packings where nothing can be pushed down
are of interest, bounds are inferred section by section, parts that share no time are solved apart.
What differs is the branching, which is on one buffer at a time:

- `least[i]` is an offset below which buffer i lies in no packing of this branch. Pick a buffer i
  such that no other unplaced one fits beneath `least[i]`. In a packing where nothing can be pushed
  down, i either lies at `least[i]`, or it rests on another unplaced buffer k, hence at or above
  `least[k] + size[k]`. These are the two branches; the second one raises `least[i]`, so a refuted
  choice is never met again. If nothing else wants that place, the first branch is the only one.
- In one section the buffers follow each other upwards, so sorted by `least` they must end within
  the capacity. If placing the lowest leaves `slack` bytes to waste, a buffer whose `least` is
  higher by more than that cannot be the lowest one, hence rests on another.
- When the rest falls apart in time, each part is solved on its own: a part that fails refutes the
  choices made before the split, and the choices inside a solved part are forgotten.

Which buffer is picked decides between milliseconds and hours, so `pool` restarts the search with
other orders. Sections that ended a branch gain weight, and `weighted` goes to the heavy ones first.
"""

from __future__ import annotations

from collections.abc import Callable
from enum import IntEnum
from typing import Any, Final

import numpy as np

from ..base import native
from .problem import Ints, Problem

UNIT: Final = 1 << 20
"""Weight of one ended branch, and the weight every section starts with."""

# More than any search looks at.
ALL: Final = 2**62


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


class Verdict(IntEnum):
    """What a search knows so far."""

    IMPOSSIBLE = 0
    FOUND = 1
    UNFINISHED = 2


class Rule(IntEnum):
    """Which section the next buffer is picked from: the lowest, or low and heavy in one score."""

    LOWEST = 0
    WEIGHTED = 1


class Searcher:
    """Starts searches on one problem; its lists are built once.

    Parameters
    ----------
    problem
        At least one buffer, all sizes above 0.
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._prepared = native.core().problem(
            problem.first, problem.last, problem.size, problem.align, problem.sections
        )

    def start(self, capacity: int, rule: Rule, rank: Ints, weights: Ints) -> Search:
        """Start one; of two buffers equally low the one of lesser `rank` goes first."""
        handle = native.core().search(self._prepared, capacity, int(rule), rank, weights)
        return Search(handle, len(self.problem), self.problem.sections)


class Search:
    """A search that can be interrupted.

    `run` goes on for at most `decisions` of them, and stops soon after having looked at `work`
    buffers, in the middle of a decision too; asked again, it resumes. `spent` are the decisions so
    far, where one that looked at far more than it should counts several times.
    """

    def __init__(self, handle: Any, count: int, sections: int) -> None:
        self._handle, self._shape = handle, (count, sections)
        self.spent = 0

    def run(self, decisions: int, work: int = ALL) -> Verdict:
        verdict, self.spent = native.core().run(self._handle, decisions, work)
        return Verdict(verdict)

    def offsets(self) -> Ints:
        return self._read()[0]

    def weights(self) -> Ints:
        return self._read()[1]

    def _read(self) -> tuple[Ints, Ints]:
        offsets, weights = (np.zeros(count, np.int64) for count in self._shape)
        native.core().read(self._handle, offsets, weights)
        return offsets, weights
