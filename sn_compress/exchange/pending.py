"""Tensors in mid-exchange: every round of all of them is begun before one is waited for.

Ranks finish their tensors in different orders. One that waited for the second round of one
tensor, and had not begun that of another for which a second rank waits, would wait for ever.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from ..contract import Floats
from .digits import Words
from .shared import Rounds

# (name of the all-reduce, words) -> handle
Start = Callable[[str, Words], Any]
Wait = Callable[[Any], Words]


@dataclass
class _Underway:
    rounds: Rounds
    start: Start
    wait: Wait
    handle: Any
    round: int = 0
    mean: Floats | None = None


class Pending:
    """The tensors of one optimizer that are on their way, by name."""

    def __init__(self) -> None:
        self._underway: dict[str, _Underway] = {}

    def begin(self, name: str, rounds: Rounds, start: Start, wait: Wait) -> int:
        """Start the first round; its bytes."""
        words = next(rounds)
        self._underway[name] = _Underway(rounds, start, wait, start(f"sn0.{name}", words))
        return words.nbytes

    def finish(self, name: str) -> Floats:
        """The mean of a tensor, [n]; takes all others as far as it has to."""
        while any(other.mean is None for other in self._underway.values()):
            for each in sorted(self._underway):
                self._advance(each)
        mean = self._underway.pop(name).mean
        assert mean is not None
        return mean

    def _advance(self, name: str) -> None:
        tensor = self._underway[name]
        if tensor.mean is not None:
            return
        total = tensor.wait(tensor.handle)
        try:
            words = tensor.rounds.send(total)
        except StopIteration as end:
            tensor.mean = end.value
        else:
            tensor.round += 1
            tensor.handle = tensor.start(f"sn{tensor.round}.{name}", words)
