"""How large numbers may be: every sum that planner and checker form fits 64 bits, or is finite.

Sizes are added in 64-bit integers and seconds in doubles, and neither says when it has too many:
four storages of 2**63 - 1 bytes wrap around to 4 bytes less than nothing, twice 1e308 seconds are
infinite, and then every bound is true. So whatever could ever be added up in a plan is added up
once, exactly, when a graph is made (`graph/numbers.py`).
"""

from __future__ import annotations

import math
import operator
import sys
from numbers import Real
from typing import Any, Final

# What a plan has at once is at most twice the sum (an op may make all that is there a second time),
# which is below 2**63.
LARGEST: Final = 2**62
LARGEST_FLOAT: Final = sys.float_info.max
# A plan may run ops again. With this bound on one run of all, it takes 10**289 reruns to overflow.
LONGEST_S: Final = float(LARGEST)


def is_count(value: Any) -> bool:
    """Whether this is a whole number from 0 to the largest there may be."""
    if isinstance(value, bool):
        return False
    try:
        return 0 <= operator.index(value) <= LARGEST
    except TypeError:
        return False


def is_amount(value: Any) -> bool:
    """Whether this is a number from 0 to the largest finite one; NaN is none."""
    try:
        return isinstance(value, Real) and 0.0 <= float(value) < math.inf
    except OverflowError:
        return False
