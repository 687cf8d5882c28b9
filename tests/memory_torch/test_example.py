"""The example and the benchmark run as a user runs them, if briefly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

pytestmark = pytest.mark.slow
ROOT = Path(__file__).resolve().parents[2]


def run(*arguments):
    paths = os.pathsep.join([str(ROOT), os.environ.get("PYTHONPATH", "")])
    environment = {**os.environ, "PYTHONPATH": paths, "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *map(str, arguments)]
    done = subprocess.run(
        command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=240
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_the_example_says_what_it_saved():
    said = run("examples/torch_memory.py", "--steps", 2, "--batch", 4)
    assert "bit-equal" in said
    assert "the same to the bit" in said
    assert "largest batch in 1 GiB" in said


def test_the_benchmark_writes_rows_and_goes_on(tmp_path):
    file = tmp_path / "rows.json"
    flags = ["--models", "unet/8", "--planner", "superneurons_memory", "--json", file]
    run("benchmarks/planner_torch.py", *flags)
    rows = json.loads(file.read_text())
    assert [row["share"] for row in rows] == [1.0, 0.6, 0.3, 0.0]
    # With copies on the host tensors are counted, and no scratch.
    for row in [row for row in rows if row["kept"] or not row["share"]]:
        assert row["equal"]
        assert row["scratch_bytes"] < 0.5 * row["predicted_peak_bytes"]
        least = row["predicted_peak_bytes"] - row["scratch_bytes"]
        assert least <= row["measured_peak_bytes"] <= row["predicted_peak_bytes"]
    assert rows[3]["predicted_peak_bytes"] == rows[3]["smallest_bytes"]
    assert rows[3]["measured_peak_bytes"] < rows[3]["baseline_peak_bytes"]
    assert not run("benchmarks/planner_torch.py", *flags)


def test_the_largest_batch_is_larger_with_a_plan():
    said = run("examples/torch_largest_batch.py", "--memory", "6MiB")
    plain, batch = (int(word) for word in said.replace(",", "").split() if word.isdigit())
    assert batch > plain > 0
    assert "the same to the bit" in said


def test_activations_example_says_what_fits():
    out = run("examples/torch_activations.py", "--steps", 3, "--batch", 8)
    assert "times less" in out
    assert "images a second expected" in out
