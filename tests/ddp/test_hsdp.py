"""compress_replicas under the real FSDP2: 2 x 2 processes on this machine, over Gloo."""

from __future__ import annotations

from pathlib import Path

import pytest

REPLICAS = Path(__file__).parent / "ranks" / "replicas.py"
pytestmark = pytest.mark.slow


def test_replicas(ranks, cases_of):
    """The cases share one launch: starting torch takes longer than most of them."""
    cases = cases_of(REPLICAS)
    for rank in ranks(4, REPLICAS, timeout=240):
        assert rank.returncode == 0, rank.output
        assert rank.output.count("ok ") == cases, rank.output
