"""The boundary of the loss: the op between the planned forward pass and the planned backward pass.

A plan of a model does not know the loss: the user's code makes it of the outputs, and hands their
gradients in. In the graph that is one op, which stays where it is and takes no time of the plan's.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Final

from ..graph.records import Op

LOSS: Final = "loss"


def loss_op(outputs: Iterable[str], gradients: Iterable[str]) -> Op:
    """Return the op that reads the outputs and makes their gradients, by names of storages."""
    return Op(
        LOSS,
        tuple(dict.fromkeys(outputs)),
        tuple(dict.fromkeys(gradients)),
        kind=LOSS,
        phase="backward",
        seconds=0.0,
        effect=True,
        fixed=True,
    )
