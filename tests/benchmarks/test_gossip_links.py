"""Gossip behind shaped links: the bytes it says it sends, and what is done once is kept."""

import json

import pytest

pytest.importorskip("horovod")
import gossip_links
import rank_jobs
import shaped_links


@pytest.mark.slow
def test_gossip_and_all_reduce_behind_links(tmp_path, monkeypatch, capsys):
    if reason := shaped_links.why_not():
        pytest.skip(reason)
    rows = tmp_path / "rows.json"
    argv = f"--model resnet50 --ranks 2 --gbit 4 --rho 1 --slow 1.5 --steps 1 --json {rows}".split()
    monkeypatch.setattr(gossip_links, "METHODS", ("all-reduce", "gossip"))
    gossip_links.main(argv)
    reduced, gossip = json.loads(rows.read_text())
    assert gossip["sent_bytes"] == 4 * 25_557_032  # one model
    for row in (reduced, gossip):
        # The slow rank computes half as long again, and nobody can be faster than it.
        assert row["step_s"] >= 1.5 * row["compute_s"]
        assert 0 < row["efficiency"] <= 1
    capsys.readouterr()
    monkeypatch.setattr(rank_jobs, "run_ranks", None)
    gossip_links.main(argv)
    assert "0 runs to do" in capsys.readouterr().err
