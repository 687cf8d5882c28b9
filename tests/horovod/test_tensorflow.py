"""Compression of TensorFlow in the real, unpatched Horovod: several processes."""

from __future__ import annotations

import re
import time
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
pytestmark = pytest.mark.horovod

WAYS = [
    "fp32", "fp16", "bf16", "paper", "sum", "predivide", "groups", "groups-listed", "groups-bf16",
    "shared", "shared-sum", "shared-groups", "generic-names", "process-sets",
    "process-sets-traced",
]  # fmt: skip


FOR_THREE = ["bf16", "groups", "shared", "process-sets-traced"]


@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, WAYS), (3, FOR_THREE)])
def test_ranks_stay_bit_identical_over_20_steps(horovodrun, ranks, cases):
    """The cases share one launch: starting horovodrun takes longer than any of them."""
    run = horovodrun(ranks, RANKS / "tensorflow_train.py", *cases, timeout=280).check()
    for case in cases:
        assert run.stdout.count(f"ok {case}\n") == ranks, f"{case}\n{run.stdout}"


@pytest.mark.slow
def test_edges(horovodrun):
    source = (RANKS / "tensorflow_behave.py").read_text()
    cases = len(re.findall(r"^def \w+\(\):", source, re.MULTILINE))
    run = horovodrun(2, RANKS / "tensorflow_behave.py", timeout=280).check()
    assert run.stdout.count(">:ok ") == 2 * cases, run.stdout


@pytest.mark.slow
def test_low_rank_in_the_graph(horovodrun, cases_of):
    cases = cases_of(RANKS / "tensorflow_sized.py")
    run = horovodrun(2, RANKS / "tensorflow_sized.py", timeout=280).check()
    assert run.stdout.count(">:ok ") == 2 * cases, run.stdout


@pytest.mark.slow
def test_frequencies_in_the_graph(horovodrun, cases_of):
    cases = cases_of(RANKS / "tensorflow_gathered.py")
    run = horovodrun(2, RANKS / "tensorflow_gathered.py", timeout=280).check()
    assert run.stdout.count(">:ok ") == 2 * cases, run.stdout


@pytest.mark.slow
def test_frequencies_of_many_ranks_in_the_graph(horovodrun):
    case = "many_ranks_have_the_bits_of_the_engine"
    run = horovodrun(3, RANKS / "tensorflow_gathered.py", case, timeout=120).check()
    assert run.stdout.count(f">:ok {case}") == 3, run.stdout


@pytest.mark.slow
def test_gradients_that_nobody_applies_and_those_sent_again(horovodrun, cases_of):
    cases = cases_of(RANKS / "tensorflow_outcomes.py")
    run = horovodrun(2, RANKS / "tensorflow_outcomes.py", timeout=280).check()
    assert run.stdout.count(">:ok ") == 2 * cases, run.stdout


@pytest.mark.slow
def test_nothing_goes_wrong_in_silence(horovodrun, cases_of):
    cases = cases_of(RANKS / "tensorflow_trust.py")
    run = horovodrun(2, RANKS / "tensorflow_trust.py", timeout=280).check()
    assert run.stdout.count(">:ok ") == 2 * cases, run.stdout


@pytest.mark.slow
def test_theta_follows_every_kind_of_schedule(horovodrun):
    run = horovodrun(2, RANKS / "tensorflow_schedules.py", timeout=280).check()
    assert run.stdout.count(">:ok cosine") == 2, run.stdout  # the last of the kinds


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
