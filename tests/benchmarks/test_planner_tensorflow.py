"""The stored rows of planned TensorFlow steps keep what is promised; the one command runs them."""

import json
from pathlib import Path

import pytest

pytest.importorskip("tensorflow")
import planner
import planner_tensorflow

RESULTS = Path(__file__).resolve().parents[2] / "benchmarks/results"
PLANS = [
    row
    for row in json.loads((RESULTS / "planner_tensorflow.json").read_text(encoding="utf-8"))
    if row["kind"] == "plan"
]
RIVALS = [
    row
    for row in json.loads((RESULTS / "planner_tensorflow_rivals.json").read_text(encoding="utf-8"))
    if "measured_peak_bytes" in row
]


@pytest.mark.parametrize("row", PLANS, ids=lambda row: f"{row['model']}-{row['share']}")
def test_predicted_is_measured_and_saved(row):
    predicted, measured = row["predicted_peak_bytes"], row["measured_peak_bytes"]
    assert abs(measured / predicted - 1) < 0.05
    assert abs(row["resident_peak_bytes"] / predicted - 1) < 0.05
    saved = row["unplanned_measured_bytes"] - measured
    assert saved >= 0.85 * (row["baseline_peak_bytes"] - predicted)


@pytest.mark.parametrize("row", RIVALS, ids=lambda row: f"{row['model']}-{row['rival']}")
def test_no_more_memory_than_a_rival(row):
    assert row["kept"]
    assert row["measured_peak_bytes"] <= row["rival_measured_bytes"]


def test_one_command_for_all_frameworks(monkeypatch):
    seen = []
    monkeypatch.setattr(planner_tensorflow, "main", lambda argv: seen.append(argv) or 0)
    assert planner.main(["--framework", "tensorflow", "--models", "vgg16"]) == 0
    assert seen == [["--models", "vgg16"]]
