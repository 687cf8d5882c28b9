"""The memory of this machine, and what of it this process may have, as its system tells."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath
from typing import Final

if sys.platform != "win32":
    import resource

# What `limits` reads, in words for an error.
READ: Final = (
    "RLIMIT_DATA (ulimit -d), RLIMIT_AS (ulimit -v), memory.max and memory.high of cgroups (v2), "
    "memory.limit_in_bytes of cgroups (v1), MemAvailable of /proc/meminfo"
)
# In cgroups of version 1 "no limit" is the largest number of whole pages.
_NONE: Final = 1 << 62


@dataclass(frozen=True)
class Limit:
    """What one limit leaves to this process.

    Parameters
    ----------
    name
        Which one, in words.
    free_bytes
        What may still be had; 0 where more is taken than it allows.
    """

    name: str
    free_bytes: int


def available_bytes(root: Path = Path("/")) -> int | None:
    """Return what can be had without swapping; None where the system does not say."""
    return _kib(root / "proc/meminfo").get("MemAvailable")


def limits(root: Path = Path("/")) -> list[Limit]:
    """Return all limits of this process that are known; none but on Linux.

    root : where /proc and /sys lie
    """
    found = [*_by_rlimits(root), *_by_cgroups(root)]
    available = available_bytes(root)
    if available is not None:
        found.append(Limit("free memory (MemAvailable)", available))
    return found


def smallest_limit() -> Limit | None:
    """Return the limit that leaves least; None where none is known."""
    return min(limits(), key=lambda it: it.free_bytes, default=None)


def _by_rlimits(root: Path) -> Iterator[Limit]:
    if sys.platform == "win32":
        return
    # RLIMIT_RSS has had no effect since Linux 2.4.30.
    held = _kib(root / "proc/self/status")
    of = (
        ("RLIMIT_DATA", resource.RLIMIT_DATA, "VmData"),
        ("RLIMIT_AS", resource.RLIMIT_AS, "VmSize"),
    )
    for name, number, what in of:
        most, _ = resource.getrlimit(number)
        if most != resource.RLIM_INFINITY and what in held:
            yield Limit(name, max(most - held[what], 0))


def _by_cgroups(root: Path) -> Iterator[Limit]:
    """Yield limits of the process's own cgroup and of those above it.

    In a container the path may be the host's; what is mounted is then the container's own, and the
    walk comes to it last.
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
        # Of the page cache what was not read lately: the kernel takes it before it kills. The rest
        # has this process's own libraries in it.
        cached = sum(int(words[1]) for words in lines if words[:1] == [cache])
        yield Limit(f"{file} of {folder}", max(most - held + cached, 0))


def _number(path: Path) -> int | None:
    """Return the whole number in a file; None where there is none, as "max"."""
    text = (_text(path) or "").strip()
    return int(text) if text.isdecimal() else None


def _kib(path: Path) -> dict[str, int]:
    """Return lines as "VmData: 12 kB", in bytes."""
    lines = (line.split() for line in (_text(path) or "").splitlines())
    return {it[0].rstrip(":"): int(it[1]) << 10 for it in lines if it[2:] == ["kB"]}


def _text(path: Path) -> str | None:
    try:
        return path.read_text(encoding="ascii")
    except OSError:
        return None
