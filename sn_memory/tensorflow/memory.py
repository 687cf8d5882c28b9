"""Bytes requested from TensorFlow's allocator while something ran, and bytes it allocated.

The allocator's statistics count allocated blocks. The allocator (BFC) does not split a free block
that is less than twice the request, so this count depends on what ran before, and is up to twice
what tensors hold. The profiler's trace has both sizes of each block, and the op that requested it.

On a CPU both need oneDNN, as in TensorFlow's releases for x86, and see blocks of 256 KiB and more.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import tensorflow as tf

from .errors import TraceError

_ALLOCATED, _FREED = "MemoryAllocation", "MemoryDeallocation"
# Smallest block of the CPU's traced allocator; smaller ones come from malloc and are not counted.
TRACED_BYTES: Final = 1 << 18
# Name prefix of the profiler traces that `Allocations` reports on.
MARK: Final = "sn_memory "
# Time in picoseconds, name and fields of an event.
Event = tuple[int, str, dict[str, Any]]


def main_device() -> str:
    """Return the device whose memory is planned: the first GPU, else the CPU."""
    return "GPU:0" if tf.config.list_physical_devices("GPU") else "CPU:0"


def bytes_of(value: Any) -> int:
    """Return the bytes of a tensor or variable; 0 if its size is unknown."""
    count = tf.TensorShape(value.shape).num_elements() or 0
    return int(count) * int(tf.as_dtype(value.dtype).size)


def has_statistics(device: str) -> bool:
    """Whether the allocator of a device has working statistics."""
    # With the system's allocator (TF_ONEDNN_USE_SYSTEM_ALLOCATOR) statistics exist but stay at
    # zero. The total is compared, as frees in other threads could hide a difference.
    with tf.device(device):
        block = tf.zeros((1 << 20,), tf.uint8)
    try:
        counted = int(tf.config.experimental.get_memory_info(device)["current"]) >= 1 << 20
    except ValueError:
        counted = False
    del block
    return counted


@dataclass(frozen=True, slots=True)
class Holding:
    """A block: the op that requested it, its use (`output`, `temp`), bytes requested and allocated.

    For the results of a Python function in the graph, the op is "outside of ops".
    """

    op: str
    use: str
    bytes: int
    allocated_bytes: int


class Allocations:
    """Blocks that ops requested while the context was open, of 256 KiB and more on a CPU.

    Attributes
    ----------
    peak_bytes
        The most bytes requested and not yet freed, beyond those held at the start.
    allocated_peak_bytes
        The same, counting the sizes of the allocated blocks.
    left_bytes
        Bytes requested and not freed at the end.
    holders
        The blocks held at `peak_bytes`, largest first.
    scratch_bytes
        Per `tf.profiler.experimental.Trace` in the context whose name begins with MARK: the peak
        of the bytes requested in it, minus those it left.
    held_bytes
        Per such trace: bytes requested since the context began and not freed at the trace's end.

    Raises
    ------
    TraceError
        If the device's allocator has no statistics, or another profiler runs.

    Examples
    --------
    >>> import tensorflow as tf
    >>> from sn_memory.tensorflow import Allocations
    >>> with Allocations() as found:
    ...     x = tf.random.uniform((1000, 1000))
    >>> found.peak_bytes, found.left_bytes, found.holders[0].op
    (4000000, 4000000, 'RandomUniform')
    """

    def __init__(self, device: str = "CPU:0") -> None:
        if not has_statistics(device):
            raise TraceError(
                f"the allocator of {device} does not count, so nothing can be measured. On a CPU, "
                "start TensorFlow with TF_ENABLE_ONEDNN_OPTS=1 and without "
                "TF_ONEDNN_USE_SYSTEM_ALLOCATOR."
            )
        kind, _, number = device.rpartition("/")[-1].partition(":")
        self._allocator = "mklcpu" if kind == "CPU" else f"GPU_{number or 0}_bfc"
        self.peak_bytes = self.allocated_peak_bytes = self.left_bytes = 0
        self.holders: tuple[Holding, ...] = ()
        self.scratch_bytes: dict[str, int] = {}
        self.held_bytes: dict[str, int] = {}

    def __enter__(self) -> Allocations:
        self._folder = tempfile.TemporaryDirectory(prefix="sn_memory")
        # Allocator events are host events; Python calls and device kernels are not needed.
        options = tf.profiler.experimental.ProfilerOptions(
            host_tracer_level=2, python_tracer_level=0, device_tracer_level=0
        )
        try:
            tf.profiler.experimental.start(self._folder.name, options=options)
        except tf.errors.AlreadyExistsError as error:
            self._folder.cleanup()
            raise TraceError("another profiler runs; stop it before memory is measured.") from error
        return self

    def __exit__(self, *_: Any) -> None:
        tf.profiler.experimental.stop()
        with self._folder:
            events, marks = _read(Path(self._folder.name), self._allocator)
        asked, self.allocated_peak_bytes, self.holders = _account(events)
        self.peak_bytes, self.left_bytes = max(asked), asked[-1]
        times = [event[0] for event in events]
        for name, begin, end in marks:
            within = _account(events[bisect_left(times, begin) : bisect_right(times, end)])[0]
            self.scratch_bytes[name] = max(within) - within[-1]
            self.held_bytes[name] = asked[bisect_right(times, end)]


def _account(events: list[Event]) -> tuple[list[int], int, tuple[Holding, ...]]:
    """Return bytes held before and after each event, the allocated peak, and the peak's blocks.

    A block allocated before the first event does not count when it is freed.
    """
    held: dict[int, Holding] = {}
    asked, handed_out, most_handed_out = [0], 0, 0
    holders: list[Holding] = []
    peak = 0
    for _, name, stats in events:
        change = 0
        if name == _ALLOCATED:
            block = Holding(
                stats.get("tf_op", "outside of ops"),
                stats.get("region_type", "unknown"),
                stats["requested_bytes"],
                stats["allocation_bytes"],
            )
            held[stats["addr"]] = block
            change, handed_out = block.bytes, handed_out + block.allocated_bytes
            most_handed_out = max(most_handed_out, handed_out)
        elif (gone := held.pop(stats["addr"], None)) is not None:
            change, handed_out = -gone.bytes, handed_out - gone.allocated_bytes
        asked.append(asked[-1] + change)
        if asked[-1] > peak:
            peak, holders = asked[-1], list(held.values())
    holders.sort(key=lambda block: -block.bytes)
    return asked, most_handed_out, tuple(holders)


def _read(folder: Path, allocator: str) -> tuple[list[Event], list[tuple[str, int, int]]]:
    """Return an allocator's events in chronological order, and the marks: name, begin, end."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    events: list[Event] = []
    marks = []
    for path in folder.rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace()
        space.ParseFromString(path.read_bytes())
        for plane in space.planes:
            names = {key: meta.name for key, meta in plane.event_metadata.items()}
            keys = {key: meta.name for key, meta in plane.stat_metadata.items()}
            for line in plane.lines:
                for event in line.events:
                    name = names[event.metadata_id]
                    begin = line.timestamp_ns * 1000 + event.offset_ps
                    if name.startswith(MARK):
                        marks.append((name, begin, begin + event.duration_ps))
                    # Checked before the fields are read: most events are not the allocator's.
                    if name not in (_ALLOCATED, _FREED):
                        continue
                    stats = {keys[stat.metadata_id]: _value(stat, keys) for stat in event.stats}
                    if stats.get("allocator_name") == allocator:
                        events.append((begin, name, stats))
    return sorted(events, key=lambda event: event[0]), marks


def _value(stat: Any, keys: dict[int, str]) -> Any:
    kind = stat.WhichOneof("value")
    value = getattr(stat, kind)
    # Frequent strings are stored in the table of keys.
    return keys[value] if kind == "ref_value" else value
