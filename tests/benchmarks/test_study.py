"""The accuracy study: equal bytes, what is planned, and what is told of the rows."""

from __future__ import annotations

import math

import pytest

from sn_compress.codecs.base import HEADER_BYTES


@pytest.fixture(scope="module")
def study():
    """The script, where torch is."""
    pytest.importorskip("torch")
    import study

    return study


@pytest.mark.parametrize("ratio", [50.0, 150.0])
@pytest.mark.parametrize("method", ["top-k", "sparseloco", "demo"])
def test_rivals_are_set_to_the_bytes_asked_for(study, method, ratio):
    """Never more bytes than asked for, and no more than a knob's step (a sixth here) fewer."""
    shapes = {"a": (64, 48, 3, 3), "b": (128, 1024)}
    exchanges = study.build(method, shapes, 8, ratio, 100)
    received = 0
    for name, shape in shapes.items():
        codec = exchanges[name].codecs[0]
        received += 7 * (codec.payload_bytes(math.prod(shape)) - HEADER_BYTES)
    plain = 2 * 7 / 8 * 4 * sum(map(math.prod, shapes.values()))
    assert ratio <= plain / received <= ratio * 1.2


def test_plan_has_no_run_twice_and_begins_with_the_headline(study):
    runs = study.plan([0, 1], None)
    assert len(set(runs)) == len(runs)
    assert [r.method for r in runs[:3]] == ["plain", "auto", "auto"]
    assert {r.method for r in runs} == set(study.BUILD)
    for seed in (0, 1):
        for net, optimizer in (("cnn", "sgd"), ("transformer", "adam")):
            assert any(
                (r.net, r.optimizer, r.seed, r.method) == (net, optimizer, seed, "plain")
                for r in runs
            )


def test_rivals_train(study, monkeypatch):
    """Two steps behind the dense ones, on noise; ours has its own tests of the simulation."""
    torch = pytest.importorskip("torch")
    noise = torch.randn(200, 1, 28, 28), torch.randint(0, 10, (200,))
    monkeypatch.setattr(study, "fashion_mnist", lambda part: noise)
    runs = {r.method: r for r in study.plan([0], study.DENSE + 2) if r.net == "cnn"}
    for name, run in runs.items():
        if not name.startswith("auto"):
            row = study.train(run)
            assert row["train_loss"] is not None, run
            # DGC has just begun: its first steps keep a quarter of all values, of all eight ranks.
            assert row["ratio_received"] > {"plain": 0.99, "dgc": 0.5}.get(name, 1.9), row


def test_learning_rate_warms_up_and_ends_at_zero(study):
    rates = [study.learning_rate(step, 300) for step in range(300)]
    assert rates[0] == pytest.approx(0.1)
    assert max(rates) == 1.0
    assert rates.index(1.0) == 9
    assert 0 < rates[-1] < 1e-3


def row(method, ratio, seed, accuracy, loss=0.25, asked=None):
    return {
        "net": "cnn", "optimizer": "sgd", "method": method, "ratio_asked": asked, "seed": seed,
        "steps": 10, "rate": 0.1, "exchange": "x", "ratio_received": ratio, "ratio_sent": ratio,
        "ratio_with_small": ratio, "accuracy": accuracy, "train_loss": loss, "seconds": 1.0,
        "commit": "c", "machine": "m",
    }  # fmt: skip


def test_report_pairs_seeds_and_names_what_diverged(study, tmp_path):
    rows = [row("plain", 1.0, 0, 90.0), row("plain", 1.0, 1, 91.0)]
    rows += [row("auto", 50.1, 0, 89.9, asked=50.0), row("auto", 50.3, 1, 90.7, asked=50.0)]
    rows += [row("demo", 50.0, 0, 10.0, None, asked=50.0)]
    lines = study.report.table(rows).splitlines()
    ours = next(line for line in lines if "**auto**" in line)
    # -0.1 and -0.3: the mean, and the standard deviation of two.
    assert "| 50.2 |" in ours
    assert "-0.20 ± 0.14" in ours
    assert "diverged" in next(line for line in lines if "| demo" in line)
    study.report.picture(rows, tmp_path / "study.png")
    assert (tmp_path / "study.png").stat().st_size > 10_000


def test_report_goes_between_its_markers(study, tmp_path):
    page = tmp_path / "page.md"
    page.write_text("a\n<!-- study:start -->\nold\n<!-- study:end -->\nz\n")
    study.report.put_into(page, "study", "new")
    assert page.read_text() == "a\n<!-- study:start -->\nnew\n<!-- study:end -->\nz\n"
    page.write_text("no place\n")
    with pytest.raises(SystemExit, match="study:start"):
        study.report.put_into(page, "study", "new")
