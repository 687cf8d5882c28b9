"""Compression in the real, unpatched Horovod: several processes on this machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
pytestmark = pytest.mark.horovod

ALWAYS = [
    "fp32", "fp16", "bf16", "sum", "predivide", "accumulate", "clip", "unused", "groups",
    "groups-bf16", "order", "process-sets",
]  # fmt: skip
CASES = {
    ("gather", 3): [*ALWAYS, "paper", "without-names", "two-optimizers"],
    ("shared", 3): [*ALWAYS, "join"],
    ("overlap", 2): [*ALWAYS, "join", "scaler"],
    ("overlap", 3): ["fp32", "bf16", "order", "process-sets", "join"],
}


@pytest.mark.slow
@pytest.mark.parametrize(("exchange", "ranks"), CASES)
def test_ranks_stay_bit_identical_over_20_steps(horovodrun, exchange, ranks):
    """The cases share one launch: starting ranks takes longer than any of them.

    Three: sums then depend on their order, and pieces of a tensor are of several lengths.
    """
    cases = CASES[exchange, ranks]
    run = horovodrun(ranks, RANKS / "train.py", exchange, *cases, timeout=280).check()
    for case in cases:
        assert run.stdout.count(f"ok {case}\n") == ranks, f"{case}\n{run.stdout}"


@pytest.mark.slow
def test_a_skipped_step_is_as_if_it_had_never_been(horovodrun):
    """To the bit, on three ranks too. Fused tensors are summed in an order that depends on when
    they came, and a last bit decides which values are kept: two runs are alike only with nothing
    fused.
    """
    cases = ["gather", "scaler", "shared", "scaler"]
    run = horovodrun(3, RANKS / "train.py", *cases, HOROVOD_FUSION_THRESHOLD="0").check()
    assert run.stdout.count("ok scaler\n") == 2 * 3, run.stdout


def test_edges(horovodrun, tmp_path, cases_of):
    run = horovodrun(2, RANKS / "behave.py", tmp_path, timeout=240).check()
    assert run.stdout.count(">:ok ") == 2 * cases_of(RANKS / "behave.py"), run.stdout


@pytest.mark.slow
def test_gradients_travel_in_buckets(horovodrun, cases_of):
    """Nothing fused, so that runs that compare bits sum in one order."""
    run = horovodrun(2, RANKS / "buckets.py", timeout=200, HOROVOD_FUSION_THRESHOLD="0").check()
    assert run.stdout.count(">:ok ") == 2 * cases_of(RANKS / "buckets.py"), run.stdout


@pytest.mark.slow
def test_theta_follows_every_kind_of_schedule(horovodrun):
    run = horovodrun(2, RANKS / "schedules.py", timeout=200).check()
    assert run.stdout.count(">:ok cosine") == 2, run.stdout  # the last of the kinds


@pytest.mark.slow
def test_nothing_goes_wrong_in_silence(horovodrun, cases_of):
    """The cases share one launch: starting horovodrun takes longer than most of them."""
    cases = cases_of(RANKS / "trust.py")
    run = horovodrun(2, RANKS / "trust.py", timeout=200).check()
    assert run.stdout.count(">:ok ") == 2 * cases, run.stdout


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
