"""Which gradients an output of a model gives rise to: those of the others are None.

Where a loss takes some of the outputs only, the tape returns None for the variables of the rest,
and an optimizer passes them over. Zeros are not the same: moments go on, weights decay.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import tensorflow as tf

from .capture import Captured


def left_out(captured: Captured, incoming: Sequence[Any]) -> frozenset[int]:
    """Return the places of gradients that come from outputs alone that have none.

    incoming : the gradients of the outputs, in the order of `captured.stand_ins`
    """
    here = [it is not None for it in those_there(incoming)]
    if all(here):
        return frozenset()
    found = dict(zip(captured.stand_ins, here, strict=True))
    for node in captured.nodes:
        given = [found[it] for it in node.inputs if it in found]
        if given:
            found.update(dict.fromkeys(node.outputs, any(given)))
    return frozenset(
        place for place, value in enumerate(captured.gradients) if not found.get(value, True)
    )


def those_there(incoming: Sequence[Any]) -> list[Any]:
    """Return what a custom gradient is given, with None for zeros that the tape made up.

    It gives zeros for results that have no gradient. What a loss makes is no constant, and zeros
    like a result itself are the tape's. Where nothing would be left, they are the caller's.
    """
    there = [None if it is None or _is_made_up(it) else it for it in incoming]
    return there if any(it is not None for it in there) else list(incoming)


def _is_made_up(gradient: Any) -> bool:
    if gradient.op.type == "ZerosLike":
        return gradient.op.inputs[0].op.type == "IdentityN"
    return gradient.op.type == "Const" and not tf.get_static_value(gradient).any()
