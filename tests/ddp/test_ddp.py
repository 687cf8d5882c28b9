"""The hook under the real DDP and FSDP2: several processes on this machine, over Gloo."""

from __future__ import annotations

import re
import signal
import time
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
slow = pytest.mark.slow
# Programs that share a start, on so many ranks. The first is not slow; of three, what depends on
# their number: who owns a piece, and sums whose order counts.
STARTS = [
    (2, ["behave.py", "outcomes.py"]),
    (2, ["trust.py", "programs.py", "tune.py", "bad_input.py", "gpu.py", "schedules.py"]),
    (3, ["behave.py", "apoptosis.py"]),
    (4, ["replicas.py", "shards.py", "hierarchy.py"]),
]
OF_THREE = [
    "ranks_stay_bit_identical", "mean_is_the_mean", "nothing_is_lost",
    "nothing_is_lost_when_unused", "resumed_run_is_bit_equal", "damage_reaches_every_rank",
]  # fmt: skip


def cases(n, program):
    """Of a program, without loading what it imports."""
    if (n, program) == (3, "behave.py"):
        return OF_THREE
    text = (RANKS / program).read_text()
    return re.findall(r"(\w+)(?:,|$)", text.partition("\nCASES = [")[2].partition("]")[0])


def words(n, programs):
    return [f"{program[:-3]}.{case}" for program in programs for case in cases(n, program)]


EACH = [
    pytest.param(start, word, id=f"{n}-{word}", marks=[slow] * (start > 0))
    for start, (n, programs) in enumerate(STARTS)
    for word in [*words(n, programs), "end"]
]


@pytest.fixture(scope="module")
def ended():
    """How each start ended that was begun so far."""
    return {}


@pytest.mark.timeout(600)
@pytest.mark.parametrize(("start", "word"), EACH)
def test_case(ranks_of_module, ended, start, word):
    """They share one launch: starting torch takes longer than most of them."""
    n, programs = STARTS[start]
    if start not in ended:
        ended[start] = []  # where it does not end, no other case starts it anew
        asked = words(n, programs) if n == 3 else [program[:-3] for program in programs]
        ended[start] = ranks_of_module(n, RANKS / "several.py", *asked, timeout=580)
    assert ended[start], "the start failed: see its first case"
    for rank in ended[start]:
        if word == "end":
            assert rank.returncode == 0, rank.output
        else:
            assert f"ok {word} (" in rank.output, rank.output[-8000:]


@pytest.mark.parametrize("n", [pytest.param(n, marks=slow) for n in (3, 4)])
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
