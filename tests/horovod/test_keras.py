"""Our Keras 3 DistributedOptimizer on real ranks, beside Horovod's own, which does not average."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
pytestmark = [pytest.mark.horovod, pytest.mark.slow]


def test_every_way_to_train(horovodrun):
    """One launch: starting horovodrun and Keras takes longer than any of the cases."""
    listed = re.search(r"^CASES = \[(.*?)\]", (RANKS / "keras_train.py").read_text(), re.M | re.S)
    cases = re.findall(r"\w+", listed[1])
    assert {"stock_diverges", "fit_and_loops", "resume"} <= set(cases)
    train(horovodrun, 2, cases)


def test_three_ranks(horovodrun):
    train(horovodrun, 3, ["accumulate", "mixed_precision", "shared", "process_sets"])


def train(horovodrun, ranks, cases):
    run = horovodrun(ranks, RANKS / "keras_train.py", *cases, timeout=280).check()
    for case in cases:
        assert run.stdout.count(f"ok {case}\n") == ranks, f"{case}\n{run.stdout}"
