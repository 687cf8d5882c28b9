"""Where a result was measured: columns that every benchmark adds to its rows."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent


def commit() -> str:
    """The commit measured, with "+" when the tree had changes; "unknown" outside a checkout."""
    try:
        name, state = (
            subprocess.run(
                ["git", *args], cwd=ROOT, check=True, capture_output=True, text=True
            ).stdout
            for args in (["rev-parse", "--short=10", "HEAD"], ["status", "--porcelain", "-uno"])
        )
    except (OSError, subprocess.CalledProcessError):
        return "unknown"
    # Results written by the same run are no change of the program.
    changed = [line for line in state.splitlines() if "benchmarks/results/" not in line]
    return name.strip() + "+" * bool(changed)


def origin() -> dict[str, str]:
    """The columns of a row that say which commit ran, and where."""
    return {"commit": commit(), "machine": machine()}


def command(script: str) -> str:
    """The command that runs this script, a path, as it was called."""
    return " ".join(["python -m benchmarks", Path(script).stem, *sys.argv[1:]])


def machine() -> str:
    """Processor model and number of cores, as the system names them."""
    model = platform.processor() or platform.machine()
    try:
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                model = line.partition(":")[2].strip()
                break
    except OSError:
        pass  # not Linux: what platform says will do
    return f"{model}, {os.cpu_count()} cores"
