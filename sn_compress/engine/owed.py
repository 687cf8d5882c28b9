"""What tensors that travel plain from now on have not sent yet.

A tuner that gives compression up leaves memories behind. They go along with the next plain gradient
of their tensor, on each rank with its own: where it has none, as of a parameter that was not used,
what goes along might be dropped with it, and waits.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
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
        self._committed: dict[str, Floats | None] = {}  # of what changed since

    def take(self, name: str, exchange: Exchange) -> None:
        """Take over what the exchange remembers of a tensor; called by all ranks in one step."""
        if exchange.remembers(name):
            self._committed.setdefault(name, self._left.get(name))
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
        self._committed.setdefault(name, left)
        del self._left[name]
        return left

    def rescale(self, factor: float) -> None:
        """As when a loss scaler has changed its scale."""
        self._left = {name: left * np.float32(factor) for name, left in self._left.items()}

    def commit(self, names: Iterable[str]) -> None:
        """Keep what was done of these tensors so far: `abort` takes back what comes after."""
        for name in names:
            self._committed.pop(name, None)

    def abort(self, names: Iterable[str]) -> None:
        """Be as after the last commit of these tensors."""
        for name in names:
            if name in self._committed:
                self._left.pop(name, None)
                if (left := self._committed.pop(name)) is not None:
                    self._left[name] = left

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
        return found

    def change(self, name: str, function: Any) -> None:
        """Put function(vector), [n] float32, in the place of what is owed of a tensor."""
        if name in self._left:
            self._left[name] = function(self._left[name])
