"""Assign offsets in one arena to buffers with known lifetimes: `pack` and `arrange`.

An allocator that sees requests one by one leaves holes; measured on the files of MiniMalloc, it
needs 1.2 to 1.9 times the peak of live bytes. With all lifetimes known in advance, this module
computes, in this order: the lower bound (the largest sum of live sizes), the best of several greedy
rules, and if they differ, an exact search (`Searcher`).

The search is restarted with other orders until one is fast: run times of such searches vary by
factors of thousands with the order, and most problems have some orders that take milliseconds. The
limit of a run grows, so that in the end a run either finds a packing or proves that there is none.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from enum import IntEnum
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..base.errors import CapacityError, PackError, core
from ..base.progress import counting, now, report_progress, spend
from .problem import Ints, Problem, read_problem

UNIT: Final = 1 << 20
"""Weight of one failed branch, and the initial weight of every section."""

# More than any search examines.
ALL: Final = 2**62


# First fit takes seconds for 100,000 buffers and guarantees no height. Each rule sorts the buffers
# and puts them one by one at the lowest free offset. No rule is best everywhere: `size` (large
# first) is best for scattered lifetimes, `start` (like an allocator at run time) and `length`
# (long-lived first) for nested lifetimes, such as activations in training.
# The keys of each sort, the most important one last as np.lexsort requires.
RULES: Final[dict[str, Callable[[Problem], tuple[Ints, ...]]]] = {
    "size": lambda p: (-(p.upper - p.lower), -p.size),
    "length": lambda p: (-p.size, -(p.upper - p.lower)),
    "start": lambda p: (-p.size, p.lower),
    # The product may exceed 64 bits; the sum of logarithms has the same order.
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
    """Put each buffer, in order, at the lowest aligned offset free in its lifetime: [n] int64."""
    offsets = np.zeros(len(problem), np.int64)
    core().first_fit(
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
    """The state of a search."""

    IMPOSSIBLE = 0
    FOUND = 1
    UNFINISHED = 2


class Rule(IntEnum):
    """The section to pick the next buffer from: the lowest, or a score of low and heavy."""

    LOWEST = 0
    WEIGHTED = 1


class Searcher:
    """Starts searches on one problem; its lists are built once.

    The ideas are MiniMalloc's (Moffitt, ASPLOS 2023): only packings where nothing can be pushed
    down are considered, bounds are inferred section by section, parts that share no time are solved
    separately. The branching differs; it is on one buffer at a time:


    - `least[i]` is a lower bound for the offset of buffer i in this branch. Pick a buffer i such
      that no other unplaced one fits beneath `least[i]`. In a packing where nothing can be pushed
      down, i is either at `least[i]`, or it rests on another unplaced buffer k, hence at or above
      `least[k] + size[k]`. These are the two branches; the second one raises `least[i]`, so a
      refuted choice never recurs. If nothing else can take that place, there is only the first
      branch.
    - The buffers of a section are stacked, so sorted by `least` they must end within the capacity.
      If placing the lowest leaves `slack` bytes to waste, a buffer whose `least` is higher by more
      than that cannot be the lowest one, hence rests on another.
    - When the rest separates in time, each part is solved independently: a part that fails refutes
      the choices made before the split, and the choices inside a solved part are dropped.

    The order in which buffers are picked makes the difference between milliseconds and hours, so
    `pack` restarts the search with other orders. Sections where a branch failed gain weight, and
    `weighted` picks from heavy ones first.

    problem : at least one buffer, all sizes above 0
    """

    def __init__(self, problem: Problem) -> None:
        self.problem = problem
        self._prepared = core().problem(
            problem.first, problem.last, problem.size, problem.align, problem.sections
        )

    def start(self, capacity: int, rule: Rule, rank: Ints, weights: Ints) -> Search:
        """Start a search; of two equally low buffers, the one of lower `rank` goes first."""
        handle = core().search(self._prepared, capacity, int(rule), rank, weights)
        return Search(handle, len(self.problem), self.problem.sections)


class Search:
    """A search that can be interrupted.

    `run` makes at most `decisions`, and stops soon after having examined `work` buffers, even in
    the middle of a decision; called again, it resumes. `spent` are the decisions so far; one that
    examined far more buffers than usual counts several times.
    """

    def __init__(self, handle: Any, count: int, sections: int) -> None:
        self._handle, self._shape = handle, (count, sections)
        self.spent = 0

    def run(self, decisions: int, work: int = ALL) -> Verdict:
        verdict, self.spent = core().run(self._handle, decisions, work)
        return Verdict(verdict)

    def read(self) -> tuple[Ints, Ints]:
        """Return the offsets, once found, and the weights of the sections."""
        offsets, weights = (np.zeros(count, np.int64) for count in self._shape)
        core().read(self._handle, offsets, weights)
        return offsets, weights


# Lists of neighbours for more pairs than this would fill gigabytes; greedy rules need none.
_SEARCHABLE_PAIRS: Final = 4_000_000
# Decisions, and buffers examined, between two checks of the clock: a millisecond.
_SLICE: Final = 64
_WORK: Final = 20_000
# Units of work per decision, and per buffer placed by first fit.
_DECISION: Final = 300
_PUT: Final = 20
# A run ends after 500 decisions plus this many per buffer; every few runs the limit grows.
_RUN: Final = 5
_GROWTH: Final = 1.5
# The first runs use plain keys; later ones perturb them with this standard deviation.
_NOISE: Final = 0.2


@dataclass(frozen=True)
class Packing:
    """Offsets of buffers, and the quality of the packing.

    offsets : one for each buffer, in the given order, in bytes
    height : the bytes of the arena: the largest end of any buffer
    lower_bound : no packing is lower
    seconds : seconds it took, measured like the time limit
    """

    offsets: tuple[int, ...]
    height: int
    lower_bound: int
    seconds: float

    @property
    def proved(self) -> bool:
        """Whether no packing is lower than this one."""
        return self.height == self.lower_bound


def pack(
    buffers: Iterable[Sequence[int]] | npt.NDArray[Any],
    capacity: int | None = None,
    *,
    time_limit_s: float = 10.0,
    deterministic: bool = False,
) -> list[int]:
    """Return an offset for each buffer, so that no two buffers live at the same time overlap.

    Parameters
    ----------
    buffers
        Rows of (lower, upper, size) or (lower, upper, size, alignment), whole numbers: live in the
        half-open [lower, upper), `size` bytes, offset a multiple of `alignment`.
    capacity
        Bytes of the arena. None: as few as can be found in the time limit.
    time_limit_s
        Wall-clock seconds in total. The first greedy rule always runs to its end.
    deterministic
        Count work instead of seconds, as in `plan_graph`: the result is the same on any machine,
        whatever its load.

    Raises
    ------
    PackError
        For an invalid buffer, or a setting out of range.
    CapacityError
        With a capacity, if no packing within it was found. `proved` says whether there is none, or
        only time ran out.

    Examples
    --------
    At most eight bytes are live at any time, and eight suffice:

    >>> pack([(0, 2, 4), (1, 3, 4), (2, 4, 4)], capacity=8)
    [0, 4, 0]
    """
    packing = arrange(buffers, capacity, time_limit_s=time_limit_s, deterministic=deterministic)
    return list(packing.offsets)


def arrange(
    buffers: Iterable[Sequence[int]] | npt.NDArray[Any],
    capacity: int | None = None,
    *,
    time_limit_s: float = 10.0,
    deterministic: bool = False,
) -> Packing:
    """Return the offsets of `pack` together with the height and the lower bound.

    Parameters and errors are those of `pack`. The lower bound is the largest sum of live sizes, or
    a higher bound proved by the search.

    Examples
    --------
    >>> arrange([(0, 2, 4), (1, 3, 4), (2, 4, 4)]).height
    8
    """
    if not time_limit_s >= 0:
        raise PackError(f"got time_limit_s={time_limit_s!r}, expected seconds, 0 or more.")
    if capacity is not None and capacity < 0:
        raise PackError(f"got capacity={capacity!r}, expected bytes, 0 or more.")
    with counting(deterministic):
        return _arranged(read_problem(buffers), capacity, time_limit_s)


def _arranged(problem: Problem, capacity: int | None, time_limit_s: float) -> Packing:
    began = now()
    # Empty buffers can be anywhere; the rest is packed part by part.
    full = np.flatnonzero(problem.size)
    solid = problem.only(full)
    deadline = began + time_limit_s
    parts = [_Part(solid.only(chosen), chosen, began, deadline) for chosen in solid.components()]
    offsets = np.zeros(len(problem), np.int64)
    if capacity is None:
        _minimise(parts, deadline)
    else:
        _fit(parts, capacity, began, time_limit_s)
    for part in parts:
        offsets[full[part.chosen]] = part.offsets
    return Packing(
        offsets=tuple(offsets.tolist()),
        height=max((part.height for part in parts), default=0),
        lower_bound=max((part.bound for part in parts), default=0),
        seconds=now() - began,
    )


class _Part:
    """Buffers connected in time: the best packing so far, the bound, and its searches."""

    def __init__(self, problem: Problem, chosen: Ints, began: float, deadline: float) -> None:
        self.problem, self.chosen, self.began = problem, chosen, began
        self.grain = problem.grain
        # All offsets and sizes are multiples of the grain, so every height is as well.
        self.bound = -(-problem.lower_bound // self.grain) * self.grain
        self.offsets, self.height = _best_greedy(problem, self.bound, deadline)
        self.searchable = problem.pairs() <= _SEARCHABLE_PAIRS
        self.run_decisions = 500 + _RUN * len(problem)
        self._searcher: Searcher | None = None
        self._weights = np.full(problem.sections, UNIT, np.int64)
        self._runs = 0

    def decide(self, capacity: int, effort: float, deadline: float) -> Verdict:
        """Search for a packing within `capacity`; `effort` limits the decisions.

        A packing that is found replaces the current one; a proof raises the bound.
        """
        if not self.searchable or now() > deadline:
            return Verdict.UNFINISHED
        self._searcher = self._searcher or Searcher(self.problem)
        at_first = self._runs
        while effort > 0 and now() < deadline:
            note = f"{self.height} bytes, at least {self.bound}"
            report_progress("pack", now() - self.began, deadline - self.began, note)
            rule = list(Rule)[self._runs % len(Rule)]
            search = self._searcher.start(
                capacity, rule, _ranks(self.problem, self._runs // len(Rule)), self._weights
            )
            rounds = (self._runs - at_first) // (len(Rule) * len(_KEYS))
            decisions = int(self.run_decisions * _GROWTH**rounds)
            self._runs += 1
            verdict = Verdict.UNFINISHED
            while verdict is Verdict.UNFINISHED and decisions > search.spent and now() < deadline:
                before, slice_ = search.spent, _SLICE - search.spent % _SLICE
                verdict = search.run(slice_, _WORK)
                # Interrupted within a decision, it has used up its slice.
                spent = search.spent - before
                spend(_WORK if spent < slice_ else _DECISION * spent)
            effort -= search.spent
            offsets, weights = search.read()
            # Weights decay, so that obstacles of the latest runs count most.
            self._weights = UNIT + (weights - UNIT) // 2
            if verdict is Verdict.FOUND:
                self.offsets = offsets
                self.height = int((self.offsets + self.problem.size).max())
                return verdict
            if verdict is Verdict.IMPOSSIBLE:
                self.bound = max(self.bound, (capacity // self.grain + 1) * self.grain)
                return verdict
        return Verdict.UNFINISHED

    def improve(self, floor: int, effort: float, deadline: float) -> None:
        """Halve the distance between the bound and the height, as far as `effort` allows."""
        low = max(self.bound, floor)
        # The bound itself first: often there is such a packing, and then no proof is needed.
        capacity = low
        while low < self.height and now() < deadline:
            verdict = self.decide(capacity, effort, deadline)
            if verdict is not Verdict.FOUND:
                low = capacity + self.grain
            middle = (low + self.height) // 2
            capacity = max(low, middle - middle % self.grain)


_KEYS: Final = ("area", "size", "length")


def _ranks(problem: Problem, round_: int) -> Ints:
    """Return the rank of each buffer, which decides between equally low ones: [n] int64."""
    span = (problem.upper - problem.lower).astype(float)
    size = problem.size.astype(float)
    key = {"area": span * size, "size": size, "length": span}[_KEYS[round_ % len(_KEYS)]]
    if round_ >= len(_KEYS):
        noise = np.random.default_rng(round_).standard_normal(len(key))
        key = key * np.exp(_NOISE * noise)
    rank = np.empty(len(key), np.int64)
    rank[np.argsort(-key, kind="stable")] = np.arange(len(key))
    return rank


def _best_greedy(problem: Problem, bound: int, deadline: float) -> tuple[Ints, int]:
    best: tuple[Ints, int] | None = None
    for rule in RULES:
        offsets = first_fit(problem, order_by(problem, rule))
        spend(_PUT * len(problem))
        height = int((offsets + problem.size).max())
        if best is None or height < best[1]:
            best = offsets, height
        if height <= bound or now() > deadline:
            break
    assert best is not None  # the first rule always runs
    return best


def _minimise(parts: list[_Part], deadline: float) -> None:
    """Lower the highest part until it reaches the bound of some part, or time is up."""
    # In runs of the search: two means one with each rule.
    effort = 2
    while parts and now() < deadline:
        floor = max(part.bound for part in parts)
        highest = max(parts, key=lambda part: part.height)
        if highest.height <= floor or not highest.searchable:
            return
        highest.improve(floor, effort * highest.run_decisions, deadline)
        effort *= 2


def _fit(parts: list[_Part], capacity: int, began: float, time_limit_s: float) -> None:
    deadline = began + time_limit_s
    # Small ones first, to find an impossible one as early as possible.
    for part in sorted(parts, key=lambda part: len(part.problem)):
        if part.height <= capacity:
            continue
        verdict = Verdict.IMPOSSIBLE
        if part.bound <= capacity:
            verdict = part.decide(capacity, float("inf") if part.searchable else 0, deadline)
        if verdict is not Verdict.FOUND:
            bound = max(part.bound for part in parts)
            height = max(part.height for part in parts)
            proved = verdict is Verdict.IMPOSSIBLE
            why = (
                "which was proved to be impossible"
                if proved
                else f"and {time_limit_s:g} s were not enough to find out whether they can"
                if part.searchable
                else "and there are too many buffers alive together to search"
            )
            raise CapacityError(
                f"{sum(len(part.problem) for part in parts)} buffers do not fit into a capacity of "
                f"{capacity} bytes, {why}. The lower bound is {bound}, the lowest packing found is "
                f"{height}. Raise the capacity{'' if proved else ', or the time limit'}.",
                capacity_bytes=capacity,
                lower_bound_bytes=bound,
                height_bytes=height,
                proved=proved,
            )
