"""How far two steps are apart: what rounding makes is small, whatever its size, all else is not."""

import numpy as np
import pytest

from sn_memory.tensorflow.model import relative_error

UNIT = 2.0**-23
PLAIN = np.linspace(1.0, 2.0, 64, dtype=np.float32)


def error(off, rounding, *, largest=1.0):
    """The measure of a gradient that is `off`, where the last bit of weights does `rounding`."""
    expected = {"result 0": PLAIN * largest, "result 1": PLAIN * 100}
    got = {**expected, "result 0": expected["result 0"] + np.float32(off)}
    nudged = {**expected, "result 0": expected["result 0"] + np.float32(rounding)}
    return relative_error(expected, got, lambda: nudged, UNIT)


def test_bit_equal_is_no_error():
    assert error(0.0, 0.1) == 0


@pytest.mark.parametrize("off", [0.005, 0.1, 0.7])
def test_what_the_last_bit_of_the_weights_does_is_rounding(off):
    # A deep network on few values makes tenths of one bit: no plan is wrong for that.
    assert error(off, 0.1) <= 8 * UNIT


@pytest.mark.parametrize("off", [0.01, 0.5, 2.0])
def test_the_same_difference_is_an_error_where_rounding_does_not_make_it(off):
    assert error(off, 1e-6) == pytest.approx(off / 2, rel=1e-3)


def test_a_gradient_that_is_nothing_like_it_is_an_error_even_where_rounding_is_large():
    assert error(2.0, 0.1) > 0.5


def test_zero_but_for_rounding_is_held_against_the_others():
    assert error(1e-6, 1e-7, largest=1e-7) == pytest.approx(1e-6 / 200, rel=0.1)
