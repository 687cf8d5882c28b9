"""The accuracy study: equal bytes, what is planned, and what is told of the rows."""

from __future__ import annotations

import math

import numpy as np
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


@pytest.mark.parametrize(("shape", "axes"), [
    ((64, 32, 3, 3), (2, 3)),  # torch
    ((3, 3, 32, 64), (0, 1)),  # TensorFlow
    ((64, 3, 7, 7), (2, 3)),
    ((7, 7, 3, 64), (0, 1)),
    ((32, 16, 5), (2,)),
    ((5, 16, 32), (0,)),
    ((8, 8, 3, 3, 3), (2, 3, 4)),
    ((64, 1, 3, 3), (2, 3)),  # depthwise
    ((3, 3, 64, 1), (0, 1)),
    ((64, 64, 1, 3), (3,)),
    ((64, 32, 1, 1), (1,)),  # a matrix
    ((1, 1, 32, 64), (2,)),
    ((128, 1024), (0,)),
    ((1024, 64), (1,)),
    ((64, 64), (1,)),
])  # fmt: skip
def test_the_axes_that_a_shape_asks_for(shape, axes):
    from _study_methods import transform_of

    assert transform_of(shape) == {"transform": "axes", "shape": shape, "axes": axes}


@pytest.mark.parametrize("shape", [(), (0,), (1,), (65536,), (1, 65536), (65536, 1), (1, 1, 7, 1)])
def test_one_axis_is_a_vector(shape):
    from _study_methods import transform_of

    assert transform_of(shape) == {"transform": "fft"}


@pytest.mark.parametrize(("method", "ratio"), [
    ("fft by shape, warm-up", 50.0),
    ("fft by shape, no memory", 3.0),
    ("fft by shape, no memory, diminishing", 3.0),
])  # fmt: skip
def test_schedules_are_set_to_the_bytes_asked_for(study, method, ratio):
    """Over all steps; theta of the first is what the schedule says, and moves where it should."""
    shapes, steps = {"a": (64, 48, 3, 3), "b": (128, 1024)}, 300
    exchanges = study.build(method, shapes, 8, ratio, steps + study.DENSE)
    received, thetas = 0, set()
    for step in range(steps):
        for name, shape in shapes.items():
            codec = exchanges[name].at(None, step)
            thetas.add(codec.theta)
            received += 7 * codec.payload_bytes(math.prod(shape))
    plain = 2 * 7 / 8 * 4 * sum(map(math.prod, shapes.values())) * steps
    assert ratio <= plain / received <= ratio * 1.2
    assert (len(thetas) > 1) is (method != "fft by shape, no memory")


@pytest.mark.parametrize("method", ["fft, annealed", "fft, 2 bits, annealed"])
def test_annealed_receives_what_was_asked_for_and_less_at_every_step(study, method):
    """Counted from what travels between four ranks, over all steps."""
    shapes, ranks, steps = {"a": (32, 24, 3, 3), "b": (64, 256)}, 4, 40
    exchanges = study.build(method, shapes, ranks, 50.0, steps + study.DENSE)
    rng, received = np.random.default_rng(0), [0.0]
    for _ in range(steps):
        gradients = {
            name: [rng.standard_normal(math.prod(shape), dtype=np.float32) for _ in range(ranks)]
            for name, shape in shapes.items()
        }
        first, *_ = own = list(exchanges.values())
        first.means(own, list(gradients.values()))
        received.append(sum(each.received for each in own))
    plain = 2 * (ranks - 1) / ranks * 4 * sum(map(math.prod, shapes.values())) * steps
    assert 50.0 <= plain / received[-1] <= 50.0 * 1.05
    each = np.diff(received)
    assert (np.diff(each) <= 0).all()
    assert each[0] > 1.7 * received[-1] / steps, "the first steps have more than the mean"


def test_unseen_nets_are_new_and_at_each_number_of_ranks(study):
    runs = study.unseen_plan([0], [2, 4, 8])
    assert len(set(runs)) == len(runs)
    assert {(r.net, r.ranks) for r in runs} == {
        (net, ranks) for net in ("residual", "wide") for ranks in (2, 4, 8)
    }
    assert not {r.net for r in runs} & {r.net for r in study.plan([0], None)}
    sizes = {name: sum(p.numel() for p in make().parameters()) for name, make in study.MAKE.items()}
    assert sizes["residual"] == 77_546
    assert sizes["wide"] > 1_000_000


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


@pytest.mark.slow
def test_rivals_train(study, monkeypatch):
    """Two steps behind the dense ones, on noise; ours has its own tests of the simulation."""
    torch = pytest.importorskip("torch")
    noise = torch.randn(200, 1, 28, 28), torch.randint(0, 10, (200,))
    monkeypatch.setattr(study, "fashion_mnist", lambda part: noise)
    runs = {r.method: r for r in study.plan([0], study.DENSE + 2) if r.net == "cnn"}
    for name, run in runs.items():
        if not name.startswith(("auto", "fft by shape, ")):  # the steps are too few for a schedule
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
    ours = next(line for line in lines if "**LowRankCompression**" in line)
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


def test_cells_are_compared_seed_by_seed_with_what_they_were():
    import _study_report as report

    def rows(ratio, *accuracies, first=0):
        cell = {"net": "cnn", "optimizer": "sgd", "method": "auto", "ratio_asked": ratio}
        each = enumerate(accuracies, first)
        return [cell | {"steps": 9, "seed": seed, "accuracy": value} for seed, value in each]

    # Deviation of the earlier seeds 1.0: a mean difference of -1 is within it, one of -1.5 is not.
    earlier = [*rows(50.0, 88.0, 89.0, 90.0), *rows(150.0, 88.0, 89.0, 90.0)]
    now = [*rows(50.0, 88.0, 87.0), *rows(150.0, 87.5, 86.5), *rows(50.5, 1.0)]
    _, kept, lost, other = report.compared(now, earlier).splitlines()
    assert kept.endswith("+0.00 -2.00: no worse")
    assert lost.endswith("-0.50 -2.50: WORSE")
    assert other.endswith("no earlier run of these seeds")
