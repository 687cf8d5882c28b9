"""Print the test files that a change concerns, found by imports; `make test-changed` runs them.

    python scripts/changed_tests.py                changes against main, committed or not
    python scripts/changed_tests.py --since REF    changes against another commit

A file concerns a test if the test's file reaches it by imports (those inside functions count), or
names it in a string, as tests name the scripts that they start. Files that no Python file can
reach, such as C++ or settings, concern the tests in FURTHER; files not in that table concern all.
"""

from __future__ import annotations

import argparse
import ast
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path

import architecture

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("sn_compress", "sn_memory")
# Folders whose files import each other by their bare names.
FLAT = (
    "benchmarks", "scripts", "fuzz", "tests/compress", "tests/memory", "tests/memory_torch",
    "tests/memory_tensorflow",
)  # fmt: skip
FIXTURES = "conftest"  # without its suffix: this file starts none of them
# Files that nothing imports, by how their paths begin; the first that fits counts.
FURTHER: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("csrc/compress", ("tests/compress", "tests/cuda", "tests/ddp", "tests/horovod")),
    ("csrc/memory", ("tests/memory", "tests/memory_torch", "tests/memory_tensorflow")),
    ("docs", ("tests/docs", "tests/frame")),
    ("README.md", ("tests/docs",)),
    ("CHANGELOG.md", ()),
    ("CONTRIBUTING.md", ("tests/docs",)),
    ("examples", ("tests/examples", "tests/docs", "tests/ddp", "tests/memory_torch")),
    ("benchmarks/results", ("tests/docs", "tests/benchmarks", "tests/frame")),
    ("tests/golden", ("tests/compress",)),
    ("tests/data", ("tests/memory",)),
)


def sources() -> dict[str, Path]:
    """Return all Python files of the project by name: modules dotted, others by their path."""
    modules = {
        name: path for package in PACKAGES for name, path in architecture.modules(package).items()
    }
    for folder in ("tests", "benchmarks", "scripts", "fuzz", "examples"):
        for path in sorted((ROOT / folder).rglob("*.py")):
            modules[path.relative_to(ROOT).as_posix()] = path
    return modules


def asked(name: str, path: Path, known: dict[str, Path], by_file: dict[str, list[str]]) -> set[str]:
    """Return the names of the files that one file imports, or starts by name.

    by_file : the names of all files with a given file name
    """
    imported = architecture.imports(name, path, known)
    here = path.parent.relative_to(ROOT).as_posix()
    for node in architecture.parsed(path):
        if isinstance(node, ast.Constant) and str(node.value).endswith(".py"):
            # Of a conftest.py, which each folder may have, the name says not which one.
            named = Path(str(node.value)).name
            imported.update(by_file.get(named, ()) if named != f"{FIXTURES}.py" else ())
        bare: list[str] = []
        if isinstance(node, ast.Import):
            bare = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom) and not node.level:
            bare = [node.module or ""]
        places = [f"{folder}/{module}.py" for module in bare for folder in (*FLAT, here)]
        imported.update(module for module in places if module in known)
    if name.endswith(".py"):
        folders = Path(name).parents
        imported.update(
            fixture for up in folders if (fixture := f"{up.as_posix()}/{FIXTURES}.py") in known
        )
    else:
        # A package's __init__ runs before what lies in it.
        parts = name.split(".")
        imported.update(".".join(parts[:end]) for end in range(1, len(parts)))
    return imported - {name}


def users_of(known: dict[str, Path]) -> dict[str, set[str]]:
    """Return for each file the names of those that import or start it."""
    by_file: dict[str, list[str]] = {}
    for name, path in known.items():
        by_file.setdefault(path.name, []).append(name)
    users: dict[str, set[str]] = {name: set() for name in known}
    for name, path in known.items():
        for other in asked(name, path, known, by_file):
            users[other].add(name)
    return users


def concerned(
    changed: Iterable[str], known: dict[str, Path], users: dict[str, set[str]]
) -> list[str]:
    """Return the test files, or folders of tests, that a change of these paths concerns."""
    by_path = {path.relative_to(ROOT).as_posix(): name for name, path in known.items()}
    wanted: set[str] = set()
    todo: list[str] = []
    for path in changed:
        if path in by_path:
            todo.append(by_path[path])
        # A Python file that is not there is gone: what imported it has changed as well.
        elif not path.endswith(".py"):
            wanted.update(
                next((tests for start, tests in FURTHER if path.startswith(start)), ("tests",))
            )
    seen = set(todo)
    while todo:
        fresh = users[todo.pop()] - seen
        seen |= fresh
        todo += fresh
    wanted.update(
        path for path in seen if Path(path).name.startswith("test_") and path.endswith(".py")
    )
    # A folder that is wanted whole needs none of its files beside it.
    return sorted(
        path for path in wanted if not any(path.startswith(f"{other}/") for other in wanted)
    )


def changed_since(ref: str) -> list[str]:
    """Return the paths that differ from a commit, including uncommitted and untracked ones."""

    def git(*args: str) -> list[str]:
        done = subprocess.run(["git", *args], cwd=ROOT, capture_output=True, text=True, check=False)
        if done.returncode:
            sys.exit(f"git {args[0]} failed: {done.stderr.strip()}")
        return done.stdout.splitlines()

    base = git("merge-base", ref, "HEAD")[0]
    return git("diff", "--name-only", base) + git("ls-files", "--others", "--exclude-standard")


def main() -> int:
    """Print the tests that the change concerns, one per line."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--since", default="main", help="commit to compare with (default: main)")
    args = parser.parse_args()
    known = sources()
    for line in concerned(changed_since(args.since), known, users_of(known)):
        print(line)
    return 0


if __name__ == "__main__":
    sys.exit(main())
