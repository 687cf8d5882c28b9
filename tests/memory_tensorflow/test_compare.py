"""How far two steps are apart: what rounding makes is small, whatever its size, all else is not."""

import numpy as np
import pytest

from sn_memory.tensorflow.model import relative_error

UNIT = 2.0**-23
PLAIN = np.linspace(1.0, 2.0, 64, dtype=np.float32)


@pytest.mark.parametrize(
    ("off", "rounding", "largest", "least", "most"),
    [
        (0.0, 0.1, 1.0, 0.0, 0.0),  # bit-equal is no error
        # A deep network on few values makes tenths of one bit: no plan is wrong for that.
        *((off, 0.1, 1.0, 0.0, 8 * UNIT) for off in (0.005, 0.1, 0.7)),
        # The same difference is an error where rounding does not make it.
        *((off, 1e-6, 1.0, 0.4995 * off, 0.5005 * off) for off in (0.01, 0.5, 2.0)),
        (2.0, 0.1, 1.0, 0.5, 9.0),  # nothing like it, even where rounding is large
        # Zero but for rounding is held against the others.
        (1e-6, 1e-7, 1e-7, 0.9e-6 / 200, 1.1e-6 / 200),
    ],
)
def test_the_error_of_a_gradient(off, rounding, largest, least, most):
    """Of one that is `off`, where the last bit of weights does `rounding`."""
    expected = {"result 0": PLAIN * largest, "result 1": PLAIN * 100}
    got = {**expected, "result 0": expected["result 0"] + np.float32(off)}
    nudged = {**expected, "result 0": expected["result 0"] + np.float32(rounding)}
    assert least <= relative_error(expected, got, lambda: nudged, UNIT) <= most
