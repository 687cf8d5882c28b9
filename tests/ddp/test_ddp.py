"""The hook under the real DDP and FSDP2: several processes on this machine, over Gloo."""

from __future__ import annotations

import re
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


PROGRAMS = [  # on so many ranks, and their cases if it is not all; the first two are not slow
    ("behave.py", 2, []), ("outcomes.py", 2, []), ("behave.py", 3, OF_THREE), ("trust.py", 2, []),
    ("programs.py", 2, []), ("tune.py", 2, []), ("schedules.py", 2, []), ("apoptosis.py", 3, []),
    ("replicas.py", 4, []), ("shards.py", 4, []), ("hierarchy.py", 4, []),
]  # fmt: skip


def names(program):
    """Of its cases, without loading what it imports."""
    listed = (RANKS / program).read_text().partition("\nCASES = [")[2].partition("]")[0]
    return re.findall(r"(\w+)(?:,|$)", listed)


EACH = [
    pytest.param(start, case, id=f"{program}-{n}-{case}", marks=[pytest.mark.slow] * (start > 1))
    for start, (program, n, asked) in enumerate(PROGRAMS)
    for case in [*(asked or names(program)), "end"]
]


@pytest.fixture(scope="module")
def ended():
    """How each program ended that was started so far."""
    return {}


@pytest.mark.parametrize(("start", "case"), EACH)
def test_case(ranks_of_module, ended, start, case):
    """They share one launch: starting torch takes longer than most of them."""
    program, n, asked = PROGRAMS[start]
    if start not in ended:
        ended[start] = []  # where it does not end, no other case starts it anew
        ended[start] = ranks_of_module(n, RANKS / program, *asked, timeout=250)
    assert ended[start], "the start failed: see its first case"
    for rank in ended[start]:
        if case == "end":
            assert rank.returncode == 0, rank.output
        else:
            assert f"ok {case} (" in rank.output, rank.output[-8000:]


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
