"""The Horovod that the build script made averages on real ranks, and the runner ends a hang."""

import time

import pytest

pytestmark = pytest.mark.horovod

AVERAGE = """
import horovod.torch as hvd, torch
hvd.init()
mean = hvd.allreduce(torch.tensor([float(hvd.rank())]), name="mean")
print(f"rank {hvd.rank()} of {hvd.size()} has {mean.item()}")
"""

HANG = """
import time
time.sleep(600)
"""


def test_two_ranks_average(horovodrun, rank_script):
    pytest.importorskip("torch")
    run = horovodrun(2, rank_script(AVERAGE)).check()
    for rank in range(2):
        assert f"rank {rank} of 2 has 0.5" in run.stdout


@pytest.mark.slow
def test_a_hang_ends_at_the_time_limit(horovodrun, rank_script):
    start = time.monotonic()
    run = horovodrun(2, rank_script(HANG), timeout=8)
    assert run.timed_out
    assert run.returncode != 0
    assert time.monotonic() - start < 60


@pytest.mark.slow
def test_the_interface_is_the_one_asked_for(horovodrun, rank_script):
    """Our edit of Gloo: process sets use HOROVOD_GLOO_IFACE, so a wrong one is an error."""
    pytest.importorskip("torch")
    script = "import os; os.environ['HOROVOD_GLOO_IFACE'] = 'no-such-interface'\n" + AVERAGE
    run = horovodrun(2, rank_script(script), timeout=60)
    assert run.returncode != 0
