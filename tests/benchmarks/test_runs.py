"""Each kind of benchmark runs, if briefly: its counts are right, and its rows are gone on with."""

import importlib
import json
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture
def rows(tmp_path):
    """A file of rows, and what is in it."""
    path = tmp_path / "rows.json"
    return path, lambda: json.loads(path.read_text())


def noise(count):
    """Images and labels like those of Fashion-MNIST."""
    torch = pytest.importorskip("torch")
    generator = torch.Generator().manual_seed(count)
    images = torch.randn(count, 1, 28, 28, generator=generator)
    return images, torch.randint(10, (count,), generator=generator)


@pytest.mark.parametrize("method", [("plain", None), ("ours", 9.0), ("nearest 2", None)])
def test_training_with_compressed_activations(method):
    study = pytest.importorskip("activations")
    run = study.Run("cnn", method[0], method[1], 0, 3)
    row = study.train(run, dict.fromkeys(("train", "t10k"), noise(128)))
    assert row["ratio"] >= (method[1] or 1)
    assert 0 <= row["accuracy"] <= 100
    if method[0] == "ours":
        # What is held is the compressed tensors, the loss and its own saved ones.
        assert row["held_bytes"] <= row["plain_bytes"] / 9 + 64 * 1024
        assert row["held_bytes"] < row["peak_bytes"]
    assert f"| cnn, 3 steps | {method[0]}" in study.table([row | {"seed": 0}])


def test_peaks_with_compressed_activations():
    memory = pytest.importorskip("activations_memory")
    row = memory.row_of("transformer", 4, 1)
    assert row["compressed_bytes"] < row["saved_bytes"] / 4
    assert row["peak_bytes"] < 0.8 * row["plain_peak_bytes"]
    assert "| transformer | 4 bits | " in memory.table([row])


def test_peaks_with_compressed_activations_in_keras():
    memory = pytest.importorskip("activations_memory_tensorflow")
    from sn_memory.tensorflow.memory import has_statistics

    if not has_statistics("CPU:0"):
        pytest.skip("TensorFlow's allocator keeps no statistics here")
    row = memory.row_of("CNN", (8, False), 1)
    assert row["peak_bytes"] < 0.7 * row["plain_peak_bytes"]
    assert "| CNN | 8 bits | " in memory.table([row])


def test_apoptosis_is_tried_on_rows_of_training(monkeypatch, rows, capsys):
    """Half as many steps again for all but plain; what is tried never sees the test rows."""
    torch = pytest.importorskip("torch")
    pytest.importorskip("sklearn")
    study, seen = pytest.importorskip("apoptosis"), []

    def score(net, inputs, labels):
        seen.append(labels)
        return 50.0

    monkeypatch.setattr(study, "score", score)
    monkeypatch.setattr(study, "LOOKS", 1)
    command = ["apoptosis.py", "--nets", "tumours_wide", "--seeds", "0", "--steps", "2", "--more"]
    command += ["1.5", "--methods", "plain", "apoptosis", "--held-out"]
    monkeypatch.setattr(sys, "argv", command)
    with pytest.raises(SystemExit):
        study.main()
    assert "a file of its own" in capsys.readouterr().err
    path, read = rows
    for _ in range(2):
        monkeypatch.setattr(sys, "argv", [*command, "--json", str(path)])
        study.main()
        assert [(row["steps"], row["held_out"]) for row in read()] == [(2, True), (3, True)]
    _, labels, _, _ = study.tumours(0)
    assert all(torch.equal(tried, labels[-len(tried) :]) for tried in seen)


def test_gossip_counts_its_bytes_and_follows_the_distance(monkeypatch):
    study = pytest.importorskip("gossip")
    monkeypatch.setattr(study, "fashion_mnist", lambda part: noise(256))
    reduced = study.train(study.Run("all-reduce", 4, 0, 6))
    weights = study.train(study.Run("weights", 4, 0, 6))
    small = study.train(study.Run("weights, top-k", 4, 0, 6, 0.1))
    assert reduced["ratio"] == pytest.approx(4 / 6, abs=0.01)  # a ring sends 2 (p - 1) / p models
    assert weights["ratio"] == 1
    assert small["ratio"] > 20
    assert not any(reduced["distance"])
    assert weights["steps_seen"] == [1, 2, 3, 4, 5, 6]
    assert weights["distance"][2] > 0
    # The same images in the same order: the means have moved alike after a step, not the ranks.
    assert weights["norm"][0] == pytest.approx(reduced["norm"][0], abs=1e-3)


@pytest.mark.horovod
@pytest.mark.slow
def test_gossip_in_keras_on_real_ranks(horovodrun, rows):
    """Two ranks that average after the step do what all-reduce does, but for roundings."""
    pytest.importorskip("tensorflow")
    if pytest.importorskip("nets").fetch_fashion_mnist.find() is None:
        pytest.skip("no Fashion-MNIST")
    path, read = rows
    script = ROOT / "benchmarks/gossip_tensorflow.py"
    subprocess.run([sys.executable, script, "--quick", "--json", path], check=True, timeout=280)
    found = {row["method"]: row for row in read()}
    reduced, gossip = found["all-reduce"], found["weights, not overlapped"]
    assert not any(reduced["distance"]), "all-reduce was to keep ranks equal"
    assert max(gossip["distance"]) < 1e-5
    assert gossip["norm"] == pytest.approx(reduced["norm"], abs=2e-4)  # rounded to 1e-4
    assert found["weights"]["distance"][5] > 1e-3
    assert found["weights"]["ratio"] == 1


@pytest.mark.slow
def test_gossip_and_all_reduce_behind_links(rows, monkeypatch, capsys):
    pytest.importorskip("horovod")
    links, shaped = pytest.importorskip("gossip_links"), pytest.importorskip("shaped_links")
    if reason := shaped.why_not():
        pytest.skip(reason)
    path, read = rows
    argv = f"--model resnet50 --ranks 2 --gbit 4 --rho 1 --slow 1.5 --steps 1 --json {path}".split()
    monkeypatch.setattr(links, "METHODS", ("all-reduce", "gossip"))
    links.main(argv)
    for row in read():
        # The slow rank computes half as long again, and nobody can be faster than it.
        assert row["step_s"] >= 1.5 * row["compute_s"]
        assert 0 < row["efficiency"] <= 1
    assert read()[1]["sent_bytes"] == 4 * 25_557_032  # one model
    capsys.readouterr()
    monkeypatch.setattr(sys.modules["rank_jobs"], "run_ranks", None)
    links.main(argv)
    assert "0 runs to do" in capsys.readouterr().err


@pytest.mark.slow
def test_policies_keep_their_rows_and_go_on(rows):
    bench = pytest.importorskip("policy_peaks")
    path, read = rows
    arguments = ["--json", str(path), "--models", "vit/3", "--ways", "eager", "--shares"]
    assert bench.main([*arguments, "0.6"]) == 0
    (first,) = read()
    assert first["peak_bytes"] == first["predicted_bytes"] <= first["budget_bytes"]
    assert bench.main([*arguments, "0.6", "0.9"]) == 0
    assert read()[0] == first
    assert len(read()) == 2


@pytest.mark.slow
def test_two_budgets_of_two_ways(rows):
    bench = pytest.importorskip("budgets_kept")
    path, read = rows
    ways = ["--ways", "aot_eager:ilp", "ours:policy"]
    assert bench.main(["--quick", "--json", str(path), *ways]) == 0
    assert len(read()) == 4
    for row in read():
        if row["way"].startswith("ours:"):
            assert row.get("peak_bytes", 0) <= row["asked_bytes"]
            assert row.get("smallest_bytes", row["asked_bytes"] + 1) > row["asked_bytes"]


@pytest.mark.parametrize("name", ["Llama", "GAT"])
def test_estimates_of_networks_that_look_at_their_integers(name):
    pytest.importorskip("transformers" if name == "Llama" else "torch_geometric")
    estimated = pytest.importorskip("estimated")
    row = estimated.row_of(name)
    assert abs(row["over"]) <= estimated.WITHIN, row


@pytest.mark.slow  # three processes that import torch and transformers
def test_a_trial_trains_within_its_limit_or_runs_out_of_it():
    under_limit = pytest.importorskip("under_limit")
    tiny = {
        "task": "resnet", "update": "early", "size": 1, "steps": 2, "time_limit_s": 2.0,
        "width": 4, "side": 32, "limit_bytes": 192 << 20, "margin_bytes": 160 << 20,
    }  # fmt: skip
    plain = under_limit.trial(tiny | {"way": "plain"}, timeout_s=600)
    ours = under_limit.trial(tiny | {"way": "ours"}, timeout_s=600)
    assert plain["trained"]
    assert ours["trained"]
    assert ours["losses"] == plain["losses"]
    assert ours["predicted_bytes"] <= ours["budget_bytes"] == 32 << 20
    del tiny["margin_bytes"]
    few = tiny | {"limit_bytes": 6 << 20, "way": "plain"}
    starved = under_limit.trial(few, timeout_s=600)
    assert not starved["trained"]
    assert starved["out_of_memory"]


def test_the_search_under_a_limit_doubles_and_halves():
    under_limit, sizes = pytest.importorskip("under_limit"), []

    def run(size):
        sizes.append(size)
        return size <= 37

    assert under_limit.largest(run, 10, grain=0.0, step=1) == 37
    assert sizes[:4] == [10, 20, 40, 30]
    assert under_limit.largest(lambda _: False, 8, grain=0.0, step=1) == 0


@pytest.mark.slow
def test_new_lengths_are_within_the_budget_and_equal(monkeypatch):
    pytest.importorskip("transformers")
    # Here: it imports transformers, for which collecting need not wait.
    bench = importlib.import_module("new_inputs")
    monkeypatch.setattr(bench, "STEPS", 6)
    row = bench.epoch("longest", (256,), bench.trained(bench.gpt2("small")))
    assert row["equal"]
    assert row["most"] <= row["budget"] < row["plain"]
    assert row["searched"] == 1
    assert row["at_sight_s"] > 0
    assert len(row["kinds"]) > 2


def test_a_ratio_of_paired_steps_is_of_medians_whatever_comes_between():
    """Other takes 1.5 times plain's seconds; one step in ten of either takes a hundred times."""
    tuned, counts = pytest.importorskip("tuned"), {"plain": 0, "other": 0}

    def way(name, seconds):
        def step():
            counts[name] += 1
            return seconds * (100 if counts[name] % 10 == 0 else 1)

        return step

    row = tuned.paired(
        way("plain", 0.2), way("other", 0.3), pairs=4, steps=10, mean=lambda value: value
    )
    assert counts == {"plain": 40, "other": 40}
    assert row["tuned_over_plain"] == pytest.approx(1.5)
    assert row["plain_s"] == pytest.approx(0.2)


def test_one_command_for_all_frameworks(monkeypatch):
    other, seen = pytest.importorskip("planner_tensorflow"), []
    monkeypatch.setattr(other, "main", lambda argv: seen.append(argv) or 0)
    command = ["--framework", "tensorflow", "--models", "vgg16"]
    assert pytest.importorskip("planner").main(command) == 0
    assert seen == [["--models", "vgg16"]]


@pytest.mark.slow
def test_rivals_of_the_study_train(monkeypatch):
    """Two steps behind the dense ones, on noise; ours has its own tests of the simulation."""
    study = pytest.importorskip("study")
    images = noise(200)
    monkeypatch.setattr(study, "fashion_mnist", lambda part: images)
    runs = {r.method: r for r in study.plan([0], study.DENSE + 2) if r.net == "cnn"}
    for name, run in runs.items():
        if not name.startswith(("auto", "fft by shape, ")):  # the steps are too few for a schedule
            row = study.train(run)
            assert row["train_loss"] is not None, run
            # DGC has just begun: its first steps keep a quarter of all values, of all eight ranks.
            assert row["ratio_received"] > {"plain": 0.99, "dgc": 0.5}.get(name, 1.9), row


def test_the_table_of_the_study_pairs_seeds_and_names_what_diverged():
    study = pytest.importorskip("study")

    def row(method, ratio, seed, accuracy, loss=0.25):
        return {
            "net": "cnn", "optimizer": "sgd", "method": method, "ratio_asked": 50.0, "seed": seed,
            "steps": 10, "rate": 0.1, "exchange": "x", "ratio_received": ratio, "ratio_sent": ratio,
            "ratio_with_small": ratio, "accuracy": accuracy, "train_loss": loss, "seconds": 1.0,
            "commit": "c", "machine": "m",
        }  # fmt: skip

    rows = [row("plain", 1.0, 0, 90.0) | {"ratio_asked": None}]
    rows += [row("plain", 1.0, 1, 91.0) | {"ratio_asked": None}]
    rows += [row("auto", 50.1, 0, 89.9), row("auto", 50.3, 1, 90.7)]
    rows += [row("demo", 50.0, 0, 10.0, None)]
    lines = study.report.table(rows).splitlines()
    ours = next(line for line in lines if "**LowRankCompression**" in line)
    # -0.1 and -0.3: the mean, and the standard deviation of two.
    assert "| 50.2 |" in ours
    assert "-0.20 ± 0.14" in ours
    assert "diverged" in next(line for line in lines if "| demo" in line)
