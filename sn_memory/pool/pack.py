"""Addresses in one arena for buffers whose lifetimes are known: `pack` and `arrange`.

An allocator that sees requests one by one leaves holes; measured on the files of MiniMalloc it
needs 1.2 to 1.9 times the bytes that are ever live. Whoever plans ahead knows all lifetimes, and
can do what this module does, in this order: the lower bound (the largest sum of live sizes), the
best of several greedy rules, and if they do not meet, an exact search (`pool/search.py`).

The search is restarted with other orders until one is quick: run times of such searches vary by
factors of thousands with the order, and most problems have some orders that take milliseconds. The
limit of a run grows, so that in the end one either finds a packing or proves that there is none.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..base.clock import counting, now, spend
from ..base.errors import CapacityError, PackError
from ..base.progress import report_progress
from .problem import Ints, Problem, read_problem
from .search import RULES, UNIT, Rule, Searcher, Verdict, first_fit, order_by

# Lists of neighbours for more pairs than this would fill gigabytes; greedy rules need none.
_SEARCHABLE_PAIRS: Final = 4_000_000
# Decisions, and buffers looked at, between two looks at the clock: a millisecond.
_SLICE: Final = 64
_WORK: Final = 20_000
# Units of work of a decision, and of a buffer that first fit puts somewhere.
_DECISION: Final = 300
_PUT: Final = 20
# A run ends after 500 decisions and this many for each buffer; every few runs the limit grows.
_RUN: Final = 5
_GROWTH: Final = 1.5
# The first runs follow plain keys; later ones disturb them by this standard deviation.
_NOISE: Final = 0.2


@dataclass(frozen=True)
class Packing:
    """Where buffers go, and how good that is.

    Parameters
    ----------
    offsets
        One for each buffer, in the order given, in bytes.
    height
        The bytes of the arena: the largest end of any buffer.
    lower_bound
        No packing is lower.
    seconds
        Seconds it took, counted as the time limit is.
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
    """Return an offset for each buffer, so that no two that are alive together overlap.

    Parameters
    ----------
    buffers
        Rows of (lower, upper, size) or (lower, upper, size, alignment), whole numbers: alive in
        the half-open [lower, upper), `size` bytes, offset a multiple of `alignment`.
    capacity
        Bytes of the arena. None: as few as can be found in the time.
    time_limit_s
        Seconds in all, on the wall, as everywhere in sn_memory. The first greedy rule is carried to
        its end whatever they are.
    deterministic
        Count work in place of seconds, as `plan_graph` does: what is found is the same on any
        machine, whatever its load.

    Raises
    ------
    PackError
        A buffer that makes no sense, or a setting out of range.
    CapacityError
        With a capacity: no packing within it was found. `proved` says whether there is none or
        only the time ran out.

    Examples
    --------
    At no moment more than eight bytes are live, and eight are enough:

    >>> pack([(0, 2, 4), (1, 3, 4), (2, 4, 4)], capacity=8)
    [0, 4, 0]
    """
    found = arrange(buffers, capacity, time_limit_s=time_limit_s, deterministic=deterministic)
    return list(found.offsets)


def arrange(
    buffers: Iterable[Sequence[int]] | npt.NDArray[Any],
    capacity: int | None = None,
    *,
    time_limit_s: float = 10.0,
    deterministic: bool = False,
) -> Packing:
    """Return what `pack` returns together with its height and the lower bound.

    Takes and raises what `pack` does. The lower bound is the largest sum of live sizes, or what the
    search has proved beyond it.

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
    # Empty buffers lie anywhere; what is left is packed part by part.
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
        self.bound = -(-problem.lower_bound // self.grain) * self.grain
        self.offsets, self.height = _best_greedy(problem, self.bound, deadline)
        self.searchable = problem.pairs() <= _SEARCHABLE_PAIRS
        self.run_decisions = 500 + _RUN * len(problem)
        self._searcher: Searcher | None = None
        self._weights = np.full(problem.sections, UNIT, np.int64)
        self._runs = 0

    def decide(self, capacity: int, effort: float, deadline: float) -> Verdict:
        """Search for a packing within `capacity`; `effort` limits the decisions.

        A packing that is found replaces the one so far, a proof raises the bound.
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
                # Cut within a decision, it has done all that a slice may do.
                made = search.spent - before
                spend(_WORK if made < slice_ else _DECISION * made)
            effort -= search.spent
            # Weights fade, so that what hindered the last runs counts most.
            self._weights = UNIT + (search.weights() - UNIT) // 2
            if verdict is Verdict.FOUND:
                self.offsets = search.offsets()
                self.height = int((self.offsets + self.problem.size).max())
                return verdict
            if verdict is Verdict.IMPOSSIBLE:
                self.bound = max(self.bound, (capacity // self.grain + 1) * self.grain)
                return verdict
        return Verdict.UNFINISHED

    def improve(self, floor: int, effort: float, deadline: float) -> None:
        """Halve the distance between the bound and the height, as far as `effort` allows."""
        low = max(self.bound, floor)
        capacity = low
        while low < self.height and now() < deadline:
            verdict = self.decide(capacity, effort, deadline)
            if verdict is not Verdict.FOUND:
                low = capacity + self.grain
            middle = (low + self.height) // 2
            capacity = max(low, middle - middle % self.grain)


_KEYS: Final = ("area", "size", "length")


def _ranks(problem: Problem, round_: int) -> Ints:
    """Which of two buffers equally low goes first: the rank of each, [n] int64."""
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
    assert best is not None  # there are rules, and the first one always runs
    return best


def _minimise(parts: list[_Part], deadline: float) -> None:
    """Lower the highest part until it meets the bound of some part, or time is up."""
    # In runs of the search: two is one with each rule.
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
    for part in sorted(parts, key=lambda part: len(part.problem)):
        if part.height <= capacity:
            continue
        verdict = Verdict.IMPOSSIBLE
        if part.bound <= capacity:
            verdict = part.decide(capacity, float("inf") if part.searchable else 0, deadline)
        if verdict is not Verdict.FOUND:
            bound = max(each.bound for each in parts)
            height = max(each.height for each in parts)
            proved = verdict is Verdict.IMPOSSIBLE
            why = (
                "which was proved to be impossible"
                if proved
                else f"and {time_limit_s:g} s were not enough to find out whether they can"
                if part.searchable
                else "and there are too many buffers alive together to search"
            )
            raise CapacityError(
                f"{sum(len(each.problem) for each in parts)} buffers do not fit into a capacity of "
                f"{capacity} bytes, {why}. The lower bound is {bound}, the lowest packing found is "
                f"{height}. Raise the capacity{'' if proved else ', or the time limit'}.",
                capacity_bytes=capacity,
                lower_bound_bytes=bound,
                height_bytes=height,
                proved=proved,
            )
