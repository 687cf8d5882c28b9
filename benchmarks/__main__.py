"""All benchmarks by name.

    python -m benchmarks --list                   benchmarks, with their results and pages
    python -m benchmarks NAME [ARGS]              run benchmarks/NAME.py
    python -m benchmarks --stale                  results that may be older than the code
    python -m benchmarks --record RESULT ...      record complete results of the current code
    python -m benchmarks --accept RESULT REASON   keep a result: the change cannot alter it

A benchmark is a file whose docstring contains `python -m benchmarks` and its own name; the other
files are what benchmarks share or start. A run that measures a complete result, with the command
of the manifest, records that itself.
"""

from __future__ import annotations

import argparse
import ast
import re
import runpy
import shlex
import sys
import time
from pathlib import Path

HERE = Path(__file__).resolve().parent
# As if one of the files had been started itself: its neighbours first, not the current folder.
sys.path[0] = str(HERE)

import manifest as results  # noqa: E402

MODULE = "-m benchmarks"


def benchmarks() -> dict[str, str]:
    """Return what each benchmark measures, by name."""
    purposes = {}
    for path in sorted(HERE.glob("*.py")):
        docstring = ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or ""
        if f"{MODULE} {path.stem}" in docstring:
            purposes[path.stem] = docstring.partition("\n")[0]
    return purposes


def show(purposes: dict[str, str]) -> None:
    """Print a paragraph for each: what it measures, seconds, results, pages."""
    rows = results.load()["results"]
    texts = results.page_texts().items()
    commands = {page: re.findall(r"-m\s+benchmarks\s+(\w+)", text) for page, text in texts}
    for name, what in purposes.items():
        own = {result: row for result, row in rows.items()
               if f"{MODULE} {name} " in f"{row['command']} "}  # fmt: skip
        took = [f"{row['took_s']} s" for row in own.values() if "took_s" in row]
        pages = {page for result in own for page in results.pages().get(result, ())}
        pages |= {page for page, names in commands.items() if name in names}
        about = [*took, *(f"benchmarks/results/{result}" for result in own), *sorted(pages)]
        print(f"{name}: {what}\n    {', '.join(about)}")


def show_stale(manifest: dict[str, dict[str, results.Row]]) -> None:
    """Print why, and the command, of each result that may be older than the code."""
    for name, why in results.stale(manifest).items():
        print(f"{name}: {why}\n    {manifest['results'][name]['command']}")


def run(name: str, arguments: list[str]) -> object:
    """Run a benchmark, record what it measured whole, and return how it ended."""
    paths = {result: results.RESULTS / result for result in results.results()}
    before = {result: (path.stat().st_mtime_ns, path.read_text()) for result, path in paths.items()}
    sys.argv = [str(HERE / f"{name}.py"), *arguments]
    began = time.monotonic()
    try:
        runpy.run_path(sys.argv[0], run_name="__main__")
    except SystemExit as end:
        if end.code:
            return end.code
    command = shlex.join(["python", *MODULE.split(), name, *arguments])
    for result in sorted(results.results()):
        changed_ns, old = before.get(result, (0, "[]"))
        if (results.RESULTS / result).stat().st_mtime_ns != changed_ns:
            print(results.note(result, old, command, round(time.monotonic() - began)))
    return 0


def main(argv: list[str]) -> object:
    """List, run, or keep the manifest."""
    purposes = benchmarks()
    if argv and not argv[0].startswith("-"):
        if argv[0] not in purposes:
            raise SystemExit(f"no benchmark {argv[0]}; python -m benchmarks --list has all")
        return run(argv[0], argv[1:])
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    flags = parser.add_mutually_exclusive_group(required=True)
    flags.add_argument("--list", action="store_true")
    flags.add_argument("--stale", action="store_true")
    flags.add_argument("--record", nargs="+", metavar="RESULT")
    flags.add_argument("--accept", nargs=2, metavar=("RESULT", "REASON"))
    args = parser.parse_args(argv)
    manifest = results.load()
    rows = manifest["results"]
    asked = args.record or (args.accept or [])[:1]
    if unknown := [result for result in asked if result not in rows]:
        raise SystemExit(f"{unknown[0]} has no row in {results.MANIFEST.name}; give it one")
    if args.list:
        show(purposes)
    elif args.stale:
        show_stale(manifest)
    for result in args.record or ():
        results.record(manifest, result)
    if args.accept:
        row, reason = rows[args.accept[0]], args.accept[1]
        if row["code"] is None:
            raise SystemExit(f"{args.accept[0]} was measured with unknown code: {row['command']}")
        row["accepted"] = {"code": results.code_hash(row, manifest["areas"]), "reason": reason}
    if asked:
        results.save(manifest)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
