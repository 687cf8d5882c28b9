"""Steps of the build script, with progress, a log, and errors that name the step."""

from __future__ import annotations

import os
import re
import subprocess
import sys
import time
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final

TAIL_LINES: Final = 25
# What a line of the log means for the person reading it; the first match wins.
HINTS: Final = (
    (r"Python\.h: No such file", "install Python's headers (Debian: apt-get install python3-dev)"),
    (
        r"Killed|cannot allocate memory|out of memory",
        "the compiler ran out of memory: run again with --jobs 1",
    ),
    (r"No space left on device", "free some disk space (the build needs about 1 GB in $TMPDIR)"),
    (
        r"No CMAKE_CXX_COMPILER|is not a full path to an existing compiler",
        "install g++ (Debian: apt-get install g++), or set CXX to a C++17 compiler",
    ),
    (
        r"Could NOT find NCCL|nccl\.h: No such file",
        "install NCCL's headers (pip install nvidia-nccl-cu12, or libnccl-dev) or set "
        "HOROVOD_NCCL_HOME",
    ),
    (r"Could NOT find MPI", "repair the MPI installation, or take mpirun off PATH"),
    (
        r"NewConnectionError|No matching distribution|Temporary failure in name resolution",
        "the package index was not reached: get horovod-0.28.1.tar.gz elsewhere, pass it with "
        "--sdist, and build with --installed-tools",
    ),
    (
        r"THESE PACKAGES DO NOT MATCH THE HASHES",
        "a mirror or proxy gave another file than the pinned one; it was not run",
    ),
    (r"No module named pip", "this interpreter has no pip: run `python -m ensurepip` first"),
    (r"Compatibility with CMake < 3\.5", "set CMAKE_POLICY_VERSION_MINIMUM=3.5, or use cmake < 4"),
)


class StepError(RuntimeError):
    """A step failed; the message says which, shows the end of the log and what to do."""


def hint_for(lines: Sequence[str]) -> str | None:
    """Return advice for the first known symptom in these lines, or None."""
    text = "\n".join(lines)
    for pattern, advice in HINTS:
        if re.search(pattern, text, re.IGNORECASE):
            return advice
    return None


class Steps:
    """Numbered steps on the terminal; every command's full output goes to the log file."""

    def __init__(self, total: int, log: Path) -> None:
        self.total = total
        self.log = log
        self.number = 0
        self.name = ""
        self._started_s = time.monotonic()
        self._cpu_started_s = _cpu_s()
        self._percent = -1
        log.parent.mkdir(parents=True, exist_ok=True)
        log.write_text("", encoding="utf-8")

    def begin(self, name: str) -> None:
        """Start the next step."""
        self.number += 1
        self.name = name
        self._percent = -1
        self.say(name)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"\n=== step {self.number} of {self.total}: {name}\n")

    def say(self, text: str) -> None:
        """Print one line with the step's number and the time since the start."""
        print(f"[{self.number}/{self.total} {self._elapsed()}] {text}", flush=True)

    def percent(self, value: int) -> None:
        """Show how far the step is: live on a terminal, every tenth percent elsewhere."""
        if value <= self._percent:
            return
        if sys.stdout.isatty():
            end = "\n" if value >= 100 else ""
            head = f"\r[{self.number}/{self.total} {self._elapsed()}]"
            print(f"{head} {self.name}: {value:3d} %", end=end, flush=True)
        elif value // 10 > self._percent // 10:
            self.say(f"{self.name}: {value} %")
        self._percent = value

    def run(
        self,
        command: Sequence[str],
        *,
        env: Mapping[str, str] | None = None,
        cwd: Path | None = None,
        on_line: Callable[[str], None] | None = None,
    ) -> str:
        """Run a command, log its output, return it; raise StepError with the end of it."""
        tail: deque[str] = deque(maxlen=400)
        with self.log.open("a", encoding="utf-8") as log:
            log.write(f"$ {' '.join(command)}\n")
            try:
                process = subprocess.Popen(
                    command,
                    env=dict(env) if env is not None else dict(os.environ),
                    cwd=cwd,
                    text=True,
                    errors="replace",
                    stdin=subprocess.DEVNULL,
                    stdout=subprocess.PIPE,
                    stderr=subprocess.STDOUT,
                )
            except OSError as error:
                raise self.failed([f"{command[0]}: {error}"]) from error
            # Leaving the block closes the pipe and waits.
            with process:
                for line in process.stdout or ():
                    log.write(line)
                    tail.append(line.rstrip())
                    if on_line:
                        on_line(line)
        if process.returncode != 0:
            raise self.failed([*tail, f"exit status {process.returncode}"])
        return "\n".join(tail)

    def failed(self, lines: Sequence[str]) -> StepError:
        """Return the error of this step, with what is known of its cause."""
        shown = "\n".join(f"  | {line}" for line in error_lines(lines))
        advice = hint_for(lines) or "read the log above the first line that says 'error'"
        return StepError(
            f"step {self.number} of {self.total} failed: {self.name}\n{shown}\n"
            f"  log: {self.log}\n  do:  {advice}"
        )

    def seconds(self) -> float:
        """Return seconds since the start."""
        return round(time.monotonic() - self._started_s, 1)

    def cpu_seconds(self) -> float:
        """Return seconds of processor since the start: what a busy machine does not stretch."""
        return round(_cpu_s() - self._cpu_started_s, 1)

    def _elapsed(self) -> str:
        seconds = int(time.monotonic() - self._started_s)
        return f"{seconds // 60}:{seconds % 60:02d}"


def _cpu_s() -> float:
    used = os.times()
    return used.user + used.system + used.children_user + used.children_system


def error_lines(lines: Sequence[str]) -> list[str]:
    """Return the last lines, from the first compiler error on where there is one.

    A parallel make goes on for pages after the line that matters, so the plain tail hides it.
    """
    for index, line in enumerate(lines):
        if re.search(r"(fatal error|error|CMake Error)\b.*:|: error", line):
            return list(lines[index : index + TAIL_LINES])
    return list(lines[-TAIL_LINES:])
