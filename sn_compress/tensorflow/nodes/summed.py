"""Buckets of the sized form whose words are summed: low rank, rows and whole tensors.

The generator of `sums/step.py` is driven while TensorFlow traces, with Horovod's all-reduce between
two of its words.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from typing import Any

import numpy as np
import tensorflow as tf

from ...devices.arrays import to_host
from ...ops.words.scales import times_power
from ...report import Ran
from ...sums.bucket import HEAD
from ...sums.session import SharedExchange
from ...sums.step import bucket_of, step
from ...sums.summable import Summable
from . import namespace as _namespace  # noqa: F401 - it makes tensors known to the core
from .outcomes import restored
from .sized import Collectives
from .variables import variable

_DAMAGED = (
    "PayloadError: the summed words do not have the sum of their checksums: they were damaged on "
    "the way, or ranks run with different settings. If it happens again, suspect memory or the "
    "network."
)


class SummedBucket:
    """What ranks share of tensors that travel together, and what this rank has not sent of them."""

    def __init__(
        self, exchange: SharedExchange, names: Sequence[str], *, undoable: bool = False
    ) -> None:
        self._of, self.names = exchange, tuple(names)
        summables = self.summables()
        self.bucket, self.order = bucket_of(tuple(one.part for one in summables))
        own = [summables[at] for at in self.order]
        self._exponents = [exchange.tensors[name].exponent for name in names]
        state = self.bucket.join([_hosted(one.state) for one in own])
        self.state = {name: variable(it) for name, it in state.items()}
        self.memories = [variable(to_host(one.memory)) for one in own]
        for one in own:  # not twice in memory; `read` brings it back
            one.replace(np.broadcast_to(np.float32(0), (one.n,)))
        self._committed: tuple[list[Any], dict[str, Any]] | None = None
        if undoable:
            state = {name: variable(it) for name, it in self.state.items()}
            self._committed = [variable(it) for it in self.memories], state
        self._began = [exchange.tensors[name].step for name in names]
        self._until = until_dense(exchange, names)
        self._sent: list[int] = []  # words in each round, known when traced
        self._ranks = 1

    def summables(self) -> list[Summable]:
        """Those of the exchange, in the order of the names."""
        found = [self._of.tensors[name].summable for name in self.names]
        return [one for one in found if one is not None]

    def _begin(self, dropped: Any) -> tuple[list[Any], dict[str, Any]]:
        """What is remembered, and shared, when a step begins."""
        memories = [it.read_value() for it in self.memories]
        state = {name: it.read_value() for name, it in self.state.items()}
        if self._committed is None or dropped is None:
            return memories, state
        own_memories, own_state = self._committed

        def before() -> list[Any]:
            gone = [dropped[at] for at in self.order]
            kept = zip(gone, own_memories, self.memories, strict=True)
            left = [tf.where(it, old.read_value(), new.read_value()) for it, old, new in kept]
            old, new = (
                self.bucket.split({name: it.read_value() for name, it in each.items()})
                for each in (own_state, self.state)
            )
            shared = self.bucket.join(
                [
                    {name: tf.where(it, one[name], other[name]) for name in one}
                    for it, one, other in zip(gone, old, new, strict=True)
                ]
            )
            return [*left, *(shared[name] for name in state)]

        found = restored(dropped, [*memories, *state.values()], before)
        memories = found[: len(memories)]
        state = dict(zip(state, found[len(memories) :], strict=True))
        for own, memory in zip(own_memories, memories, strict=True):
            own.assign(memory)
        for name, value in state.items():
            own_state[name].assign(value)
        return memories, state

    def step(
        self, number: int, vectors: Sequence[Any], by: Collectives, dropped: Any = None
    ) -> tuple[list[Any], Any]:
        """See SizedBucket."""
        self._ranks = by.ranks
        memories, state = self._begin(dropped)
        rounds = step(
            self.bucket,
            state,
            memories,
            [times_power(vectors[at], -self._exponents[at]) for at in self.order],
            ranks=by.ranks,
            rank=by.rank,
            decay=self._of.decay,
            exact=self._of.exact,
        )
        total, self._sent = None, []
        while True:
            try:
                words = rounds.send(total)  # type: ignore[arg-type]
            except StopIteration as end:
                made = end.value
                break
            self._sent.append(words.shape[0])
            total = by.total(words, number, len(self._sent))
            total.set_shape(words.shape)
        sound = tf.debugging.Assert(made.numbers[1] == 0, [_DAMAGED])
        with tf.control_dependencies([sound]):
            for name, own in self.state.items():
                own.assign(made.state[name])
            for own, memory in zip(self.memories, made.memories, strict=True):
                own.assign(memory)
            placed = dict(zip(self.order, made.means, strict=True))
            energy, sent = tf.unstack(made.numbers[2:])
            told = tf.stack([energy, tf.maximum(energy - sent, 0), tf.zeros_like(energy)])
            each = enumerate(self._exponents)
            return [tf.identity(times_power(placed[at], power)) for at, power in each], told

    def remembered(self) -> list[Any]:
        """See SizedBucket."""
        return [it.read_value() for it in (*self.memories, *self.state.values())]

    def read(self, steps: int) -> None:
        """See SizedBucket."""
        summables = self.summables()
        state = {name: it.numpy() for name, it in self.state.items()}
        pieces = zip(self.order, self.bucket.split(state), self.memories, strict=True)
        for at, own, memory in pieces:
            summables[at].replace(memory.numpy())
            summables[at].state = own
        if self._committed is not None:
            left, shared = self._committed
            states = self.bucket.split({name: it.numpy() for name, it in shared.items()})
            for at, own, memory in zip(self.order, states, left, strict=True):
                self._of.tensors[self.names[at]].reopen(memory.numpy(), own)
        for name, first in zip(self.names, self._began, strict=True):
            self._of.tensors[name].step = first + min(steps, self._until)

    def ran(self, steps: int) -> list[Ran]:
        """See SizedBucket; the first tensor has what none has alone, the heads."""
        if not self._sent:
            return []
        own = [sum(each - HEAD for each in one.words(self._ranks)) for one in self.summables()]
        own[0] = sum(self._sent) - sum(own[1:])
        found = []
        for name, words in zip(self.names, own, strict=True):
            n = math.prod(self._of.tensors[name].shape)
            found.append(Ran(name, n, 4 * n, 4 * words, self._of.way(name), steps))
        return found


def until_dense(exchange: SharedExchange, names: Iterable[str]) -> int:
    """Steps until the next one of these tensors that is for Python; 0 unless all have sizes.

    A dense one, or one of a vote; where a tensor waits for energy, each.
    """
    found = [exchange.tensors.get(name) for name in names]
    if any(it is None or it.summable is None for it in found):
        return 0
    if any(it.size is not None and it.size.waits for it in found if it is not None):
        return 0
    every = exchange.every
    dense = [(every - 1 - (it.step - exchange.warmup)) % every for it in found if it is not None]
    votes = [it for it in map(exchange.until_vote, names) if it is not None]
    return min(dense + votes)


def _hosted(state: dict[str, Any]) -> dict[str, Any]:
    return {name: to_host(value) for name, value in state.items()}
