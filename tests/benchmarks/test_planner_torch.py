"""The stored rows of planned torch models keep what is promised."""

import json

import pytest
from torch_memory_report import RESULTS

ROWS = json.loads((RESULTS / "planner_torch.json").read_text(encoding="utf-8"))
RAN = [row for row in ROWS if "measured_peak_bytes" in row]


def named(row):
    return f"{row['model']}-{row['share']}"


@pytest.mark.parametrize("row", RAN, ids=named)
def test_predicted_is_measured(row):
    assert abs(row["measured_peak_bytes"] / row["predicted_peak_bytes"] - 1) <= 0.01
    assert row["equal"]
    assert row["measured_peak_bytes"] <= max(row["budget_bytes"], row.get("smallest_bytes", 0))
