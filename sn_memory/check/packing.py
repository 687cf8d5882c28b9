"""The judge of packings: one sweep over time. Shares nothing with the packers, by rule and by test.

It keeps the buffers that are alive in order of their offsets. A new one may touch only its two
neighbours there, for those alive do not overlap each other.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections.abc import Sequence

from ..base.errors import PackError


def check_packing(
    buffers: Sequence[Sequence[int]], offsets: Sequence[int], capacity: int | None = None
) -> int:
    """Return the height of a packing.

    Parameters
    ----------
    buffers
        Rows of (lower, upper, size) or (lower, upper, size, alignment).
    offsets
        One for each of them.
    capacity
        Bytes that no buffer may end above.

    Raises
    ------
    PackError
        Naming the first violation: a missing offset, one below zero or off its alignment, an end
        above the capacity, or the two buffers that overlap.
    """
    if len(offsets) != len(buffers):
        raise PackError(f"got {len(offsets)} offsets, expected {len(buffers)}: one per buffer.")
    height = 0
    events = []
    for at, (buffer, offset) in enumerate(zip(buffers, offsets, strict=True)):
        lower, upper, size = buffer[:3]
        alignment = buffer[3] if len(buffer) > 3 else 1
        if lower >= upper or size < 0 or alignment < 1:
            raise PackError(
                f"buffer {at}: got {tuple(buffer)}, expected lower < upper, a size of 0 or more "
                "and an alignment of 1 or more."
            )
        if offset < 0 or offset % alignment:
            raise PackError(
                f"buffer {at}: got offset {offset}, expected a multiple of {alignment}, 0 or more."
            )
        if capacity is not None and offset + size > capacity:
            raise PackError(
                f"buffer {at}: ends at {offset + size}, above the capacity of {capacity}."
            )
        height = max(height, offset + size)
        if size:
            # Lifetimes are half-open: at one moment, ends come before starts.
            events += [(lower, 1, at), (upper, 0, at)]
    alive: list[tuple[int, int, int]] = []
    for moment, starts, at in sorted(events):
        span = (offsets[at], offsets[at] + buffers[at][2], at)
        place = bisect_left(alive, span)
        if not starts:
            del alive[place]
            continue
        for other in alive[max(place - 1, 0) : place + 1]:
            if other[0] < span[1] and span[0] < other[1]:
                raise PackError(
                    f"buffers {other[2]} and {at} are both alive at {moment} and overlap: "
                    f"bytes [{other[0]}, {other[1]}) and [{span[0]}, {span[1]})."
                )
        insort(alive, span)
    return height
