"""Record what a tree does before a redesign, and compare it afterwards.

    python -m benchmarks evidence freeze --out FOLDER [--sections NAME ...] [--units NAME ...]
                                         [--all] [--resume]
    python -m benchmarks evidence compare BEFORE AFTER [--sections NAME ...] [--explained PATTERN]
    python -m benchmarks evidence list

`freeze` runs the tree whose `sn_memory` Python finds first, so PYTHONPATH says which, with that
tree's own benchmarks; it writes FOLDER/SECTION.json after each row. With `--resume` units that are
done are left out; the sources must be the same then. Each unit runs in a process of its own, on one
thread, with an empty cache of op times. Without `--all` a section has the units that take
minutes, and without `--sections` all sections are frozen, those with seconds in them last.

`compare` prints what differs, and returns 1 if anything is worse than the rule of its section in
evidence_sections.py: plans equal where the search ended by itself and within 1.5 % where it was
cut, no case lost, no peak above its budget. `--explained` takes regular expressions of lines that
do not count: name the decision that explains them beside the command.
"""

from __future__ import annotations

import argparse
import hashlib
import importlib
import json
import os
import re
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Iterator, Sequence
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path
from typing import Any

from evidence_compress import COMPRESS_SECTIONS
from evidence_rules import compared
from evidence_sections import SECTIONS as MEMORY_SECTIONS

SECTIONS = COMPRESS_SECTIONS | MEMORY_SECTIONS
LINE = "evidence: "
LIBRARIES = ("numpy", "scipy", "torch", "tensorflow", "tensorflow-cpu", "transformers")
ENVIRONMENT = {
    "OMP_NUM_THREADS": "1", "MKL_NUM_THREADS": "1", "TF_NUM_INTRAOP_THREADS": "1",
    "TF_NUM_INTEROP_THREADS": "1", "TF_CPP_MIN_LOG_LEVEL": "3", "CUDA_VISIBLE_DEVICES": "",
}  # fmt: skip


def tree() -> Path:
    """Return the root of the tree that is measured; its benchmarks are imported from here on."""
    spec = find_spec("sn_memory")
    if spec is None or spec.origin is None:
        raise SystemExit("there is no sn_memory; name the tree to freeze in PYTHONPATH.")
    root = Path(spec.origin).resolve().parents[1]
    folder = str(root / "benchmarks")
    if folder not in sys.path and Path(folder).is_dir():
        sys.path.insert(0, folder)
    return root


def sources(root: Path, package: str) -> str:
    """Return a digest of all that decides what a package does: its Python, C++ and extensions."""
    digest = hashlib.sha256()
    patterns = (f"{package}/**/*.py", "csrc/**/*", f"{package}/*.so")
    for path in sorted(
        file for pattern in patterns for file in root.glob(pattern) if file.is_file()
    ):
        digest.update(str(path.relative_to(root)).encode() + b"\0" + path.read_bytes())
    return digest.hexdigest()[:16]


def about(root: Path, package: str) -> dict[str, Any]:
    """Return what all rows of a file have in common."""
    machine = importlib.import_module("machine")
    versions = {"python": sys.version.split()[0]}
    for name in LIBRARIES:
        try:
            versions[name] = metadata.version(name)
        except metadata.PackageNotFoundError:
            continue
    return {
        "commit": machine.commit(),
        "sources": sources(root, package),
        "machine": machine.machine(),
        "versions": versions,
    }


def child(command: Sequence[str], limit_s: float) -> Iterator[tuple[str, Any]]:
    """Run this script in a process of its own; yield "row", "units" or "note", or "crashed" last.

    Lines that other benchmarks print are notes.
    """
    with tempfile.TemporaryDirectory() as cache, tempfile.TemporaryFile("w+") as errors:
        began = time.monotonic()
        with subprocess.Popen(
            [sys.executable, __file__, *command],
            env=os.environ | ENVIRONMENT | {"XDG_CACHE_HOME": cache},
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process:
            timer = threading.Timer(limit_s, process.kill)
            timer.start()
            try:
                assert process.stdout is not None
                for line in process.stdout:
                    if line.startswith(LINE):
                        yield tuple(json.loads(line[len(LINE) :]))
                    elif line.strip():
                        yield "note", line.rstrip()
                code = process.wait()
            finally:
                timer.cancel()
                process.kill()
        if code:
            errors.seek(0)
            last = (errors.read().strip().splitlines() or ["no message"])[-1]
            late = "stopped after its time; " if time.monotonic() - began >= limit_s else ""
            yield "crashed", f"{late}ended with {code}: {last[:300]}"


def say(kind: str, data: Any) -> None:
    """Tell the parent something."""
    print(LINE + json.dumps([kind, data]), flush=True)


def unit_names(section: str, *, everything: bool) -> list[str]:
    """Return the units of a section. They are asked of a process, as their lists import torch."""
    for kind, data in child(["units", section], 600.0):
        if kind == "units":
            return list(data[everything])
        if kind == "crashed":
            raise SystemExit(f"the units of {section} cannot be listed: {data}")
    raise AssertionError(section)


def freeze_section(
    name: str, out: Path, state: dict[str, Any], units: Sequence[str] | None, args: Any
) -> int:
    """Freeze one section; return how many units crashed."""
    path = out / f"{name}.json"
    file: dict[str, Any] = {"section": name, **state, "units": {}, "rows": []}
    if args.resume and path.exists():
        file = json.loads(path.read_text("utf-8"))
        if file["sources"] != state["sources"]:
            raise SystemExit(
                f"{path} is of other sources ({file['commit']}); take another folder, or freeze "
                "it anew without --resume."
            )
        file["rows"] = [row for row in file["rows"] if row["unit"] in file["units"]]
    wanted = list(units or unit_names(name, everything=args.all))
    crashed = 0
    for number, unit in enumerate(wanted, 1):
        if unit in file["units"]:
            print(f"{name} {number}/{len(wanted)} {unit}: done before", flush=True)
            continue
        began, count, failed = time.monotonic(), 0, ""
        for kind, data in child(["rows", name, unit], SECTIONS[name].limit_s):
            if kind == "note":
                print(f"    {data[:160]}", flush=True)
                continue
            if kind == "crashed":
                data, failed = {"key": unit, "crashed": data}, data
            else:
                count += 1
            file["rows"].append({"unit": unit, **data})
            save(path, file)
        spent = round(time.monotonic() - began, 1)
        if failed:
            crashed += 1
        else:
            file["units"][unit] = spent
            save(path, file)
        end = f"CRASHED, {failed}" if failed else f"{count} rows"
        print(f"{name} {number}/{len(wanted)} {unit}: {end} in {spent} s", flush=True)
    return crashed


def save(path: Path, file: dict[str, Any]) -> None:
    """Write a file whole or not at all: a freeze may be stopped at any moment."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_suffix(".part")
    draft.write_text(json.dumps(file, indent=1) + "\n", "utf-8")
    draft.replace(path)


def freeze(args: argparse.Namespace) -> int:
    """Freeze sections of the tree; 1 if a unit crashed."""
    root = tree()
    crashed = 0
    for name in args.sections or SECTIONS:
        state = about(root, SECTIONS[name].package)
        print(f"{name}: {root}, commit {state['commit']}, sources {state['sources']}", flush=True)
        crashed += freeze_section(name, args.out, state, args.units, args)
    return int(crashed > 0)


def compare(args: argparse.Namespace) -> int:
    """Print what differs between two folders; 1 if anything is worse."""
    patterns = [re.compile(pattern) for pattern in args.explained]
    total = 0
    for name in args.sections or SECTIONS:
        paths = [folder / f"{name}.json" for folder in (args.before, args.after)]
        if not paths[0].exists():
            continue
        if not paths[1].exists():
            print(f"{name}: WORSE, {paths[1]} is not there")
            total += 1
            continue
        before, after = (json.loads(path.read_text("utf-8")) for path in paths)
        for what in ("machine", "versions"):
            if before[what] != after[what]:
                print(f"{name}: frozen with other {what}: {before[what]}; {after[what]}")
        rules = SECTIONS[name]
        worse = differ = 0
        for key, finding in compared(
            before["rows"], after["rows"], rules.rules, rules.section_rules
        ):
            line = f"{name}: {key + ': ' if key else ''}{finding.what}"
            explained = finding.worse and any(pattern.search(line) for pattern in patterns)
            mark = "explained " if explained else "WORSE " if finding.worse else ""
            worse += mark == "WORSE "
            differ += mark != "WORSE "
            print(f"{mark}{line}")
        total += worse
        print(f"{name}: {len(before['rows'])} rows, {worse} worse, {differ} other differences")
    return int(total > 0)


def main(argv: list[str]) -> int:
    """Read the command line and do as asked."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    commands = parser.add_subparsers(dest="command", required=True)
    freezing = commands.add_parser("freeze", help="write the evidence of a tree to files")
    freezing.add_argument("--out", type=Path, required=True)
    freezing.add_argument("--units", nargs="+", help="units of one section")
    freezing.add_argument("--all", action="store_true", help="also units that take hours")
    freezing.add_argument("--resume", action="store_true")
    comparing = commands.add_parser("compare", help="print differences, and which are worse")
    comparing.add_argument("before", type=Path)
    comparing.add_argument("after", type=Path)
    comparing.add_argument("--explained", nargs="+", default=[], metavar="PATTERN")
    for subparser in (freezing, comparing):
        subparser.add_argument("--sections", nargs="+", choices=list(SECTIONS))
    commands.add_parser("list", help="list the sections")
    # What `freeze` runs in processes of their own.
    for command in ("units", "rows"):
        inner = commands.add_parser(command)
        inner.add_argument("section", choices=list(SECTIONS))
        if command == "rows":
            inner.add_argument("unit")
    args = parser.parse_args(argv)
    if args.command == "freeze":
        if args.units and len(args.sections or ()) != 1:
            parser.error("--units needs one section")
        return freeze(args)
    if args.command == "compare":
        return compare(args)
    if args.command == "list":
        for name, section in SECTIONS.items():
            print(f"{name:25} {section.what}{', timed' if section.timed else ''}")
        return 0
    tree()
    section = SECTIONS[args.section]
    if args.command == "units":
        say("units", [list(unit) for unit in section.units()])
        return 0
    for row in section.rows(args.unit):
        say("row", row)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
