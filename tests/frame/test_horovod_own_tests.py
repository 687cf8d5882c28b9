"""Horovod's own tests under our classes: what the script prints of a small checkout."""

import subprocess
import sys
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "horovod_own_tests.py"
pytestmark = [pytest.mark.horovod, pytest.mark.slow]

TESTS = """
import unittest
import horovod.torch as hvd
import torch
from common import reason


class TorchTests(unittest.TestCase):
    def wrap(self, **options):
        hvd.init()
        net = torch.nn.Linear(32, 64)
        optimizer = torch.optim.SGD(net.parameters(), lr=0.1)
        wrapped = hvd.DistributedOptimizer(optimizer, net.named_parameters(), **options)
        net(torch.ones(1, 32)).sum().backward()
        wrapped.step()
        return wrapped._compression.__name__

    def test_of_ours(self):
        self.assertEqual(self.wrap(), "FFTCompression")

    def test_uneven(self):
        assert hvd.rank() == 0, "this rank is another"

    def test_left_out(self):
        self.skipTest(reason)

    def test_adasum(self):
        self.wrap(op=hvd.Adasum)
"""


def test_each_test_passes_or_says_why_not(tmp_path):
    """A rank that fails ends the others; behind it, ranks start anew."""
    for name, text in {"parallel/test_torch.py": TESTS, "utils/common.py": "reason = 'no'"}.items():
        path = tmp_path / "test" / name
        path.parent.mkdir(parents=True)
        path.write_text(text, encoding="utf-8")
    tests = ["of_ours", "uneven", "left_out", "adasum"]
    run = subprocess.run(
        [sys.executable, SCRIPT, tmp_path, "--compression", "FFTCompression", "--tests", *tests],
        capture_output=True, text=True, timeout=240,
    )  # fmt: skip
    assert run.returncode == 0, run.stderr
    rows = [line.split() for line in run.stdout.splitlines()[:4]]
    assert {name: outcome for _, name, outcome in rows} == {
        "of_ours": "passed", "uneven": "failed", "left_out": "skipped", "adasum": "refused",
    }  # fmt: skip
    assert "this rank is another" in run.stdout
