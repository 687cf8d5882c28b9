"""GossipOptimizer for torch: by threads in many ways, on real ranks where the wire matters."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

RANKS = Path(__file__).parent / "ranks"
CASES = [
    "weights", "momentum", "buckets", "kinds", "consensus", "coded", "settles",
    "resume", "limit", "spread", "differ", "counted", "scaler", "ring", "grown", "unequal-momenta",
    "copies",
]  # fmt: skip
# Cases whose topologies or bounds depend on the number of ranks; of the others, three will do.
OTHERS = [(2, "weights"), (2, "coded"), (2, "limit"), (4, "weights"), (4, "momentum"), (1, "ring")]
# What a transport could get wrong: both must give the bits of the reference.
REAL = ["threads", "consensus", "coded", "differ", "counted", "ring", "late"]


@pytest.mark.parametrize(("ranks", "case"), [*((3, case) for case in CASES), *OTHERS])
def test_threads_follow_the_rules(tmp_path, ranks, case):
    pytest.importorskip("torch")
    from local_peers import Hall
    from torch_cases import CASES, World

    def work(peers):
        world = World(peers.rank, peers.ranks, [{"group": peers}], peers.gather, tmp_path)
        CASES[case](world)

    Hall(ranks).run(work)


@pytest.mark.horovod
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "cases"), [(2, REAL), (4, ["weights", "idle-ranks"])])
def test_ranks_follow_the_rules(horovodrun, tmp_path, ranks, cases):
    """The cases share one launch: starting horovodrun takes longer than most of them. What
    gathers often is left to two, as ranks spin while Horovod gathers: four of them, on two cores.
    """
    script = RANKS / "torch_train.py"
    run = horovodrun(ranks, script, tmp_path, *cases, timeout=120).check()
    for case in cases:
        assert run.stdout.count(f"ok {case}\n") == ranks, f"{case}\n{run.stdout}"


@pytest.mark.horovod
@pytest.mark.slow
@pytest.mark.parametrize("transport", ["horovod", "distributed"])
def test_a_dead_rank_ends_the_run_with_an_error_on_the_others(horovodrun, tmp_path, transport):
    """Horovod's Gloo waits 30 s for a peer; torch's Gloo sees the connection close."""
    start = time.monotonic()
    run = horovodrun(3, RANKS / "fail.py", tmp_path, transport, timeout=120)
    assert not run.timed_out, run.stdout
    assert run.returncode != 0
    # The others may be told before they come to it.
    assert "[1]<stdout>:reached the bad step" in run.stdout, run.stdout
    assert "all steps done" not in run.stdout
    assert " was told: " in run.stdout, run.stdout
    assert time.monotonic() - start < 90
