"""The placing allocator as CUDA's: bits, places, and what is reserved."""

import json
import subprocess
import sys
from pathlib import Path

import pytest


@pytest.mark.gpu
def test_planned_steps_lie_where_they_were_packed():
    """In a process of its own: an allocator is torch's for good."""
    script = Path(__file__).with_name("placed_steps.py")
    done = subprocess.run(
        [sys.executable, str(script)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr[-4000:]
    report = json.loads(done.stdout.splitlines()[-1])
    held, step = report["held"], report["step"]
    assert all(report["equal"]), report
    assert step["hits"] > 30, report
    assert step["misses"] == step["skipped"] == 0, report
    assert held["bad_frees"] == 0, report
    assert 0 < held["arena_bytes"] < held["reserved_bytes"], report
    assert report["simulated"] <= report["budget"], report
    # Loss and sums lie beside the plan, in segments of 2 MiB, and what libraries keep for threads.
    assert held["peak_reserved_bytes"] <= report["budget"] + report["kept"] + (8 << 20), report
    assert report["arena_after"] == 0, report
    assert "does not yet support" in report["refused"]["memory_stats"], report
    assert report["refused"]["pool"], report
    assert "placing allocator: out of memory" in report["refused"]["too much"], report
