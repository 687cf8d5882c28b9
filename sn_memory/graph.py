"""The graph: ops in execution order and the storages they read and write. Frozen records.

Planning on tensors counts a view twice and misses in-place writes. Here the unit is the *storage*:
one block of memory. Views and other names of the same block are aliases, resolved at the door. The
words and the exact meaning of each field are in `docs/graph_format.md`; `sn_memory/check.py` is
their executable form.

Names are for people and files. Inside, ops and storages are numbered in the order given, and
`Graph.arrays` holds what the algorithms need as NumPy arrays and plain lists of those numbers.
"""

from __future__ import annotations

import os
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from .arrays import ALLOCATORS, Arrays, number
from .errors import GraphError
from .limits import is_amount, is_count

RESIDENT_ROLES: Final = ("parameter", "input", "state", "constant")


@dataclass(frozen=True, slots=True)
class Compressed:
    """What a storage becomes when held compressed: bytes, and seconds to get there and back.

    `decompress_s=None`: the ops of the backward pass read the compressed form as it is.
    """

    bytes: int
    compress_s: float
    decompress_s: float | None


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of memory.

    Parameters
    ----------
    name
        Unique among storages and aliases.
    bytes
        Its size before the allocator rounds it; 0 or more.
    role
        `parameter`, `input`, `state` and `constant` are resident: there before the first op and
        after the last. `activation`, `gradient` and `temporary` are made by exactly one op.
    keep
        It must be on the device, in its last version, when the last op has run.
    compressed
        The lossy form it may be held in, where the graph's owner allows one.
    """

    name: str
    bytes: int
    role: str = "activation"
    keep: bool = False
    compressed: Compressed | None = None

    @property
    def resident(self) -> bool:
        return self.role in RESIDENT_ROLES


@dataclass(frozen=True, slots=True)
class Workspace:
    """One way to carry an op out: scratch bytes held while it runs, and its seconds then.

    `seconds=None` takes the op's own seconds.
    """

    bytes: int
    seconds: float | None = None
    name: str = ""


@dataclass(frozen=True, slots=True)
class Op:
    """One step of the execution.

    Parameters
    ----------
    name
        Unique among ops.
    inputs, outputs, writes
        Storages read; storages allocated and made; storages changed in place (they are read too).
    releases
        Storages whose owner lets go only after this op, as logs of other tools say. The op counts
        as a use of them; no later op may use them.
    kind
        What it computes (`conv2d`, `relu`, ...), for policies and reports.
    phase
        `forward`, `backward` or `update`.
    seconds, flops, traffic_bytes
        Measured time; else arithmetic and bytes read and written (default: all storages named).
    random, replayable
        It draws random numbers; it draws the same ones when run again.
    effect, collective
        It changes something outside the graph; it meets other ranks. Neither runs twice.
    fixed, once
        It may not move past any other op; it may not run twice.
    workspaces
        Ways to carry it out; the first is the default. None: no scratch memory.
    """

    name: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
    releases: tuple[str, ...] = ()
    kind: str = ""
    phase: str = "forward"
    seconds: float | None = None
    flops: float = 0.0
    traffic_bytes: int | None = None
    random: bool = False
    replayable: bool = False
    effect: bool = False
    collective: bool = False
    fixed: bool = False
    once: bool = False
    workspaces: tuple[Workspace, ...] = ()

    @property
    def ordered(self) -> bool:
        """Whether it keeps its place among all ops of which this is true."""
        return self.effect or self.collective or self.fixed or (self.random and not self.replayable)

    @property
    def repeatable(self) -> bool:
        """Whether its flags let it run twice; in-place writes are judged by versions instead."""
        return not (
            self.effect or self.collective or self.once or (self.random and not self.replayable)
        )


@dataclass(frozen=True, slots=True)
class Device:
    """Speeds of the machine. Unknown ones are None: then what needs them is not offered.

    Parameters
    ----------
    flops_per_s, bytes_per_s
        Arithmetic and memory bandwidth, for the roofline of ops that were not measured.
    to_host_bytes_per_s, to_device_bytes_per_s, transfer_latency_s
        The two transfer lanes; each moves one storage at a time, beside the ops.
    pinned_bytes
        Host memory that offloaded storages may fill at any one time; None is no limit.
    """

    name: str = ""
    flops_per_s: float | None = None
    bytes_per_s: float | None = None
    to_host_bytes_per_s: float | None = None
    to_device_bytes_per_s: float | None = None
    transfer_latency_s: float = 0.0
    pinned_bytes: int | None = None

    @property
    def can_offload(self) -> bool:
        return self.to_host_bytes_per_s is not None and self.to_device_bytes_per_s is not None


@dataclass(frozen=True)
class Graph:
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

    storages: tuple[Storage, ...]
    ops: tuple[Op, ...]
    name: str = ""
    device: Device = field(default_factory=Device)
    allocator: str = "none"
    aliases: Mapping[str, str] = field(default_factory=dict)

    def __init__(
        self,
        storages: Iterable[Storage],
        ops: Iterable[Op],
        *,
        name: str = "",
        device: Device | None = None,
        allocator: str = "none",
        aliases: Mapping[str, str] | None = None,
    ) -> None:
        values = {
            "storages": tuple(storages),
            "ops": tuple(ops),
            "name": name,
            "device": device or Device(),
            "allocator": allocator,
            "aliases": dict(aliases or {}),
        }
        for key, value in values.items():
            object.__setattr__(self, key, value)
        if allocator not in ALLOCATORS:
            raise GraphError(
                f"graph: got allocator {allocator!r}, expected one of {', '.join(ALLOCATORS)}."
            )
        _check_device(self.device)
        # Made now, not at first use: a graph that exists is a graph that makes sense.
        _ = self.arrays

    @cached_property
    def op_index(self) -> dict[str, int]:
        """The number of each op, by name."""
        return {op.name: index for index, op in enumerate(self.ops)}

    @cached_property
    def storage_index(self) -> dict[str, int]:
        """The number of each storage, by name or alias."""
        index = {storage.name: number for number, storage in enumerate(self.storages)}
        for alias, target in self.aliases.items():
            if alias in index:
                raise GraphError(f"aliases.{alias}: a storage has this name already; rename one.")
            if target not in index:
                raise GraphError(f"aliases.{alias}: there is no storage named {target!r}.")
        index.update({alias: index[target] for alias, target in self.aliases.items()})
        return index

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

    def as_run(self, targets: Iterable[str]) -> Graph:
        """Return the graph whose ops have these names: this one, or one with storages compressed.

        `compress h` among them puts in the ops that compress `h` and restore it; see `packed.py`.
        """
        from .packed import COMPRESS, packed

        new = {name for name in targets if name.startswith(COMPRESS)} - self.op_index.keys()
        return packed(self, {name.removeprefix(COMPRESS) for name in new}) if new else self

    @staticmethod
    def from_json(source: str | os.PathLike[str]) -> Graph:
        """Read a graph from a path, or from JSON text (anything that starts with a brace).

        Raises GraphError with the line (not JSON) or the key (JSON that makes no sense).
        """
        from .graph_file import read

        return read(source)

    def to_json(self, path: str | os.PathLike[str] | None = None) -> str:
        """Return the graph as JSON text, one record a line; also write it to `path` if given."""
        from .graph_file import text_of

        text = text_of(self)
        if path is not None:
            with open(path, "w", encoding="utf-8") as file:
                file.write(text)
        return text


def _check_device(device: Device) -> None:
    for key in ("flops_per_s", "bytes_per_s", "to_host_bytes_per_s", "to_device_bytes_per_s"):
        value = getattr(device, key)
        if value is not None and not (is_amount(value) and value > 0):
            raise GraphError(f"device.{key}: got {value!r}, expected a finite number above 0.")
    if not is_amount(device.transfer_latency_s):
        raise GraphError(
            f"device.transfer_latency_s: got {device.transfer_latency_s!r}, expected 0 or more."
        )
    if device.pinned_bytes is not None and not is_count(device.pinned_bytes):
        raise GraphError(
            f"device.pinned_bytes: got {device.pinned_bytes!r}, expected a whole number from 0 to "
            "2**62, or none."
        )
