"""What a user installs: csrc is in wheel and sdist; without a compiler it installs all the same."""

import os
import re
import shutil
import subprocess
import sys
import tarfile
import tomllib
import zipfile
from pathlib import Path

import pytest

import sn_compress
import sn_memory
from sn_cli.memory.graphs import EXAMPLES
from sn_compress._cuda import source

ROOT = Path(__file__).resolve().parents[2]
CSRC = ROOT / "csrc" / "compress"
NAMES = sorted(path.name for path in CSRC.iterdir() if path.is_file())
BROKEN = {"CC": "/bin/false", "CXX": "/bin/false", "LDSHARED": "/bin/false"}


def test_source_is_found_from_here_or_said_where_it_was_looked_for():
    assert NAMES, "csrc/compress is empty"
    for name in NAMES:
        assert source(name).read_bytes() == (CSRC / name).read_bytes()
    with pytest.raises(FileNotFoundError, match=r"no_such_kernel\.cu.*_csrc") as caught:
        source("no_such_kernel.cu")
    assert "Install superneurons again" in str(caught.value)


def test_no_extra_brings_a_framework_that_never_sees_a_gpu():
    extras = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"][
        "optional-dependencies"
    ]
    assert any(need.startswith("tensorflow>=") for need in extras["tensorflow"])
    assert not [need for needs in extras.values() for need in needs if "-cpu" in need]


def test_versions_are_one():
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    assert sn_compress.__version__ == sn_memory.__version__ == project["version"]
    assert f"\nversion: {project['version']}\n" in (ROOT / "CITATION.cff").read_text()
    minors = {
        line.rpartition(" ")[2] for line in project["classifiers"] if re.search(r":: 3\.\d+$", line)
    }
    wheels = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["cibuildwheel"]
    assert wheels["build"].split() == [f"cp{it.replace('.', '')}-*" for it in sorted(minors)]


def test_hooks_are_what_make_check_runs():
    hooks = (ROOT / ".pre-commit-config.yaml").read_text()
    rule = (ROOT / "Makefile").read_text().partition("\ncheck:")[2].partition("\n\n")[0]
    asked = re.findall(r"\$\(BIN\)/(\w+(?: \w+)?)", rule)
    assert asked == ["ruff check", "ruff format", "mypy"]
    assert all(f".venv/bin/{command}" in hooks for command in asked)


@pytest.fixture
def clone(tmp_path):
    """A copy of what packaging reads: builds leave droppings in the folder they run in."""
    tree = tmp_path / "clone"
    tree.mkdir()
    for name in ("sn_cli", "sn_compress", "sn_memory", "csrc"):
        ignore = shutil.ignore_patterns("*.so", "__pycache__", "*_missing.txt")
        shutil.copytree(ROOT / name, tree / name, ignore=ignore)
    for name in ("pyproject.toml", "setup.py", "MANIFEST.in", "LICENSE"):
        shutil.copyfile(ROOT / name, tree / name)
    (tree / "README.md").write_text("readme\n")
    return tree


def build(tree: Path, what: str, **env: str) -> Path:
    """Call the build backend as pip does, without its isolation: no network."""
    out = tree / "out"
    out.mkdir(exist_ok=True)
    code = f"from setuptools import build_meta as b; b.build_{what}({str(out)!r})"
    done = subprocess.run(
        [sys.executable, "-c", code], cwd=tree, env=os.environ | env, capture_output=True, text=True
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return next(out.glob("*.whl" if what == "wheel" else "*.tar.gz"))


@pytest.mark.slow
def test_a_wheel_of_the_sdist_has_csrc_and_extensions(clone, tmp_path):
    with tarfile.open(build(clone, "sdist")) as archive:
        archive.extractall(tmp_path / "unpacked", filter="data")
    with zipfile.ZipFile(build(next((tmp_path / "unpacked").iterdir()), "wheel")) as archive:
        names = archive.namelist()
        archive.extractall(tmp_path / "site")
    for name in NAMES:
        assert f"sn_compress/_csrc/{name}" in names
    assert {f"{name}/py.typed" for name in ("sn_cli", "sn_compress", "sn_memory")} <= set(names)
    assert {f"sn_cli/graphs/{name}.json" for name in EXAMPLES} <= set(names)
    for library in ("sn_compress/_core.", "sn_memory/_core.", "sn_memory/_placing."):
        assert any(name.startswith(library) for name in names)
    scripts = next((tmp_path / "site").glob("*.dist-info/entry_points.txt")).read_text()
    assert "sn = sn_cli.main:script" in scripts
    assert not [name for name in names if name.startswith(("tests/", "scripts/", "csrc/"))]
    # From the unpacked wheel, away from any clone, the package's own copy is found.
    code = f"from sn_compress._cuda import source; print(source({NAMES[0]!r}))"
    found = subprocess.run(
        [sys.executable, "-c", code], cwd=tmp_path / "site", capture_output=True, text=True,
        env=os.environ | {"PYTHONPATH": str(tmp_path / "site")}, check=True,
    )  # fmt: skip
    assert Path(found.stdout.strip()) == tmp_path / "site" / "sn_compress" / "_csrc" / NAMES[0]


def test_a_broken_compiler_does_not_end_the_install(clone):
    with zipfile.ZipFile(build(clone, "wheel", **BROKEN)) as archive:
        names = archive.namelist()
        note = archive.read("sn_compress/_core_missing.txt").decode()
        assert "they raise MissingExtra" in archive.read("sn_memory/_core_missing.txt").decode()
        assert "placing_allocator" in archive.read("sn_memory/_placing_missing.txt").decode()
    assert not [name for name in names if name.startswith("sn_compress/_core.")]
    assert "was not built" in note
    assert "several times slower" in note
    assert "apt-get install g++" in note
