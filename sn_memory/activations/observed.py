"""What was seen of all that a model saves, and the bytes it takes at given bits.

Several saved tensors may lie in one memory: it is counted once. What lies inside a unit that runs
again is not kept, but what the unit was given is.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping

from .rerun import INPUT, Unit, is_inside
from .rows import Row, compressed_bytes

Groups = dict[str, list[Row]]


class Observed:
    """Rows by key, bytes that no choice changes by key, and units by name.

    Parameters
    ----------
    overflow_limit
        Overflows after which a tensor is kept as it is.
    """

    def __init__(self, overflow_limit: int) -> None:
        self.overflow_limit = overflow_limit
        self.rows: dict[str, Row] = {}
        self.others: dict[str, int] = {}
        self.units: dict[str, Unit] = {}

    def is_free(self, row: Row) -> bool:
        """Whether its bits can be chosen."""
        return row.bits is not None and row.overflows < self.overflow_limit

    @property
    def free(self) -> list[Row]:
        return [row for row in self.rows.values() if self.is_free(row)]

    def groups(self, again: frozenset[str]) -> tuple[Groups, Groups]:
        """Groups that are compressed if these units run again: linear in all their rows, or not."""
        found: Groups = {}
        for row in self.free:
            if row.unit is None and not is_inside(row.key, again):
                found.setdefault(row.group, []).append(row)
        inputs = {group: n for name in again for group, n in self._inputs(name)}
        linear: Groups = {}
        rest: Groups = {group: [Row(group, n, 8, 0.0)] for group, n in inputs.items()}
        for group, rows in found.items():
            here = linear if group not in rest and all(row.linear for row in rows) else rest
            here[group] = rows
        return linear, rest

    def _inputs(self, name: str) -> Iterable[tuple[str, int]]:
        """What a unit was given: as it was observed or, without, as it was compressed."""
        if name in self.units:
            return self.units[name].inputs.items()
        keys = (key for key in self.rows if key.startswith(f"{name}/{INPUT}/"))
        return [(self.rows[key].group, self.rows[key].n) for key in keys]

    def held(self, again: frozenset[str], linear_bits: int, nonlinear_bits: int) -> int:
        """Bytes kept if these units run again."""
        exact = {
            row.group: compressed_bytes(row.n, None)
            for row in self.rows.values()
            if not self.is_free(row) and not is_inside(row.key, again)
        }
        linear, rest = self.groups(again)
        compressed = (
            compressed_bytes(rows[0].n, bits)
            for groups, bits in ((linear, linear_bits), (rest, nonlinear_bits))
            for rows in groups.values()
        )
        others = self._others(lambda key: not is_inside(key, again))
        return others + sum(exact.values()) + sum(compressed)

    def held_at(self, again: frozenset[str], bits: Mapping[str, int | None]) -> int:
        """Bytes kept if these units run again, at bits by key."""
        rows = (
            row
            for row in self.rows.values()
            if not is_inside(row.key, again) and (row.unit is None or row.unit in again)
        )
        return self._others(lambda key: not is_inside(key, again)) + _together(rows, bits)

    def inside(self, name: str, linear_bits: int, nonlinear_bits: int) -> int:
        """Bytes of what a unit saves, while it runs again."""
        rows = [it for it in self.rows.values() if it.unit is None and is_inside(it.key, {name})]
        bits: dict[str, int | None] = {
            row.key: (linear_bits if row.linear else nonlinear_bits) if self.is_free(row) else None
            for row in rows
        }
        return self._others(lambda key: is_inside(key, {name})) + _together(rows, bits)

    def _others(self, counts: Callable[[str], bool]) -> int:
        return sum(size for key, size in self.others.items() if counts(key))


def _together(rows: Iterable[Row], bits: Mapping[str, int | None]) -> int:
    """Bytes of rows, each memory once, at the most bits any row of it has."""
    sizes: dict[str, int] = {}
    for row in rows:
        size = compressed_bytes(row.n, bits[row.key])
        sizes[row.group] = max(sizes.get(row.group, 0), size)
    return sum(sizes.values())
