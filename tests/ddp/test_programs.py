"""Programs that people write around DDP, on real ranks; cases in ranks/programs.py."""

from __future__ import annotations

from pathlib import Path

import pytest

PROGRAMS = Path(__file__).parent / "ranks" / "programs.py"


@pytest.mark.slow
def test_programs(ranks, cases_of):
    """The cases share one launch: starting torch takes longer than most of them."""
    for rank in ranks(2, PROGRAMS, timeout=200):
        assert rank.returncode == 0, rank.output
        assert rank.output.count("ok ") == cases_of(PROGRAMS), rank.output
