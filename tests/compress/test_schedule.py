"""Theta over time, and the convergence condition of docs/convergence.md on a convex problem."""

import itertools
import math

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sn_compress import CompressError, FFTCodec
from sn_compress.schedule import Annealed, Constant, Diminishing, Warmup, on_ladder
from sn_compress.settings import Settings, ThetaInTime


@given(st.floats(0, 0.9999))
def test_ladder_moves_keep_by_at_most_half_a_rung(theta):
    keep, moved = 1 - theta, 1 - on_ladder(theta)
    assert 0 <= on_ladder(theta) < 1
    # Rungs are 2**(1/4) apart, so the nearest is within 2**(1/8); a little for rounding.
    assert max(keep / moved, moved / keep) <= 2 ** (1 / 8) * (1 + 1e-12)


def test_warmup_begins_dense_ends_at_its_successor_and_never_falls():
    schedule = Warmup(100, Constant(0.98))
    thetas = [schedule.theta(step) for step in range(150)]
    assert thetas[:26] == [0.0] * 26
    assert thetas[100:] == [0.98] * 50
    assert all(a <= b + 1e-12 for a, b in itertools.pairwise(thetas[:100]))
    assert len(set(thetas)) < 30, "few rungs: each new payload size is negotiated"


def test_diminishing_follows_the_square_root_of_the_rate():
    schedule = Diminishing(0.9, rate=lambda step: 1 / (1 + step / 10))
    assert schedule.theta(0) == pytest.approx(0.9, abs=0.02)
    assert schedule.theta(30) == pytest.approx(0.45, abs=0.06)  # half a rung of keep 0.55
    assert schedule.theta(10**6) == pytest.approx(0.0, abs=0.09)
    with pytest.raises(CompressError, match="rate"):
        Diminishing(0.9, rate=lambda step: 2.0).theta(0)
    for power in (-1.0, math.nan):
        with pytest.raises(CompressError, match="power"):
            Diminishing(0.9, rate=lambda step: 0.5, power=power)


def cosine(steps: int):
    """A learning rate that rises over a tenth of the steps and falls along a cosine to 0."""
    rise = steps // 10

    def rate(step: int) -> float:
        if step < rise:
            return (step + 1) / rise
        return 0.5 * (1 + math.cos(math.pi * (step - rise) / (steps - rise)))

    return rate


@pytest.mark.parametrize(
    ("steps", "mean"),
    [(600, 0.85), (600, 0.98), (10_000, 0.9)],  # more than are looked at, too
)
def test_annealed_keeps_on_average_what_a_constant_theta_keeps(steps, mean):
    schedule = Annealed(mean, cosine(steps), steps)
    kept = [1 - schedule.theta(step) for step in range(steps)]
    assert sum(kept) / steps == pytest.approx(1 - mean, rel=0.02)
    top = steps // 10 - 1
    assert all(a <= b for a, b in itertools.pairwise(kept[: top + 1])), "it rises with the rate"
    assert all(a >= b for a, b in itertools.pairwise(kept[top:])), "and falls with it"
    assert kept[-1] == 2**-10, "where the rate is 0 something is still sent"
    assert schedule.theta(steps + 5) == schedule.theta(steps - 1)
    assert len(set(kept)) < 40, "few rungs: each new payload size is negotiated"


def test_annealed_keeps_by_a_power_of_the_rate():
    schedule = Annealed(0.9, lambda step: 1.0 if step < 50 else 0.25, steps=100, power=1)
    # 1 and a quarter of x, 0.1 on average: x is 0.16 and within half a rung of it.
    assert 1 - schedule.theta(0) == pytest.approx(0.16, rel=0.09)
    assert 1 - schedule.theta(50) == pytest.approx((1 - schedule.theta(0)) / 4)
    assert repr(Annealed(0.9, math.cos, steps=1, power=2)).startswith("Annealed(mean=0.9, rate=cos")
    # Nothing is kept twice: the highest rate may ask for more than all.
    assert Annealed(0.2, lambda step: 0.1 if step else 1.0, steps=100).theta(0) == 0


@pytest.mark.parametrize(("settings", "told"), [
    ({"rate": lambda step: 2.0}, r"Annealed: rate\(0\) = 2"),
    ({"rate": lambda step: 0.0}, "0 at every step"),
    ({"rate": lambda step: math.nan}, "rate"),
    ({"steps": 0}, "at least one step"),
    ({"power": 0}, "a power above 0"),
    ({"mean": 1.0}, "theta=1.0"),
])  # fmt: skip
def test_what_is_no_rate_or_no_theta_is_refused(settings, told):
    with pytest.raises(CompressError, match=told):
        Annealed(**{"mean": 0.9, "rate": lambda step: 1.0, "steps": 10} | settings)
    for bad in (-0.1, 1.0, math.nan):
        with pytest.raises(CompressError, match="theta"):
            Constant(bad)


def gradient_after(schedule, steps: int) -> float:
    """Mean |gradient|^2 over the last quarter of SGD without memory on f(x) = |S x|^2 / 2.

    Skewed noise of mean zero and standard deviation 1/2: its rare large values are kept, its many
    small ones of the other sign dropped, so that top-k of the values is biased. L = 1, learning
    rate 1/16 / (1 + t / 200).
    """
    rng = np.random.default_rng(1)
    n = 256
    curvature = np.linspace(0.2, 1.0, n)
    x = np.ones(n)
    tail = []
    for step in range(steps):
        gradient = curvature * x + 0.5 * (rng.exponential(size=n) - 1)
        codec = FFTCodec(theta=schedule.theta(step), transform="identity", values="fp16", block=256)
        sent = codec.decode(codec.encode(gradient.astype(np.float32)))
        x = x - 1 / 16 / (1 + step / 200) * sent
        if step >= steps * 3 // 4:
            tail.append(np.square(curvature * x).sum())
    return float(np.mean(tail))


def test_diminishing_theta_goes_below_the_floor_of_a_constant_one():
    steps = 4000
    constant = gradient_after(Constant(0.6), steps)
    falling = gradient_after(Diminishing(0.6, lambda step: 1 / (1 + step / 200)), steps)
    dense = gradient_after(Constant(0.0), steps)
    assert 4 * falling < constant, (falling, constant)
    # Theta has fallen to 0.13 at the end, where it loses next to nothing: near the dense run.
    assert falling < 1.5 * dense, (falling, dense)


def test_how_long_theta_stays_is_known_ahead():
    """For graphs, traced for one theta; a schedule may know no more steps than it runs."""
    listed = [0.5] * 7 + [0.75] * 5

    class Listed:
        def theta(self, step):
            return listed[step]

    for theta, step, expected in (
        (0.9, 0, 2**62), (Constant(0.9), 3, 2**62), (Warmup(8, Constant(0.9)), 8, 2**62),
        (Warmup(8, Constant(0.9)), 0, 3), (Listed(), 0, 7), (Listed(), 6, 1), (Listed(), 8, 4),
        (Diminishing(0.9, rate=lambda step: 1.0), 0, 2**12),
        (Annealed(0.9, lambda step: 1.0 if step < 5 else 0.1, steps=20), 0, 5),
    ):  # fmt: skip
        settings = Settings().changed(theta=theta)
        time = ThetaInTime(settings, 1)
        time.steps = step
        assert time.steady_steps() == expected, (theta, step)
        assert time.next_codec.theta == settings.schedule().theta(step)
        assert time.steps == step
