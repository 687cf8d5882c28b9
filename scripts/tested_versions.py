#!/usr/bin/env python3
"""Run the tests under several interpreters, each with its own torch, and keep a table.

    python scripts/tested_versions.py .venv-one/bin/python .venv-other/bin/python
    python scripts/tested_versions.py --table           # rewrite docs/works.md, run nothing

An environment:
`make .venv-one/.stamps/packages VENV=.venv-one TORCH=torch==2.15.0 TENSORFLOW= CONSTRAINTS=`.
It runs `pytest -n 2 -m "not slow"`, as `make test` does; tests of packages that are not
installed skip. A row is kept for each pair of Python and torch.
"""

from __future__ import annotations

import argparse
import json
import re
import shlex
import subprocess
import sys
import time
from pathlib import Path
from typing import Any, Final

from horovod_matrix import put

ROOT: Final = Path(__file__).resolve().parents[1]
RESULT: Final = ROOT / "benchmarks" / "results" / "tested_versions.json"
PAGE: Final = ROOT / "docs" / "works.md"
START, END = "<!-- tested:start -->", "<!-- tested:end -->"
HEAD: Final = ("Python", "torch", "TensorFlow", "Horovod", "passed", "failed", "skipped", "commit")
VERSIONS: Final = """
import importlib.metadata as all, json, platform, torch
def of(*names):
    for name in names:
        try:
            return all.version(name)
        except all.PackageNotFoundError:
            pass
    return ""
print(json.dumps({"python": platform.python_version(), "torch": torch.__version__,
    "tensorflow": of("tensorflow", "tensorflow-cpu"), "horovod": of("horovod").partition("+")[0]}))
"""


def counts(output: str) -> dict[str, int]:
    r"""Return the number of tests by outcome, from pytest's last line.

    >>> counts("...\n== 2 failed, 10 passed, 3 skipped, 4 deselected, 1 error in 9.1s ==")
    {'passed': 10, 'failed': 3, 'skipped': 3}
    """
    closing = next(
        (line for line in reversed(output.splitlines()) if re.search(r" in [\d.]+s", line)), ""
    )
    numbers = {word: int(number) for number, word in re.findall(r"(\d+) ([a-z]+)", closing)}
    failed = numbers.get("failed", 0) + numbers.get("error", 0) + numbers.get("errors", 0)
    return {
        "passed": numbers.get("passed", 0),
        "failed": failed,
        "skipped": numbers.get("skipped", 0),
    }


def tested(python: Path, arguments: list[str]) -> dict[str, Any]:
    """Return the row of one interpreter."""
    printed = subprocess.run([python, "-c", VERSIONS], capture_output=True, text=True, check=True)
    row: dict[str, Any] = json.loads(printed.stdout.splitlines()[-1])
    command = [str(python), "-m", "pytest", *arguments]
    print(f"== {row}: {' '.join(command)}", flush=True)
    began = time.monotonic()
    done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)
    print(
        "\n".join(line for line in done.stdout.splitlines() if line.startswith(("FAILED", "ERR")))
    )
    row |= counts(done.stdout) | {"seconds": round(time.monotonic() - began)}
    if not row["passed"]:
        raise SystemExit(
            f"no test passed under {python}:\n{done.stdout[-3000:]}{done.stderr[-3000:]}"
        )
    commit = subprocess.run(
        ["git", "describe", "--always", "--dirty=+"],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    return row | {"commit": commit.stdout.strip()}


def table(rows: list[dict[str, Any]]) -> str:
    """Return the rows as Markdown."""
    ordered = sorted(rows, key=lambda row: (row["torch"], row["python"]), reverse=True)
    lines = [list(HEAD), ["---"] * len(HEAD)]
    lines += [[str(row[name.lower()]) for name in HEAD] for row in ordered]
    return "\n".join(f"| {' | '.join(line)} |" for line in lines)


def write(rows: list[dict[str, Any]]) -> None:
    """Write the table into its page."""
    text = PAGE.read_text(encoding="utf-8")
    PAGE.write_text(put(text, table(rows), START, END), encoding="utf-8")


def main(argv: list[str]) -> int:
    """Run, keep, write."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("pythons", nargs="*", type=Path)
    parser.add_argument("--table", action="store_true", help="only rewrite the page's table")
    parser.add_argument("--pytest", default="-n 2 -m 'not slow'", help="arguments of pytest")
    args = parser.parse_args(argv)
    if not args.pythons and not args.table:
        parser.error("name an interpreter, or --table")
    rows: list[dict[str, Any]] = json.loads(RESULT.read_text()) if RESULT.exists() else []
    for python in args.pythons:
        row = tested(python, shlex.split(args.pytest))
        same = ("python", "torch", "tensorflow")
        rows = [other for other in rows if any(other[key] != row[key] for key in same)] + [row]
        RESULT.write_text(json.dumps(rows, indent=1) + "\n")
    write(rows)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
