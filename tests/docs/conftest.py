"""Commands that pages show: do their targets, scripts, flags and extras exist?"""

import re
import shlex
import tomllib
from pathlib import Path

import pytest

from sn_cli import main as command_line

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def check_command():
    """Return what asserts that a command, as words, names what exists."""
    return _check_command


def _status(arguments):
    """How the command line takes these; --help and --version end by themselves."""
    try:
        command_line.parser().parse_args(arguments)
    except SystemExit as end:
        return end.code
    return 0


def _check_command(words):
    """Assert that the targets, scripts, flags and extras of one command exist."""
    if words[:1] == ["make"]:
        rules = re.findall(r"^([\w -]+):(?!=)", (ROOT / "Makefile").read_text(), re.MULTILINE)
        targets = {target for rule in rules for target in rule.split()}
        asked = {word for word in words[1:] if "=" not in word and not word.startswith("-")}
        assert asked <= targets, f"make has no {asked - targets}"
    if words[:1] == ["sn"]:
        assert not _status(words[1:]), f"{shlex.join(words)}: no such command or flag"
    if "install" in words:
        project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
        for extras in re.findall(r"\.\[([\w,]+)\]", " ".join(words)):
            assert set(extras.split(",")) <= set(project["optional-dependencies"]), extras
    module = re.search(r"-m benchmarks (\w+) ?(.*)", " ".join(words))
    if module:
        words = [f"benchmarks/{module[1]}.py", *module[2].split()]
    scripts = [word for word in words if word.endswith(".py")]
    # A script of ours is named by its folder; `train.py` stands for the reader's own.
    for script in (ROOT / word for word in scripts if "/" in word):
        assert script.exists(), f"{script.relative_to(ROOT)} is not there"
        text = script.read_text()
        # What benchmarks share of their flags.
        text += (ROOT / "benchmarks/rows_file.py").read_text() if "flags(" in text else ""
        known = set(re.findall(r'"(--?[a-z][\w-]*)"', text))
        after = words[words.index(str(script.relative_to(ROOT))) :]
        used = {word.partition("=")[0] for word in after if re.match(r"--?[a-z]", word)}
        assert used <= known | {"--help"}, f"{script.name} has no {used - known}"
