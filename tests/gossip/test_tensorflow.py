"""GossipOptimizer for Keras 3, on real ranks over Horovod."""

from __future__ import annotations

from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
pytestmark = [pytest.mark.horovod, pytest.mark.slow]

CASES = ["rules", "idle-ranks", "consensus", "limit", "coded", "refused", "ring"]


# With four ranks what two cannot show; importing TensorFlow so often is most of the time.
@pytest.mark.parametrize(("ranks", "cases"), [(2, CASES), (4, ["rules", "idle-ranks"])])
def test_ranks_follow_the_rules(horovodrun, ranks, cases):
    run = horovodrun(ranks, RANKS / "tensorflow_train.py", *cases, timeout=280).check()
    for case in cases:
        assert run.stdout.count(f"ok {case}\n") == ranks, f"{case}\n{run.stdout}"
