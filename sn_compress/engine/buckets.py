"""Buckets: which gradients travel together, from the order of the parameters alone.

A collective costs its latency, so a net's gradients share a few. Which ones is laid out once, alike
on all ranks, never from the order in which gradients come: that differs between ranks.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

GROUP = 2**23  # elements from which on a bucket is full


class Buckets:
    """The layout, and what of the step under way has come.

    Parameters
    ----------
    tensors : (name, elements, device) in the order in which gradients mostly come
    full : elements from which on a bucket takes no more
    """

    def __init__(self, tensors: Iterable[tuple[str, int, Any]], *, full: int = GROUP) -> None:
        self.members: list[list[str]] = []
        self._number: dict[str, int] = {}
        held, there = full, None
        for name, elements, device in tensors:
            if held >= full or device != there:  # words of a bucket are made in one place
                self.members.append([])
                held, there = 0, device
            self.members[-1].append(name)
            self._number[name] = len(self.members) - 1
            held += elements
        self.begin()

    def begin(self) -> None:
        """A step begins: nothing has come."""
        self._missing = [len(names) for names in self.members]
        self._filed: dict[int, dict[str, Any]] = {}

    def come(self, name: str, filed: Any = None) -> int | None:
        """Note that a gradient has come; the number of its bucket, if that is complete now.

        filed : what is to be handed out with the bucket; None for what travels by itself
        """
        number = self._number[name]
        self._missing[number] -= 1
        if filed is not None:
            self._filed.setdefault(number, {})[name] = filed
        return number if not self._missing[number] and number in self._filed else None

    def take(self, number: int) -> list[tuple[str, Any]]:
        """What was filed in a bucket, in its order; it is handed out once."""
        filed = self._filed.pop(number)
        return [(name, filed[name]) for name in self.members[number] if name in filed]

    def rest(self) -> list[int]:
        """Numbers of the buckets in which something was filed that was not taken, in order."""
        return sorted(self._filed)
