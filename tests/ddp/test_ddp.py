"""The hook under the real DDP and FSDP2: several processes on this machine, over Gloo."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"


@pytest.mark.parametrize("n", [2, pytest.param(3, marks=pytest.mark.slow)])
def test_hook(ranks, n, cases_of):
    """The cases share one launch: starting torch takes longer than most of them."""
    cases = cases_of(RANKS / "behave.py")
    for rank in ranks(n, RANKS / "behave.py", timeout=240):
        assert rank.returncode == 0, rank.output
        assert rank.output.count("ok ") == cases, rank.output


@pytest.mark.slow
def test_nothing_goes_wrong_in_silence(ranks, cases_of):
    cases = cases_of(RANKS / "trust.py")
    for rank in ranks(2, RANKS / "trust.py", timeout=120):
        assert rank.returncode == 0, rank.output
        assert rank.output.count("ok ") == cases, rank.output


def test_killed_rank_ends_the_others(ranks):
    start = time.monotonic()
    ended = ranks(3, RANKS / "fail.py", timeout=90)
    assert ended[1].returncode == -signal.SIGKILL, ended[1].output
    for rank in (ended[0], ended[2]):
        assert "reached step 5" in rank.output
        assert rank.returncode not in (0, None), rank.output
        assert "RuntimeError" in rank.output or "DistBackendError" in rank.output, rank.output
    # 10 s are the group's time-out; what is left is for starting torch on a busy machine.
    assert time.monotonic() - start < 60
