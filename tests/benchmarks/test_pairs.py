"""Paired steps: ratios of medians; and nets that were run in the memory of a shallower one."""

import json
from pathlib import Path

import pairs
import pytest

ROOT = Path(__file__).resolve().parents[2]


def test_a_ratio_is_of_medians_whatever_comes_between():
    """Other takes 1.5 times plain's seconds; one step in ten of either takes a hundred times."""
    counts = {"plain": 0, "other": 0}

    def way(name, seconds):
        def step():
            counts[name] += 1
            return seconds * (100 if counts[name] % 10 == 0 else 1)

        return step

    row = pairs.paired(
        way("plain", 0.2), way("other", 0.3), pairs=4, steps=10, mean=lambda value: value
    )
    assert counts == {"plain": 40, "other": 40}
    assert row["tuned_over_plain"] == pytest.approx(1.5)
    assert row["plain_s"] == pytest.approx(0.2)
    assert row["lower_quartile"] == row["upper_quartile"] == pytest.approx(1.5)
    line = pairs.line_of(row | {"model": "net", "against": "tuned", "methods": ["plain"]})
    assert line.startswith("net: plain 200.00 ms, tuned 300.00 ms, ratio 1.500 (1.500 to 1.500)")


def test_each_deeper_net_stayed_in_the_memory_of_the_first():
    first, *deeper = json.loads((ROOT / "benchmarks/results/deeper.json").read_text())
    assert [row["blocks"] for row in deeper] == sorted(row["blocks"] for row in deeper)
    for row in deeper:
        assert row["equal"]
        assert row["budget_bytes"] == first["unplanned_peak_bytes"]
        assert row["measured_peak_bytes"] <= row["budget_bytes"] < row["unplanned_peak_bytes"]
        assert row["measured_peak_bytes"] == row["predicted_peak_bytes"]
