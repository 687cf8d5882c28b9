"""Which gradients an output of a model gives rise to, and which buffers it comes from.

Where a loss takes some of the outputs only, autograd leaves the parameters of the rest without a
gradient, and an optimizer passes them over. Zeros are not the same: moments go on, weights decay.
"""

from __future__ import annotations

from collections.abc import Sequence

from ..trace.record import Captured, View
from ..trace.to_graph import statistics


def reached(captured: Captured) -> tuple[int, ...]:
    """Return, per gradient, the output gradients it is computed from: their numbers, as bits.

    Numbers are places in `captured.output_gradients`; 0 where it is computed from none.
    """
    of: dict[int, int] = {}
    for number, view in enumerate(captured.output_gradients):
        of[view.storage] = of.get(view.storage, 0) | 1 << number
    for call in captured.recording.calls[captured.boundary :]:
        found = 0
        for storage in call.reads:
            found |= of.get(storage, 0)
        for storage in call.makes:
            of[storage] = found
        for storage in call.writes:
            of[storage] = of.get(storage, 0) | found
    return tuple(0 if view is None else of.get(view.storage, 0) for _, view in captured.gradients)


def left_out(reached: Sequence[int], arrived: Sequence[object]) -> frozenset[int]:
    """Return the places of gradients that come from outputs alone that have none.

    arrived : the gradients of the outputs, None where there is none
    """
    if all(it is not None for it in arrived):
        return frozenset()
    here = sum(1 << number for number, it in enumerate(arrived) if it is not None)
    return frozenset(place for place, bits in enumerate(reached) if bits and not bits & here)


def overwritten(captured: Captured) -> list[str]:
    """Return the names of parameters and buffers that a forward pass reads, and writes over.

    Run once more, it would compute something else. Statistics of a batch norm that trains, and
    counts, are read for themselves alone.
    """
    calls = captured.recording.calls[: captured.boundary]
    written = {storage for call in calls for storage in call.writes}
    named = (*captured.parameters, *captured.buffers)
    of = {view.storage: {name} for name, view in named if view.storage in written}
    for call in calls:
        own = statistics(call)
        reads = [arg for place, arg in enumerate(call.flat) if place not in own]
        read = {it.storage for it in reads if isinstance(it, View)}
        names = set[str]().union(*(of.get(storage, ()) for storage in read))
        for storage in (*call.makes, *call.writes):
            of[storage] = of.get(storage, set()) | names
    results = {view.storage for view in captured.outputs if isinstance(view, View)}
    return sorted(set[str]().union(*(of.get(storage, ()) for storage in results)))
