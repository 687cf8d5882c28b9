"""The graph: records that make sense together, checked when made, and the same in numbers.

Names are for people and files. Inside, ops and storages are numbered in the order given, and
`Graph.arrays` holds what the algorithms need as NumPy arrays and plain lists of those numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import cached_property

from .json import read, text_of
from .numbers import Arrays, number
from .records import Device, Op, Records, Storage


@dataclass(frozen=True)
class Graph(Records):
    """Ops in execution order and the storages they work on; checked when made.

    Parameters
    ----------
    storages, ops
        Records; the order of the ops is the execution order that is known to work.
    name
        For reports.
    device
        Speeds; see Device.
    allocator
        How sizes are rounded: `none`, `torch`, `torch_segments`, `tensorflow`.
    aliases
        Other names of storages (views). Ops may use them.
    unplanned_peak_bytes
        The peak of the step that the graph was made from, as it runs without a plan, where the
        graph holds less by itself; percent of a budget are of it. None is the graph's own peak.

    Raises
    ------
    GraphError
        Naming the op or storage and what is wrong with it.

    Examples
    --------
    >>> graph = Graph(
    ...     [Storage("x", 8, "input"), Storage("h", 4), Storage("y", 2, keep=True)],
    ...     [Op("f", ("x",), ("h",), seconds=1.0), Op("g", ("h",), ("y",), seconds=1.0)],
    ... )
    >>> graph.base_bytes, graph.arrays.producer.tolist()
    (8, [-1, 0, 1])
    """

    def __init__(
        self,
        storages: Iterable[Storage],
        ops: Iterable[Op],
        *,
        name: str = "",
        device: Device | None = None,
        allocator: str = "none",
        aliases: Mapping[str, str] | None = None,
        unplanned_peak_bytes: int | None = None,
    ) -> None:
        values = {
            "storages": tuple(storages),
            "ops": tuple(ops),
            "name": name,
            "device": device or Device(),
            "allocator": allocator,
            "aliases": dict(aliases or {}),
            "unplanned_peak_bytes": unplanned_peak_bytes,
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)
        # Made now, not at first use: a graph that exists is a graph that makes sense.
        _ = self.arrays

    @cached_property
    def arrays(self) -> Arrays:
        """The graph in numbers."""
        return number(self)

    @cached_property
    def base_bytes(self) -> int:
        """Bytes of all resident storages: there whatever the plan."""
        return int(self.arrays.bytes[self.arrays.resident].sum())

    @cached_property
    def seconds_sources(self) -> dict[str, int]:
        """How many ops have their seconds from where: measured, roofline or flops."""
        counts: dict[str, int] = {}
        for source in self.arrays.source:
            counts[source] = counts.get(source, 0) + 1
        return counts

    @staticmethod
    def from_json(source: str | os.PathLike[str]) -> Graph:
        """Read a graph from a path, or from JSON text (anything that starts with a brace).

        Raises GraphError with the line (not JSON) or the key (JSON that makes no sense).
        """
        found = read(source)
        return Graph(
            found.storages,
            found.ops,
            name=found.name,
            device=found.device,
            allocator=found.allocator,
            aliases=found.aliases,
            unplanned_peak_bytes=found.unplanned_peak_bytes,
        )

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the graph as JSON text, one record a line; also write it to `path` if given."""
        text = text_of(self)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return text
