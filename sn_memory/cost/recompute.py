"""What it costs to rebuild a storage, given what is there and what runs again anyway.

The price of letting a storage go is that of its *closure*: its own ops, and those of every input
that would not be there either. Prices change with every decision, because a rebuilt input is held
for its other uses as well.
"""

from __future__ import annotations

from ..graph.holes import Holes
from .schedule import Schedule


class Presence:
    """What a schedule has on the device when, and what it runs again when, by op of the graph."""

    def __init__(self, holes: Holes, schedule: Schedule) -> None:
        self.holes = holes
        self.spans: dict[int, list[tuple[int, int]]] = {}
        for storage, first, last in schedule.intervals.tolist():
            span = (schedule.at[first], schedule.at[last])
            self.spans.setdefault(storage, []).append(span)
        # The last moment at which an op runs again.
        self.again: dict[int, int] = {
            op: at for op, at in zip(schedule.ops, schedule.at, strict=True) if op != at
        }

    def there(self, storage: int, at: int) -> bool:
        """Whether a storage is there just before op `at`."""
        return any(first < at <= last for first, last in self.spans.get(storage, ()))

    def closure_seconds(self, storage: int, at: int) -> float:
        """Return the seconds of ops to run before op `at` to make a storage that is not there.

        Ops that run again then or later anyway are free: what they make is only made earlier.
        Infinity when the storage cannot be made again.
        """
        holes = self.holes
        total, seen, missing = 0.0, {storage}, [storage]
        while missing:
            here = missing.pop()
            if not holes.rebuildable[here]:
                return float("inf")
            for op in holes.chain[here]:
                if op >= at:
                    break
                if self.again.get(op, -1) >= at:
                    continue
                if holes.expires[op] < at:
                    return float("inf")
                total += holes.seconds[op]
                for source in holes.graph.arrays.reads[op]:
                    if source not in seen and holes.chain[source]:
                        seen.add(source)
                        if not self.there(source, at):
                            missing.append(source)
        return total
