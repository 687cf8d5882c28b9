"""The records a graph is made of: ops in execution order and the storages they read and write.

Planning on tensors counts a view twice and misses in-place writes. Here the unit is the *storage*:
one block of memory. Views and other names of the same block are aliases, resolved at once. The
words and the exact meaning of each field are in `docs/graph_format.md`; `sn_memory/check/replay.py`
is their executable form.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cached_property
from typing import Final

from ..base.errors import GraphError
from ..base.limits import is_amount, is_count

PHASES: Final = ("forward", "backward", "update")
ROLES: Final = ("parameter", "input", "state", "constant", "activation", "gradient", "temporary")
ALLOCATORS: Final = ("none", "torch", "torch_segments", "tensorflow")
RESIDENT_ROLES: Final = ("parameter", "input", "state", "constant")


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
    held
        Somebody outside holds it too (an output, the gradient of one): moved to the host, nothing
        would be free.
    """

    name: str
    bytes: int
    role: str = "activation"
    keep: bool = False
    held: bool = False

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
    """One operation of a training step.

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
    dtype
        What its arithmetic is done in, as `bf16`: which of the device's speeds holds.
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
    dtype: str = ""

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
    launch_s
        The least seconds of such an op, whatever it does.
    flops_per_s_by_dtype
        Pairs of a dtype, as ops state it, and the arithmetic in it; `flops_per_s` for others.
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
    launch_s: float = 0.0
    flops_per_s_by_dtype: tuple[tuple[str, float], ...] = ()

    @property
    def can_offload(self) -> bool:
        return self.to_host_bytes_per_s is not None and self.to_device_bytes_per_s is not None


@dataclass(frozen=True)
class Records:
    """All that a graph says, as it was written down: nothing is checked yet. See Graph."""

    storages: tuple[Storage, ...]
    ops: tuple[Op, ...]
    name: str = ""
    device: Device = field(default_factory=Device)
    allocator: str = "none"
    aliases: Mapping[str, str] = field(default_factory=dict)
    unplanned_peak_bytes: int | None = None

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


def check_device(device: Device) -> None:
    """Raise GraphError for a device whose speeds make no sense."""
    for key in ("flops_per_s", "bytes_per_s", "to_host_bytes_per_s", "to_device_bytes_per_s"):
        value = getattr(device, key)
        if value is not None and not (is_amount(value) and value > 0):
            raise GraphError(f"device.{key}: got {value!r}, expected a finite number above 0.")
    for key in ("transfer_latency_s", "launch_s"):
        if not is_amount(value := getattr(device, key)):
            raise GraphError(f"device.{key}: got {value!r}, expected 0 or more.")
    for dtype, value in device.flops_per_s_by_dtype:
        if not (is_amount(value) and value > 0):
            raise GraphError(
                f"device.flops_per_s_by_dtype.{dtype}: got {value!r}, expected a finite number "
                "above 0."
            )
    if device.pinned_bytes is not None and not is_count(device.pinned_bytes):
        raise GraphError(
            f"device.pinned_bytes: got {device.pinned_bytes!r}, expected a whole number from 0 to "
            "2**62, or none."
        )


def check_storages(graph: Records) -> None:
    """Raise GraphError for storages that make no sense, each by itself."""
    for number, storage in enumerate(graph.storages):
        where = f"storages[{number}] ({storage.name})"
        if not is_count(storage.bytes):
            raise GraphError(
                f"{where}.bytes: got {storage.bytes!r}, expected a whole number from 0 to 2**62."
            )
        if storage.role not in ROLES:
            raise GraphError(
                f"{where}.role: got {storage.role!r}, expected one of {', '.join(ROLES)}."
            )
    if len({storage.name for storage in graph.storages}) != len(graph.storages):
        raise GraphError(
            f"storages: the name {twice(s.name for s in graph.storages)!r} is there twice."
        )


def twice(names: Iterable[str]) -> str:
    """Return the first name that is there twice."""
    seen: set[str] = set()
    for name in names:
        if name in seen:
            return name
        seen.add(name)
    raise AssertionError("no name is there twice")


def check_op(op: Op, where: str) -> None:
    """Raise GraphError for an op whose numbers make no sense by themselves."""
    if op.phase not in PHASES:
        raise GraphError(f"{where}.phase: got {op.phase!r}, expected one of {', '.join(PHASES)}.")
    for key, value in (("seconds", op.seconds), ("flops", op.flops)):
        if value is not None and not is_amount(value):
            raise GraphError(f"{where}.{key}: got {value!r}, expected a finite number of 0 or more")
    if op.traffic_bytes is not None and not is_count(op.traffic_bytes):
        raise GraphError(
            f"{where}.traffic_bytes: got {op.traffic_bytes!r}, expected a whole number from 0 to "
            "2**62."
        )
    for index, way in enumerate(op.workspaces):
        if not is_count(way.bytes) or (way.seconds is not None and not is_amount(way.seconds)):
            raise GraphError(
                f"{where}.workspaces[{index}]: got {way.bytes!r} bytes and {way.seconds!r} s, "
                "expected 0 or more, and 2**62 bytes at most."
            )
