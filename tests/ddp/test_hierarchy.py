"""Ranks by nodes under the real DDP: four processes on this machine that say they are on two."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"


@pytest.mark.slow
def test_gradients_travel_by_nodes(ranks, cases_of):
    cases = cases_of(RANKS / "hierarchy.py")
    for rank in ranks(4, RANKS / "hierarchy.py", timeout=280):
        assert rank.returncode == 0, rank.output
        assert rank.output.count("ok ") == cases, rank.output


@pytest.mark.slow
def test_killed_rank_ends_those_of_its_node_and_of_others(ranks):
    """Rank 1 is killed; rank 0 shares its node, ranks 2 and 3 are on the other one."""
    start = time.monotonic()
    ended = ranks(4, RANKS / "fail.py", "nodes", timeout=90)
    assert ended[1].returncode == -signal.SIGKILL, ended[1].output
    for rank in (ended[0], ended[2], ended[3]):
        assert "reached step 5" in rank.output
        assert rank.returncode not in (0, None), rank.output
        assert "RuntimeError" in rank.output or "DistBackendError" in rank.output, rank.output
    assert time.monotonic() - start < 60
