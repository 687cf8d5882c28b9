"""Connected groups of evicted storages, with their summed seconds: union-find."""

from __future__ import annotations

from collections.abc import Iterable


class Groups:
    """Sets that can be joined, but not split: DTR's estimate of what a rebuild drags in.

    A storage that comes back leaves its group with its own seconds only; the rest stays joined,
    though it may hang together no more: an overestimate that union-find cannot undo.
    """

    def __init__(self, count: int) -> None:
        # An element per eviction: one that came back and leaves again starts anew.
        self._element: list[int | None] = [None] * count
        self._parent: list[int] = []
        self._total: list[float] = []
        self._own: list[float] = [0.0] * count

    def __contains__(self, storage: int) -> bool:
        return self._element[storage] is not None

    def add(self, storage: int, seconds: float, neighbours: Iterable[int]) -> None:
        """Evict a storage: it joins the groups beside it."""
        element = len(self._parent)
        self._element[storage] = element
        self._own[storage] = seconds
        self._parent.append(element)
        self._total.append(seconds)
        for root in self._roots(neighbours):
            if root != element:
                self._parent[root] = element
                self._total[element] += self._total[root]

    def remove(self, storage: int) -> None:
        """Note that a storage is back."""
        element = self._element[storage]
        assert element is not None
        root = self._root(element)
        self._total[root] = max(0.0, self._total[root] - self._own[storage])
        self._element[storage] = None

    def cost_of(self, storages: Iterable[int]) -> float:
        """Return the seconds of all groups that these storages are in, each once."""
        return sum(self._total[root] for root in self._roots(storages))

    def _roots(self, storages: Iterable[int]) -> set[int]:
        elements = (self._element[storage] for storage in storages)
        return {self._root(element) for element in elements if element is not None}

    def _root(self, element: int) -> int:
        while self._parent[element] != element:
            self._parent[element] = self._parent[self._parent[element]]
            element = self._parent[element]
        return element
