"""What tensors that travel plain from now on have not sent yet.

A tuner that gives compression up leaves memories behind. They go along with the next plain gradient
of their tensor, on each rank with its own: where it has none, as of a parameter that was not used,
what goes along might be dropped with it, and waits.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, Protocol

import numpy as np

from ..base.errors import CompressError
from ..base.saved import floats, reading
from ..codecs.base import Floats


class Exchange(Protocol):
    """Who keeps the memories of tensors that are compressed."""

    def remembers(self, name: str) -> bool:
        """Whether there is a memory of `name`."""

    def release(self, name: str) -> Floats:
        """What was not sent, [n], which the exchange forgets."""


class Owed:
    """By name of the tensor; each rank's own."""

    def __init__(self) -> None:
        self._left: dict[str, Floats] = {}
        self._before: dict[str, Floats] = {}

    def take(self, name: str, exchange: Exchange) -> None:
        """Take over what the exchange remembers of a tensor; called by all ranks in one step."""
        if exchange.remembers(name):
            left = exchange.release(name)
            self._left[name] = self._left[name] + left if name in self._left else left

    def __contains__(self, name: str) -> bool:
        return name in self._left

    def left(self, name: str) -> Floats:
        """What is owed of a tensor, [n]."""
        return self._left[name]

    def pay(self, name: str, elements: int) -> Floats:
        """What goes along with a gradient of so many elements, [n]; it is owed no more."""
        left = self._left[name]
        if left.size != elements:
            raise CompressError(
                f"{name!r} has {elements} elements; it was left with {left.size} to send. Names "
                "must be unique and shapes constant."
            )
        del self._left[name]
        return left

    def rescale(self, factor: float) -> None:
        """As when a loss scaler has changed its scale."""
        self._left = {name: left * np.float32(factor) for name, left in self._left.items()}

    def undo(self) -> None:
        """Be as before the last step, which a loss scaler skipped."""
        self._left = dict(self._before)

    def settle(self) -> None:
        """A step begins: `undo` takes back what comes after."""
        self._before = dict(self._left)

    def state_dict(self) -> dict[str, Any]:
        """A copy, by name."""
        return {name: left.copy() for name, left in self._left.items()}

    @classmethod
    def mean(cls, states: Sequence[Mapping[str, Any]]) -> Owed:
        """From one state, or the mean of all ranks', in which a name that is missing is zero."""
        found = cls()
        with reading("what is owed"):
            for state in states:
                for name, saved in state.items():
                    part = floats(saved, "owed", (np.size(saved),)) / np.float32(len(states))
                    found._left[name] = found._left[name] + part if name in found else part
        found.settle()
        return found

    def change(self, name: str, function: Any) -> None:
        """Put function(vector), [n] float32, in the place of what is owed of a tensor."""
        if name in self._left:
            self._left[name] = function(self._left[name])
