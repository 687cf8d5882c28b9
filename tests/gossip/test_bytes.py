"""Bytes that leave a rank in a step, by the counters of its network interface."""

import json
import os
import statistics
import subprocess
import sys
from pathlib import Path

import pytest
import shaped_links

ROOT = Path(__file__).resolve().parents[2]
SCRIPT = Path(__file__).parent / "ranks/count_bytes.py"


@pytest.mark.slow
def test_a_step_sends_one_model_whatever_the_number_of_ranks():
    pytest.importorskip("torch")
    if reason := shaped_links.why_not():
        pytest.skip(reason)
    paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]
    env = {"PYTHONPATH": os.pathsep.join(filter(None, paths)), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(SCRIPT), "2", "4", "8"],
        env=os.environ | env, capture_output=True, text=True, timeout=280,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    found = [json.loads(line) for line in done.stdout.splitlines()]
    assert [row["ranks"] for row in found] == [2] * 2 + [4] * 4 + [8] * 8
    for ranks in (2, 4, 8):
        rows = [row for row in found if row["ranks"] == ranks]
        model = rows[0]["model"]
        # A busy machine's TCP sends some of one rank's bytes again: the rank in the middle says it.
        sent = {way: statistics.median_low(row[way] for row in rows) for way in rows[0]}
        # Headers, acknowledgements and a barrier: a few per cent, and a few kilobytes.
        for way, expected in {
            "gossip": model, "exact": model, "all-reduce": 2 * (ranks - 1) / ranks * model,
        }.items():  # fmt: skip
            assert expected <= sent[way] <= 1.1 * expected + 1e4, (way, sent)
        assert model / 30 < sent["coded"] < model / 20, sent
