"""Trials in separate processes: started, and measured by the kernel while they run."""

from __future__ import annotations

import json
import os
import re
import subprocess
import sys
import threading
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

# What libraries say where an allocation failed; oneDNN cannot make the code of a kernel then.
STARVED = (
    "allocate memory", "bad_alloc", "MemoryError", "OOM when allocating", "Out of memory",
    "out of memory", "could not create", "RESOURCE_EXHAUSTED", "Resource temporarily unavailable",
)  # fmt: skip

# Of the thread that looks: the default of 8 MiB would be a part of what it counts.
STACK_BYTES = 1 << 18


def fresh(
    script: str,
    *words: object,
    env: Mapping[str, str] | None = None,
    timeout_s: float | None = None,
    enter: Callable[[], object] | None = None,
) -> subprocess.CompletedProcess[str]:
    """Run a script in a process of its own, and keep what it says.

    enter : what the process does before anything else
    """
    return subprocess.run(
        [sys.executable, script, *map(str, words)],
        env=os.environ | dict(env or {}), capture_output=True, text=True, check=False,
        timeout=timeout_s, preexec_fn=enter,
    )  # fmt: skip


def last_row(ended: subprocess.CompletedProcess[str]) -> Any:
    """What a script printed in its last line, as JSON."""
    return json.loads(ended.stdout.splitlines()[-1])


def starved(text: str) -> bool:
    """Whether a text says that memory ran out."""
    return any(message in text for message in STARVED)


def restart_high_water() -> None:
    """Let VmHWM start anew from what is resident now."""
    Path("/proc/self/clear_refs").write_text("5")


def status() -> dict[str, int]:
    """What the system says of this process, in bytes: VmData, VmRSS, VmHWM, RssAnon, RssFile."""
    text = Path("/proc/self/status").read_text()
    return {name: int(kib) * 1024 for name, kib in re.findall(r"(\w+):\s+(\d+) kB", text)}


class Watch(threading.Thread):
    """The most of each, in samples of every 10 ms until the process ends.

    What is mapped from a file (RssFile) is resident as long as the system has room for it.
    """

    def __init__(self) -> None:
        super().__init__(daemon=True)
        self.most = status()
        self._ended = threading.Event()
        before = threading.stack_size(STACK_BYTES)
        self.start()
        threading.stack_size(before)

    def run(self) -> None:
        while not self._ended.wait(0.01):
            self.most = {name: max(size, self.most[name]) for name, size in status().items()}

    def end(self) -> dict[str, int]:
        """Stop looking, and return the most there was."""
        self._ended.set()
        self.join()
        return self.most
