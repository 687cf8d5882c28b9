"""Compression in the real, unpatched Horovod: several processes on this machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
pytestmark = pytest.mark.horovod


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["gather", "shared"])
def test_killed_rank_ends_the_run(horovodrun, exchange):
    """Horovod's Gloo waits 30 s for a peer; the other ranks have to end within that."""
    start = time.monotonic()
    run = horovodrun(3, RANKS / "fail.py", "kill", exchange, timeout=120)
    assert not run.timed_out, run.stdout
    assert run.returncode != 0
    assert run.stdout.count("reached the bad step") == 3, run.stdout
    assert "finished the bad step" not in run.stdout
    # The survivors learn it from Horovod itself, not only from the launcher's signal.
    assert "HorovodInternalError" in run.stdout, run.stdout
    assert time.monotonic() - start < 90


@pytest.mark.slow
@pytest.mark.parametrize(
    ("ranks", "exchange"),
    [(2, "gather"), (2, "arrays"), (2, "shared"), (3, "gather"), (3, "arrays")],
)
def test_a_damaged_payload_is_an_error_on_every_rank(horovodrun, ranks, exchange):
    """Of the next step where the host does not read what has come.

    Of three ranks, one owner alone is sent it.
    """
    run = horovodrun(ranks, RANKS / "fail.py", "damage", exchange, timeout=120)
    assert not run.timed_out, run.stdout
    assert run.stdout.count("reached the bad step") == ranks, run.stdout
    assert run.stdout.count("finished the bad step") == (ranks if exchange == "arrays" else 0)
    assert "all steps done" not in run.stdout
    assert "PayloadError" in run.stdout, run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, 3])
def test_join_ends_every_rank_with_an_error_where_payloads_are_gathered(horovodrun, ranks):
    """Never a silent wrong gradient: each rank gets an error, and soon.

    Which one depends on timing. Either Horovod fills in zeros for the rank that joined, which we
    find and name; or its background thread fails on the gather it cannot join and shuts down.
    """
    run = horovodrun(ranks, RANKS / "fail.py", "join", "gather", timeout=90)
    assert not run.timed_out, run.stdout
    assert run.returncode != 0
    assert "finished the bad step" not in run.stdout
    told = "another rank called hvd.join()" in run.stdout
    shut_down = "HorovodInternalError" in run.stdout
    assert told or shut_down, run.stdout


@pytest.mark.slow
@pytest.mark.parametrize("exchange", ["gather", "shared"])
def test_three_ranks_become_two(horovodrun, tmp_path, exchange):
    """Horovod leaves out the host of a worker that died: the third one is on a host of its own."""
    discover = tmp_path / "discover.sh"
    discover.write_text("#!/bin/sh\necho localhost:2\necho 127.0.0.1:1\n")
    discover.chmod(0o755)
    options = ["--min-np", "2", "--max-np", "3", "--host-discovery-script", str(discover)]
    run = horovodrun(3, RANKS / "elastic.py", exchange, options=options, timeout=180)
    assert not run.timed_out, run.stdout
    assert run.stdout.count("ok memories at step 15") == 2, run.stdout
    assert run.stdout.count("ok ended with 2 ranks") == 2, run.stdout
