"""The file of measured times: what is wrong with it is said in one line, and nothing is lost."""

import json
import logging
import os
import subprocess
import sys

import pytest

from sn_memory.cost import op_times
from sn_memory.cost.op_times import OpTimes, is_seconds

NAME = "times.json"


def times():
    return OpTimes(NAME, is_seconds)


@pytest.fixture
def folder(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    (tmp_path / "sn_memory").mkdir()
    return tmp_path / "sn_memory"


def test_what_is_added_is_read_and_nothing_else_is_left(folder):
    first, second = times(), times()
    first.read(), second.read()
    first.add({"a": 1.5})
    second.add({"b": 0})  # what others added since is kept
    assert first.read() == times().read() == {"a": 1.5, "b": 0}
    assert os.listdir(folder) == [NAME]


NO_TIMES = {"b": float("nan"), "c": -1.0, "d": float("inf"), "e": "x", "f": [], "g": True}
DAMAGED = {
    "cut off": b'{"a": 1.0, "b"',
    "no text": b"\xff\xfe\x00",
    "empty": b"",
    "a list": b"[1, 2]",
    "a number": b"7",
    "nested": b"[" * 100_000,
    "values that are no times": json.dumps({"a": 1.0, **NO_TIMES}).encode(),
    "too large for a float": b'{"a": 1.0, "b": 1e999}',
}


@pytest.mark.parametrize("content", DAMAGED.values(), ids=DAMAGED)
def test_damage_is_ignored_with_one_line(folder, caplog, content):
    (folder / NAME).write_bytes(content)
    file, kept = times(), {"a": 1.0} if content.endswith(b"}") else {}
    with caplog.at_level(logging.INFO):
        assert file.read() == kept
        file.add({"new": 2.0})
    assert len(caplog.records) == 1
    assert str(folder / NAME) in caplog.text
    assert times().read() == {**kept, "new": 2.0}


def a_folder(path):
    (path / "sn_memory" / NAME).mkdir(parents=True)
    return path


def below_a_file(path):
    (path / "file").touch()
    return path / "file" / "below"


def not_ours(path):
    if os.geteuid() == 0:
        # Root may write anywhere but here.
        return "/proc/nobody"
    path.chmod(0o500)
    return path


@pytest.mark.parametrize("home", [a_folder, below_a_file, not_ours])
def test_a_place_that_will_not_do_is_ignored_with_one_line(monkeypatch, tmp_path, caplog, home):
    monkeypatch.setenv("XDG_CACHE_HOME", str(home(tmp_path)))
    file = times()
    with caplog.at_level(logging.INFO):
        assert file.read() == {}
        file.add({"a": 1.0})
    assert len(caplog.records) == 1


def test_without_a_home_nothing_is_kept(monkeypatch):
    def none():
        raise RuntimeError("Could not determine home directory.")

    monkeypatch.delenv("XDG_CACHE_HOME", raising=False)
    monkeypatch.setattr(op_times.Path, "home", none)
    file = times()
    file.add({"a": 1.0})
    assert file.read() == {}


WRITER = """
import sys
from sn_memory.cost.op_times import OpTimes, is_seconds
file = OpTimes("times.json", is_seconds)
for count in range(40):
    file.add({f"{sys.argv[1]}-{count}": 1.0})
"""


def test_writers_at_once_leave_a_whole_file(folder):
    writers = [subprocess.Popen([sys.executable, "-c", WRITER, str(it)]) for it in range(4)]
    assert [it.wait(timeout=60) for it in writers] == [0] * 4
    written = json.loads((folder / NAME).read_text())
    assert any(f"{it}-39" in written for it in range(4))
    assert os.listdir(folder) == [NAME]


def test_seconds_are_finite_numbers_of_zero_or_more():
    assert all(map(is_seconds, (0, 1, 0.5, 1e6)))
    wrong = (None, True, "1", -1e-9, float("nan"), float("inf"), 10**400, 1e300, [1.0])
    assert not any(map(is_seconds, wrong))
