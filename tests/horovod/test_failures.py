"""Runs that cannot go on, in the real, unpatched Horovod: ranks get an error, and soon."""

from __future__ import annotations

import time
from pathlib import Path
from socket import gethostname

import pytest

RANKS = Path(__file__).parent / "ranks"
NODES = ["-H", "localhost:2,127.0.0.1:2"]  # two of two ranks, both of them this machine
pytestmark = [pytest.mark.horovod, pytest.mark.slow]


@pytest.mark.parametrize(("ranks", "exchange"), [(2, "shared"), (4, "gather")])
def test_killed_rank_ends_the_run(horovodrun, ranks, exchange):
    """Horovod's Gloo waits 30 s for a peer; the other ranks have to end within that.

    Of four, rank 0 shares the killed one's node, ranks 2 and 3 are on the other one.
    """
    start, options = time.monotonic(), NODES if ranks == 4 else ()
    run = horovodrun(ranks, RANKS / "fail.py", "kill", exchange, options=options, timeout=120)
    assert not run.timed_out, run.stdout
    assert run.returncode != 0
    assert run.stdout.count("reached the bad step") == ranks, run.stdout
    assert "finished the bad step" not in run.stdout
    # Survivors learn it from Horovod itself, where the launcher does not end them first.
    assert "HorovodInternalError" in run.stdout, run.stdout
    assert "terminate called" not in run.stdout, run.stdout
    assert time.monotonic() - start < 90


@pytest.mark.parametrize(("ranks", "exchange"), [(2, "arrays"), (3, "gather"), (4, "shared")])
def test_a_damaged_payload_is_an_error_on_every_rank(horovodrun, ranks, exchange):
    """Of the next step where the host does not read what has come.

    Of three ranks, one owner alone is sent it; of four by nodes one rank, which tells the others.
    """
    options = NODES if ranks == 4 else ()
    run = horovodrun(ranks, RANKS / "fail.py", "damage", exchange, options=options, timeout=120)
    assert not run.timed_out, run.stdout
    assert run.stdout.count("reached the bad step") == ranks, run.stdout
    assert run.stdout.count("finished the bad step") == (ranks if exchange == "arrays" else 0)
    assert "all steps done" not in run.stdout
    assert "PayloadError" in run.stdout, run.stdout
    if ranks == 4:
        assert "[3]<stderr>:sn_compress.errors.PayloadError" in run.stdout, run.stdout
        told = "CompressError: another rank has failed in this step: rank 3: PayloadError"
        assert run.stdout.count(told) == 3, run.stdout


def test_join_ends_every_rank_with_an_error_where_payloads_are_gathered(horovodrun):
    """Never a silent wrong gradient: each rank gets an error, and soon.

    Which one depends on timing. Either Horovod fills in zeros for the rank that joined, which we
    find and name; or its background thread fails on the gather it cannot join and shuts down.
    """
    run = horovodrun(3, RANKS / "fail.py", "join", "gather", timeout=90)
    assert not run.timed_out, run.stdout
    assert run.returncode != 0
    assert "finished the bad step" not in run.stdout
    told = "another rank called hvd.join()" in run.stdout
    assert told or "HorovodInternalError" in run.stdout, run.stdout


def test_three_ranks_become_two(horovodrun, tmp_path):
    """Horovod leaves out the host of a worker that died: the third one is on a host of its own."""
    discover = tmp_path / "discover.sh"
    discover.write_text("#!/bin/sh\necho localhost:2\necho 127.0.0.1:1\n")
    discover.chmod(0o755)
    options = ["--min-np", "2", "--max-np", "3", "--host-discovery-script", str(discover)]
    run = horovodrun(3, RANKS / "elastic.py", "kept", options=options, timeout=180)
    assert not run.timed_out, run.stdout
    assert run.stdout.count("ok memories at step 15") == 2, run.stdout
    assert run.stdout.count("ok ended with 2 ranks") == 2, run.stdout
    assert "begins anew" not in run.stdout, run.stdout


def test_a_rank_is_replaced_where_memories_are_not_kept(horovodrun, tmp_path):
    """As many ranks as before, of which one knows nothing: all begin anew, and one says so."""
    discover = tmp_path / "discover.sh"
    discover.write_text(f"#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\necho {gethostname()}:1\n")
    discover.chmod(0o755)
    options = ["--min-np", "2", "--max-np", "2", "--host-discovery-script", str(discover)]
    run = horovodrun(
        2, RANKS / "elastic.py", "replaced", tmp_path / "died", options=options, timeout=180
    )
    assert not run.timed_out, run.stdout
    assert (tmp_path / "died").exists()
    assert run.stdout.count("ok ended with 2 ranks") == 2, run.stdout
    assert run.stdout.count("begins anew on all") == 1, run.stdout


@pytest.mark.parametrize(("ranks", "how"), [(2, "join"), (4, "kill")])
def test_a_rank_of_tensorflow_that_is_gone_ends_the_run_with_an_error(horovodrun, ranks, how):
    """Never a silent wrong gradient, and soon; in the survivors' own step, by nodes too."""
    start, options = time.monotonic(), NODES if ranks == 4 else ()
    run = horovodrun(ranks, RANKS / "tensorflow_fail.py", how, options=options, timeout=120)
    assert not run.timed_out, run.stdout
    assert run.returncode != 0
    assert run.stdout.count("reached step 5") == ranks, run.stdout
    assert "all steps done" not in run.stdout
    assert "terminate called" not in run.stdout, run.stdout
    # The survivors learn it in their own step, not only from the launcher's signal.
    # Which one depends on timing.
    told = ("Horovod has been shut down", "HorovodInternalError", "gloo/transport/tcp/pair.cc")
    if how == "join":  # refused before anything is sent that Horovod cannot do without a rank
        told = ("another rank called hvd.join()",)
        assert "background loop uncaught exception: unordered_map" not in run.stdout, run.stdout
    assert any(text in run.stdout for text in told), run.stdout
    assert time.monotonic() - start < 100
