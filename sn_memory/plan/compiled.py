"""The loops of the search in C++: the same answers as their Python twins, some fifty times faster.

`simulate.lower_in_python`, `greedy.fit_in_python`, `greedy.trim_in_python` and the loop of `anneal`
are the twins: what runs where there is no compiler. The tests compare them with what comes from
here.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from ..base import native
from ..graph.idle import Gaps
from ..graph.numbers import Ints

Moves = Mapping[int, tuple[int, int]]
# Runs, the op before which each happens, intervals, live bytes, trips, seconds: see Schedule.
Lowered = tuple[
    list[int],
    list[int],
    list[tuple[int, int, int]],
    Ints,
    list[tuple[int, int, int, int]],
    float,
]


class Compiled:
    """The gaps of a graph in the extension. For one thread at a time.

    Parameters
    ----------
    core
        The extension.
    gaps
        What it is to work on.
    """

    def __init__(self, core: Any, gaps: Gaps) -> None:
        arrays, last = gaps.graph.arrays, len(gaps.graph.ops)
        self._core = core
        self._tables = core.tables(
            _ragged(arrays.reads),
            _ragged(arrays.outputs),
            _ragged(gaps.needs),
            _ragged(gaps.touched),
            _ragged(gaps.chain),
            _column(gaps.first),
            _column(gaps.storage),
            _column(gaps.start),
            _column(gaps.end),
            _column(int(min(op, last)) for op in gaps.expires),
            _column(gaps.bytes),
            _column(gaps.workspace),
            np.array(gaps.seconds, np.float64),
            arrays.resident.astype(np.int64),
            arrays.keep.astype(np.int64),
            _column(gaps.rebuildable),
            _column(gaps.stays),
            gaps.graph.base_bytes,
        )
        self._dear = sum(gaps.seconds)

    def lower(self, choice: Sequence[int], moves: Moves | None) -> Lowered | None:
        """Return what `lowering.lower` makes a Schedule of; None for an impossible choice."""
        found = self._core.lower(self._tables, _column(choice), _moves(moves))
        if found is None:
            return None
        ops, at, intervals, live, trips, seconds = found
        return (
            np.frombuffer(ops, np.int32).tolist(),
            np.frombuffer(at, np.int32).tolist(),
            [(a, b, c) for a, b, c in np.frombuffer(intervals, np.int32).reshape(-1, 3).tolist()],
            np.frombuffer(live, np.int64),
            [
                (s, a, b, c)
                for _, s, a, b, c in np.frombuffer(trips, np.int32).reshape(-1, 5).tolist()
            ],
            seconds,
        )

    def fit(
        self,
        choice: Sequence[int],
        budget_bytes: int,
        late: Callable[[], bool],
        moves: Moves | None,
        rounds: int,
        factors: Sequence[float],
    ) -> list[int] | None:
        """Return the choice that `fitting.fit` finds."""
        held = _column(choice)
        weights = np.array(factors, np.float64)
        found = self._core.fit(
            self._tables, held, _moves(moves), weights, budget_bytes, self._dear, rounds, late
        )
        return held.tolist() if found else None

    def trim(
        self,
        choice: Sequence[int],
        order: Sequence[int],
        budget_bytes: int,
        late: Callable[[], bool],
        moves: Moves | None,
        *,
        filtered: bool,
    ) -> list[int]:
        """Return the choice that `fitting.trim` ends with, gaps tried in this order."""
        held = _column(choice)
        self._core.trim(
            self._tables, held, _moves(moves), _column(order), budget_bytes, filtered, late
        )
        return list(held.tolist())

    def anneal(
        self,
        choice: Sequence[int],
        moved: Sequence[bool],
        budget_bytes: int,
        late: Callable[[], bool],
        lanes: tuple[float, float, float, int],
        heat: tuple[float, float],
        *,
        tries: int,
        seed: int,
        recompute: bool,
    ) -> tuple[list[int], list[bool]]:
        """Return the choice, and per gap whether it is moved, that `annealing.anneal` ends with."""
        held, away = _column(choice), _column(moved)
        self._core.anneal(
            self._tables, held, away, budget_bytes, tries, seed, recompute, lanes, heat, late
        )
        return held.tolist(), [bool(it) for it in away.tolist()]


def compiled(gaps: Gaps) -> Compiled | None:
    """Return gaps in the extension, handed over once; None where the Python twins are to run."""
    if "compiled" not in gaps.memo:
        core = native.core()
        gaps.memo["compiled"] = None if core is None else Compiled(core, gaps)
    found: Compiled | None = gaps.memo["compiled"]
    return found


def _column(values: Iterable[int]) -> Ints:
    return np.array(list(values), np.int64)


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    return _column(map(len, rows)), _column(chain.from_iterable(rows))


def _moves(moves: Moves | None) -> Ints:
    return np.array([(gap, *ends) for gap, ends in (moves or {}).items()], np.int64).reshape(-1)
