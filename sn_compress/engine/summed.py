"""The rounds of gradients whose words are summed, and the memories that sit a step out."""

from __future__ import annotations

from collections.abc import Sequence

from ..devices.arrays import INT32, Array, like_of, namespace, on_host, quickest
from ..report import Traffic
from ..sums.session import SharedExchange
from .carry import Carry, Gradient, Rounds, dtype_name
from .payloads import is_used


class Sums:
    """Those of one optimizer.

    A framework drops the mean of a parameter that no rank has used, so nothing may be sent for it.
    Elsewhere the memory of a rank without a gradient only waits.

    find_unused, drops_unused, pauses : see Engine
    """

    def __init__(
        self,
        shared: SharedExchange,
        traffic: Traffic,
        *,
        find_unused: bool,
        drops_unused: bool,
        pauses: bool,
    ) -> None:
        self._shared, self._traffic, self._pauses = shared, traffic, pauses
        self._find_unused, self._drops_unused = find_unused, drops_unused
        self._held: dict[str, Array] = {}  # in this step

    def rounds(self, gradients: Sequence[Gradient], *, ranks: int, rank: int) -> Rounds:
        """Average gradients in their place; see Engine.rounds."""
        names = [str(gradient.name) for gradient in gradients]
        xp = namespace(gradients[0].values)
        # The same memory if they are float32.
        vectors = [quickest(xp.astype(each.values, xp.float32, copy=False)) for each in gradients]
        for name, vector in zip(names, vectors, strict=True):
            self._hold(name, vector)
        late = not on_host(vectors[0])
        nbytes, total = 0, None
        try:
            rounds = self._shared.exchange_all(names, vectors, ranks=ranks, rank=rank, outs=vectors)
            while True:
                try:
                    words = next(rounds) if total is None else rounds.send(total)
                except StopIteration:
                    break
                if total is None and late:
                    # The last step has long ended; to ask at its end would have been to wait.
                    for name in names:
                        self._traffic.lost(*self._shared.lost(name))
                nbytes += words.nbytes
                (came,) = yield [Carry("sum", like_of(words, gradients[0].values))]
                total = quickest(came, INT32)
            if self._pauses:
                yield []
        finally:
            for name in names:
                self._put_back(name)
        for gradient, vector in zip(gradients, vectors, strict=True):
            if dtype_name(gradient.values) != "float32":
                gradient.values[...] = xp.astype(
                    like_of(vector, gradient.values), gradient.values.dtype
                )
        for name, gradient in zip(names, gradients, strict=True):
            # The words of all are counted with the first.
            energy, error = (0.0, 0.0) if late else self._shared.lost(name)
            way = self._shared.way(name)
            self._traffic.shared(name, gradient.elements, nbytes, energy, error, way=way)
            nbytes = 0

    def _hold(self, name: str, vector: Array) -> None:
        """Keep the memory of what this rank has not used from travelling."""
        summable = self._shared.tensors[name].summable
        looks = self._drops_unused and (on_host(vector) or self._find_unused)
        if summable is None or not looks:
            return
        if not is_used(vector):
            self._held[name] = summable.exclude(namespace(vector).zeros_like(vector))

    def _put_back(self, name: str) -> None:
        summable = self._shared.tensors[name].summable
        if name in self._held and summable is not None:
            summable.include(self._held.pop(name))
