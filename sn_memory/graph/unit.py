"""What a planner of state decides about: a parameter, and what belongs to it."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Unit:
    """A parameter and what belongs to it: what is decided about as a whole.

    Parameters
    ----------
    parameter
        The name of its storage, a resident one.
    gradient
        The name of the storage of its gradient; None for one that is not trained.
    state_bytes
        What the optimizer keeps for it.
    scratch_bytes
        What its update holds beside parameter, gradient and state.
    update_s
        Seconds of the update by the device.
    host_update_s
        Seconds of the update where it is not the device's: `host`, or `in place`.
    counts_bytes
        What the optimizer keeps for it that never moves, as its count of steps.
    movable
        Whether it may lie on the host.
    used_up
        Whether the gradient may go once it has been used; one that the caller holds may not.
    """

    parameter: str
    gradient: str | None
    state_bytes: int = 0
    scratch_bytes: int = 0
    update_s: float = 0.0
    movable: bool = True
    used_up: bool = True
    counts_bytes: int = 0
    host_update_s: float = 0.0


def scratch_bytes(unit: Unit, by: str) -> int:
    """Return what the device holds for an update beside what it works on.

    In place it is where the state is made in the first step, before it goes to where it rests.
    """
    if by == "host":
        return 0
    return unit.scratch_bytes + (unit.state_bytes if by == "in place" else 0)


def update_seconds(unit: Unit, by: str) -> float:
    """Return the seconds of an update by the device, by the host, or in place."""
    return unit.update_s if by == "device" else unit.host_update_s
