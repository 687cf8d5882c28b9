"""The shared exchange over steps: another loss scale, half precision; all ranks in one place."""

import numpy as np
import pytest
import sessions

from sn_compress.errors import CompressError

RANKS = 2
FACTORS, ROWS, WHOLE, LONG = (64, 48), (400, 8), (2000,), (70000,)  # how they travel
LARGER = 2.0**10  # a power of two: everything that follows is exact


def step(exchanges, gradients, **how):
    """One step of one tensor on all ranks; returns the mean that all get."""
    flat = [own.ravel() for own in gradients]
    return sessions.step(exchanges, "w", gradients[0].shape, flat, **how)[0]


def ranks(**settings):
    return sessions.sessions_of(RANKS, ratio=8, warmup=2, **settings)


def gradients_of(shape, steps, seed=0):
    rng = np.random.default_rng(seed)
    found = rng.standard_normal((steps, RANKS, *shape)).astype(np.float32)
    if shape == ROWS:  # few rows that are not zero: sent by rows
        found[:, :, 9:] = 0
    return found


@pytest.mark.parametrize(("shape", "at", "factor"), [
    (FACTORS, 0, LARGER), (FACTORS, 2, 1 / LARGER), (FACTORS, 4, LARGER),
    (ROWS, 1, 1 / LARGER), (ROWS, 2, LARGER), (ROWS, 6, 1 / LARGER),
    (WHOLE, 0, 1 / LARGER), (WHOLE, 1, LARGER), (WHOLE, 4, 1 / LARGER),
])  # fmt: skip
def test_a_new_loss_scale_changes_nothing_but_the_scale(shape, at, factor):
    """Rescaled before step `at`, all that follows is the run without, times the factor: to the bit
    where only digits and sums are scaled, to rounding where LAPACK decomposes.
    """
    plain, scaled = ranks(), ranks()
    owed = {"w": gradients_of(shape, 1, seed=1)[0, 0]}
    for exchange in (*plain, *scaled):
        exchange.restart(owed)
    for number, gradients in enumerate(gradients_of(shape, 8)):
        if number == at:
            for exchange in scaled:
                exchange.rescale(factor)
        times = np.float32(factor if number >= at else 1)
        expected = step(plain, gradients) * times
        found = step(scaled, gradients * times)
        # 2**-20: float32 rounds by 2**-24, a decomposition of 64 columns by some times that.
        assert np.abs(found - expected).max() <= 2.0**-20 * np.abs(expected).max(), number


def test_what_half_precision_rounds_away_on_a_dense_step_is_sent_later():
    """Nothing is lost: what came in went out, or is still remembered on its rank."""
    exchanges, due, paid = ranks(), 0.0, 0.0
    for number, gradients in enumerate(gradients_of((64, 48), 6)):
        gradients = gradients * np.float32(1 + 2.0**-12)  # no float16
        due = due + gradients.astype(np.float64).mean(axis=0).ravel()
        paid = paid + step(exchanges, gradients, wire=np.float16).astype(np.float64)
        kept = np.mean([each.residual("w").astype(np.float64) for each in exchanges], axis=0)
        # Six steps round sums of float32, 2**-24 each, and the mean of the ranks once.
        assert np.abs(paid + kept - due).max() <= 20 * 2.0**-24 * np.abs(due).max(), number
        if number < 2:
            assert np.abs(kept).max() > 2.0**-14, "half precision was to round something away"


def test_what_half_precision_cannot_hold_is_not_remembered_as_nonsense():
    exchanges = ranks()
    gradients = gradients_of((64, 48), 1)[0]
    gradients[0, 0, 0] = 1e30
    with np.errstate(over="ignore"):
        step(exchanges, gradients, wire=np.float16)
    assert np.isfinite(exchanges[0].residual("w")).all()


@pytest.mark.parametrize(("shape", "power"), [
    (FACTORS, -145), (FACTORS, -60), (FACTORS, 45), (FACTORS, 125),
    (ROWS, -145), (ROWS, -126), (ROWS, 64), (ROWS, 125),
    (LONG, -145), (LONG, -100), (LONG, 100), (LONG, 125),
])  # fmt: skip
def test_gradients_may_lie_anywhere_in_the_range_of_float32(shape, power):
    """Times a power of two, the run is that without, times the power: to the bit where only digits
    and sums are scaled, to rounding where LAPACK decomposes.
    """
    plain, scaled = ranks(), ranks()
    for number, gradients in enumerate(gradients_of(shape, 8)):
        # Of few bits: scaled by 2**-145, none is below the least float32.
        gradients = np.round(np.clip(gradients, -4, 3.75))
        with np.errstate(over="raise"):
            found = step(scaled, np.ldexp(gradients, power))
        # As float32 holds it: a dense mean of two whole numbers, too, whose halves may be lost.
        expected = np.ldexp(step(plain, gradients), power)
        assert np.isfinite(found).all(), number
        # 2**-20: see above. A mean below the normal range is rounded to the least number.
        room = 2.0**-20 * np.abs(expected).max() + 2.0**-149
        assert np.abs(found - expected).max() <= room, number
        if number == 4:
            again = ranks()[0]
            again.load_state_dict(scaled[0].state_dict())
            assert np.array_equal(again.residual("w"), scaled[0].residual("w"))
            scaled[0] = again


def test_an_exponent_that_is_none_of_float32_is_refused():
    exchanges = ranks()
    for gradients in gradients_of((64, 48), 4):
        step(exchanges, (gradients * 2.0**100).astype(np.float32))
    saved = exchanges[0].state_dict()
    assert saved["tensors"]["w"]["exponent"] in (101, 102, 103)
    for wrong in (1000, 2.5, "1", None, True):
        saved["tensors"]["w"]["exponent"] = wrong
        with pytest.raises(CompressError, match="exponent"):
            exchanges[1].load_state_dict(saved)
