"""All kinds of Keras models, planned at 70 % of their activations: right, or refused with a reason.

The table of all of them, at larger sizes, is benchmarks/planner_architectures_tensorflow.py.
"""

import sys
from pathlib import Path

import pytest

BENCHMARKS = str(Path(__file__).resolve().parents[2] / "benchmarks")
if BENCHMARKS not in sys.path:
    sys.path.append(BENCHMARKS)

from planner_architectures_tensorflow import row  # noqa: E402 - found by the line above


@pytest.mark.slow
@pytest.mark.parametrize(("name", "chosen"), [("subclassed", "graph"), ("LSTM", "layers")])
def test_right_within_the_budget(name, chosen):
    found = row(name, 1, time_limit_s=1.0, share=0.85)
    assert found["chosen"] == chosen, found
    assert bool(found["reason"]) == (chosen != "graph")
    assert found["error_relative"] < 1e-4, found
    # A step by layers is measured twice, and may hold a tensor more in a third run.
    slack = 1.0 if chosen == "graph" else 1.1
    assert found["measured_bytes"] <= slack * found["budget_bytes"], found
    assert found["measured_bytes"] < found["plain_bytes"], found


def test_refused_with_a_reason():
    """Its layers are single convolutions: running them again saves nothing worth having."""
    found = row("subclassed, rows by value", 1)
    assert found["chosen"] == "refused", found
    assert "the budget is" in found["reason"]
    assert "depends on values" in found["reason"]
