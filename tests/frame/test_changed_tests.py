"""`make test-changed` runs what a change concerns: what imports it, starts it, or reads it."""

from __future__ import annotations

import subprocess

import changed_tests
import pytest


@pytest.fixture(scope="module")
def concerned():
    """`concerned(path)`: the test files and folders."""
    known = changed_tests.sources()
    users = changed_tests.users_of(known)

    # Without the suffix: a test that named these files would concern them.
    def concern(path):
        whole = path if "." in path else f"{path}.py"
        return changed_tests.concerned([whole], known, users)

    return concern


def stems(paths):
    return [path.removesuffix(".py") for path in paths]


@pytest.mark.slow
def test_what_a_change_concerns(concerned):
    found = stems(concerned("sn_compress/gossip/topology"))
    assert "tests/gossip/test_topology" in found  # imports it
    assert "tests/gossip/test_torch" in found  # imports what imports it
    assert "tests/memory/test_pool" not in found
    assert stems(concerned("tests/memory/test_pool")) == ["tests/memory/test_pool"]
    # Scripts that a test starts by name.
    assert "tests/ddp/test_ddp" in stems(concerned("tests/ddp/ranks/trust"))
    assert stems(concerned("benchmarks/ddp_step")) == ["tests/benchmarks/test_ddp_step"]
    # Fixtures concern their folder only.
    found = concerned("tests/cuda/conftest")
    assert found
    assert all(it.startswith("tests/cuda/") for it in found)
    # What no import reaches.
    assert concerned("csrc/memory/core.cpp") == [
        "tests/memory", "tests/memory_tensorflow", "tests/memory_torch"
    ]  # fmt: skip
    assert concerned("docs/cuda.md") == ["tests/docs", "tests/frame"]
    assert concerned("pyproject.toml") == ["tests"]
    assert concerned("CHANGELOG.md") == []


def test_folders_of_the_table_are_there(concerned):
    for start, folders in changed_tests.FURTHER:
        for path in (start, *folders):
            assert (changed_tests.ROOT / path).exists(), path


def test_what_is_not_committed_counts(tmp_path, monkeypatch):
    def git(*args):
        name = ["-c", "user.name=n", "-c", "user.email=n@example.org"]
        subprocess.run(["git", *name, *args], cwd=tmp_path, check=True, capture_output=True)

    git("init", "-b", "main")
    for name in ("kept.py", "edited.py"):
        (tmp_path / name).write_text("1\n")
    git("add", ".")
    git("commit", "-m", "first")
    (tmp_path / "edited.py").write_text("2\n")
    (tmp_path / "new.py").write_text("3\n")
    monkeypatch.setattr(changed_tests, "ROOT", tmp_path)
    assert changed_tests.changed_since("main") == ["edited.py", "new.py"]
    with pytest.raises(SystemExit, match="merge-base failed"):
        changed_tests.changed_since("no-such-commit")
