"""GossipOptimizer for Keras 3, on real ranks over Horovod."""

from __future__ import annotations

from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
pytestmark = [pytest.mark.horovod, pytest.mark.slow]

CASES = ["rules", "eager", "idle-ranks", "consensus", "limit", "coded", "refused", "ring"]


def test_ranks_follow_the_rules(horovodrun):
    """Two ranks: to import TensorFlow in four of them on two cores is a minute of its own."""
    run = horovodrun(2, RANKS / "tensorflow_train.py", *CASES, timeout=280).check()
    for case in CASES:
        assert run.stdout.count(f"ok {case}\n") == 2, f"{case}\n{run.stdout}"
