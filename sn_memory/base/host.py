"""The memory limits of this process, and returning the memory that malloc keeps.

glibc's malloc maps each block above a threshold separately, and returns it to the kernel when it is
freed. By default the threshold grows with the blocks freed, up to 32 MiB. Smaller tensors then lie
in the heap, whose holes stay with the process: 90 to 180 MiB beside a step of 150 to 270
(docs/torch_memory.md, "The limits of a process"). With a fixed threshold, each tensor of 128 KiB or
more is returned when it is freed, and its pages are faulted in again next time, which makes a step
take 1.2 to 2 times its seconds. mallopt affects the whole process, and glibc cannot go back to a
threshold that grows.
"""

from __future__ import annotations

import ctypes
import os
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

from .errors import PlanWarning
from .sizes import show_bytes

if sys.platform != "win32":
    import resource

# What `limits` reads, as text for an error.
READ: Final = (
    "RLIMIT_DATA (ulimit -d), RLIMIT_AS (ulimit -v), memory.max and memory.high of cgroups (v2), "
    "memory.limit_in_bytes of cgroups (v1), MemAvailable of /proc/meminfo"
)
SETTING: Final = "SN_MEMORY_MALLOC"
_WAYS: Final = ("auto", "on", "off")
# <malloc.h>: from which size blocks are mapped, and how much of the heap's end is kept. The values
# are glibc's initial ones.
_M_TRIM_THRESHOLD, _M_MMAP_THRESHOLD, _BYTES = -1, -3, 128 << 10
# A process that may use this many times the peak of a step has room for what malloc keeps: a step
# took up to 2.7 times its peak. No larger, as a step is slower when malloc returns memory.
_NEAR: Final = 3
# The limit that was near; the warning is given once per process.
_WARNED: list[str] = []
# In cgroups of version 1 "no limit" is the largest number of whole pages.
_NONE: Final = 1 << 62


@dataclass(frozen=True)
class Limit:
    """What one limit leaves to this process.

    name : which limit, as text
    free_bytes : what may still be allocated; 0 if the limit is exceeded
    """

    name: str
    free_bytes: int


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return the bytes that can be allocated without swapping; None if unknown."""
    return _kib(root / "proc/meminfo").get("MemAvailable")


def limits(root: Path = Path("/")) -> list[Limit]:
    """Return all known limits of this process; none except on Linux.

    root : the folder that contains /proc and /sys
    """
    available = available_bytes(root)
    free = [] if available is None else [Limit("free memory (MemAvailable)", available)]
    return [*_by_rlimits(root), *_by_cgroups(root), *free]


def smallest_limit() -> Limit | None:
    """Return the limit that leaves least; None if no limit is known."""
    return min(limits(), key=lambda limit: limit.free_bytes, default=None)


def _by_rlimits(root: Path) -> Iterator[Limit]:
    if sys.platform == "win32":
        return
    # RLIMIT_RSS has had no effect since Linux 2.4.30.
    held = _kib(root / "proc/self/status")
    for name, what in (("RLIMIT_DATA", "VmData"), ("RLIMIT_AS", "VmSize")):
        most, _ = resource.getrlimit(getattr(resource, name))
        if most != resource.RLIM_INFINITY and what in held:
            yield Limit(name, max(most - held[what], 0))


def _by_cgroups(root: Path) -> Iterator[Limit]:
    """Yield limits of the process's own cgroup and of those above it.

    In a container the path may be the host's, while the container's own cgroup is mounted at the
    top, which is visited last.
    """
    for line in (_text(root / "proc/self/cgroup") or "").splitlines():
        _, controllers, path = line.split(":", 2)
        if controllers and "memory" not in controllers.split(","):
            continue
        if controllers:
            tops = [root / "sys/fs/cgroup/memory"]
            files, used, cache = ["memory.limit_in_bytes"], "memory.usage_in_bytes", "total_"
        else:
            tops = [root / "sys/fs/cgroup", root / "sys/fs/cgroup/unified"]
            files, used, cache = ["memory.max", "memory.high"], "memory.current", ""
        own = PurePosixPath(path.lstrip("/"))
        for top in tops:
            for inside in dict.fromkeys((own, *own.parents)):
                yield from _by_cgroup(top / inside, files, used, cache + "inactive_file")


def _by_cgroup(folder: Path, files: list[str], used: str, cache: str) -> Iterator[Limit]:
    for file in files:
        most, held = _number(folder / file), _number(folder / used)
        if most is None or held is None or most >= _NONE:
            continue
        lines = (line.split() for line in (_text(folder / "memory.stat") or "").splitlines())
        # The inactive part of the page cache, which the kernel reclaims before it kills. The active
        # part contains this process's own libraries.
        cached = sum(int(words[1]) for words in lines if words[:1] == [cache])
        yield Limit(f"{file} of {folder}", max(most - held + cached, 0))


def _number(path: Path) -> int | None:
    """Return the integer in a file; None if it has none, e.g. "max"."""
    text = (_text(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _kib(path: Path) -> dict[str, int]:
    """Return the values of lines such as "VmData: 12 kB", in bytes."""
    lines = (line.split() for line in (_text(path) or "").splitlines())
    return {words[0].rstrip(":"): int(words[1]) << 10 for words in lines if words[2:] == ["kB"]}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return None


def return_freed(peak_bytes: int = 0) -> bool:
    """Make malloc return freed memory if this process is near its limit; return whether it does.

    peak_bytes : of a planned step; if 0, only with SN_MEMORY_MALLOC=on

    Raises ValueError if SN_MEMORY_MALLOC is neither `auto`, `on` nor `off`.
    """
    way = os.environ.get(SETTING, "auto")
    if way not in _WAYS:
        raise ValueError(f"got {SETTING}={way!r}, expected one of {', '.join(_WAYS)}.")
    if way == "off" or sys.platform != "linux":
        return False
    library = ctypes.CDLL(None)
    # Another C library has no such function or thresholds; a threshold set by the user stays.
    if not hasattr(library, "gnu_get_libc_version") or "MALLOC_MMAP_THRESHOLD_" in os.environ:
        return False
    if way == "auto":
        limit = smallest_limit()
        if limit is None or limit.free_bytes >= _NEAR * peak_bytes:
            return False
        if not _WARNED:
            _WARNED.append(limit.name)
            warnings.warn(
                f"{limit.name} leaves {show_bytes(limit.free_bytes)}, less than {_NEAR} times what "
                f"a planned step holds ({show_bytes(peak_bytes)}): from now on malloc returns what "
                "tensors free to the system, so that the limit holds; steps may take up to 1.8 "
                f"times as long. {SETTING}=off leaves malloc alone.",
                PlanWarning,
                stacklevel=2,
            )
    done = library.mallopt(_M_MMAP_THRESHOLD, _BYTES) and library.mallopt(_M_TRIM_THRESHOLD, _BYTES)
    library.malloc_trim(0)
    return bool(done)
