"""A setting that a docstring names is one that can be given."""

import ast
import inspect
import re
from pathlib import Path
from typing import get_type_hints

import pytest

from sn_compress import (
    AutoCompression,
    CastCompression,
    FFTCompression,
    LowRankCompression,
    settings,
)

ROOT = Path(__file__).resolve().parents[2]
FILES = sorted(
    path for name in ("sn_cli", "sn_compress", "sn_memory") for path in (ROOT / name).rglob("*.py")
)
SECTION = re.compile(r"^Parameters\n-+\n(.*?)(?=^\S[^\n]*\n-{3,}|\Z)", re.DOTALL | re.MULTILINE)
ENTRY = re.compile(r"^([*\w]+(?:, [*\w]+)*) : ", re.MULTILINE)
# In a section of sn_memory a name stands alone, above lines of text.
LONE_ENTRY = re.compile(r"^([*\w]+(?:, [*\w]+)*)$", re.MULTILINE)


def named(section, entry=ENTRY):
    """Names that begin an entry, `name : ...` or `one, other : ...`."""
    return {n.lstrip("*") for names in entry.findall(section) for n in names.split(", ")}


def attributes(node):
    """Names that a class has besides what its constructor takes; those of its methods too."""
    methods = {a.name for a in node.body if isinstance(a, ast.FunctionDef)}
    return methods | {
        a.attr
        for a in ast.walk(node)
        if isinstance(a, ast.Attribute) and ast.unparse(a.value) == "self"
    }


def accepted(node):
    """Names that a function, or the constructor of a class, takes."""
    found = set()
    functions = [node]
    if isinstance(node, ast.ClassDef):
        made = ("__init__", "__new__")
        functions = [f for f in node.body if isinstance(f, ast.FunctionDef) and f.name in made]
        found = {a.target.id for a in node.body if isinstance(a, ast.AnnAssign)}
    for function in functions:
        given = function.args
        every = [*given.posonlyargs, *given.args, *given.kwonlyargs, given.vararg, given.kwarg]
        found |= {argument.arg for argument in every if argument}
    return found


def test_parameters_named_in_docstrings_exist():
    seen, wrong = 0, []
    for path in FILES:
        for node in ast.walk(ast.parse(path.read_text())):
            if not isinstance(node, ast.FunctionDef | ast.ClassDef):
                continue
            doc = ast.get_docstring(node) or ""
            section = SECTION.search(doc)
            text = section[1] if section else ""
            known, names = accepted(node), named(text)
            if "sn_memory" in path.parts:
                names |= named(text, LONE_ENTRY)
                # Outside of a section attributes stand beside parameters.
                held = attributes(node) if isinstance(node, ast.ClassDef) else set()
                names |= named(doc) - held
            seen += len(names)
            if unknown := names - known:
                wrong.append(f"{path}:{node.lineno}: {node.name} does not take {unknown}")
    assert not wrong
    assert seen > 100


@pytest.mark.parametrize(
    "compression", [FFTCompression, LowRankCompression, CastCompression, AutoCompression]
)
def test_settings_named_by_a_compression_are_those_it_takes(compression):
    docs = compression if compression is not AutoCompression else LowRankCompression
    found = named(inspect.cleandoc(docs.__doc__)) | named(inspect.cleandoc(docs.__base__.__doc__))
    taken = compression.using.__func__.__annotations__["settings"]
    keywords = get_type_hints(getattr(settings, taken.removeprefix("Unpack[").removesuffix("]")))
    assert found == set(keywords)
