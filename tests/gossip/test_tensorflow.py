"""GossipOptimizer for Keras 3, on real ranks over Horovod."""

from __future__ import annotations

from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
pytestmark = [pytest.mark.horovod, pytest.mark.slow]

CASES = ["rules", "idle-ranks", "consensus", "limit", "coded", "refused", "ring"]


@pytest.mark.parametrize("ranks", [2, 4])
def test_ranks_follow_the_rules(horovodrun, ranks):
    run = horovodrun(ranks, RANKS / "tensorflow_train.py", *CASES, timeout=280).check()
    for case in CASES:
        assert run.stdout.count(f"ok {case}\n") == ranks, f"{case}\n{run.stdout}"
