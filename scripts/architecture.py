"""Make the pictures and tables of docs/architecture.md from the imports of the code.

    python scripts/architecture.py [--check]

Writes between the markers of the page; with --check it writes nothing and exits with 1 if the
page is out of date. An arrow in a picture is an import, from the importer to the imported file,
possibly through files that are not in the picture. Imports inside functions count.
"""

from __future__ import annotations

import argparse
import ast
import sys
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
PAGE = ROOT / "docs" / "architecture.md"
# What a gradient, or a training step, passes on its way; in the order in which it does. What is
# between two of them is not drawn.
WAYS = {
    "sn_compress": (
        "torch/horovod.py",
        "torch/ddp.py",
        "tensorflow/tape.py",
        "engine/engine.py",
        "collective.py",
        "engine/payloads.py",
        "engine/feedback.py",
        "allreduce/exchange.py",
        "allreduce/allocate.py",
        "codecs/fft.py",
        "ops/transforms.py",
        "arrays.py",
    ),
    "sn_memory": (
        "torch/plan.py",
        "tensorflow/plan.py",
        "torch/trace/trace.py",
        "tensorflow/trace/trace.py",
        "plan/api.py",
        "plan/search/search.py",
        "plan/simulate.py",
        "cost/offload.py",
        "check.py",
        "torch/eager/program.py",
        "tensorflow/eager.py",
        "plan/plan.py",
        "graph/graph.py",
    ),
}
Graph = dict[str, set[str]]


def modules(package: str) -> dict[str, Path]:
    """Return the files of a package by the names of their modules."""
    paths = {}
    for path in sorted((ROOT / package).rglob("*.py")):
        parts = path.relative_to(ROOT).with_suffix("").parts
        paths[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = path
    return paths


@cache
def parsed(path: Path) -> tuple[ast.AST, ...]:
    """Return all nodes of a file's syntax."""
    return tuple(ast.walk(ast.parse(path.read_text(encoding="utf-8"))))


def imports(name: str, path: Path, known: dict[str, Path]) -> set[str]:
    """Return the modules of `known` that a file imports, wherever in it."""
    package = name if path.name == "__init__.py" else name.rpartition(".")[0]
    imported: set[str] = set()
    for node in parsed(path):
        wanted: list[str] = []
        if isinstance(node, ast.Import):
            wanted = [alias.name for alias in node.names]
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            wanted = [
                full if (full := f"{base}.{alias.name}") in known else base for alias in node.names
            ]
        imported.update(module for module in wanted if module in known and module != name)
    return imported


def arrows(graph: Graph, shown: list[str]) -> list[tuple[str, str]]:
    """Return the imports between shown modules, also through others, without transitive ones."""
    direct: Graph = {}
    for start in shown:
        seen: set[str] = set()
        todo = list(graph[start])
        while todo:
            here = todo.pop()
            if here in seen:
                continue
            seen.add(here)
            if here not in shown:
                todo += graph[here]
        direct[start] = (seen & set(shown)) - {start}
    return [
        (start, end)
        for start in shown
        for end in shown
        if end in direct[start]
        and not any(end in _behind(direct, module) for module in direct[start])
    ]


def _behind(graph: Graph, start: str) -> set[str]:
    """Return all modules reachable from a module, without the module itself."""
    seen: set[str] = set()
    todo = list(graph[start])
    while todo:
        here = todo.pop()
        if here not in seen:
            seen.add(here)
            todo += graph[here]
    return seen - {start}


def picture(package: str) -> str:
    """Return the path through a package as a Mermaid flow chart."""
    files = modules(package)
    graph = {name: imports(name, path, files) for name, path in files.items()}
    by_path = {path.relative_to(ROOT / package).as_posix(): name for name, path in files.items()}
    shown = [by_path[path] for path in WAYS[package]]
    place = {name: f"n{at}" for at, name in enumerate(shown)}
    lines = ["```mermaid", "flowchart TD"]
    lines += [
        f'    {place[name]}["{path}"]' for path, name in zip(WAYS[package], shown, strict=True)
    ]
    lines += [f"    {place[start]} --> {place[end]}" for start, end in arrows(graph, shown)]
    return "\n".join([*lines, "```"])


def rooms(package: str) -> str:
    """Return a table of the folders of a package: what each is for, and which it imports."""
    files = modules(package)

    def room(name: str) -> str:
        path = files[name]
        return path.parent.relative_to(ROOT).as_posix()

    asked: Graph = {}
    for name, path in files.items():
        mine = room(name)
        theirs = {room(other) for other in imports(name, path, files)}
        asked.setdefault(mine, set()).update(theirs - {mine})
    lines = ["| folder | what it is for | imports |", "|---|---|---|"]
    for folder in sorted(asked):
        docstring = ast.get_docstring(ast.parse((ROOT / folder / "__init__.py").read_text("utf-8")))
        first = (docstring or "").split("\n\n")[0].replace("\n", " ").replace("|", "\\|")
        names = sorted(other.removeprefix(f"{package}/") for other in asked[folder])
        lines.append(f"| `{folder}` | {first} | {', '.join(f'`{other}`' for other in names)} |")
    return "\n".join(lines)


def filled(text: str) -> str:
    """Return the page with the content between its markers replaced."""
    for package in WAYS:
        for what, part in (("picture", picture(package)), ("rooms", rooms(package))):
            begin, end = f"<!-- {what} {package} -->", f"<!-- end {what} {package} -->"
            head, _, rest = text.partition(begin)
            _, old, tail = rest.partition(end)
            if not old:
                raise ValueError(f"{PAGE.name}: got no {begin} ... {end}; put both back.")
            text = f"{head}{begin}\n{part}\n{end}{tail}"
    return text


def main() -> int:
    """Write the page, or check whether it is current."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0] if __doc__ else "")
    parser.add_argument(
        "--check", action="store_true", help="write nothing; exit with 1 if out of date"
    )
    options = parser.parse_args()
    text = PAGE.read_text(encoding="utf-8")
    new = filled(text)
    if options.check:
        if new != text:
            print(f"{PAGE} is not what the code says. Run: python scripts/architecture.py")
        return int(new != text)
    PAGE.write_text(new, encoding="utf-8")
    return 0


if __name__ == "__main__":
    sys.exit(main())
