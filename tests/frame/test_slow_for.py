"""`--slow-for`: on a slow machine the suite ends in time, and says what it left out."""

from __future__ import annotations

import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.mark.parametrize(("seconds", "ended"), [("0", "1 skipped"), ("1000", "2 passed")])
def test_slow_tests_that_come_late_are_skipped_and_said(seconds, ended, tmp_path):
    (tmp_path / "conftest.py").write_bytes((ROOT / "tests" / "conftest.py").read_bytes())
    (tmp_path / "test_two.py").write_text(
        "import pytest\n@pytest.mark.slow\ndef test_slow(): pass\ndef test_quick(): pass\n"
    )
    settings = tmp_path / "pytest.ini"
    settings.write_text("[pytest]\nmarkers = slow: takes long\n")
    command = [sys.executable, "-m", "pytest", "-ra", "-c", str(settings), str(tmp_path)]
    done = subprocess.run(
        [*command, "-p", "no:cacheprovider", f"--slow-for={seconds}"],
        stdout=subprocess.PIPE, text=True, check=True, cwd=tmp_path,
    )  # fmt: skip
    assert ended in done.stdout.splitlines()[-1]
    assert ("no slow test begins after 0 s" in done.stdout) == (seconds == "0")


def test_each_commit_lets_others_come_late():
    in_turn = runpy.run_path(str(ROOT / "tests" / "conftest.py"))["in_turn"]
    files = [f"tests/{name}.py" for name in ("memory/a", "ddp/b", "frame/c", "gossip/d")]
    orders = [sorted(files, key=in_turn(files, turn).get) for turn in range(2)]
    assert [[Path(file).stem for file in order] for order in orders] == [list("bdac"), list("dbca")]
