"""Who may import whom: the rules of the house, each held by a test.

Rules about what ends in memory run in a fresh interpreter; rules about who names whom are read from
the source, so that an import inside a function counts too.
"""

import ast
import graphlib
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
FRAMEWORKS = {"torch", "tensorflow", "keras", "horovod", "tf_keras"}
# CuPy is no framework of the user's: the GPU back end may name it, and nothing else in the core.
CUPY_FILES = {"sn_compress/_cuda.py"}
PACKAGES = [name for name in ("sn_cli", "sn_compress", "sn_memory") if (ROOT / name).is_dir()]
FILES = sorted(path for name in PACKAGES for path in (ROOT / name).rglob("*.py"))
START_LIMIT_S = 0.3

# Arrows point one way: a module may import from its own layer or from a lower one. What an import
# for type checkers or inside a function names counts as well. The rooms of sn_compress, as
# docs/decisions/0076 has them.
LAYERS = (
    ("sn_compress.errors", "sn_compress.text_table"),
    ("sn_compress.saved", "sn_compress.consistency", "sn_compress._native", "sn_compress.arrays"),
    ("sn_compress._cuda", "sn_compress.collective"),
    ("sn_compress.ops",),
    ("sn_compress.codecs.base",),
    ("sn_compress.codecs.registry",),
    ("sn_compress.codecs.frame",),
    ("sn_compress.codecs",),
    ("sn_compress.allreduce.methods",),
    ("sn_compress.allreduce",),
    ("sn_compress.gossip",),
    ("sn_compress.report", "sn_compress.schedule"),
    ("sn_compress.settings",),
    # Before prediction: what measures and chooses is handed to an engine.
    ("sn_compress.engine",),
    ("sn_compress.prediction",),
    ("sn_compress.compression",),
    # The rim of tensorflow.
    ("sn_compress.tensorflow.gained",),
    ("sn_compress.tensorflow.gossip",),
    ("sn_compress.tensorflow",),
    # The rim of torch.
    ("sn_compress.torch.outcomes",),
    ("sn_compress.torch.gossip",),
    ("sn_compress.torch.process_group", "sn_compress.torch.layout"),
    ("sn_compress.torch.under_horovod",),
    ("sn_compress.torch",),
)
# What all of sn_compress may name of ours.
BASE = ("sn_compress.errors", "sn_compress.saved", "sn_compress.consistency")
ARRAYS = ("sn_compress.arrays", "sn_compress._native", "sn_compress._cuda")
# What a room may name of ours besides itself, where the order says less.
ONLY = {
    "sn_compress.ops": (*BASE, *ARRAYS),
    "sn_compress.codecs": (*BASE, *ARRAYS, "sn_compress.ops"),
    "sn_compress.allreduce": (
        *BASE,
        *ARRAYS,
        "sn_compress.collective",
        "sn_compress.ops",
        "sn_compress.codecs.base",
    ),
    "sn_compress.gossip": (*BASE, "sn_compress.text_table", "sn_compress.codecs.base"),
    "sn_memory.apoptosis": ("sn_memory.base.errors",),
    # What judges plans knows what a graph and a plan are, and nothing of who made them.
    "sn_memory.check": ("sn_memory.base", "sn_memory.graph", "sn_memory.plan.plan"),
}
# What nothing else of the packages imports, not even by a name: users do.
ALONE = ("sn_memory.apoptosis",)
MOST_CLI_FLOORS = 6  # of the command line and the module below it
# Modules, of both packages, of which each imports the one before. It was 15 before models were
# planned by regions, between the way into planning and the program (decision 92), and 19 before a
# report drew the plan of `liveness` in place of a second curve of its own.
MOST_FLOORS = 20
# What a room of sn_compress may name of the frameworks, and no other file of it any of them.
ROOMS = {
    "torch": ("torch", "horovod.torch", "horovod.common.elastic"),
    "tensorflow": ("tensorflow", "keras", "horovod.tensorflow", "horovod.common.elastic"),
}
# The same for the planner: its rooms, as docs/decisions/0076 has them.
MEMORY_LAYERS = (
    ("sn_memory.base",),
    ("sn_memory.settings",),
    # A room of its own that knows nothing of plans: NumPy alone, then its rims.
    ("sn_memory.apoptosis.torch", "sn_memory.apoptosis.tensorflow", "sn_memory.apoptosis"),
    ("sn_memory.graph",),
    ("sn_memory.cost",),
    ("sn_memory.plan.plan",),
    ("sn_memory.plan.bound", "sn_memory.plan.simulate", "sn_memory.plan.buffers"),
    ("sn_memory.plan.simulate",),
    ("sn_memory.plan.search", "sn_memory.plan.policies"),
    ("sn_memory.plan",),
    ("sn_memory.pool",),
    ("sn_memory.check",),
    ("sn_memory.report",),
    ("sn_memory.run",),
    ("sn_memory.activations",),
    # The rim of tensorflow.
    ("sn_memory.tensorflow.errors",),
    ("sn_memory.tensorflow.guards", "sn_memory.tensorflow.memory", "sn_memory.tensorflow.target"),
    ("sn_memory.tensorflow.model",),
    ("sn_memory.tensorflow.trace",),
    ("sn_memory.tensorflow.eager", "sn_memory.tensorflow.model"),
    ("sn_memory.tensorflow.modules",),
    ("sn_memory.tensorflow.reruns",),
    ("sn_memory.tensorflow.activations",),
    ("sn_memory.tensorflow",),
    # The rim of torch.
    ("sn_memory.torch.errors",),
    ("sn_memory.torch.quirks",),
    (
        "sn_memory.torch.target.accelerator",
        "sn_memory.torch.target.allocator",
        "sn_memory.torch.target.gpu",
        "sn_memory.torch.target.scratch",
    ),
    ("sn_memory.torch.model",),
    ("sn_memory.torch.chunked_loss",),
    # Of these rooms the one file that knows what a model is.
    ("sn_memory.torch.target",),
    ("sn_memory.torch.trace",),
    ("sn_memory.torch.step",),
    ("sn_memory.torch.host",),
    ("sn_memory.torch.eager",),
    ("sn_memory.torch.state",),
    ("sn_memory.torch.compile",),
    ("sn_memory.torch.policy",),
    ("sn_memory.torch.modules",),
    ("sn_memory.torch.regions",),
    ("sn_memory.torch.activations",),
    ("sn_memory.torch",),
)
# The command line of both, which neither knows of. It reaches rims by names in a table.
CLI_LAYERS = (
    ("sn_cli.command",),
    ("sn_cli.compress", "sn_cli.memory"),
    ("sn_cli.main",),
    ("sn_cli.__main__",),
)
OF_PACKAGE = {"sn_cli": CLI_LAYERS, "sn_compress": LAYERS, "sn_memory": MEMORY_LAYERS}


def is_rim(path: Path) -> bool:
    """Say whether a file is where a framework may be named."""
    relative = path.relative_to(ROOT)
    if relative.parts[0] == "sn_compress":
        return relative.parts[1] in ROOMS
    if relative.parts[:2] == ("sn_memory", "apoptosis"):
        return relative.parts[2] in ("torch", "tensorflow")
    return relative.parts[:2] in (("sn_memory", "torch"), ("sn_memory", "tensorflow"))


def is_of(name: str, prefixes: tuple[str, ...]) -> bool:
    return any(name == prefix or name.startswith(prefix + ".") for prefix in prefixes)


def module_name(path: Path) -> str:
    parts = path.relative_to(ROOT).with_suffix("").parts
    return ".".join(parts[:-1] if parts[-1] == "__init__" else parts)


MODULES = {module_name(path): path for path in FILES}


def own_module(name: str) -> str | None:
    """Return the module of ours that `name` is or lives in; None for anything else."""
    if name.endswith("._core"):  # the compiled extension: it imports nothing of ours
        return None
    while name:
        if name in MODULES:
            return name
        name = name.rpartition(".")[0]
    return None


def is_type_checking(test: ast.expr) -> bool:
    return ast.unparse(test) in ("TYPE_CHECKING", "typing.TYPE_CHECKING")


@cache
def imports(path: Path, *, for_checkers: bool = False) -> set[str]:
    """Return all modules a file imports, by full name; for type checkers if `for_checkers`."""
    package = module_name(path)
    if path.name != "__init__.py":
        package = package.rpartition(".")[0]
    found = set()

    def visit(node: ast.AST) -> None:
        if isinstance(node, ast.If) and is_type_checking(node.test) and not for_checkers:
            for child in node.orelse:
                visit(child)
            return
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = node.module or ""
            if node.level:
                above = package.split(".")[: len(package.split(".")) - node.level + 1]
                base = ".".join([*above, base] if base else above)
            # `from package import module` names the module, `from module import name` the module.
            found.update(
                full if (full := f"{base}.{alias.name}") in MODULES else base
                for alias in node.names
            )
        elif isinstance(node, ast.Call) and node.args:
            # import_module("torch") is an import as well.
            called = ast.unparse(node.func).rpartition(".")[2]
            first = node.args[0]
            named = isinstance(first, ast.Constant) and isinstance(first.value, str)
            if called in ("import_module", "__import__") and named:
                found.add(first.value)
        for child in ast.iter_child_nodes(node):
            visit(child)

    visit(ast.parse(path.read_text(encoding="utf-8")))
    return found


def fresh(code: str) -> str:
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


@pytest.mark.parametrize("package", PACKAGES)
def test_import_loads_no_framework(package):
    code = f"import {package}, sys; print(*{{name.partition('.')[0] for name in sys.modules}})"
    assert not set(fresh(code).split()) & (FRAMEWORKS | {"cupy"})


@pytest.mark.parametrize("package", PACKAGES)
def test_starting_python_with_the_import_is_quick(package):
    code = (
        "import resource, subprocess, sys\n"
        f"subprocess.run([sys.executable, '-c', 'import {package}'], check=True)\n"
        "used = resource.getrusage(resource.RUSAGE_CHILDREN)\n"
        "print(used.ru_utime + used.ru_stime)"
    )
    assert any(float(fresh(code)) < START_LIMIT_S for _ in range(5))


def test_only_rims_name_a_framework():
    for path in FILES:
        if is_rim(path):
            continue
        named = {name.partition(".")[0] for name in imports(path)}
        assert not named & FRAMEWORKS, path
        assert "cupy" not in named or path.relative_to(ROOT).as_posix() in CUPY_FILES, path


@pytest.mark.parametrize(("framework", "do", "rims"), [
    ("horovod", "scripts/build_horovod.py", "sn_compress.torch.horovod"
     " sn_compress.tensorflow.tape sn_compress.tensorflow.keras sn_compress.tensorflow.gossip"),
    ("torch", "pip install 'superneurons[torch]'",
     "sn_compress.torch.ddp sn_compress.torch.horovod sn_memory.torch sn_memory.apoptosis.torch"),
    ("tensorflow", "pip install 'superneurons[tensorflow]'",
     "sn_compress.tensorflow.tape sn_compress.tensorflow.keras sn_memory.tensorflow"
     " sn_memory.apoptosis.tensorflow"),
])  # fmt: skip
def test_a_rim_without_its_framework_says_what_to_install(framework, do, rims):
    code = (
        "import importlib, importlib.util as u\n"
        "real = u.find_spec\n"
        f"u.find_spec = lambda name, *a: None if name == '{framework}' else real(name, *a)\n"
        f"for rim in {rims.split()}:\n"
        "    try:\n        importlib.import_module(rim)\n"
        "    except ImportError as error:\n        print(type(error).__name__, error)\n"
    )
    lines = fresh(code).splitlines()
    assert len(lines) == len(rims.split())
    for line in lines:
        assert line.startswith("MissingExtra"), line
        assert do in line


@pytest.mark.parametrize("room", ROOMS)
def test_a_room_names_its_own_framework_only(room):
    files = [path for path in FILES if path.is_relative_to(ROOT / "sn_compress" / room)]
    assert len(files) > 5
    rooms = tuple(f"sn_compress.{other}" for other in ROOMS if other != room)
    for path in files:
        named = imports(path, for_checkers=True)
        theirs = {name for name in named if name.partition(".")[0] in FRAMEWORKS}
        assert not {name for name in theirs if not is_of(name, ROOMS[room])}, path
        assert not {name for name in named if is_of(name, rooms)}, path


def test_packages_point_one_way():
    above = {"sn_compress": ("sn_memory", "sn_cli"), "sn_memory": ("sn_cli",)}
    for path in FILES:
        theirs = above.get(module_name(path).partition(".")[0], ())
        assert not {name for name in imports(path) if is_of(name, theirs)}, path


def layer(name: str, layers: tuple[tuple[str, ...], ...] = LAYERS) -> int | None:
    for index, prefixes in enumerate(layers):
        if is_of(name, prefixes):
            return index
    return None


def test_arrows_point_one_way():
    for name, path in MODULES.items():
        package = name.partition(".")[0]
        if name == package:
            continue
        layers = OF_PACKAGE[package]
        mine = layer(name, layers)
        assert mine is not None, f"{name} is in no layer: give it one in this test"
        for target in imports(path, for_checkers=True):
            below = own_module(target)
            if below and below.startswith(f"{package}."):
                theirs = layer(below, layers)
                assert theirs is not None, f"{name} imports {below}, which is in no layer"
                assert theirs <= mine, f"{name} imports {below}, which is above it"


@pytest.mark.parametrize("room", ONLY)
def test_a_room_imports_only_what_it_says(room):
    files = [name for name in MODULES if is_of(name, (room,))]
    assert files
    for name in files:
        ours = {own_module(it) for it in imports(MODULES[name], for_checkers=True)} - {None}
        assert not {it for it in ours if not is_of(it, (room, *ONLY[room]))}, name


@pytest.mark.parametrize("room", ALONE)
def test_nothing_else_imports_a_room_of_its_own(room):
    inside = {name for name in MODULES if is_of(name, (room,))}
    assert len(inside) > 3
    for name in MODULES.keys() - inside:
        assert not {it for it in imports(MODULES[name], for_checkers=True) if is_of(it, (room,))}
        # The tables of names that are loaded at first use hold strings.
        tail = room.rpartition(".")[2]
        strings = {
            node.value
            for node in ast.walk(ast.parse(MODULES[name].read_text(encoding="utf-8")))
            if isinstance(node, ast.Constant) and isinstance(node.value, str)
        }
        assert not {it for it in strings if is_of(it, (room, f".{tail}"))}, name


@pytest.mark.parametrize("package", PACKAGES)
def test_every_room_says_what_it_is_for(package):
    for room in sorted({path.parent for path in FILES if path.is_relative_to(ROOT / package)}):
        said = ast.get_docstring(ast.parse((room / "__init__.py").read_text(encoding="utf-8")))
        assert said, room


def asked(package: str = "") -> dict[str, set[str]]:
    """Return whom each module of ours imports."""
    return {
        name: {own_module(it) for it in imports(path, for_checkers=True)} - {None, name}
        for name, path in MODULES.items()
        if name.startswith(package)
    }


def circle(package: str = "") -> list[str]:
    """Return modules that import each other in a circle, [] if none do."""
    try:
        tuple(graphlib.TopologicalSorter(asked(package)).static_order())
    except graphlib.CycleError as error:
        return list(error.args[1])
    return []


def floors(package: str = "", but: tuple[str, ...] = ()) -> list[str]:
    """Return the longest chain of modules of which each imports the next, `but` some packages."""
    # What a file takes from the door of its own package is inside that package.
    graph = {
        name: {it for it in others if not name.startswith(f"{it}.")}
        for name, others in asked(package).items()
        if not is_of(name, but)
    }
    chains: dict[str, list[str]] = {}
    for name in graphlib.TopologicalSorter(graph).static_order():
        below = [chains[it] for it in graph.get(name, ())]
        chains[name] = [name, *max(below, key=len, default=[])]
    return max((chains[name] for name in graph), key=len)


def test_no_cycles_in_functions_or_for_type_checkers_either():
    # What is loaded by a name in a table (the rims by compression.py, a codec by the registry) is
    # not seen here: there nothing else could be, as the user decides what is loaded.
    assert not circle("sn_compress.")
    assert not circle("sn_memory.")


def test_no_chain_of_imports_is_long():
    chain = floors(but=("sn_cli",))
    assert len(chain) <= MOST_FLOORS, " > ".join(chain)
    # The command line stands above both, and is counted down to their doors.
    chain = floors("sn_cli")
    assert len(chain) <= MOST_CLI_FLOORS, " > ".join(chain)


def test_imports_in_functions_and_for_type_checkers_are_seen(tmp_path, monkeypatch):
    sources = {
        "one": "def f():\n    from . import two\n",
        "two": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .one import f\n",
    }
    (tmp_path / "made").mkdir()
    paths = {f"made.{name}": tmp_path / "made" / f"{name}.py" for name in sources}
    for path in paths.values():
        path.write_text(sources[path.stem])
    monkeypatch.setitem(globals(), "ROOT", tmp_path)
    monkeypatch.setitem(globals(), "MODULES", paths)
    assert set(circle()) == set(paths)
    paths["made.two"].write_text("")
    imports.cache_clear()
    assert floors("made.") == ["made.one", "made.two"]


def test_no_utils_drawer():
    assert not [path for path in FILES if path.stem in ("utils", "util", "helpers", "misc")]
