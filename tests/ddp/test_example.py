"""The example under torchrun: it learns, and goes on from its checkpoint."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLE = ROOT / "examples" / "ddp.py"


def test_example_is_short_and_marks_our_lines():
    lines = EXAMPLE.read_text().splitlines()
    assert len(lines) < 100
    ours = [line for line in lines if "state." in line or "compression_hook" in line]
    ours = [line for line in ours if "load_state_dict(saved[" not in line or "compr" in line]
    assert len(ours) >= 5
    assert all(line.endswith("# <- sn") for line in ours)


@pytest.mark.slow
def test_it_learns_and_goes_on(tmp_path):
    pytest.importorskip("torch.distributed")
    environment = os.environ | {
        "PYTHONPATH": os.pathsep.join(filter(None, [str(ROOT), os.environ.get("PYTHONPATH")])),
        "OMP_NUM_THREADS": "1",
        "GLOO_SOCKET_IFNAME": "lo",
    }
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone"]
    command += ["--nproc-per-node", "2", str(EXAMPLE), "--checkpoint", str(tmp_path)]

    def losses(steps):
        done = subprocess.run(
            [*command, "--steps", str(steps)],
            cwd=ROOT, env=environment, capture_output=True, text=True, timeout=150,
        )  # fmt: skip
        assert done.returncode == 0, done.stdout + done.stderr
        sent, of = re.search(r"sent ([\d,]+) of ([\d,]+) bytes", done.stdout).groups()
        assert 20 * int(sent.replace(",", "")) < int(of.replace(",", ""))
        found = re.findall(r"step (\d+): loss ([\d.]+)", done.stdout)
        return {int(step): float(loss) for step, loss in found}

    first = losses(10)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["rank0.pt", "rank1.pt"]
    second = losses(20)
    assert list(second) == [20], "it went on, and did not begin again"
    # Ten classes guessed at random have a loss of ln 10 = 2.3.
    assert second[20] < first[10] < 2
