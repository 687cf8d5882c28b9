"""The hook under the real DDP and FSDP2: several processes on this machine, over Gloo."""

from __future__ import annotations

import signal
import time
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
# What depends on their number: who owns a piece, and sums whose order counts.
OF_THREE = [
    "ranks_stay_bit_identical", "mean_is_the_mean", "nothing_is_lost",
    "nothing_is_lost_when_unused", "resumed_run_is_bit_equal", "errors_reach_every_rank",
]  # fmt: skip


@pytest.mark.parametrize(("program", "n", "names"), [
    ("behave.py", 2, []),
    ("outcomes.py", 2, []),
    *(pytest.param(*of, marks=pytest.mark.slow) for of in (
        ("behave.py", 3, OF_THREE), ("trust.py", 2, []), ("programs.py", 2, []),
        ("tune.py", 2, []), ("schedules.py", 2, []), ("apoptosis.py", 3, []),
        ("replicas.py", 4, []), ("shards.py", 4, []), ("hierarchy.py", 4, []),
    )),
])  # fmt: skip
def test_cases(ranks, cases_of, program, n, names):
    """They share one launch: starting torch takes longer than most of them."""
    cases = len(names) or cases_of(RANKS / program)
    for rank in ranks(n, RANKS / program, *names, timeout=280):
        assert rank.returncode == 0, rank.output
        assert rank.output.count("ok ") == cases, rank.output


@pytest.mark.parametrize("n", [3, pytest.param(4, marks=pytest.mark.slow)])
def test_killed_rank_ends_the_others(ranks, n):
    """Of four, rank 0 shares the killed one's node; ranks 2 and 3 are on the other one."""
    start = time.monotonic()
    ended = ranks(n, RANKS / "fail.py", *["nodes"][: n - 3], timeout=90)
    assert ended[1].returncode == -signal.SIGKILL, ended[1].output
    for rank in (ended[0], *ended[2:]):
        assert "reached step 5" in rank.output
        assert rank.returncode not in (0, None), rank.output
        assert "RuntimeError" in rank.output or "DistBackendError" in rank.output, rank.output
    # 10 s are the group's time-out; what is left is for starting torch on a busy machine.
    assert time.monotonic() - start < 60
