"""The stored rows of planned torch models say what the page says, and keep what is promised."""

import json

import pytest
from planner_torch_report import END, PAGE, RESULTS, START, tables

ROWS = json.loads(RESULTS.read_text(encoding="utf-8"))
RAN = [row for row in ROWS if "measured_peak_bytes" in row]


def named(row):
    return f"{row['model']}-{row['share']}"


@pytest.mark.parametrize("row", RAN, ids=named)
def test_predicted_is_measured(row):
    assert abs(row["measured_peak_bytes"] / row["predicted_peak_bytes"] - 1) <= 0.01
    assert row["equal"]
    assert row["measured_peak_bytes"] <= max(row["budget_bytes"], row.get("smallest_bytes", 0))


def test_the_page_shows_the_rows():
    page = PAGE.read_text(encoding="utf-8")
    assert page.split(START)[1].split(END)[0].strip() == tables(ROWS)
