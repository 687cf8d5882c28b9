"""The apoptosis study: only what is missing runs, times are to the target, pruning cuts."""

import json
import sys

import apoptosis
import pytest
import torch


def row(net, method, seed, args):
    tested = {"plain": [80.0, 90.0], "apoptosis": [85.0, 91.0]}.get(method, [70.0, 80.0])
    settings = {k: getattr(args, k) for k in ("steps", "tolerance", "every", "schedule")}
    return settings | {
        "net": net,
        "method": method,
        "seed": seed,
        "accuracy": tested[-1],
        "parameters": 1000,
        "seconds": 8.0,
        "curve_step": [1, 2],
        "curve_seconds": [4.0, 8.0],
        "curve_accuracy": tested,
        "curve_widths": [[32, 32], [16, 8]],
    }


def test_only_what_is_missing_runs(monkeypatch, tmp_path, capsys):
    pytest.importorskip("matplotlib")
    calls = []

    def run(net, method, seed, args, ended):
        calls.append((method, seed, ended))
        return row(net, method, seed, args)

    monkeypatch.setattr(apoptosis, "run", run)
    path = tmp_path / "rows.json"
    command = ["apoptosis.py", "--json", str(path), "--nets", "mlp_narrow", "--seeds"]
    monkeypatch.setattr(sys, "argv", [*command, "0"])
    apoptosis.main()
    assert calls[:2] == [("plain", 0, []), ("apoptosis", 0, [])]
    assert calls[2:] == [("pruned", 0, [16, 8]), ("small", 0, [16, 8])]
    monkeypatch.setattr(sys, "argv", [*command, "0", "1", "--png", str(tmp_path / "picture.png")])
    apoptosis.main()
    assert len(calls) == 8, "seed 0 was there already"
    assert len(json.loads(path.read_text())) == 8
    said = capsys.readouterr().out
    assert "| mlp_narrow | apoptosis | 91.00 | 1,000 | 8.0 | 8.0 | 90.00 |" in said
    assert "| mlp_narrow | pruned | 80.00 | 1,000 | 8.0 | 0 of 2 did | 90.00 |" in said
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_pruning_takes_the_smallest_and_leaves_the_rest():
    torch.manual_seed(0)
    net = apoptosis.dense(12, 10)
    with torch.no_grad():
        net[1].weight[[2, 5, 7]] = 0.0
        net[1].bias[[2, 5, 7]] = 0.0
    images = torch.randn(4, 1, 28, 28)
    before = net(images)
    optimizer = torch.optim.Adam(net.parameters())
    apoptosis.prune(net, optimizer, images, [9, 10])
    assert apoptosis.widths(net) == [9, 10]
    # Neurons that are always zero: only the order of float32 sums of 12 products differs.
    torch.testing.assert_close(net(images), before, rtol=1e-5, atol=1e-6)
    assert optimizer.param_groups[0]["params"] == list(net.parameters())
