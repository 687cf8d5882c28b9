"""Do the tests notice a fault? Break lines of the packages, one at a time, in a copy of the tree.

    python scripts/mutations.py --number 200 --log mutations.jsonl
    python scripts/mutations.py --number 25 --log ops.jsonl --tests tests/compress sn_compress/ops

Runs the tests that `changed_tests` names for the broken file, nearest by imports first, until one
fails: "caught", if it passes without the change. "survived": all passed. "unfinished": none had
failed by the time limit. A mutant that is already in the log is not run again.
"""

from __future__ import annotations

import argparse
import ast
import copy
import itertools
import json
import os
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import changed_tests

# Each operator becomes its neighbour, so that what is computed stays near to what it was.
PAIRS = """Add Sub, Mult Div, FloorDiv Mult, Mod Mult, Pow Mult, LShift RShift, BitAnd BitOr,
    And Or, BitXor BitAnd, Lt LtE, Gt GtE, Eq NotEq, Is IsNot, In NotIn"""
BOTH = [pair.split() for pair in PAIRS.split(",")]
OPERATORS = {b: a for a, b in reversed(BOTH)} | dict(BOTH)
NOT_RUN = ("annotation", "returns", "decorator_list")  # fields of nodes


class Mutant(NamedTuple):
    """One change of one line; `source` is the whole file with it."""

    file: str
    line: int
    change: str
    source: str


def neighbour(operator: ast.AST) -> Any:
    """Return the operator that takes the place of another one."""
    return getattr(ast, OPERATORS.get(name := type(operator).__name__, name))()


def broken(node: ast.AST) -> ast.AST | None:
    """Return the node with one fault in it; None for those that are left alone."""
    mutated = copy.deepcopy(node)
    match mutated:
        case ast.BinOp() | ast.BoolOp() | ast.AugAssign():
            mutated.op = neighbour(mutated.op)
        case ast.Compare():
            mutated.ops[0] = neighbour(mutated.ops[0])
        case ast.UnaryOp(op=ast.Not(), operand=operand):
            return operand
        case ast.Constant(value=bool(value)):
            mutated.value = not value
        case ast.Constant(value=int(value) | float(value)):
            mutated.value = value + 1
        case ast.Expr(value=ast.Call()):
            return ast.Pass()
    return None if ast.dump(mutated) == ast.dump(node) else mutated


def computed(node: ast.AST) -> Iterator[ast.expr | ast.stmt]:
    """Yield the expressions and statements in a node, without annotations and messages."""
    for name, value in ast.iter_fields(node):
        for child in (value if isinstance(value, list) else [value]) if name not in NOT_RUN else ():
            if isinstance(child, ast.keyword) and child.arg == "strict":
                continue  # of a zip: nothing changes until something else is wrong
            if isinstance(child, ast.expr | ast.stmt):
                yield child
            if isinstance(child, ast.AST) and not isinstance(child, ast.Raise | ast.JoinedStr):
                yield from computed(child)


def drawn(files: Iterable[Path], number: int, seed: int, root: Path) -> list[Mutant]:
    """Return one mutant of each of that many lines, by a seed; fewer are a prefix of more."""
    by_line: dict[tuple[str, int], list[Mutant]] = {}
    for path in files:
        text, name = path.read_bytes(), path.relative_to(root).as_posix()
        starts = list(itertools.accumulate(map(len, text.splitlines(keepends=True)), initial=0))
        for node in computed(ast.parse(text)):
            if mutated := broken(node):
                new = (
                    f"({ast.unparse(mutated)})"
                    if isinstance(node, ast.expr)
                    else ast.unparse(mutated)
                )
                begin = starts[node.lineno - 1] + node.col_offset
                end = starts[(node.end_lineno or 0) - 1] + (node.end_col_offset or 0)
                source = (text[:begin] + new.encode() + text[end:]).decode()
                mutant = Mutant(name, node.lineno, f"{ast.unparse(node)} -> {new}", source)
                by_line.setdefault(mutant[:2], []).append(mutant)
    chance = random.Random(seed)
    chosen = [chance.choice(mutants) for mutants in by_line.values()]
    chance.shuffle(chosen)
    return chosen[:number]


def rounds_of(tests: Sequence[str], users: dict[str, set[str]], start: str) -> list[list[str]]:
    """Return tests by the number of imports between them and a file."""
    far, todo = {start: 0}, [start]
    for name in todo:
        fresh = sorted(users[name] - far.keys())
        far |= dict.fromkeys(fresh, far[name] + 1)
        todo += fresh
    return [
        [test for test in tests if far[test] == steps]
        for steps in sorted({far[test] for test in tests})
    ]


def first_failure(tree: Path, tests: Sequence[str], marks: str, until: float) -> str:
    """Run tests until one fails and return it; "" if all pass, "limit" if time is up."""
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-m", marks]
    # Bytecode is told from its source by size and second, which a mutant may share with another.
    env = os.environ | {"PYTHONPATH": str(tree), "PYTHONDONTWRITEBYTECODE": "1"}
    process = subprocess.Popen(
        [*command, *tests], cwd=tree, env=env, text=True, start_new_session=True,
        stdin=subprocess.DEVNULL, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        printed, _ = process.communicate(timeout=max(1, until - time.monotonic()))
    except subprocess.TimeoutExpired:
        os.killpg(process.pid, signal.SIGKILL)
        process.communicate()
        return "limit"
    if process.returncode in (0, 5):  # 5: the marks leave no test
        return ""
    failed = re.search(r"^(?:FAILED|ERROR) (\S+?\.py(?:::\w+)*)", printed, re.M)
    return failed[1] if failed else tests[0]


def outcome(
    tree: Path, mutant: Mutant, rounds: Sequence[Sequence[str]], marks: str, limit: float
) -> dict[str, Any]:
    """Return the outcome of a mutant's tests, as one line of the log."""
    path, until, by = tree / mutant.file, time.monotonic() + limit, ""
    text = path.read_text(encoding="utf-8")
    path.write_text(mutant.source, encoding="utf-8")
    for tests in rounds:
        by = by or first_failure(tree, tests, marks, until)
    path.write_text(text, encoding="utf-8")
    if by not in ("", "limit") and first_failure(tree, [by], marks, time.monotonic() + limit):
        sys.exit(f"{by} fails without a change, too")
    outcome_name = {"": "survived", "limit": "unfinished"}.get(by, "caught")
    return dict(zip(Mutant._fields, mutant[:3], strict=False)) | {"outcome": outcome_name, "by": by}


def main() -> int:
    """Break the requested lines, print the outcome of each, and count the outcomes."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("paths", nargs="*", default=changed_tests.PACKAGES, help="files, folders")
    parser.add_argument("--number", type=int, default=200, help="number of lines (default 200)")
    parser.add_argument("--seed", type=int, default=0, help="selects the lines (default 0)")
    parser.add_argument("--log", type=Path, required=True, help="JSON lines; resumed if it exists")
    parser.add_argument("--tests", default="tests", help="run only tests in this folder")
    parser.add_argument("--limit", type=float, default=600, help="seconds per mutant (default 600)")
    parser.add_argument("--marks", default="not slow and not horovod", help="pytest's -m")
    options, root = parser.parse_args(), changed_tests.ROOT
    paths = [path for path in options.paths for path in (root / path, *(root / path).rglob("*"))]
    files = sorted({path for path in paths if path.suffix == ".py"})
    options.log.touch()
    rows = [json.loads(line) for line in options.log.read_text(encoding="utf-8").splitlines()]
    done = {(row["file"], row["line"], row["change"]): row for row in rows}
    mutants = drawn(files, options.number, options.seed, root)
    known = changed_tests.sources()
    users, names = changed_tests.users_of(known), {path: name for name, path in known.items()}
    counts: Counter[str] = Counter()
    with tempfile.TemporaryDirectory() as folder, options.log.open("a", encoding="utf-8") as log:
        hidden = shutil.ignore_patterns(".git", ".venv", ".cache", ".*_cache", "__pycache__")
        shutil.copytree(root, tree := Path(folder) / "tree", ignore=hidden)
        for mutant in mutants:
            if (row := done.get(mutant[:3])) is None:
                tests = changed_tests.concerned([mutant.file], known, users)
                tests = [test for test in tests if test.startswith(options.tests)]
                rounds = rounds_of(tests, users, names[root / mutant.file])
                row = outcome(tree, mutant, rounds, options.marks, options.limit)
                print(json.dumps(row), file=log, flush=True)
            counts[row["outcome"]] += 1
            print(f"{row['outcome']:10} {mutant.file}:{mutant.line}: {mutant.change}", flush=True)
    print(", ".join(f"{number} {name}" for name, number in counts.items()))
    return 0


if __name__ == "__main__":
    sys.exit(main())
