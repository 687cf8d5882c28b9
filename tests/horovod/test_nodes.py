"""Ranks by nodes in the real Horovod: two nodes of two ranks, both of them this machine."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
HOSTS = ["-H", "localhost:2,127.0.0.1:2"]
pytestmark = [pytest.mark.horovod, pytest.mark.slow]


def test_gradients_travel_by_nodes(horovodrun, tmp_path, cases_of):
    """Nothing fused, so that runs without nodes that compare bits sum in one order."""
    run = horovodrun(
        4, RANKS / "nodes.py", tmp_path, options=HOSTS, timeout=290, HOROVOD_FUSION_THRESHOLD="0"
    ).check()
    assert run.stdout.count(">:ok ") == 4 * cases_of(RANKS / "nodes.py"), run.stdout


def test_all_is_as_ever(horovodrun, tmp_path):
    """What holds whatever way gradients travel."""
    run = horovodrun(4, RANKS / "nodes.py", tmp_path, "as-ever", options=HOSTS, timeout=290).check()
    cases = (RANKS / "nodes.py").read_text().partition("AS_EVER = [")[2].partition("]")[0]
    assert cases.count(",") > 5
    assert run.stdout.count(">:ok ") == 4 * cases.count(","), run.stdout


@pytest.mark.parametrize("exchange", ["gather", "shared"])
def test_ranks_stay_bit_identical_over_20_steps(horovodrun, exchange):
    cases = ["fp16", "bf16", "sum", "predivide", "accumulate", "clip", "unused", "groups-bf16"]
    cases.append("process-sets")  # which have no nodes
    run = horovodrun(4, RANKS / "train.py", exchange, *cases, options=HOSTS, timeout=280).check()
    for case in cases:
        assert run.stdout.count(f"ok {case}\n") == 4, f"{case}\n{run.stdout}"


def test_tensorflow_goes_by_nodes(horovodrun, cases_of):
    script = RANKS / "tensorflow_nodes.py"
    run = horovodrun(4, script, options=HOSTS, timeout=290).check()
    assert run.stdout.count(">:ok ") == 4 * cases_of(script), run.stdout


def test_tensorflow_goes_by_many_nodes(horovodrun):
    case = "many_nodes_learn_as_without"
    run = horovodrun(6, RANKS / "tensorflow_nodes.py", case, timeout=290).check()
    assert run.stdout.count(f">:ok {case}") == 6, run.stdout


@pytest.mark.parametrize("where", ["of_the_graph", "on_the_host"])
def test_tensorflow_goes_on_where_a_rank_has_joined(horovodrun, where):
    """The error leaves nothing applied, and nothing begun for which another rank would wait."""
    case = f"a_rank_joins_at_a_step_{where}"
    run = horovodrun(4, RANKS / "tensorflow_nodes.py", case, options=HOSTS, timeout=150)
    assert not run.timed_out, run.stdout
    assert run.check().stdout.count(f">:ok {case}") == 4, run.stdout


@pytest.mark.parametrize("how", [["kill"], ["join"], ["join", "shared"]])
def test_tensorflow_ends_where_a_rank_is_gone(horovodrun, how):
    """Rank 1, of the first node; all others learn it in their own step."""
    run = horovodrun(4, RANKS / "tensorflow_fail.py", *how, options=HOSTS, timeout=120)
    assert not run.timed_out, run.stdout
    assert run.returncode != 0
    assert run.stdout.count("reached step 5") == 4, run.stdout
    assert "all steps done" not in run.stdout
    assert "terminate called" not in run.stdout, run.stdout
    if how[0] == "join":
        assert run.stdout.count("with hierarchy=None") >= 3, run.stdout


@pytest.mark.parametrize("exchange", ["gather", "shared"])
def test_killed_rank_ends_the_run(horovodrun, exchange):
    """Rank 1 is killed; rank 0 shares its node, ranks 2 and 3 are on the other one."""
    start = time.monotonic()
    run = horovodrun(4, RANKS / "fail.py", "kill", exchange, options=HOSTS, timeout=120)
    assert not run.timed_out, run.stdout
    assert run.returncode != 0
    assert run.stdout.count("reached the bad step") == 4, run.stdout
    assert "finished the bad step" not in run.stdout
    # Survivors learn it from Horovod itself, where the launcher does not end them first.
    assert "HorovodInternalError" in run.stdout, run.stdout
    assert "terminate called" not in run.stdout, run.stdout
    assert time.monotonic() - start < 90


@pytest.mark.parametrize("exchange", ["gather", "shared"])
def test_damage_between_two_nodes_ends_the_step_on_all_ranks(horovodrun, exchange):
    """One rank is sent it; the others are told by that one."""
    run = horovodrun(4, RANKS / "fail.py", "damage", exchange, options=HOSTS, timeout=120)
    assert not run.timed_out, run.stdout
    assert run.stdout.count("reached the bad step") == 4, run.stdout
    assert "finished the bad step" not in run.stdout
    assert "[3]<stderr>:sn_compress.errors.PayloadError" in run.stdout, run.stdout
    told = "CompressError: another rank has failed in this step: rank 3: PayloadError"
    assert run.stdout.count(told) == 3, run.stdout
