"""What one of several cards holds when a step is sharded as FSDP2 does it (`fully_shard`).

Parameters, gradients and the optimizer's state lie on all cards in equal parts. The blocks of a
model are units of their own, the rest is the root's, which stays gathered from the first use on;
while a block runs, the next one is gathered too. A gradient is whole until it is reduced.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Units:
    """Bytes of parameters by what gathers them: the largest block, and all that is in none."""

    block_bytes: int
    root_bytes: int


@dataclass(frozen=True)
class Held:
    """Bytes on one card.

    Parameters
    ----------
    parameters_bytes, gradients_bytes, optimizer_bytes
        Its part of each.
    gathered_bytes
        Whole parameters of units that are gathered at once, and whole gradients of one.
    rest_bytes
        Everything else at its highest: buffers, input, activations, workspaces.
    """

    parameters_bytes: int
    gradients_bytes: int
    optimizer_bytes: int
    gathered_bytes: int
    rest_bytes: int

    @property
    def state_bytes(self) -> int:
        """The parts of parameters, gradients and optimizer."""
        return self.parameters_bytes + self.gradients_bytes + self.optimizer_bytes

    @property
    def peak_bytes(self) -> int:
        """All of them: no less than any moment of the step needs."""
        return self.state_bytes + self.gathered_bytes + self.rest_bytes


def on_cards(
    cards: int,
    *,
    parameters_bytes: int,
    gradients_bytes: int,
    optimizer_bytes: int,
    rest_bytes: int,
    units: Units,
) -> Held:
    """Return what one of so many cards holds; on a single one nothing is gathered."""
    if cards < 1:
        raise ValueError(f"got {cards} cards, expected 1 or more.")

    def part(size: int) -> int:
        return -(-size // cards)

    gathered = 2 * units.block_bytes + units.root_bytes + max(units.block_bytes, units.root_bytes)
    return Held(
        part(parameters_bytes),
        part(gradients_bytes),
        part(optimizer_bytes),
        gathered if cards > 1 else 0,
        rest_bytes,
    )
