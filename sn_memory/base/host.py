"""The memory of this machine, as its system tells."""

from __future__ import annotations

from pathlib import Path


def available_bytes() -> int | None:
    """Return what can be had without swapping; None where the system does not say."""
    try:
        lines = Path("/proc/meminfo").read_text(encoding="ascii").splitlines()
    except OSError:
        return None
    found = (line.split()[1] for line in lines if line.startswith("MemAvailable:"))
    kib = next(found, None)
    return None if kib is None else int(kib) << 10
