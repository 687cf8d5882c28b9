"""The placing allocator under AddressSanitizer: random traces against a model of blocks in use.

A case is a thousand traces of placing_traces.cpp over host memory: steps recorded, packed and
placed, on streams and devices, that diverge or do not; gradients that outlive them, wrong places,
too little memory, pointers freed twice and foreign ones. `--full` is a million of them.
"""

from __future__ import annotations

import resource
import subprocess
import tempfile
from functools import cache
from pathlib import Path

from runner import Target, main

ROOT = Path(__file__).resolve().parents[1]
TRACES = 1000
SANITIZE = ("-O1", "-g", "-fsanitize=address,undefined", "-fno-sanitize-recover=all")
_FOLDER = tempfile.TemporaryDirectory()  # goes when this process ends


@cache
def program() -> str:
    """Compile the allocator with its traces, once in a process."""
    path = str(Path(_FOLDER.name, "placing_traces"))
    sources = [ROOT / "csrc" / "placing" / "placing.cpp", ROOT / "fuzz" / "placing_traces.cpp"]
    command = ["g++", "-std=c++17", *SANITIZE, *map(str, sources), "-o", path, "-ldl", "-pthread"]
    subprocess.run(command, check=True)
    return path


def traces(seed: int) -> str:
    """Run a thousand traces, each with a seed of its own."""
    command = [program(), str(seed * TRACES), str(TRACES)]
    done = subprocess.run(command, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    lines = [line.split(" ", 1) for line in done.stdout.splitlines()]
    counts = {name: int(times) for times, name in lines}
    assert counts["traces"] == TRACES
    seen = ("hits", "misses", "repeated", "freed twice", "foreign", "no memory", "wrong places")
    missing = [name for name in seen if not counts.get(name)]
    assert not missing, missing
    return "a thousand traces"


# AddressSanitizer reserves terabytes of addresses.
TARGETS = {"traces": Target(traces, full=1000, limit_s=60.0, memory_bytes=resource.RLIM_INFINITY)}

if __name__ == "__main__":
    main(TARGETS)
