"""Compression of TensorFlow in the real, unpatched Horovod: several processes."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
pytestmark = pytest.mark.horovod


@pytest.mark.slow
@pytest.mark.parametrize("how", ["kill", "join"])
def test_a_rank_that_is_gone_ends_the_run_with_an_error(horovodrun, how):
    """Never a silent wrong gradient, and soon: Horovod's Gloo waits 30 s for a peer."""
    start = time.monotonic()
    run = horovodrun(3, RANKS / "tensorflow_fail.py", how, timeout=120)
    assert not run.timed_out, run.stdout
    assert run.returncode != 0
    assert run.stdout.count("reached step 5") == 3, run.stdout
    assert "all steps done" not in run.stdout
    # The survivors learn it in their own step, not only from the launcher's signal.
    # Which one depends on timing.
    told = ("Horovod has been shut down", "HorovodInternalError", "gloo/transport/tcp/pair.cc")
    if how == "join":  # refused before anything is sent that Horovod cannot do without a rank
        told = ("another rank called hvd.join()",)
        assert "background loop uncaught exception: unordered_map" not in run.stdout, run.stdout
    assert any(text in run.stdout for text in told), run.stdout
    assert time.monotonic() - start < 100
