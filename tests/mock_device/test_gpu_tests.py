"""The tests for a GPU, and some more, on a mock device; see mock_device.py."""

import os
import re
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

torch = pytest.importorskip("torch")
TESTS = Path(__file__).resolve().parents[1]


@pytest.mark.skipif(
    tuple(map(int, torch.__version__.split(".")[:2])) < (2, 13),
    reason="the device is written for what torch asks of one since 2.13",
)
@pytest.mark.skipif(shutil.which("g++") is None, reason="needs a C++ compiler")
@pytest.mark.skipif("SN_TEST_DEVICE" in os.environ, reason="is what runs")
@pytest.mark.slow
def test_all_that_runs_on_a_gpu_runs_on_the_mock_device():
    """In a process of its own: who has the device has it for good."""
    run = subprocess.run(
        [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "-m", "not gpu",
         str(TESTS / "gpu"), str(TESTS / "mock_device")],
        env={**os.environ, "SN_TEST_DEVICE": "mock"}, cwd=TESTS.parent,
        capture_output=True, text=True, timeout=900, check=False,
    )  # fmt: skip
    assert run.returncode == 0, run.stdout[-6000:] + run.stderr[-2000:]
    passed = re.search(r"(\d+) passed", run.stdout)
    assert passed is not None
    assert int(passed[1]) > 50
