"""Dense: whole tensors in 16-bit digits; rounding errors are sent with the next step."""

from __future__ import annotations

from collections.abc import Sequence

from ...arrays import device_of, namespace, put_all
from ...ops.fixed_point import FixedPointColumns, numbers, shifted
from .base import Array, Method, Outcome, Send, State, Step, StepOptions, Summed


class Dense(Method):
    """Sends all numbers of each tensor; a tensor has a single scale.

    Parameters
    ----------
    shapes : (rows, columns) of each tensor
    """

    rounds = 1
    settings = ("shapes",)

    def __init__(self, shapes: Sequence[tuple[int, int]]) -> None:
        self.shapes = tuple(shapes)
        self._columns = FixedPointColumns(
            [(1, rows * columns) for rows, columns in shapes], fine=True
        )

    def lengths(self) -> dict[str, Sequence[int]]:
        return {"scales": [1] * len(self.shapes)}

    def words(self, ranks: int) -> list[int]:
        return [self._columns.words(ranks)]

    def new_state(self, like: Array) -> State:
        xp = namespace(like)
        return {"scales": xp.zeros(self._columns.count, dtype=xp.int32, device=device_of(like))}

    def begin(self, state: State, means: Sequence[Array]) -> State:
        known, _ = numbers(self._columns.join(means))
        return {"scales": self._columns.expected(self._columns.peaks(known), state["scales"])}

    def rescale(self, state: State, quarters: int) -> State:
        return {"scales": shifted(state["scales"], quarters)}

    def step(
        self,
        state: State,
        matrices: Sequence[Array],
        options: StepOptions,
        outs: Sequence[Array] | None = None,
    ) -> Step:
        xp = namespace(matrices[0])
        # All tensors as one vector, so that many small ones need only a few calls.
        flat, finite = numbers(self._columns.join(matrices))
        words, sent = self._columns.pack(flat, state["scales"], options.ranks)
        received: Summed = yield Send(words, finite)
        sums, unit, scales = self._columns.unpack(received.words, state["scales"], options.ranks)
        mean = self._columns.split(xp.astype(sums, xp.float32) * (unit * received.poison))
        unsent = self._columns.split(flat - sent)
        means = [xp.reshape(part, shape) for part, shape in zip(mean, self.shapes, strict=True)]
        if outs is not None:
            put_all(outs, means)
            means = list(outs)
        residuals = [xp.reshape(x, shape) for x, shape in zip(unsent, self.shapes, strict=True)]
        return Outcome(residuals, means, {"scales": scales}, xp.sum(sent * (2 * flat - sent)))
