"""Ranks shrink alike or not at all."""

from pathlib import Path

import pytest

CASES = {"shrinks_under_ddp", "weights_differ", "settings_differ", "one_saw_no_batch"}


@pytest.mark.slow
def test_two_ranks_agree_or_both_stop(ranks):
    for rank in ranks(2, Path(__file__).parent / "ranks" / "apoptosis.py", timeout=200):
        assert rank.returncode == 0, rank.output
        said = {line.split()[1] for line in rank.output.splitlines() if line.startswith("ok ")}
        assert said == CASES, rank.output


NET_CASES = {
    "identical_after_every_event",
    "a_checkpoint_of_before_resumes_after",
    "a_rank_that_joins_late_gets_the_new_shapes",
}


@pytest.mark.slow
def test_three_ranks_shrink_one_net(ranks):
    for rank in ranks(3, Path(__file__).parent / "ranks" / "apoptosis_net.py", timeout=280):
        assert rank.returncode == 0, rank.output
        said = {line.split()[1] for line in rank.output.splitlines() if line.startswith("ok ")}
        assert said == NET_CASES, rank.output
