"""Which code each figure is from: rows of benchmarks/results/manifest.json, and their check.

A commit says too little: it changes with every comment, and rows of one file have several. So a row
keeps a hash of the code that its result measures: of the files of its areas, without comments,
docstrings and format. `areas` of the manifest name files and folders; a row of `results` has

    command     what measures it anew, whole; null where what it compares is gone
    of          areas of the code that is measured; none where no change of code makes it older
    code        the hash when it was measured; null: before hashes were kept
    date        the day, and `took_s` the seconds of that run
    accepted    {"code", "reason"}: code that changed since, and why the figures hold all the same
"""

from __future__ import annotations

import ast
import hashlib
import json
import os
import re
import time
from datetime import date
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parent.parent
RESULTS = ROOT / "benchmarks" / "results"
MANIFEST = RESULTS / "manifest.json"
PAGES = ("README.md", "CONTRIBUTING.md", "docs/**/*.md")
SOURCES = frozenset({".py", ".cpp", ".h", ".cu", ".cuh"})
AGAIN = "python -m benchmarks --record"
Row = dict[str, Any]
# With its folder anywhere; bare in a cell of a table, as in docs/papers.md.
_NAMED = re.compile(r"(?:(benchmarks/results/)|[|,] )([\w./]+\.json)\b")
_NO_CODE = re.compile(r'"(?:\\.|[^"\\\n])*"|//[^\n]*|/\*.*?\*/', re.DOTALL)


def load() -> dict[str, Any]:
    """Return the manifest: `areas` and `results`."""
    manifest: dict[str, Any] = json.loads(MANIFEST.read_text(encoding="utf-8"))
    return manifest


def save(manifest: dict[str, Any]) -> None:
    """Write the manifest, a result a line; several ranks of one run may do so at once."""
    parts = []
    for name, rows in manifest.items():
        lines = (f"  {json.dumps(key)}: {json.dumps(rows[key])}" for key in sorted(rows))
        parts.append(f' "{name}": {{\n' + ",\n".join(lines) + "\n }")
    draft = MANIFEST.with_suffix(f".{os.getpid()}")
    draft.write_text("{\n" + ",\n".join(parts) + "\n}\n", encoding="utf-8")
    os.replace(draft, MANIFEST)


def results() -> set[str]:
    """Return the names of all results.

    Those of evidence/ are of the tree before a redesign, and meant to be older than the code.
    """
    paths = set(RESULTS.rglob("*.json")) - {MANIFEST}
    names = {path.relative_to(RESULTS).as_posix() for path in paths}
    return {name for name in names if not name.startswith("evidence/")}


@cache
def page_texts() -> dict[str, str]:
    """Return the text of every page by its path."""
    paths = [path for pattern in PAGES for path in sorted(ROOT.glob(pattern))]
    return {path.relative_to(ROOT).as_posix(): path.read_text(encoding="utf-8") for path in paths}


@cache
def pages() -> dict[str, list[str]]:
    """Return the pages that name a file of results, by its name."""
    by_result: dict[str, list[str]] = {}
    for page, text in page_texts().items():
        for folder, name in _NAMED.findall(text):
            # In a table without the folder, it is any file.
            if page not in by_result.setdefault(name, []) and (folder or (RESULTS / name).exists()):
                by_result[name].append(page)
    return {name: pages for name, pages in by_result.items() if pages}


def _plain(node: Any) -> Any:
    """Nodes without places, docstrings and what only some versions of Python have, if empty."""
    if isinstance(node, ast.AST):
        fields = ((name, _plain(value)) for name, value in ast.iter_fields(node))
        return type(node).__name__, *((name, value) for name, value in fields if value)
    if isinstance(node, list):
        return [_plain(item) for item in node if not _is_docstring(item)]
    return "" if node is None else repr(node)


def _is_docstring(node: Any) -> bool:
    value = node.value if isinstance(node, ast.Expr) else None
    return isinstance(value, ast.Constant) and isinstance(value.value, str)


def code_of(text: str, suffix: str) -> str:
    """Return what of a source counts: of Python its syntax tree, else its letters."""
    if suffix == ".py":
        return repr(_plain(ast.parse(text)))
    kept = _NO_CODE.sub(lambda match: match[0] if match[0].startswith('"') else " ", text)
    return "".join(kept.split())


@cache
def _digest(path: Path) -> str:
    code = code_of(path.read_text(encoding="utf-8"), path.suffix)
    return hashlib.sha256(code.encode()).hexdigest()


def code_files(row: Row, areas: dict[str, list[str]]) -> set[Path]:
    """Return the sources of a row's areas; FileNotFoundError for what is not there."""
    files: set[Path] = set()
    for pattern in (pattern for area in row["of"] for pattern in areas[area]):
        paths = list(ROOT.glob(pattern))
        if not paths:
            raise FileNotFoundError(f"{pattern} of {MANIFEST.name} is not there; say where it went")
        for path in paths:
            files.update(path.rglob("*") if path.is_dir() else [path])
    return {path for path in files if path.suffix in SOURCES}


def code_hash(row: Row, areas: dict[str, list[str]]) -> str:
    """Return the hash of the code of a row today. Files may move: their names are no part of it."""
    digests = sorted(map(_digest, code_files(row, areas)))
    return hashlib.sha256("".join(digests).encode()).hexdigest()[:16]


def stale(manifest: dict[str, Any]) -> dict[str, str]:
    """Return why figures may not be those of the code, by result; those that are have no entry."""
    reasons = {}
    for name, row in manifest["results"].items():
        if not row["of"]:
            continue
        known = row["code"], row.get("accepted", {}).get("code")
        if row["code"] is None:
            reasons[name] = "measured before hashes of the code were kept"
        elif code_hash(row, manifest["areas"]) not in known:
            reasons[name] = f"{', '.join(row['of'])} changed since {row['date']}"
    return reasons


def problems(manifest: dict[str, Any]) -> list[str]:
    """Return what is wrong between pages, results and code, each with what to do.

    Results that were measured before hashes were kept are no problem here: see `stale`.
    """
    rows, existing, named = manifest["results"], results(), pages()
    faults = [f"{named[name][0]} names benchmarks/results/{name}, which is not there; measure it"
             for name in sorted(named) if not (RESULTS / name).exists()]  # fmt: skip
    for name in sorted(existing):
        if name not in named:
            faults.append(f"no page names benchmarks/results/{name}; name it there, or remove it")
        if name not in rows:
            faults.append(
                f"{name} has no row in {MANIFEST.name}; give it one, then: {AGAIN} {name}"
            )
    faults += [f"{name} of {MANIFEST.name} is not there; run: {rows[name]['command']}"
              for name in sorted(set(rows) - existing)]  # fmt: skip
    faults += [f"{name}: {why}; run: {rows[name]['command']}\n    or say why its figures hold: "
              f"python -m benchmarks --accept {name} REASON"
              for name, why in stale(manifest).items() if rows[name]["code"]]  # fmt: skip
    return faults


def record(manifest: dict[str, Any], result: str, **more: Any) -> None:
    """Say that a result is of the code of today."""
    row = {key: value for key, value in manifest["results"][result].items() if key != "accepted"}
    today = {"code": code_hash(row, manifest["areas"]), "date": date.today().isoformat()}
    manifest["results"][result] = row | today | more


def rows_kept(before: str, after: str) -> bool:
    """Whether a row of the text of a result before a run is in the text after it, too."""
    old, new = (json.loads(text) for text in (before, after))
    if not isinstance(old, list) or not isinstance(new, list):
        return bool(old == new)
    return any(row in old for row in new)


def note(result: str, old: str, command: str, took_s: int) -> str:
    """Record a result that a run has just written, and say so; or say why it cannot be.

    old : its text before the run
    """
    manifest = load()
    row = manifest["results"].get(result)
    if row is None:
        return f"{result} is new: give it a row in {MANIFEST.name}, then: {AGAIN} {result}"
    other = [spec.origin for package in ("sn_compress", "sn_memory")
             if (spec := find_spec(package)) and spec.origin
             and not Path(spec.origin).is_relative_to(ROOT)]  # fmt: skip
    began = time.time() - took_s
    why = ""
    if other:
        why = f"the code that ran is {other[0]}"
    elif any(file.stat().st_mtime > began for file in code_files(row, manifest["areas"])):
        why = "the code changed meanwhile"
    elif rows_kept(old, (RESULTS / result).read_text(encoding="utf-8")):
        why = "it has rows from before"
    elif not (row["command"] or "").endswith(command):
        why = f"its command is `{row['command']}`"
    if why:
        return f"{result} is not recorded: {why}. If it is of the code of today: {AGAIN} {result}"
    record(manifest, result, took_s=took_s)
    save(manifest)
    return f"{result} is recorded as measured with the code of today"
