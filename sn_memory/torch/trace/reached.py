"""Which gradients an output of a model gives rise to: those of the others it leaves at None.

Where a loss takes some of the outputs only, autograd leaves the parameters of the rest without a
gradient, and an optimizer passes them over. Zeros are not the same: moments go on, weights decay.
"""

from __future__ import annotations

from .captured import Captured


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
