"""How large numbers may be: every sum that planner and checker form fits 64 bits, or is finite.

Sizes are added in 64-bit integers and seconds in doubles, and neither says when it has too many:
four storages of 2**63 - 1 bytes wrap around to 4 bytes less than nothing, twice 1e308 seconds are
infinite, and then every bound is true. So whatever could ever be added up in a plan is added up
here once, exactly, when a graph is made.
"""

from __future__ import annotations

import math
import operator
import sys
from collections.abc import Iterable
from numbers import Real
from typing import TYPE_CHECKING, Any, Final

from .errors import GraphError

if TYPE_CHECKING:
    from .graph import Graph

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


def check_sums(
    graph: Graph, sizes: Iterable[int], spaces: Iterable[int], seconds: Iterable[float]
) -> None:
    """Raise GraphError for sizes or seconds that are too large together.

    sizes, spaces : of storages and workspaces, as the allocator rounds them
    seconds : of the slowest way of each op
    """
    small = [storage.compressed for storage in graph.storages if storage.compressed is not None]
    held = sum(sizes)
    total = held + sum(spaces) + sum(form.bytes for form in small)
    if total >= LARGEST:
        raise GraphError(
            f"graph: all storages, compressed forms and workspaces together have {total} bytes, "
            "expected less than 2**62. Look for sizes in a wrong unit."
        )
    device, count = graph.device, len(graph.storages)
    time = sum(seconds) + sum(form.compress_s + (form.decompress_s or 0.0) for form in small)
    time += 2 * count * device.transfer_latency_s
    for speed in (device.to_host_bytes_per_s, device.to_device_bytes_per_s):
        time += held / speed if speed is not None else 0.0
    if not time <= LONGEST_S:
        raise GraphError(
            f"graph: all ops and transfers together take {time!r} s, expected 2**62 at most. Look "
            "for seconds in a wrong unit, or for speeds near 0."
        )
