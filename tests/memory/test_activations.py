"""The theory against plain simulation, and the controller's choices on hand-made layers."""

from __future__ import annotations

import itertools
import math
import warnings

import numpy as np
import pytest

from sn_memory import BudgetError
from sn_memory.activations import (
    AccuracyWarning,
    Controller,
    coverage,
    error_tolerance,
    gradient_sd,
    suggest_batch,
)
from sn_memory.activations.saved import Cost, Timed, packing_of, rates_of


def test_deviation_of_a_linear_layers_gradient():
    """Uniform errors on non-zeros; the mean square of 64 x 48 x 40 entries is within 10 %."""
    rng = np.random.default_rng(0)
    x, dy = np.maximum(rng.standard_normal((256, 64)), 0), rng.laplace(size=(256, 48))
    energy, nonzero = float(np.square(dy).sum()), (x != 0).mean()
    for tolerance in (0.01, 0.5):
        drawn = (rng.uniform(-tolerance, tolerance, x.shape) * (x != 0) for _ in range(40))
        sd = gradient_sd(tolerance**2 / 3 * nonzero, energy, outputs=48)
        assert np.std([dy.T @ errors for errors in drawn]) == pytest.approx(sd, rel=0.1)
        assert error_tolerance(sd, energy, 48, nonzero) == pytest.approx(tolerance)
    # A gradient of zero bears any error.
    assert error_tolerance(0.1, 0.0, 8) == math.inf
    assert gradient_sd(0.5, 0.0, 8) == 0


@pytest.mark.parametrize(
    ("size", "kernel", "stride", "padding", "dilation"),
    [(7, 3, 1, 1, 1), (8, 3, 2, 1, 1), (9, 5, 1, 0, 1), (9, 3, 1, 2, 2), (4, 7, 1, 3, 1)],
)
def test_coverage_counts_the_pairs_inside(size, kernel, stride, padding, dilation):
    out = (size + 2 * padding - dilation * (kernel - 1) - 1) // stride + 1
    inside = np.pad(np.ones((size, size)), padding)
    hits = sum(
        inside[i * stride + a * dilation, j * stride + b * dilation]
        for i, j, a, b in itertools.product(range(out), range(out), range(kernel), range(kernel))
    )
    found = coverage(*([value, value] for value in (size, out, kernel, stride, padding, dilation)))
    assert found == pytest.approx(hits / (out * kernel) ** 2)


def test_the_papers_constant_is_that_of_one_distribution():
    """a = rms / (sqrt(3) mean magnitude) of dY, over sqrt(outputs) terms of equal size."""
    rng = np.random.default_rng(0)
    for dy, a in ((rng.standard_normal((512, 16)), 0.7236), (rng.laplace(size=(512, 16)), 0.8165)):
        exact = gradient_sd(0.1**2 / 3, float(np.square(dy).sum()), outputs=16)
        paper = a * float(np.abs(dy).mean()) * math.sqrt(512) * 0.1
        # The rms of 8192 Laplace numbers is known to 2 %, five deviations.
        assert paper == pytest.approx(exact, rel=0.05)


def seen(controller, key, n=10_000, variance=1e-4, energy=1.0, bits=8, yardstick=1.0, **more):
    controller.observe(key, n=n, bits=bits, variance=variance, **more)
    controller.observe_gradient(key, energy=energy, outputs=1, yardstick=yardstick)


def test_the_fewest_bits_that_keep_to_the_error():
    # At 8 bits a deviation of 1e-4; the step is 17, 85 and 255 times wider at 4, 2 and 1.
    for error, bits in ((1e-4, 8), (1.6e-3, 8), (1.8e-3, 4), (8.6e-3, 2), (2.6e-2, 1)):
        controller = Controller(error=error)
        seen(controller, "a", variance=1e-8)
        controller.refresh()
        assert controller.bits("a") == bits, error
        (row,) = controller.rows()
        assert row.predicted_sd(bits) <= error or bits == 8
        assert row.predicted_sd() == pytest.approx(1e-4)


def test_nothing_is_chosen_without_statistics_or_a_yardstick():
    controller = Controller(error=0.01, start_bits=4)
    controller.observe("a", n=100, bits=4, variance=0.0)
    seen(controller, "b", variance=1e-3, yardstick=0.0)
    controller.observe("c", n=100, bits=8, variance=1e-9, kind="nonlinear")
    controller.refresh()
    assert [controller.bits("a"), controller.bits("b")] == [4, 8]
    assert controller.bits("c", kind="nonlinear") == 8
    assert [controller.due(step) for step in (0, 1, 200)] == [True, False, True]


def test_a_budget_goes_where_a_bit_helps_most():
    controller = Controller(budget_bytes=14_000)
    seen(controller, "sensitive", variance=1e-2)
    seen(controller, "blunt", variance=1e-6)
    controller.observe_other("mask", nbytes=1000)
    controller.refresh()
    assert controller.bits("sensitive") > controller.bits("blunt")
    assert controller.total_bytes <= 14_000
    # Against all combinations: no better one fits, but for a last step that is too large.
    rows = {row.key: row for row in controller.rows()}

    def loss(bits):
        return sum(rows[key].predicted_sd(b) ** 2 for key, b in bits.items())

    chosen = {key: controller.bits(key) for key in rows}
    fitting = [
        dict(zip(rows, pair, strict=True))
        for pair in itertools.product((1, 2, 4, 8), repeat=2)
        if sum(math.ceil(10_000 * (b / 8 + 6 / 256)) for b in pair) + 1000 <= 14_000
    ]
    assert loss(chosen) == min(map(loss, fitting))


def told(bits):
    return pytest.warns(AccuracyWarning, match=f"leaves {bits} bits for inputs of GELU")


def norm_and_linear(budget):
    controller = Controller(budget_bytes=budget, least_nonlinear_bits=2)
    seen(controller, "linear")
    controller.observe("norm", n=10_000, bits=8, variance=1e-6, kind="nonlinear")
    return controller


@pytest.mark.parametrize(("budget", "width"), [(13_500, 8), (9_000, 4), (6_000, 2)])
def test_what_is_not_linear_gives_way_first(budget, width):
    controller = norm_and_linear(budget)
    with warnings.catch_warnings() if width == 8 else told(width):
        controller.refresh()
    controller.refresh()  # said once
    assert controller.bits("norm", kind="nonlinear") == width
    assert controller.bits("linear") >= 2
    assert controller.total_bytes <= budget


def test_a_budget_below_the_fewest_bits_is_refused():
    with pytest.raises(BudgetError, match="fewest bits") as caught:
        norm_and_linear(3000).refresh()
    assert caught.value.peak_bytes > caught.value.budget_bytes == 3000


def test_a_budget_is_refused_rather_than_norms_spoilt():
    def transformer(**settings):
        """Two blocks of a norm, attention, two dense layers and an activation."""
        controller = Controller(budget_bytes=60_000, **settings)
        for block in ("a", "b"):
            for op, n in (("norm/layer_norm/0", 10_000), ("attention/sdpa/0", 30_000)):
                controller.observe(f"{block}.{op}", n=n, bits=8, variance=1e-6, kind="nonlinear")
            seen(controller, f"{block}.dense1/linear/0", n=10_000, variance=1e-6)
            seen(controller, f"{block}.dense2/linear/0", n=40_000, variance=1e-6)
            controller.observe_other(f"{block}.relu/relu/0", nbytes=5000)
        return controller

    with pytest.raises(BudgetError, match=r"least_nonlinear_bits, 8 now.*plan\(model, sample"):
        transformer().refresh()
    spoilt = transformer(least_nonlinear_bits=2)
    with told(2):
        spoilt.refresh()
    assert spoilt.total_bytes <= 60_000


def test_overflows_widen_and_then_give_up():
    controller = Controller(bits=2)
    controller.observe("a", n=1000, bits=2, variance=0.1)
    widths = []
    for _ in range(4):
        controller.overflowed("a")
        controller.refresh()
        widths.append(controller.bits("a"))
    assert widths == [4, 8, None, None]
    assert controller.total_bytes == 4000
    assert "exact" in controller.report()


def test_the_error_gives_the_papers_form_a_tolerance():
    controller = Controller(error=0.01)
    assert controller.tolerance("a") == math.inf
    controller.observe("a", n=100, bits=8, variance=1e-6, nonzero=0.5)
    assert controller.tolerance("a") == math.inf
    controller.observe_gradient("a", energy=6.0, outputs=4, yardstick=2.0)
    tolerance = controller.tolerance("a")
    assert gradient_sd(tolerance**2 / 3 * 0.5, 6.0, 4) == pytest.approx(0.02)


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "got nothing; expected exactly one"),
        ({"error": 0.01, "bits": 2}, "got error, bits; expected exactly one"),
        ({"error": 0.0}, "error=0.0; expected above 0"),
        ({"bits": 3}, "bits=3; expected 1, 2, 4, 8"),
        ({"error": 1, "every": 0}, "every=0"),
        ({"error": 1, "nonlinear_bits": 16}, "nonlinear_bits=16"),
        ({"error": 1, "least_nonlinear_bits": 3}, "least_nonlinear_bits=3; expected 1, 2"),
    ],
)
def test_wrong_settings_are_named(settings, message):
    with pytest.raises(ValueError, match=message):
        Controller(**settings)


def test_suggested_batches_fit_and_one_more_does_not():
    fixed, plain, compressed, working = 10**6, 50_000, 4_000, 6_000
    sizes = {"fixed_bytes": fixed, "sample_bytes": plain, "compressed_sample_bytes": compressed}
    found = suggest_batch(10**7, **sizes, transient_sample_bytes=working, multiple=8)
    for batch, size in ((found.batch, compressed), (found.plain_batch, plain)):
        assert batch % 8 == 0
        assert fixed + batch * (size + working) <= 10**7
        assert fixed + (batch + 8) * (size + working) > 10**7
    assert found.speedup is None
    timed = suggest_batch(10**7, **sizes, step_s=(0.1, 0.001), compressed_step_s=(0.1, 0.002))
    assert timed.samples_per_s == pytest.approx(2250 / (0.1 + 0.002 * 2250))
    assert timed.plain_samples_per_s == pytest.approx(180 / (0.1 + 0.001 * 180))
    assert timed.speedup < 1  # the compressed step is too slow here, and that is said
    with pytest.raises(ValueError, match="has no room for 8 samples"):
        suggest_batch(fixed + 1, **sizes, multiple=8)
    with pytest.raises(ValueError, match="expected sizes above zero"):
        suggest_batch(10, **(sizes | {"sample_bytes": 0}))


def test_what_runs_again_holds_no_more_and_costs_no_more_than_a_byte_is_worth():
    first = Timed(frozenset({"", "a"}), "OnHost", True, 400, 400, 100, 3.0)
    second = Timed(frozenset({"", "b"}), "OnHost", True, 400, 400, 100, 1.0)
    mask = Timed(frozenset({"", "b"}), "Mask", False, 100, 0, 4, 0.1)
    rates = rates_of([first, second, mask])
    assert rates == pytest.approx({"OnHost": 0.005, "": 0.005, "Mask": 0.001})
    packed = packing_of([Timed(frozenset({"a"}), "OnHost", True, 400, 400, 100, 3.0)], rates)
    assert packed == Cost(2.0, 400, 100)
    price = 0.01
    assert packed.saved_by(Cost(1.0, 400, 101), price) == 0
    assert packed.saved_by(Cost(2.4, 400, 50), price) == pytest.approx(0.1)
    assert packed.saved_by(Cost(2.6, 400, 50), price) == pytest.approx(-0.1)


def test_what_packs_slowest_is_left_as_it_is_where_a_budget_has_bytes_left():
    controller = Controller(budget_bytes=7_000)
    for key, seconds in (("a/linear/0", 1.0), ("b/linear/0", 2.0), ("c/gelu/0", 3.0)):
        kind = "nonlinear" if key.startswith("c") else "linear"
        controller.observe(key, n=1024, bits=8, variance=1.0, kind=kind)
        controller.timed(key, seconds)
    controller.refresh()
    # Three of 1,048 bytes, and 3,048 more for each that is left alone.
    found = [controller.bits(row.key, kind=row.kind) for row in controller.rows()]
    assert found == [8, 8, None]
    assert controller.total_bytes == 4096 + 2 * 1048 <= 7_000
    # Nobody measured: packed, as far as it goes.
    unmeasured = Controller(budget_bytes=7_000)
    unmeasured.observe("a/linear/0", n=1024, bits=8, variance=1.0)
    unmeasured.refresh()
    assert unmeasured.bits("a/linear/0") == 8
