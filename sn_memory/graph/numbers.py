"""A graph in numbers: the checks of what comes in, and the arrays that the algorithms work on."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Final

import numpy as np
import numpy.typing as npt

from ..base.errors import GraphError
from ..base.limits import LARGEST, LONGEST_S
from .records import ALLOCATORS, ROLES, Op, Records, check_device, check_op, check_storages, twice

Ints = npt.NDArray[np.int64]
Ints32 = npt.NDArray[np.int32]
Floats = npt.NDArray[np.float64]

# With no device given, flops are turned into seconds at this speed; only ratios mean anything.
NOMINAL_FLOPS_PER_S: Final = 1e12


def rounded(sizes: Ints, allocator: str) -> Ints:
    """Return sizes as an allocator hands them out, in bytes [n] int64.

    `none` leaves them; `torch` rounds up to 512 bytes; `torch_segments` also rounds blocks of
    10 MiB and more up to 2 MiB, as torch reserves them; `tensorflow` (BFC) rounds up to 256 bytes.
    """
    if allocator == "none":
        return sizes
    grain = 256 if allocator == "tensorflow" else 512
    result = (sizes + grain - 1) // grain * grain
    if allocator == "torch_segments":
        large = sizes >= 10 << 20
        result[large] = -(-sizes[large] // (2 << 20)) * (2 << 20)
    return result


@dataclass(frozen=True)
class Arrays:
    """A graph in numbers: ops and storages by index. All sizes are rounded by the allocator.

    Parameters
    ----------
    bytes
        [storages] int64.
    resident, keep, held
        [storages] bool.
    producer
        [storages] int64, the op that makes it; -1 where resident.
    reads
        Per op, the distinct storages that must be there: inputs and writes.
    outputs, writes, releases
        Per op, storage numbers.
    version
        Per op, beside `reads`: how many in-place writes each of them has seen before this op.
    workspace_bytes, seconds
        Per op, one entry per way to carry it out (at least one).
    source
        Per op: `measured`, `roofline` or `flops`.
    """

    bytes: Ints
    resident: npt.NDArray[np.bool_]
    keep: npt.NDArray[np.bool_]
    held: npt.NDArray[np.bool_]
    producer: Ints
    reads: list[tuple[int, ...]]
    outputs: list[tuple[int, ...]]
    writes: list[tuple[int, ...]]
    releases: list[tuple[int, ...]]
    version: list[tuple[int, ...]]
    workspace_bytes: list[tuple[int, ...]]
    seconds: list[tuple[float, ...]]
    source: list[str]


def _op_seconds(graph: Records, op: Op, traffic_bytes: int) -> tuple[tuple[float, ...], str]:
    """Return the seconds of each way to carry an op out, and where they come from."""
    device, source = graph.device, "measured"
    if op.seconds is not None:
        own = op.seconds
    elif op.workspaces and all(way.seconds is not None for way in op.workspaces):
        own = 0.0
    elif device.flops_per_s is not None and device.bytes_per_s is not None:
        moved = traffic_bytes if op.traffic_bytes is None else op.traffic_bytes
        speed = dict(device.flops_per_s_by_dtype).get(op.dtype, device.flops_per_s)
        own = max(op.flops / speed, moved / device.bytes_per_s, device.launch_s)
        source = "roofline"
    else:
        speed = device.flops_per_s or NOMINAL_FLOPS_PER_S
        # An op without flops still costs something, or it would be rebuilt for nothing.
        own, source = max(op.flops, 1.0) / speed, "flops"
    ways = tuple(own if way.seconds is None else way.seconds for way in op.workspaces)
    return ways or (own,), source


def number(graph: Records) -> Arrays:
    """Check a graph and return it in numbers; raises GraphError naming the record."""
    if graph.allocator not in ALLOCATORS:
        raise GraphError(
            f"graph: got allocator {graph.allocator!r}, expected one of {', '.join(ALLOCATORS)}."
        )
    check_device(graph.device)
    check_storages(graph)
    index = graph.storage_index
    if len(graph.op_index) != len(graph.ops):
        raise GraphError(f"ops: the name {twice(op.name for op in graph.ops)!r} is there twice.")
    raw = [storage.bytes for storage in graph.storages]
    resident = [storage.resident for storage in graph.storages]
    count = len(raw)
    producer, written, released = [-1] * count, [0] * count, [-1] * count
    reads, outputs, writes, releases, version = [], [], [], [], []
    spaces, seconds, source = [], [], []

    def numbered(name: str, where: str) -> int:
        found = index.get(name)
        if found is None:
            raise GraphError(
                f"{where}: there is no storage or alias named {name!r}; add it to storages."
            )
        return found

    for at, op in enumerate(graph.ops):
        where = f"ops[{at}] ({op.name})"
        check_op(op, where)
        inputs = [numbered(name, f"{where}.inputs") for name in op.inputs]
        changed = tuple(dict.fromkeys(numbered(name, f"{where}.writes") for name in op.writes))
        needed = tuple(dict.fromkeys((*inputs, *changed)))
        freed = tuple(dict.fromkeys(numbered(name, f"{where}.releases") for name in op.releases))
        for storage in (*needed, *freed):
            if producer[storage] < 0 and not resident[storage] and storage not in _made(op, index):
                raise GraphError(
                    f"{where}: uses {graph.storages[storage].name!r}, which no op has made "
                    "yet. Put its op first, or give it a resident role."
                )
            if released[storage] >= 0:
                raise GraphError(
                    f"{where}: uses {graph.storages[storage].name!r}, which "
                    f"{graph.ops[released[storage]].name!r} released. Move the release."
                )
        reads.append(needed)
        version.append(tuple(written[storage] for storage in needed))
        made = tuple(numbered(name, f"{where}.outputs") for name in op.outputs)
        for storage in made:
            name = graph.storages[storage].name
            if resident[storage]:
                raise GraphError(
                    f"{where}.outputs: {name!r} is resident ({graph.storages[storage].role}); an "
                    "op that changes it names it under writes."
                )
            if producer[storage] >= 0:
                raise GraphError(
                    f"{where}.outputs: {name!r} is made by "
                    f"{graph.ops[producer[storage]].name!r} already; name it under writes, or give "
                    "the second one a storage of its own."
                )
            if storage in needed:
                raise GraphError(f"{where}: {name!r} is both read and made; use writes.")
            producer[storage] = at
        for storage in changed:
            written[storage] += 1
        for storage in freed:
            if resident[storage] or graph.storages[storage].keep:
                raise GraphError(
                    f"{where}.releases: {graph.storages[storage].name!r} is resident or kept to "
                    "the end; it cannot be released."
                )
            released[storage] = at
        outputs.append(made)
        writes.append(changed)
        releases.append(freed)
        spaces.append([way.bytes for way in op.workspaces] or [0])
        traffic = sum(raw[storage] for storage in needed) + sum(raw[storage] for storage in made)
        ways, origin = _op_seconds(graph, op, traffic)
        seconds.append(ways)
        source.append(origin)
    for at, record in enumerate(graph.storages):
        if producer[at] < 0 and not record.resident:
            raise GraphError(
                f"storages[{at}] ({record.name}): no op makes it. Give it a resident role "
                f"({', '.join(ROLES[:4])}), or remove it."
            )
    flat = rounded(np.array([size for ways in spaces for size in ways], np.int64), graph.allocator)
    held = rounded(np.array(raw, np.int64), graph.allocator)
    _check_sums(graph, held.tolist(), flat.tolist(), map(max, seconds))
    sizes = iter(flat.tolist())
    return Arrays(
        bytes=held,
        resident=np.array(resident, bool),
        keep=np.array([storage.keep for storage in graph.storages], bool),
        held=np.array([storage.held for storage in graph.storages], bool),
        producer=np.array(producer, np.int64),
        reads=reads,
        outputs=outputs,
        writes=writes,
        releases=releases,
        version=version,
        workspace_bytes=[tuple(next(sizes) for _ in ways) for ways in spaces],
        seconds=seconds,
        source=source,
    )


def _made(op: Op, index: Mapping[str, int]) -> set[int]:
    # Only reached for a storage nobody made yet: an op may release what it makes itself.
    return {index[name] for name in op.outputs if name in index and name in op.releases}


def _check_sums(
    graph: Records, sizes: Iterable[int], spaces: Iterable[int], seconds: Iterable[float]
) -> None:
    """Raise GraphError for sizes or seconds that are too large together.

    sizes, spaces : of storages and workspaces, as the allocator rounds them
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
    time = sum(seconds) + 2 * count * device.transfer_latency_s
    for speed in (device.to_host_bytes_per_s, device.to_device_bytes_per_s):
        time += held / speed if speed is not None else 0.0
    if not time <= LONGEST_S:
        raise GraphError(
            f"graph: all ops and transfers together take {time!r} s, expected 2**62 at most. Look "
            "for seconds in a wrong unit, or for speeds near 0."
        )
