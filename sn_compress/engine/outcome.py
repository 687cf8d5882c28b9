"""What became of a gradient after its exchange."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Literal, Protocol

# "held" where the gradient still waits for a step, as when gradients accumulate.
Outcome = Literal["applied", "dropped", "held", "unknown"]


class Outcomes(Protocol):
    """What became of exchanged gradients: a `torch.outcomes.Outcomes`."""

    def sent(self, names: Iterable[str]) -> None:
        """Gradients of these tensors are exchanged now."""

    def of(self, name: str) -> Outcome:
        """What became of the last one of a tensor."""
