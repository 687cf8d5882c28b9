"""The loops of the search in the C++ extension (csrc/memory), called with the holes of a graph.

`tests/oracles` has them in plain Python, some fifty times slower; tests compare the two bit by bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any

import numpy as np

from ..base import native
from ..base.clock import spend
from ..graph.graph import Ints, Ints32
from ..graph.holes import Holes

Moves = Mapping[int, tuple[int, int]]
# When a search is to end: what says so, or units of work.
Until = Callable[[], bool] | int
# Runs, the op before which each happens, intervals, live bytes, host copies, seconds: see Schedule.
Simulated = tuple[
    list[int],
    list[int],
    Ints32,
    Ints,
    list[tuple[int, int, int, int]],
    float,
]


class Compiled:
    """The holes of a graph in the extension. For one thread at a time.

    Parameters
    ----------
    core
        The extension.
    holes
        What it is to work on.
    """

    def __init__(self, core: Any, holes: Holes) -> None:
        arrays, last = holes.graph.arrays, len(holes.graph.ops)
        self._core = core
        self._tables = core.tables(
            _ragged(arrays.reads),
            _ragged(arrays.outputs),
            _ragged(holes.needs),
            _ragged(holes.touched),
            _ragged(holes.chain),
            _column(holes.first),
            _column(holes.storage),
            _column(holes.start),
            _column(holes.end),
            _column(int(min(op, last)) for op in holes.expires),
            _column(holes.bytes),
            _column(holes.workspace),
            np.array(holes.seconds, np.float64),
            arrays.resident.astype(np.int64),
            arrays.keep.astype(np.int64),
            _column(holes.rebuildable),
            _column(holes.stays),
            holes.graph.base_bytes,
        )
        self._leaves = _column(map(holes.may_leave, range(holes.count)))
        self._dear = sum(holes.seconds)
        # Ops, one more for the end, and KEEP, which is -1, at its end.
        self._numbers = [*range(last + 1), -1]

    def simulate(self, choice: Sequence[int], moves: Moves | None) -> Simulated | None:
        """Return what `simulate.simulate` makes a Schedule of; None for an impossible choice."""
        found = self._core.simulate(self._tables, _column(choice), _moves(moves))
        if found is None:
            return None
        ops, at, intervals, live, host_copies, seconds = found
        return (
            self._listed(np.frombuffer(ops, np.int32)),
            self._listed(np.frombuffer(at, np.int32)),
            np.frombuffer(intervals, np.int32).reshape(-1, 3),
            np.frombuffer(live, np.int64),
            [
                (s, a, b, c)
                for _, s, a, b, c in np.frombuffer(host_copies, np.int32).reshape(-1, 5).tolist()
            ],
            seconds,
        )

    def fit(
        self,
        choice: Sequence[int],
        budget_bytes: int,
        late: Until,
        moves: Moves | None,
        rounds: int,
        factors: Sequence[float],
    ) -> list[int] | None:
        """Return the choice that `greedy.fit` finds."""
        held = _column(choice)
        weights = np.array(factors, np.float64)
        found, work = self._core.fit(
            self._tables, held, _moves(moves), weights, budget_bytes, self._dear, rounds, late
        )
        spend(work)
        return self._listed(held) if found else None

    def _listed(self, numbers: Ints | Ints32) -> list[int]:
        """Return numbers of ops, or KEEP, as a list; equal ones are one object in all lists.

        Many schedules of one graph are held at a time, and a number of its own takes 28 bytes.
        """
        return list(map(self._numbers.__getitem__, numbers.tolist()))

    def trim(
        self,
        choice: Sequence[int],
        order: Sequence[int],
        budget_bytes: int,
        late: Until,
        moves: Moves | None,
        *,
        filtered: bool,
    ) -> list[int]:
        """Return the choice that `greedy.trim` ends with, holes tried in this order."""
        held = _column(choice)
        work = self._core.trim(
            self._tables, held, _moves(moves), _column(order), budget_bytes, filtered, late
        )
        spend(work)
        return self._listed(held)

    def anneal(
        self,
        choice: Sequence[int],
        moved: Sequence[int],
        budget_bytes: int,
        late: Until,
        lanes: tuple[float, float, float, int],
        heat: tuple[float, float],
        *,
        tries: int,
        seed: int,
        recompute: bool,
        wait: bool,
    ) -> tuple[list[int], list[int]]:
        """Return the choice that `anneal.anneal` ends with, and what is moved.

        `moved`, per hole: 0, or one more than the copies that ops wait for.
        """
        held, away = _column(choice), _column(moved)
        work = self._core.anneal(
            self._tables, held, away, self._leaves,
            budget_bytes, tries, seed, recompute, wait, lanes, heat, late,
        )  # fmt: skip
        spend(work)
        return self._listed(held), away.tolist()


def compiled(holes: Holes) -> Compiled:
    """Return holes in the extension, handed over once."""
    if "compiled" not in holes.memo:
        holes.memo["compiled"] = Compiled(native.core(), holes)
    found: Compiled = holes.memo["compiled"]
    return found


def _column(values: Iterable[int]) -> Ints:
    return np.array(list(values), np.int64)


def _ragged(rows: Sequence[Sequence[int]]) -> tuple[Ints, Ints]:
    return _column(map(len, rows)), _column(chain.from_iterable(rows))


def _moves(moves: Moves | None) -> Ints:
    return np.array([(hole, *ends) for hole, ends in (moves or {}).items()], np.int64).reshape(-1)
