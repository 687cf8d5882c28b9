"""Runs that cannot go on, in the real, unpatched Horovod: ranks get an error, and soon."""

from __future__ import annotations

import time
from pathlib import Path
from socket import gethostname

import pytest

RANKS = Path(__file__).parent / "ranks"
NODES = ["-H", "localhost:2,127.0.0.1:2"]  # two of two ranks, both of them this machine
pytestmark = [pytest.mark.horovod, pytest.mark.slow]


@pytest.mark.parametrize(("ranks", "script", "words"), [
    (2, "fail.py", ["shared"]), (4, "fail.py", ["gather"]), (4, "tensorflow_fail.py", []),
])  # fmt: skip
def test_killed_rank_ends_the_run(horovodrun, ranks, script, words):
    """Horovod's Gloo waits 30 s for a peer; the other ranks have to end within that.

    Of four, rank 0 shares the killed one's node, ranks 2 and 3 are on the other one.
    """
    start, options = time.monotonic(), NODES if ranks == 4 else ()
    run = horovodrun(ranks, RANKS / script, *words, options=options, timeout=120)
    assert not run.timed_out, run.stdout
    assert run.returncode != 0
    assert run.stdout.count("reached the bad step") == ranks, run.stdout
    assert "finished the bad step" not in run.stdout
    assert "terminate called" not in run.stdout, run.stdout
    # Survivors learn it in their own step, where the launcher does not end them first; of
    # TensorFlow's errors, which one depends on timing.
    errors = ["HorovodInternalError"]
    if script == "tensorflow_fail.py":
        errors += ["Horovod has been shut down", "gloo/transport/tcp/pair.cc"]
    assert any(text in run.stdout for text in errors), run.stdout
    assert time.monotonic() - start < 90


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


@pytest.mark.parametrize(("script", "way"), [
    ("elastic.py", "replaced"), ("tensorflow_elastic.py", "low"), ("tensorflow_elastic.py", "cast"),
])  # fmt: skip
def test_a_rank_is_replaced_where_memories_are_not_kept(horovodrun, tmp_path, script, way):
    """As many ranks as before, of which one knows nothing: all begin anew, and one says so."""
    discover = tmp_path / "discover.sh"
    discover.write_text(f"#!/bin/sh\necho localhost:1\necho 127.0.0.1:1\necho {gethostname()}:1\n")
    discover.chmod(0o755)
    options = ["--min-np", "2", "--max-np", "2", "--host-discovery-script", str(discover)]
    run = horovodrun(2, RANKS / script, way, tmp_path / "died", options=options, timeout=180)
    assert not run.timed_out, run.stdout
    assert (tmp_path / "died").exists()
    assert run.stdout.count("ok ended with 2 ranks") == 2, run.stdout
    assert run.stdout.count("begins anew on all") == 1, run.stdout
