"""The graph: consistent records, checked at construction, and the same data in arrays.

Names are for people and files; every key of a file is described in `docs/graph_format.md`.
Internally, ops and storages are numbered in their order, and `Graph.arrays` holds what the
algorithms need as NumPy arrays and lists of those numbers.
"""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Iterable, Sequence
from dataclasses import KW_ONLY, dataclass, field
from functools import cached_property
from typing import Any, Final

import numpy as np
import numpy.typing as npt

from ..base.errors import GraphError
from ..base.sizes import LARGEST, LONGEST_S, Fields, load, write_records
from .records import (
    ALLOCATORS,
    RESIDENT_ROLES,
    Device,
    Op,
    Storage,
    T,
    check_device,
    check_op,
    check_storage,
    data_of,
    record_of,
    require,
)

FORMAT: Final = "sn_memory.graph.v1"
# Without a device, FLOPs are converted to seconds at this speed; only ratios are meaningful.
NOMINAL_FLOPS_PER_S: Final = 1e12
# The part before the last slash of names without a module.
_NONE: Final = ("", "forward", "backward")

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]


def rounded(sizes: Ints, allocator: str) -> Ints:
    """Return sizes rounded as by an allocator, in bytes [n] int64."""
    grain = ALLOCATORS[allocator]
    return (sizes + grain - 1) // grain * grain


@dataclass(frozen=True)
class Arrays:
    """A graph in arrays: ops and storages by index. All sizes are rounded by the allocator.

    bytes : [storages] int64
    resident, keep, held : [storages] bool
    producer : [storages] int64, the op that makes it; -1 if resident
    reads : per op, the distinct storages that must be live: inputs and writes
    outputs, writes : per op, storage numbers
    version : per op, parallel to `reads`: how many in-place writes each has seen before this op
    workspace_bytes, seconds : per op, one entry per way to run it (at least one)
    source : per op: `measured`, `roofline` or `flops`
    """

    bytes: Ints
    resident: npt.NDArray[np.bool_]
    keep: npt.NDArray[np.bool_]
    held: npt.NDArray[np.bool_]
    producer: Ints
    reads: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    writes: list[tuple[int, ...]]
    version: list[tuple[int, ...]]
    workspace_bytes: list[tuple[int, ...]]
    seconds: list[tuple[float, ...]]
    source: list[str]


def _op_seconds(device: Device, op: Op, traffic_bytes: int) -> tuple[tuple[float, ...], str]:
    """Return the seconds of each way to run an op, and their source."""
    source = "measured"
    if op.seconds is not None:
        own = op.seconds
    elif op.workspaces and all(way.seconds is not None for way in op.workspaces):
        # Unused: each way has its own seconds.
        own = 0.0
    elif device.flops_per_s is not None and device.bytes_per_s is not None:
        moved = traffic_bytes if op.traffic_bytes is None else op.traffic_bytes
        speed = dict(device.flops_per_s_by_dtype).get(op.dtype, device.flops_per_s)
        # A kernel is bound by arithmetic, by memory or by its launch, whichever takes longest.
        own = max(op.flops / speed, moved / device.bytes_per_s, device.launch_s)
        source = "roofline"
    else:
        speed = device.flops_per_s or NOMINAL_FLOPS_PER_S
        # An op without FLOPs must cost something, or rebuilding it would be free.
        own, source = max(op.flops, 1.0) / speed, "flops"
    ways = tuple(own if way.seconds is None else way.seconds for way in op.workspaces)
    return ways or (own,), source


@dataclass(frozen=True)
class Graph:
    """Ops in execution order and the storages they work on; checked when made.

    Parameters
    ----------
    storages, ops
        Records; the order of the ops is a valid execution order.
    name
        For reports.
    device
        Speeds; see Device.
    allocator
        How sizes are rounded: `none`, `torch` to 512 bytes, `tensorflow` to 256.
    unplanned_peak_bytes
        The peak of the original step without a plan, if that is larger than the graph's own peak;
        percentages of a budget refer to it. None means the graph's own peak.

    Raises
    ------
    GraphError
        Names the op or storage and the problem.

    Examples
    --------
    >>> graph = Graph(
    ...     [Storage("x", 8, "input"), Storage("h", 4), Storage("y", 2, keep=True)],
    ...     [Op("f", ("x",), ("h",), seconds=1.0), Op("g", ("h",), ("y",), seconds=1.0)],
    ... )
    >>> graph.base_bytes, graph.arrays.producer.tolist()
    (8, [-1, 0, 1])
    """

    storages: Sequence[Storage]
    ops: Sequence[Op]
    _: KW_ONLY
    name: str = ""
    device: Device = field(default_factory=Device)
    allocator: str = "none"
    unplanned_peak_bytes: int | None = None

    def __post_init__(self) -> None:
        # A frozen dataclass refuses `self.ops = ...` here as well.
        vars(self).update(storages=tuple(self.storages), ops=tuple(self.ops))
        # Computed now, not at first use, so that every existing graph has been checked.
        _ = self.arrays

    @cached_property
    def arrays(self) -> Arrays:
        """The graph in arrays."""
        return _numbered(self)

    @cached_property
    def op_index(self) -> dict[str, int]:
        """The number of each op, by name."""
        return {op.name: index for index, op in enumerate(self.ops)}

    @cached_property
    def storage_index(self) -> dict[str, int]:
        """The number of each storage, by name."""
        return {storage.name: number for number, storage in enumerate(self.storages)}

    @cached_property
    def base_bytes(self) -> int:
        """Bytes of all resident storages, which are live under any plan."""
        return int(self.arrays.bytes[self.arrays.resident].sum())

    @cached_property
    def seconds_sources(self) -> dict[str, int]:
        """Number of ops by the source of their seconds: measured, roofline or flops."""
        return dict(Counter(self.arrays.source))

    @staticmethod
    def from_json(source: str | os.PathLike[str]) -> Graph:
        """Read a graph from a path, or from JSON text (anything that starts with a brace).

        Raises GraphError with the line (if not JSON) or the key (if invalid).
        """
        row = Fields(load(source, GraphError, "graph"), "graph", GraphError)
        if (version := row.text("format")) != FORMAT:
            raise row.fail("format", version, f'"{FORMAT}"')
        device = row.child("device")
        graph = Graph(
            _records(Storage, row, "storages"),
            _records(Op, row, "ops"),
            name=row.text("name", ""),
            device=Device() if device is None else record_of(Device, device),
            allocator=row.text("allocator", "none"),
            unplanned_peak_bytes=row.integer("unplanned_peak_bytes", None),
        )
        row.done()
        return graph

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the graph as JSON text, one record per line; also write it to `path` if given."""
        head: dict[str, Any] = {
            "format": FORMAT,
            "name": self.name,
            "allocator": self.allocator,
            "device": data_of(self.device),
        }
        if self.unplanned_peak_bytes is not None:
            head["unplanned_peak_bytes"] = self.unplanned_peak_bytes
        lists = {"storages": map(data_of, self.storages), "ops": map(data_of, self.ops)}
        return write_records(head, lists, path)


def _records(kind: type[T], row: Fields, key: str) -> list[T]:
    items = enumerate(row.items(key))
    return [record_of(kind, Fields(item, f"{key}[{at}]", GraphError)) for at, item in items]


def _numbered(graph: Graph) -> Arrays:
    """Check a graph and return its arrays; raise GraphError naming the record."""
    _check_records(graph)
    index, storages = graph.storage_index, graph.storages
    count = len(storages)
    producer, written = [-1] * count, [0] * count
    reads, outputs, writes, version = [], [], [], []
    spaces, seconds, source = [], [], []

    def numbered(names: tuple[str, ...], where: str) -> tuple[int, ...]:
        for name in names:
            if name not in index:
                raise GraphError(
                    f"{where}: there is no storage named {name!r}; add it to storages."
                )
        return tuple(index[name] for name in names)

    for at, op in enumerate(graph.ops):
        where = f"ops[{at}] ({op.name})"
        check_op(op, where)
        inputs = numbered(op.inputs, f"{where}.inputs")
        created = numbered(op.outputs, f"{where}.outputs")
        changed = tuple(dict.fromkeys(numbered(op.writes, f"{where}.writes")))
        needed = tuple(dict.fromkeys((*inputs, *changed)))
        for number in needed:
            if producer[number] < 0 and not storages[number].resident:
                raise GraphError(
                    f"{where}: uses {storages[number].name!r}, which no op has made yet. Put its "
                    "op first, or give it a resident role."
                )
        reads.append(needed)
        # Before its own writes are counted: an op reads the version that it replaces.
        version.append(tuple(written[number] for number in needed))
        for number in created:
            name, role = storages[number].name, storages[number].role
            if storages[number].resident:
                raise GraphError(
                    f"{where}.outputs: {name!r} is resident ({role}); an op that changes it names "
                    "it under writes."
                )
            if producer[number] >= 0:
                raise GraphError(
                    f"{where}.outputs: {name!r} is made by "
                    f"{graph.ops[producer[number]].name!r} already; name it under writes, or give "
                    "the second one a storage of its own."
                )
            if number in needed:
                raise GraphError(f"{where}: {name!r} is both read and made; use writes.")
            producer[number] = at
        # Everything the op names is checked; later ops see its writes.
        for number in changed:
            written[number] += 1
        outputs.append(created)
        writes.append(changed)
        spaces.append([way.bytes for way in op.workspaces] or [0])
        # Unrounded bytes: the allocator's padding is not moved.
        traffic = sum(storages[number].bytes for number in (*needed, *created))
        ways, origin = _op_seconds(graph.device, op, traffic)
        seconds.append(ways)
        source.append(origin)
    for at, record in enumerate(storages):
        if producer[at] < 0 and not record.resident:
            raise GraphError(
                f"storages[{at}] ({record.name}): no op makes it. Give it a resident role "
                f"({', '.join(RESIDENT_ROLES)}), or remove it."
            )
    # All ways of all ops in one NumPy call; `sizes` below splits them again.
    flat = rounded(np.array([size for ways in spaces for size in ways], np.int64), graph.allocator)
    held = rounded(np.array([storage.bytes for storage in storages], np.int64), graph.allocator)
    _check_sums(graph, held.tolist(), flat.tolist(), map(max, seconds))
    sizes = iter(flat.tolist())
    return Arrays(
        bytes=held,
        resident=np.array([storage.resident for storage in storages], bool),
        keep=np.array([storage.keep for storage in storages], bool),
        held=np.array([storage.held for storage in storages], bool),
        producer=np.array(producer, np.int64),
        reads=reads,
        outputs=outputs,
        writes=writes,
        version=version,
        workspace_bytes=[tuple(next(sizes) for _ in ways) for ways in spaces],
        seconds=seconds,
        source=source,
    )


def _check_records(graph: Graph) -> None:
    """Raise GraphError for records that are invalid by themselves."""
    known = f"one of {', '.join(ALLOCATORS)}"
    require(graph.allocator in ALLOCATORS, "graph.allocator", graph.allocator, known)
    check_device(graph.device)
    for at, storage in enumerate(graph.storages):
        check_storage(storage, f"storages[{at}] ({storage.name})")
    for kind, records in (("storages", graph.storages), ("ops", graph.ops)):
        for name, count in Counter(record.name for record in records).items():
            if count > 1:
                raise GraphError(f"{kind}: the name {name!r} is used twice.")


def _check_sums(
    graph: Graph, sizes: Iterable[int], spaces: Iterable[int], seconds: Iterable[float]
) -> None:
    """Raise GraphError for sizes or seconds whose sums are too large.

    sizes, spaces : of storages and workspaces, rounded by the allocator
    seconds : of the slowest way of each op
    """
    held = sum(sizes)
    total = held + sum(spaces)
    if total >= LARGEST:
        raise GraphError(
            f"graph: all storages and workspaces together have {total} bytes, "
            "expected less than 2**62. Look for sizes in a wrong unit."
        )
    device, count = graph.device, len(graph.storages)
    # At most, each storage is copied out and back.
    time = sum(seconds) + 2 * count * device.transfer_latency_s
    for speed in (device.to_host_bytes_per_s, device.to_device_bytes_per_s):
        time += held / speed if speed is not None else 0.0
    # `not <=` instead of `>`, which would let NaN pass.
    if not time <= LONGEST_S:
        raise GraphError(
            f"graph: all ops and transfers together take {time!r} s, expected 2**62 at most. Look "
            "for seconds in a wrong unit, or for speeds near 0."
        )


def module_of(graph: Graph, op: str) -> str:
    """Return the path of the module that an op, by name, belongs to; empty if unknown.

    Forward ops have it in their names (`layer1.0.conv1/convolution#3`), as have TensorFlow's
    gradients. An op of torch's backward pass belongs to the module whose parameter it reads, or
    else to the one whose forward op made the latest of its inputs.
    """
    if op not in graph.op_index:
        return ""
    path = _path(op)
    at = graph.op_index[op]
    if path or graph.ops[at].phase == "forward":
        return path
    reads, arrays = graph.arrays.reads[at], graph.arrays
    for storage in reads:
        record = graph.storages[storage]
        if record.role == "parameter" and "." in record.name:
            return record.name.rpartition(".")[0]
    # The last maker first; resident storages have none, which is -1.
    makers = sorted((int(arrays.producer[index]) for index in reads), reverse=True)
    ops = [graph.ops[index] for index in makers if index >= 0]
    paths = (_path(record.name) for record in ops if record.phase == "forward")
    return next(filter(None, paths), "")


def _path(name: str) -> str:
    head = name.removeprefix("gradient_tape/").rpartition("/")[0]
    return "" if head in _NONE else head
