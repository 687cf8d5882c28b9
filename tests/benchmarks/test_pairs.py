"""Paired steps: ratios of medians."""

import pairs
import pytest


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
