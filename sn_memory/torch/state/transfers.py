"""Instructions of a plan that fetch, update and store parameters and their state."""

from __future__ import annotations

from typing import Any

from ..eager.instructions import Memory, Take
from ..trace.record import View
from .owned import Owned


class FetchOf:
    """The instruction that starts to bring a parameter."""

    def __init__(self, owned: Owned, storage: int, form: View) -> None:
        self.owned, self.storage, self.form = owned, storage, form

    def __call__(self, memory: Memory) -> None:
        memory.held[self.storage], wait = self.owned.fetch(self.form)
        memory.underway[self.storage] = wait


class FetchStateOf:
    """The instruction that starts to bring the state of a parameter."""

    def __init__(self, owned: Owned, storage: int) -> None:
        self.owned, self.storage = owned, storage

    def __call__(self, memory: Memory) -> None:
        held: list[Any] = memory.held
        held[self.storage], memory.underway[self.storage] = self.owned.fetch_state()


class UpdateOf:
    """The instruction that updates a parameter, whose gradient is complete.

    Parameters
    ----------
    owned
        Whose.
    storage, state
        Numbers of what is brought; None for what is on the device anyway.
    gradient
        Takes its gradient.
    place
        Of that among the gradients; there is none, and no update, where the loss is of others'
        outputs.
    """

    def __init__(
        self, owned: Owned, storage: int | None, state: int | None, gradient: Take, place: int
    ) -> None:
        self.owned, self.storage, self.state, self.gradient = owned, storage, state, gradient
        self.place = place

    def __call__(self, memory: Memory) -> None:
        held: list[Any] = memory.held
        gradient = self.gradient(held)
        if self.owned.is_dry or self.place in memory.left_out:
            return
        self.owned.used_up()
        if self.state is None and self.storage is None:
            self.owned.update_here(gradient)
            return
        here = self.owned.parameter if self.storage is None else held[self.storage]
        before = {} if self.state is None else held[self.state]
        after = self.owned.update(here, gradient, before)
        if self.state is not None:
            held[self.state] = after
        else:
            self.owned._small = after


class StoreOf:
    """The instruction that starts to write a parameter and its state back."""

    def __init__(self, owned: Owned, storage: int | None, state: int | None, place: int) -> None:
        self.owned, self.storage, self.state, self.place = owned, storage, state, place

    def __call__(self, memory: Memory) -> None:
        if self.owned.is_dry or self.place in memory.left_out:
            return
        held: list[Any] = memory.held
        here = None if self.storage is None else held[self.storage]
        after = self.owned._small if self.state is None else held[self.state]
        wait = self.owned.store(here, after)
        for storage in (self.storage, self.state):
            if storage is not None:
                memory.underway[storage] = wait


class StoreGradientOf:
    """The instruction that starts to write the gradient of a parameter to the host."""

    def __init__(self, owned: Owned, storage: int, gradient: Take, place: int) -> None:
        self.owned, self.storage, self.gradient, self.place = owned, storage, gradient, place

    def __call__(self, memory: Memory) -> None:
        if not self.owned.is_dry and self.place not in memory.left_out:
            memory.underway[self.storage] = self.owned.keep_gradient(self.gradient(memory.held))
