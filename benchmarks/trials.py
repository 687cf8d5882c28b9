"""What the kernel counts of this process, and the most of it while something runs."""

from __future__ import annotations

import re
import threading
from pathlib import Path

# Of the thread that looks: the default of 8 MiB would be a part of what it counts.
STACK_BYTES = 1 << 18


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
