"""Shared by all sections: a file that is complete after every row, targets, and refusals.

A section is a program, so that a crash, or a device broken for its process, affects no other
section: `python -m gpu.codec_seconds --device cuda --json FILE --seconds 60`. On "cpu" all sizes
are small: that only checks that it runs, and its figures mean nothing.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from importlib import import_module
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from machine import ROOT, commit, machine

CANNOT = 77  # exit status, as automake's test driver has it


class CannotError(Exception):
    """A section, or a part of it, has not what it needs; str is why."""


class Section:
    """Rows, targets and omissions of one section, saved after each of them.

    device : "cuda" or "cpu"
    """

    def __init__(self, name: str, argv: Sequence[str] | None = None) -> None:
        parser = argparse.ArgumentParser(description=f"the section {name} of make gpu")
        parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
        parser.add_argument("--json", type=Path, help="file for the results")
        parser.add_argument("--seconds", type=float, default=60.0, help="share of the time")
        args = parser.parse_args(argv)
        self.device, self.path = str(args.device), args.json
        self._ends = time.monotonic() + args.seconds
        self.result: dict[str, Any] = {
            "section": name,
            "state": "running",
            "why": "",
            "device": self.device,
            "rows": [],
            "targets": [],
            "left_out": [],
            "commit": commit(),
            "machine": machine(),
            "device_name": _device_name(self.device),
            "torch": _version("torch"),
            "cupy": _version("cupy"),
            "python": platform.python_version(),
        }
        self.save()

    @property
    def dry(self) -> bool:
        """Whether this only shows that it runs."""
        return self.device == "cpu"

    def left_s(self) -> float:
        """Seconds left of the share."""
        return self._ends - time.monotonic()

    def row(self, **columns: Any) -> None:
        """Keep a row and print it."""
        self.result["rows"].append(columns)
        self.save()
        shown = (f"{name} {_short(value)}" for name, value in columns.items())
        print("  " + ", ".join(shown), flush=True)

    def target(self, what: str, value: float, *, least: float = 0.0, most: float = 0.0) -> None:
        """Keep a figure beside what was asked of it: at least, or at most. Not when dry."""
        if self.dry:
            return
        met = value >= least if least else value <= most
        asked = f">= {least:g}" if least else f"<= {most:g}"
        self.result["targets"].append({"what": what, "asked": asked, "value": value, "met": met})
        self.save()
        print(f"  target: {what} {value:.3g}, asked {asked}: {'met' if met else 'MISSED'}")

    def leave_out(self, what: str, why: str) -> None:
        """Say that a part did not run, and why."""
        self.result["left_out"].append({"what": what, "why": why})
        self.save()
        print(f"  left out: {what}: {why}", flush=True)

    def part(self, what: str, run: Callable[[], object], *, least_s: float = 0.0) -> None:
        """Run a part unless less than `least_s` is left; what it cannot do is left out and said.

        Raises whatever else it raises: a part that fails fails the section.
        """
        if self.left_s() < least_s:
            self.leave_out(what, f"needs {least_s:.0f} s, {max(0.0, self.left_s()):.0f} s are left")
            return
        try:
            run()
        except CannotError as reason:
            self.leave_out(what, str(reason))

    def save(self) -> None:
        """Write the file, whole."""
        if self.path:
            write(self.path, self.result)

    def ended(self, state: str, why: str = "") -> None:
        """Note how it ended."""
        self.result |= {"state": state, "why": why}
        self.save()


def write(path: Path, result: dict[str, Any]) -> None:
    """Write a section's file by way of another name, so that no reader sees half of it."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def main(name: str, measure: Callable[[Section], None]) -> None:
    """Run a section; the exit status is 0, or CANNOT. Whatever it raises passes through."""
    section = Section(name)
    try:
        measure(section)
    except CannotError as reason:
        section.ended("cannot", str(reason))
        print(f"  cannot: {reason}", flush=True)
        sys.exit(CANNOT)
    section.ended("ok")


def run(
    command: Sequence[str], *, timeout_s: float, keep: int = 4000, **env: str
) -> tuple[int, str]:
    """Exit status and the end of the output of a command, run at the root of the project.

    Its status is 124 if time was up.
    """
    try:
        done = subprocess.run(
            command, cwd=ROOT, env=os.environ | env, stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, timeout=timeout_s, check=False,
        )  # fmt: skip
    except subprocess.TimeoutExpired as late:
        return 124, (late.stdout or b"").decode(errors="replace")[-keep:] + "\ntime is up"
    return done.returncode, done.stdout.decode(errors="replace")[-keep:]


def _version(package: str) -> str | None:
    if find_spec(package) is None:
        return None
    return str(import_module(package).__version__)


def _device_name(device: str) -> str:
    if device == "cpu":
        return "none: small sizes on the CPU, to see that it runs"
    import torch

    return str(torch.cuda.get_device_name())


def _short(value: Any) -> str:
    return f"{value:.4g}" if isinstance(value, float) else str(value)
