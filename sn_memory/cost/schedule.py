"""What a choice leads to: runs in order, who is there when, live bytes."""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property

from ..graph.graph import Ints, Ints32


@dataclass(frozen=True)
class HostCopy:
    """One stay on the host, in run numbers.

    Copied out after `left`, its device memory given back after `freed`, taken again before
    `fetched`.
    """

    storage: int
    left: int
    freed: int
    fetched: int


@dataclass(frozen=True)
class Schedule:
    """What a choice leads to.

    Parameters
    ----------
    ops
        [runs] op numbers in the order they run.
    at
        [runs] the op of the graph's order before which (or as which) each run happens.
    intervals
        [n, 3] int32: storage, first run, last run during which it is on the device.
    live_bytes
        [runs] int64.
    run_seconds
        Summed seconds of all runs; waits for transfers come on top.
    host_copies
        The stays on the host.
    ways
        [runs] the way each op is carried out; empty: all by default.
    """

    ops: list[int]
    at: list[int]
    intervals: Ints32
    live_bytes: Ints
    run_seconds: float
    host_copies: tuple[HostCopy, ...] = ()
    ways: tuple[int, ...] = ()

    @cached_property
    def peak_bytes(self) -> int:
        return int(self.live_bytes.max(initial=0))

    @cached_property
    def starts(self) -> dict[int, list[int]]:
        """Per storage, the runs at which its intervals begin."""
        found: dict[int, list[int]] = {}
        for storage, first, _ in self.intervals.tolist():
            found.setdefault(storage, []).append(first)
        return found


class Impossible(Exception):  # noqa: N818 - says what the choice is; caught by every caller
    """A choice that cannot be carried out: a rebuild would need what cannot be made again."""
