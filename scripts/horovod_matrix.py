#!/usr/bin/env python3
"""Build Horovod in one environment after another, average over two ranks in each, keep a table.

    python scripts/horovod_matrix.py --folder /tmp/matrix       # all cells without a result yet
    python scripts/horovod_matrix.py --folder /tmp/matrix torch-2.15.0-cuda-py3.11
    python scripts/horovod_matrix.py --table                    # rewrite docs/horovod.md, no builds

A cell is a fresh virtual environment with a torch, perhaps a TensorFlow, and nothing else; it runs
build_horovod.py as a user does. For an impossible cell the reason is recorded. The result file is
written after each cell, so that an interrupted run resumes where it stopped: wheels and partial
environments are kept in the folder. A finished environment, which takes gigabytes, is deleted.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import shutil
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Final

from horovod_tools import default_jobs

ROOT: Final = Path(__file__).resolve().parents[1]
RESULT: Final = ROOT / "benchmarks" / "results" / "horovod_matrix.json"
PAGE: Final = ROOT / "docs" / "horovod.md"
START, END = "<!-- matrix:start -->", "<!-- matrix:end -->"
TENSORFLOW: Final = "tensorflow-cpu==2.21.0"
HEAD: Final = (
    "Python", "torch", "TensorFlow", "C++", "toolkit", "moves tensors by", "2 ranks averaged",
    "build, s", "of processor, s",
)  # fmt: skip


@dataclass(frozen=True)
class Cell:
    """One combination; `cuda` is of torch, TensorFlow is the CPU one."""

    torch: str
    cuda: bool
    python: str
    tensorflow: bool = False

    @property
    def name(self) -> str:
        """Name on the command line and in the result file."""
        kind = "cuda" if self.cuda else "cpu"
        return f"torch-{self.torch}-{kind}-py{self.python}{'-tf' if self.tensorflow else ''}"

    def requirements(self) -> list[str]:
        """Requirements for pip; `===` excludes builds with a local version such as +cpu."""
        torch = f"torch==={self.torch}" if self.cuda else f"torch==={self.torch}+cpu"
        return [torch, "numpy", *([TENSORFLOW] if self.tensorflow else [])]


# The most wanted first: what a time that is up leaves out is at the end.
FIRST: Final = (
    Cell("2.15.0", True, "3.11"),
    Cell("2.13.0", False, "3.11", True),
    Cell("2.11.0", True, "3.12"),
    Cell("2.13.0", True, "3.11"),
    Cell("2.15.0", True, "3.11", True),
    Cell("2.15.0", True, "3.13"),
)
ALL: Final = tuple(
    Cell(torch, cuda, python, tensorflow)
    for cuda, tensorflow in ((True, False), (False, False), (False, True))
    for torch in ("2.15.0", "2.13.0", "2.11.0")
    for python in ("3.11", "3.12", "3.13")
)
CELLS: Final = tuple(dict.fromkeys((*FIRST, *ALL)))


class CannotError(RuntimeError):
    """A cell is impossible here; the message says why."""


def interpreter(version: str, interpreters: Sequence[Path] = ()) -> Path:
    """A Python of a version, "3.12": one given, on the PATH, or of pyenv. Raises CannotError."""
    pyenv = Path(os.environ.get("PYENV_ROOT", Path.home() / ".pyenv")) / "versions"
    on_path = shutil.which(f"python{version}")
    tried: list[Path] = [*interpreters, *([Path(on_path)] if on_path else ())]
    tried += sorted(pyenv.glob(f"{version}.*/bin/python"), reverse=True)
    code = "import sys, venv, ensurepip; print('%d.%d' % sys.version_info[:2])"
    for path in tried:
        try:
            printed = subprocess.run(
                [path, "-c", code], capture_output=True, text=True, timeout=60, check=False
            ).stdout
        except OSError:
            continue  # not an interpreter: the next may be one
        if printed.strip() == version:
            return path
    raise CannotError(f"no Python {version} on this machine")


def run(command: Sequence[str | Path], log: Path) -> int:
    """Run a command, with output to a log and steps to the terminal; return its exit status."""
    env = {
        name: value
        for name, value in os.environ.items()
        if not name.startswith(("PYTHON", "VIRTUAL"))
    }
    with log.open("a", encoding="utf-8") as file:
        file.write(f"$ {' '.join(map(str, command))}\n")
        with subprocess.Popen(
            list(map(str, command)), env=env, text=True, errors="replace",
            stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        ) as process:  # fmt: skip
            for line in process.stdout or ():
                file.write(line)
                if line.startswith("["):
                    print(f"  {line.rstrip()}", flush=True)
    return process.returncode


def why_not(log: Path) -> str:
    """Return the reason that pip or the build gave, in one line."""
    lines = log.read_text(encoding="utf-8").splitlines()
    wanted = [
        line for line in lines if re.match(r"ERROR: (No matching|Could not)|step \d+ of", line)
    ]
    named = [line for line in lines if re.search(r"\berror\b.*:", line, re.IGNORECASE)]
    return (wanted[-1:] or named[:1] or lines[-1:] or ["it said nothing"])[0]


def environment(cell: Cell, folder: Path, interpreters: Sequence[Path], log: Path) -> Path:
    """Return the Python of the cell's environment; create it if incomplete. Raises CannotError."""
    home, stamp = folder / cell.name, folder / cell.name / "whole"
    python = home / "bin" / "python"
    if stamp.is_file():
        return python
    shutil.rmtree(home, ignore_errors=True)
    python = interpreter(cell.python, interpreters)
    print(f"  installing {' '.join(cell.requirements())}", flush=True)
    if run([python, "-m", "venv", home], log):
        raise CannotError(f"no virtual environment could be made: {why_not(log)}")
    pip: list[str | Path] = [
        python,
        "-m",
        "pip",
        "--disable-pip-version-check",
        "install",
        "--progress-bar=off",
    ]
    # No wheel is built of a source archive: a cell is what a user gets from the index.
    if run([*pip, "--no-cache-dir", "--only-binary=:all:", *cell.requirements()], log):
        if "No matching distribution" in log.read_text(encoding="utf-8"):
            raise CannotError("the index has no such wheel")
        raise RuntimeError(f"pip failed: {why_not(log)}")
    stamp.touch()
    return python


def measure(cell: Cell, folder: Path, args: argparse.Namespace) -> dict[str, Any]:
    """Build and check in the cell's environment; return the result, or the reason of a failure."""
    began, log, report = time.monotonic(), folder / f"{cell.name}.log", folder / "facts.json"
    log.write_text("", encoding="utf-8")
    report.unlink(missing_ok=True)
    row: dict[str, Any] = {"cell": cell.name, **asdict(cell)}
    try:
        python = environment(cell, folder, args.python, log)
        command: list[str | Path] = [
            python,
            ROOT / "scripts" / "build_horovod.py",
            "--json",
            report,
        ]
        command += ["--cache", folder / "wheels", "--jobs", str(args.jobs)]
        if run(command, log):
            row |= {"state": "failed", "why": why_not(log)}
        else:
            row |= {"state": "built", "facts": json.loads(report.read_text(encoding="utf-8"))}
    except CannotError as reason:
        row |= {"state": "cannot", "why": str(reason)}
    except RuntimeError as error:
        row |= {"state": "failed", "why": str(error)}
    if not args.keep and row["state"] != "failed":
        shutil.rmtree(folder / cell.name, ignore_errors=True)
    return row | {"seconds": round(time.monotonic() - began)}


def load(path: Path) -> dict[str, dict[str, Any]]:
    """Return the results by cell, in the order of the cells; empty without a file."""
    if not path.is_file():
        return {}
    rows = {row["cell"]: row for row in json.loads(path.read_text(encoding="utf-8"))}
    return {cell.name: rows[cell.name] for cell in CELLS if cell.name in rows}


def save(path: Path, results: dict[str, dict[str, Any]]) -> None:
    """Write the results to another name and rename it, so that readers never see a partial file."""
    path.parent.mkdir(parents=True, exist_ok=True)
    partial = path.with_suffix(".part")
    partial.write_text(json.dumps([*results.values()], indent=1) + "\n", encoding="utf-8")
    partial.replace(path)


def line_of(cell: Cell, row: dict[str, Any] | None) -> list[str]:
    """Return a cell's line of the table."""
    names = [cell.python, f"{cell.torch} {'CUDA' if cell.cuda else 'CPU'}"]
    names.append("2.21.0 CPU" if cell.tensorflow else "")
    if row is None or row["state"] != "built":
        why = "not tried" if row is None else f"{row['state']}: {row['why']}"
        return [*names, "", "", why, "", "", ""]
    facts: dict[str, Any] = row["facts"]
    if facts["torch_cuda"]:
        names[1] = f"{facts['torch']} CUDA {facts['torch_cuda']}"
    built = facts["built"]
    toolkit, times = "", ["not timed", ""]
    if built:
        toolkit = built["toolkit"] or ""
        times = [f"{built['seconds']:.0f}", f"{built['cpu_seconds']:.0f}"]
    averaged = [name for name in ("torch", "tensorflow") if facts[name]]
    return [
        facts["python"], *names[1:], str(facts["standard"]), toolkit, ", ".join(facts["moves"]),
        ", ".join(averaged), *times,
    ]  # fmt: skip


def table(results: dict[str, dict[str, Any]]) -> str:
    """Return all cells as Markdown: built ones in a table, then the others, grouped by reason."""
    built = [cell for cell in CELLS if results.get(cell.name, {}).get("state") == "built"]
    lines = [
        list(HEAD),
        ["---"] * len(HEAD),
        *(line_of(cell, results[cell.name]) for cell in built),
    ]
    text = "\n".join(f"| {' | '.join(line)} |" for line in lines)
    reasons: dict[str, dict[str, list[str]]] = {}
    for cell in CELLS:
        if cell not in built:
            python, torch, other_libraries, *_ = line = line_of(cell, results.get(cell.name))
            what = f"torch {torch}{f' and TensorFlow {other_libraries}' if other_libraries else ''}"
            reasons.setdefault(line[5], {}).setdefault(what, []).append(python)
    for why, cells in reasons.items():
        named = (f"{what} (Python {', '.join(sorted(pythons))})" for what, pythons in cells.items())
        text += f"\n\n{why[0].upper()}{why[1:]}: {'; '.join(named)}."
    return text


def put(text: str, content: str, start: str = START, end: str = END) -> str:
    """Return a page with the text between its markers replaced, or raise ValueError."""
    before, rest = text.split(start)
    _, after = rest.split(end)
    return f"{before}{start}\n{content}\n{end}{after}"


def parse(argv: list[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    names = [cell.name for cell in CELLS]
    parser.add_argument("cells", nargs="*", metavar="CELL", help=f"some of {', '.join(names)}")
    parser.add_argument("--folder", type=Path, help="for environments, wheels and logs: 15 GB free")
    parser.add_argument("--result", type=Path, default=RESULT, help="the result file")
    parser.add_argument(
        "--python", type=Path, action="append", default=[], help="interpreter to use"
    )
    parser.add_argument("--jobs", type=int, default=default_jobs(), help="parallel compilers")
    parser.add_argument("--again", action="store_true", help="also cells that have a result")
    parser.add_argument("--keep", action="store_true", help="do not delete environments")
    parser.add_argument(
        "--table", action="store_true", help="rewrite the page's table, build nothing"
    )
    parser.add_argument(
        "--check", action="store_true", help="check whether the page's table is current"
    )
    args = parser.parse_args(argv)
    if unknown := set(args.cells) - set(names):
        parser.error(f"no cell {', '.join(sorted(unknown))}; there are {', '.join(names)}")
    if not (args.table or args.check or args.folder):
        parser.error("--folder DIR is needed to build in")
    return args


def main(argv: list[str] | None = None) -> int:
    """Run the cells or write the table; return 1 if a cell failed or the page is out of date."""
    args = parse(argv)
    results = load(args.result)
    if args.table or args.check:
        text = PAGE.read_text(encoding="utf-8")
        page_text = put(text, table(results))
        if args.table:
            PAGE.write_text(page_text, encoding="utf-8")
        elif page_text != text:
            print(f"the matrix in {PAGE.name} is not that of {args.result.name}: run with --table")
            return 1
        return 0
    folder = args.folder.resolve()
    folder.mkdir(parents=True, exist_ok=True)
    wanted = [cell for cell in CELLS if cell.name in args.cells or not args.cells]
    todo = [
        cell for cell in wanted if args.again or results.get(cell.name, {}).get("state") != "built"
    ]
    for at, cell in enumerate(todo, 1):
        print(f"== {at} of {len(todo)}: {cell.name}", flush=True)
        results[cell.name] = row = measure(cell, folder, args)
        save(args.result, {cell.name: results[cell.name] for cell in CELLS if cell.name in results})
        print(f"  {row['state']}, {row['seconds']} s {row.get('why', '')}", flush=True)
    print(table(results))
    return int(any(results[cell.name]["state"] == "failed" for cell in wanted))


if __name__ == "__main__":
    sys.exit(main())
