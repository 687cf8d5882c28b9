"""The apoptosis study: only what is missing runs, times are to the target, pruning cuts."""

import json
import sys

import apoptosis
import collider
import numpy as np
import pytest
import torch


def row(net, method, seed, args):
    tested = {"plain": [80.0, 90.0], "apoptosis": [85.0, 91.0]}.get(method, [70.0, 80.0])
    settings = {k: getattr(args, k) or getattr(apoptosis.TASKS[net], k) for k in apoptosis.SAME}
    settings |= {"schedule": args.schedule, "held_out": args.held_out}
    settings["steps"] = apoptosis.steps_of(net, method, args)
    return settings | {
        "net": net, "method": method, "seed": seed, "score": tested[-1], "parameters": 1000,
        "cpu_s": 8.0, "curve_step": [1, 2], "curve_cpu_s": [4.0, 8.0], "curve_score": tested,
        "curve_widths": [[32, 32], [16, 8]],
    }  # fmt: skip


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
    first = "| mlp_narrow | {}, tolerance 0.01 | 2,811 | 2 |"
    assert f"{first.format('apoptosis')} 91.00 | 1,000 | 8.0 | 8.0 | 89.90 |" in said
    assert f"{first.format('pruned')} 80.00 | 1,000 | 8.0 | 0 of 2 did | 89.90 |" in said
    assert (tmp_path / "picture.png").read_bytes().startswith(b"\x89PNG")


def test_pruning_takes_the_smallest_and_leaves_the_rest():
    torch.manual_seed(0)
    net = apoptosis.dense(784, 10, 12, 10)
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


def test_plain_is_run_once_for_all_settings(monkeypatch, tmp_path):
    calls = []

    def run(net, method, seed, args, ended):
        calls.append(method)
        return row(net, method, seed, args)

    monkeypatch.setattr(apoptosis, "run", run)
    command = ["apoptosis.py", "--json", str(tmp_path / "rows.json"), "--seeds", "0"]
    command += ["--nets", "mlp_narrow", "--methods", "plain", "apoptosis", "--tolerance"]
    for tolerance in ("0.1", "0.2"):
        monkeypatch.setattr(sys, "argv", [*command, tolerance])
        apoptosis.main()
    assert calls == ["plain", "apoptosis", "apoptosis"]


def test_settings_are_tried_on_rows_of_training(monkeypatch, tmp_path, capsys):
    """Half as many steps again for all but plain; what is tried never sees the test rows."""
    seen = []

    def score(net, inputs, labels):
        seen.append(labels)
        return 50.0

    monkeypatch.setattr(apoptosis, "score", score)
    monkeypatch.setattr(apoptosis, "LOOKS", 1)
    path = tmp_path / "tried.json"
    command = ["apoptosis.py", "--nets", "tumours_wide", "--seeds", "0", "--steps", "2", "--more"]
    command += ["1.5", "--methods", "plain", "apoptosis", "--held-out"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        apoptosis.main()
    assert "a file of its own" in capsys.readouterr().err
    monkeypatch.setattr(sys, "argv", [*command, "--json", str(path)])
    apoptosis.main()
    tried = [(row["steps"], row["held_out"]) for row in json.loads(path.read_text())]
    assert tried == [(2, True), (3, True)]
    _, train_labels, _, _ = apoptosis.tumours(0)
    assert all(torch.equal(labels, train_labels[-len(labels) :]) for labels in seen)


def test_the_area_under_the_curve_is_that_of_all_pairs():
    answers = torch.tensor([[0.0, 1.0], [0.0, 3.0], [0.0, 2.0], [0.0, 1.0], [0.0, 0.5]])
    labels = torch.tensor([0, 1, 0, 1, 0])
    # Of six pairs of a signal and a background, four are in order and one is a tie.
    net = torch.nn.Identity()
    assert apoptosis.score(net, answers, labels) == round(100 * (4 + 0.5) / 6, 2)


def test_collisions_repeat_and_hold_what_they_say():
    torch.manual_seed(0)
    features, labels = collider.collisions("test")
    again, _ = collider.collisions("test")
    assert torch.equal(features, again)
    assert features.shape == (30_000, 14)
    assert torch.isfinite(features).all()
    assert 0.45 < labels.double().mean() < 0.55


def test_decays_conserve_mass():
    random = np.random.default_rng(0)
    mass = random.uniform(60, 300, 100)
    total = np.zeros((100, 4))
    for momentum, rapidity, azimuth in (one.T for one in collider._decay(random, mass)):
        parts = [np.cosh(rapidity), np.cos(azimuth), np.sin(azimuth), np.sinh(rapidity)]
        total += momentum[:, None] * np.stack(parts, axis=1)
    found = np.sqrt(total[:, 0] ** 2 - (total[:, 1:] ** 2).sum(axis=1))
    np.testing.assert_allclose(found, mass, rtol=1e-9)


def test_folds_of_the_real_table_are_apart_and_all_of_it():
    pytest.importorskip("sklearn")
    folds = [apoptosis.tumours(seed) for seed in range(5)]
    assert sum(len(labels) for _, _, _, labels in folds) == 569
    for inputs, labels, test_inputs, test_labels in folds:
        assert len(inputs) + len(test_inputs) == len(labels) + len(test_labels) == 569
        assert abs(inputs.mean(0)).max() < 1e-5
        rows = {row.numpy().tobytes() for row in inputs}
        assert not any(row.numpy().tobytes() in rows for row in test_inputs)
