"""What was asked of the allocator, block by block, while something ran, from TensorFlow's traces.

The allocator's statistics count blocks as they are handed out. This one (BFC) hands a free block
out whole unless it is at least twice what was asked for, so its count depends on what ran before,
and is up to twice what tensors hold. The profiler's trace has both numbers for each block, and the
op that asked.
"""

from __future__ import annotations

import tempfile
from bisect import bisect_left, bisect_right
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import tensorflow as tf

from ..errors import TraceError
from .memory import has_statistics

_ALLOCATED, _FREED = "MemoryAllocation", "MemoryDeallocation"
# What goes through the traced allocator of the CPU; smaller blocks are malloc's, and in no count.
TRACED_BYTES = 1 << 18
MARK = "sn_memory "
# Picoseconds, what happened, and the numbers told with it.
Event = tuple[int, str, dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Holding:
    """A block: the op that asked for it, for what (`output`, `temp`), how much, and what it got.

    What a Python function in the graph hands over was asked for "outside of ops".
    """

    op: str
    use: str
    bytes: int
    allocated_bytes: int


class Allocations:
    """Blocks that ops asked for while the context was open, of 256 KiB and more on a CPU.

    Attributes
    ----------
    peak_bytes
        The most that was asked for and not yet given back, beyond what was there at the start.
    allocated_peak_bytes
        The same in blocks as handed out.
    left_bytes
        Asked for and not given back at the end.
    holders
        What was held at the peak of `peak_bytes`, largest first.
    scratch_bytes
        Per `tf.profiler.experimental.Trace` that was open meanwhile with a name that begins with
        MARK: the most asked for in it, less what it left.
    held_bytes
        Per such trace: asked for and not given back when it ended.

    Raises
    ------
    TraceError
        If the device's allocator does not count, or another profiler runs.

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
        self.peak_bytes, self.left_bytes, self.allocated_peak_bytes, self.holders = _account(events)
        times = [event[0] for event in events]
        held = _held(events)
        for name, begin, end in marks:
            within = events[bisect_left(times, begin) : bisect_right(times, end)]
            peak_bytes, left_bytes = _account(within)[:2]
            self.scratch_bytes[name] = peak_bytes - left_bytes
            self.held_bytes[name] = held[bisect_right(times, end)]


def _account(events: list[Event]) -> tuple[int, int, int, tuple[Holding, ...]]:
    """Return the most asked for, what is left, the most handed out, and the holders."""
    held: dict[int, Holding] = {}
    asked = handed = peak = handed_peak = 0
    holders: list[Holding] = []
    for _, name, stats in events:
        if name == _ALLOCATED:
            block = Holding(
                stats.get("tf_op", "outside of ops"),
                stats.get("region_type", "unknown"),
                stats["requested_bytes"],
                stats["allocation_bytes"],
            )
            held[stats["addr"]] = block
            asked, handed = asked + block.bytes, handed + block.allocated_bytes
            handed_peak = max(handed_peak, handed)
            if asked > peak:
                peak, holders = asked, list(held.values())
        elif (gone := held.pop(stats["addr"], None)) is not None:
            asked, handed = asked - gone.bytes, handed - gone.allocated_bytes
    holders.sort(key=lambda it: -it.bytes)
    return peak, asked, handed_peak, tuple(holders)


def _held(events: list[Event]) -> list[int]:
    """Return what is asked for and not given back before the first event, and after each."""
    sizes: dict[str, int] = {}
    found = [0]
    for _, name, stats in events:
        change = -sizes.pop(stats["addr"], 0)
        if name == _ALLOCATED:
            change = sizes[stats["addr"]] = stats["requested_bytes"]
        found.append(found[-1] + change)
    return found


def _read(folder: Path, allocator: str) -> tuple[list[Event], list[tuple[str, int, int]]]:
    """Return what one allocator did, in the order of time, and the marks: name, begin, end."""
    from tensorflow.tsl.profiler.protobuf import xplane_pb2

    events: list[Event] = []
    marks = []
    for path in folder.rglob("*.xplane.pb"):
        space = xplane_pb2.XSpace()
        space.ParseFromString(path.read_bytes())
        for plane in space.planes:
            names = {key: it.name for key, it in plane.event_metadata.items()}
            keys = {key: it.name for key, it in plane.stat_metadata.items()}
            for line in plane.lines:
                for event in line.events:
                    name = names[event.metadata_id]
                    begin = line.timestamp_ns * 1000 + event.offset_ps
                    if name.startswith(MARK):
                        marks.append((name, begin, begin + event.duration_ps))
                    if name not in (_ALLOCATED, _FREED):
                        continue
                    stats = {keys[it.metadata_id]: _value(it, keys) for it in event.stats}
                    if stats.get("allocator_name") == allocator:
                        events.append((begin, name, stats))
    return sorted(events, key=lambda it: it[0]), marks


def _value(stat: Any, keys: dict[int, str]) -> Any:
    kind = stat.WhichOneof("value")
    value = getattr(stat, kind)
    return keys[value] if kind == "ref_value" else value
