"""The benchmark of inputs that come while training, on a few steps."""

import importlib

import pytest


@pytest.mark.slow
def test_lengths_within_the_budget_and_equal(monkeypatch):
    pytest.importorskip("transformers")
    # Here: it imports transformers, for which collecting need not wait.
    new_inputs = importlib.import_module("new_inputs")
    monkeypatch.setattr(new_inputs, "STEPS", 6)
    plain = new_inputs.trained(new_inputs.gpt2("small"))
    row = new_inputs.epoch("longest", (256,), plain)
    assert row["equal"]
    assert row["most"] <= row["budget"] < row["plain"]
    assert row["searched"] == 1
    assert row["at_sight_s"] > 0
    assert len(row["kinds"]) > 2
