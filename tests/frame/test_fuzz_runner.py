"""The runner of the fuzz scripts: what it must see, seen in cases that are made to go wrong."""

import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
HEAD = "import sys, os, time\nsys.path.insert(0, {!r})\nfrom runner import Target, main\n"


@pytest.fixture
def fuzz(tmp_path):
    def start(body, *arguments):
        script = tmp_path / "odd.py"
        end = "\nif __name__ == '__main__':\n    main({'odd': Target(case, 40, limit_s=0.5)})\n"
        script.write_text(HEAD.format(str(ROOT / "fuzz")) + body + end)
        command = [sys.executable, str(script), *arguments]
        return subprocess.run(command, capture_output=True, text=True, timeout=120)

    return start


def test_outcomes_are_counted_over_all_workers(fuzz):
    body = "def case(seed):\n    return 'even' if seed % 2 == 0 else 'odd'"
    done = fuzz(body, "--cases", "101", "--seed", "3", "--workers", "2")
    assert done.returncode == 0, done.stdout + done.stderr
    said = done.stdout.split("\n")
    assert "       51 odd" in said
    assert "       50 even" in said
    assert "go on with --seed 104" in done.stdout


@pytest.mark.slow
def test_crash_hang_and_exception_are_faults_and_the_rest_goes_on(fuzz):
    body = """def case(seed):
    if seed == 5:
        os.kill(os.getpid(), 11)
    if seed == 7:
        raise KeyError('seven')
    while seed == 9:
        pass
    if seed == 11:
        time.sleep(1000)
    return 'fine'
"""
    done = fuzz(body, "--full")
    assert done.returncode == 1, done.stdout + done.stderr
    assert "       36 fine" in done.stdout
    assert "        4 FAULTS" in done.stdout
    for words in ("exit code -11", "KeyError: 'seven'", "hung for more than 0.5 s"):
        assert words in done.stdout
    for seed in (5, 7, 9, 11):
        assert f"odd.py --only odd --one {seed}" in done.stdout
    assert "in case" in done.stderr  # where it hung


def test_one_case_runs_in_this_process_and_minutes_end_a_run_without_end(fuzz):
    body = "def case(seed):\n    return str(seed * os.getpid())"
    assert fuzz(body, "--one", "0").stdout == "odd 0\n"
    done = fuzz("def case(seed):\n    return 'fine'", "--minutes", "0.03")
    assert done.returncode == 0, done.stdout + done.stderr
    assert "go on with" in done.stdout


def test_a_script_that_does_not_start_is_no_success(fuzz):
    done = fuzz("def case(seed):\n    return 'fine'\nassert __name__ == '__main__'", "--cases", "2")
    assert done.returncode != 0
    assert "outside of any case" in done.stderr
