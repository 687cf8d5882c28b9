"""The records of a graph: ops in execution order, and the storages they read and write.

Planning by tensors counts views twice and misses in-place writes. Here the unit is the *storage*:
one block of memory with one name, however many views it has. `docs/graph_format.md` defines each
field exactly; `sn_memory/check.py` is its executable form.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import MISSING, Field, dataclass, fields
from typing import Any, Final, TypeVar

from ..base.errors import GraphError
from ..base.sizes import Fields, is_amount, is_count

PHASES: Final = ("forward", "backward", "update")
ROLES: Final = ("parameter", "input", "state", "constant", "activation", "gradient")
# Granularity of sizes: the smallest blocks of torch's caching allocator and of TensorFlow's.
ALLOCATORS: Final = {"none": 1, "torch": 512, "tensorflow": 256}
RESIDENT_ROLES: Final = ("parameter", "input", "state", "constant")
_COUNT: Final = "a whole number from 0 to 2**62"


@dataclass(frozen=True, slots=True)
class Storage:
    """One block of memory.

    Parameters
    ----------
    name
        Unique among storages.
    bytes
        Its size before the allocator rounds it; 0 or more.
    role
        `parameter`, `input`, `state` and `constant` are resident: live before the first op and
        after the last. `activation` and `gradient` are made by exactly one op.
    keep
        It must be on the device, in its last version, when the last op has run.
    held
        The caller holds it too (an output, or its gradient), so moving it to the host would free
        nothing.
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
    """One way to run an op: scratch bytes held while it runs, and its seconds.

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
    kind
        What it computes (`conv2d`, `relu`, ...), for policies and reports.
    phase
        `forward`, `backward` or `update`.
    seconds, flops, traffic_bytes
        Measured time; else FLOPs, and bytes read and written (default: all storages named).
    random, replayable
        It draws random numbers; a rerun draws the same ones.
    effect, collective
        It changes something outside the graph; it communicates with other ranks. Neither may run
        twice.
    fixed, once
        It may not move past any other op; it may not run twice.
    dtype
        The dtype of its arithmetic, e.g. `bf16`: selects the device's speed.
    workspaces
        Ways to run it; the first is the default. Empty: no scratch memory.
    """

    name: str
    inputs: tuple[str, ...] = ()
    outputs: tuple[str, ...] = ()
    writes: tuple[str, ...] = ()
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
        """Whether it keeps its order relative to all other ordered ops."""
        return self.effect or self.collective or self.fixed or (self.random and not self.replayable)

    @property
    def repeatable(self) -> bool:
        """Whether its flags allow it to run twice; versions decide about in-place writes."""
        return not (
            self.effect or self.collective or self.once or (self.random and not self.replayable)
        )


@dataclass(frozen=True, slots=True)
class Device:
    """Speeds of the machine. Unknown ones are None, and disable what needs them.

    Parameters
    ----------
    flops_per_s, bytes_per_s
        Peak FLOP/s and memory bandwidth, for the roofline of ops that were not measured.
    launch_s
        The minimum seconds of such an op.
    flops_per_s_by_dtype
        Pairs of a dtype, as in `Op.dtype`, and its FLOP/s; `flops_per_s` for others.
    to_host_bytes_per_s, to_device_bytes_per_s, transfer_latency_s
        The two transfer lanes; each copies one storage at a time, parallel to the ops.
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

    def to_host_s(self, nbytes: int, begin_s: float = 0.0) -> float:
        """Return when a copy to the host begun at `begin_s` ends; by default, its duration."""
        assert self.to_host_bytes_per_s is not None
        return begin_s + self.transfer_latency_s + nbytes / self.to_host_bytes_per_s

    def to_device_s(self, nbytes: int, begin_s: float = 0.0) -> float:
        """Return when a copy back begun at `begin_s` ends; by default, its duration."""
        assert self.to_device_bytes_per_s is not None
        return begin_s + self.transfer_latency_s + nbytes / self.to_device_bytes_per_s

    def copy_seconds(self, sizes: Sequence[int]) -> tuple[float, list[float], list[float]]:
        """Return the latency of a copy, and the seconds of each size without it, out and back."""
        # The extension adds them in the order of `to_host_s`: another order rounds differently.
        assert self.to_host_bytes_per_s is not None
        assert self.to_device_bytes_per_s is not None
        out = [size / self.to_host_bytes_per_s for size in sizes]
        return self.transfer_latency_s, out, [size / self.to_device_bytes_per_s for size in sizes]


def require(valid: bool, where: str, got: object, expected: str) -> None:
    """Raise GraphError unless a value is valid."""
    if not valid:
        raise GraphError(f"{where}: got {got!r}, expected {expected}.")


def check_device(device: Device) -> None:
    """Raise GraphError for a device with invalid speeds."""
    keys = ("flops_per_s", "bytes_per_s", "to_host_bytes_per_s", "to_device_bytes_per_s")
    speeds = {key: getattr(device, key) for key in keys}
    speeds |= {f"flops_per_s_by_dtype.{key}": speed for key, speed in device.flops_per_s_by_dtype}
    for key, value in speeds.items():
        valid = value is None or (is_amount(value) and value > 0)
        require(valid, f"device.{key}", value, "a finite number above 0")
    for key in ("transfer_latency_s", "launch_s"):
        value = getattr(device, key)
        require(is_amount(value), f"device.{key}", value, "0 or more")
    pinned = device.pinned_bytes
    valid = pinned is None or is_count(pinned)
    require(valid, "device.pinned_bytes", pinned, f"{_COUNT}, or none")


def check_storage(storage: Storage, where: str) -> None:
    """Raise GraphError for a storage that is invalid by itself."""
    require(is_count(storage.bytes), f"{where}.bytes", storage.bytes, _COUNT)
    require(storage.role in ROLES, f"{where}.role", storage.role, f"one of {', '.join(ROLES)}")


def check_op(op: Op, where: str) -> None:
    """Raise GraphError for an op with invalid numbers."""
    require(op.phase in PHASES, f"{where}.phase", op.phase, f"one of {', '.join(PHASES)}")
    for key, value in (("seconds", op.seconds), ("flops", op.flops)):
        valid = value is None or is_amount(value)
        require(valid, f"{where}.{key}", value, "a finite number of 0 or more")
    traffic = op.traffic_bytes
    require(traffic is None or is_count(traffic), f"{where}.traffic_bytes", traffic, _COUNT)
    for index, way in enumerate(op.workspaces):
        valid = is_count(way.bytes) and (way.seconds is None or is_amount(way.seconds))
        numbers = "numbers of 0 or more, and 2**62 bytes at most"
        require(valid, f"{where}.workspaces[{index}]", way, numbers)


# Records as JSON objects: each field by its name, and those with their default left out.

T = TypeVar("T", Storage, Op, Device, Workspace)


def record_of(kind: type[T], row: Fields) -> T:
    """Read a record from JSON; raise GraphError for unknown keys and invalid values."""
    values = {name: read(row, name, default) for name, read, default in _FIELDS[kind]}
    row.done()
    return kind(**values)


def _reader(spec: Field[Any]) -> tuple[str, Callable[[Fields, str, Any], Any], Any]:
    """Return the name of a field, the reader for its type, and its default."""
    # Text, because of `from __future__ import annotations`.
    declared = str(spec.type)
    # A default of MISSING makes the key mandatory in `Fields`; optional ones may be None.
    optional = spec.default is MISSING and declared.endswith("| None")
    return spec.name, _READERS[declared], None if optional else spec.default


def _workspaces(row: Fields, key: str, default: Any) -> tuple[Workspace, ...]:
    rows = enumerate(row.items(key, ()))
    return tuple(
        record_of(Workspace, Fields(way, f"{row.path}.{key}[{at}]", GraphError)) for at, way in rows
    )


def _speeds(row: Fields, key: str, default: Any) -> tuple[tuple[str, float], ...]:
    speeds = Fields(row.mapping(key), f"{row.path}.{key}", GraphError)
    return tuple((dtype, speeds.number(dtype)) for dtype in speeds.keys)


# By the type that a field is declared with.
_READERS: Final[dict[str, Callable[[Fields, str, Any], Any]]] = {
    "str": Fields.text,
    "int": Fields.integer,
    "int | None": Fields.integer,
    "float": Fields.number,
    "float | None": Fields.number,
    "bool": Fields.flag,
    "tuple[str, ...]": Fields.names,
    "tuple[Workspace, ...]": _workspaces,
    "tuple[tuple[str, float], ...]": _speeds,
}


_FIELDS: Final[dict[type, list[Any]]] = {
    kind: [_reader(spec) for spec in fields(kind)] for kind in (Storage, Op, Device, Workspace)
}


def data_of(record: Storage | Op | Device | Workspace) -> dict[str, Any]:
    """Return a record as a JSON object."""
    result: dict[str, Any] = {}
    for spec in fields(record):
        key, item = spec.name, getattr(record, spec.name)
        # The name of a device or a workspace is written even if it is empty.
        if item == spec.default and key != "name":
            continue
        # Pairs in the record, which has to be hashable; an object in JSON.
        if key == "flops_per_s_by_dtype":
            item = dict(item)
        elif isinstance(item, tuple):
            item = [data_of(part) if isinstance(part, Workspace) else part for part in item]
        result[key] = item
    return result


LOSS: Final = "loss"


def loss_op(outputs: Iterable[str], gradients: Iterable[str]) -> Op:
    """Return the op that reads the outputs and makes their gradients, by names of storages.

    A plan of a model does not know the loss: the user's code computes it, and hands gradients of
    the outputs in. In the graph that is one op, which stays where it is and takes no seconds.
    """
    return Op(
        LOSS,
        tuple(dict.fromkeys(outputs)),
        tuple(dict.fromkeys(gradients)),
        kind=LOSS,
        phase="backward",
        seconds=0.0,
        effect=True,
        # The caller's code runs here, so no op may change sides.
        fixed=True,
    )
