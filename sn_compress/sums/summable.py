"""Summable: one tensor on one rank, its part of the sums and what it has not sent yet.

Two buffers take turns: the memory, and what gradient and memory are added into, of which what is
sent is then subtracted. So the memory before the last step is still there when that step turns out
to be lost, or is aborted, and nothing is copied for it. Where gradients accumulate over several
exchanges there is a third: the memory before the first of them.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from ..base.errors import CompressError, PayloadError
from ..base.saved import floats, reading
from ..devices.arrays import Later, like_of, namespace, to_host
from ..ops.linear.remember import remembered
from .bucket import Bucket
from .host_rounds import rounds_for
from .parts.base import Array, Part, State
from .step import bucket_of, check, steadily, summed

_QUARTERS = 4  # of an octave: the steps of scales


@dataclass
class Verdict:
    """How a step has ended, known when the device has come so far.

    Attributes
    ----------
    later : the numbers lost, damaged, energy, sent
    """

    later: Later
    _told: tuple[bool, float, float] | None = None

    def read(self) -> tuple[bool, float, float]:
        """Whether the step was lost, and squared norms of what it held and of what is left.

        Raises PayloadError if a sum was damaged.
        """
        if self._told is None:
            lost, damaged, energy, sent = self.later.read()
            self._told = bool(lost or damaged), energy, max(energy - sent, 0.0)
            if damaged:  # said once: for all else the step is a lost one
                raise PayloadError(
                    "the summed words do not have the sum of their checksums: they were damaged on "
                    "the way, or ranks run with different settings. If it happens again, suspect "
                    "memory or the network."
                )
        return self._told


@dataclass(eq=False)
class Summable:
    """One tensor's share in a bucket.

    part : of this tensor alone
    state : what all ranks share of it
    memory : [n] float32, what this rank has not sent yet; of any array library, as `place` says
    """

    part: Part
    state: State
    memory: Array
    _spare: Array | None = None
    _before: tuple[Array, State] | None = None  # the last step
    _committed: tuple[Array, State] | None = None  # the first step that was not committed
    _verdict: Verdict | None = None
    _mine: int | None = field(default=None, repr=False)

    @classmethod
    def of(cls, part: Part, mean: Array) -> Summable:
        """For gradients like a mean, [n] float32, that all ranks know; zeros say nothing."""
        (shape,) = part.shapes
        state = part.begin(part.new_state(mean), [namespace(mean).reshape(mean, shape)])
        return cls(part, state, namespace(mean).zeros_like(mean))

    @property
    def n(self) -> int:
        """Elements."""
        (shape,) = self.part.shapes
        return math.prod(shape)

    def words(self, ranks: int) -> list[int]:
        """Words of 4 bytes that travel in each round when it travels alone."""
        return Bucket([self.part]).words(ranks)

    def place(self, like: Array) -> None:
        """Move everything to where an array is."""
        if type(self.memory) is not type(like) or _device(self.memory) != _device(like):
            self.conclude()
            self.memory = like_of(self.memory, like)
            self.state = {name: like_of(it, like) for name, it in self.state.items()}
            self._spare = self._before = self._committed = None

    def add(self, gradient: Array, decay: float) -> tuple[Array, Array]:
        """Gradient plus memory, [rows, columns], in the buffer that becomes the memory.

        And its squared norm, 0-d float32.
        """
        out = self.buffer(gradient)
        (shape,) = self.part.shapes
        vector, energy = remembered(self.memory, gradient, decay, out)
        self._before, self._spare = None, vector
        return namespace(vector).reshape(vector, shape), energy

    def buffer(self, gradient: Array) -> Array | None:
        """What becomes the memory, [n], where the gradient is; None before there is one."""
        self.place(gradient)
        self.conclude()
        if self._before is None:
            return self._spare
        needed = self._committed is not None and self._committed[0] is self._before[0]
        return None if needed else self._before[0]

    def into(self, gradient: Array) -> Array:
        """The same, made if there is none: for gradient plus memory, which the caller writes."""
        out = self.buffer(gradient)
        self._before, self._spare = None, np.empty_like(self.memory) if out is None else out
        return self._spare

    def end(self, left: Array, state: State, verdict: Verdict) -> None:
        """Take a step as it has ended, or will turn out to have."""
        self._before = self.memory, self.state
        self._committed = self._committed or self._before
        self.memory, self.state = namespace(left).reshape(left, (-1,)), state
        self._spare, self._verdict = None, verdict

    def conclude(self) -> None:
        """Wait for the last step's end; one that was lost is taken back."""
        verdict, self._verdict = self._verdict, None
        if verdict is None:
            return
        try:
            lost = verdict.read()[0]
        except PayloadError:
            self.undo()
            raise
        if lost:
            self.undo()

    def undo(self) -> None:
        """Take the last step back, as one that was lost."""
        self._verdict = None
        if self._before is not None:
            self._spare = self.memory
            self.memory, self.state = self._before
            self._before = None
            if self._committed is not None and self._committed[0] is self.memory:
                self._committed = None

    def commit(self) -> None:
        """Keep what was done so far: `abort` takes back what comes after."""
        self.conclude()
        if self._before is not None:
            self._spare, self._before = self._before[0], None
        self._committed = None

    def abort(self) -> None:
        """Be as after the last commit."""
        self._verdict = None
        if self._committed is not None:
            self._spare = None
            self.memory, self.state = self._committed
            self._before = self._committed = None

    def reopen(self, memory: Array, state: State) -> None:
        """Be as after a step that was not committed, before which there were these."""
        self._committed = memory, state

    def exclude(self, zeros: Array) -> Array:
        """Put zeros in the place of the memory for one step; returns it, for `include`."""
        self.conclude()
        self._committed = self._committed or (self.memory, self.state)
        held = self.memory
        self.include(zeros)
        return held

    def include(self, memory: Array) -> None:
        """Put a memory back that did not travel with a step."""
        self.conclude()
        self.memory, self._spare, self._before = memory, None, None

    def rescale(self, factor: float) -> None:
        """Expect gradients that are `factor` times as large from now on; memory is left alone."""
        self.commit()
        self.state = self.part.rescale(self.state, round(_QUARTERS * math.log2(factor)))

    def replace(self, memory: Array) -> None:
        """Put another memory, [n] float32, in the place of the one there is."""
        self.commit()
        self.memory, self._spare = memory, None

    def state_dict(self) -> dict[str, Any]:
        """NumPy arrays to go on from bit by bit; all but `memory` are alike on all ranks."""
        self.conclude()
        shared = {name: np.array(to_host(value)) for name, value in self.state.items()}
        return {"memory": np.array(to_host(self.memory)), "shared": shared}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Take over what state_dict returned; nothing changes if it does not fit."""
        self.conclude()
        mine = {"memory": self.memory, **self.state}
        with reading("the saved state"):
            saved = {"memory": state["memory"], **state["shared"]}
            found = {name: _like(saved[name], name, to_host(it)) for name, it in mine.items()}
        self.memory, self.state = found.pop("memory"), found
        self._spare = self._before = self._committed = None


def exchange(
    summables: Sequence[Summable],
    gradients: Sequence[Array],
    *,
    ranks: int,
    rank: int | None,
    decay: float = 1.0,
    exact: bool = False,
    outs: Sequence[Array] | None = None,
) -> Generator[Array, Array, tuple[list[Array], Verdict]]:
    """One step of many tensors: yields words to sum, returns the means and how it has ended.

    Parameters
    ----------
    summables, gradients : of each tensor; [n] float32 each
    ranks, rank : how many may add to the sum; which of them this is, from 0
    decay : factor on the memories before they are added
    exact : the same bits on ranks of unlike hardware
    outs : where to write each mean, [n] float32; may be the gradients

    Every rank makes the same call. Ranks that are fed the same sums return the same bits.
    """
    for one, gradient in zip(summables, gradients, strict=True):
        check(gradient, one.part.shapes[0])
    return steadily(_steps(summables, gradients, ranks, rank, decay, exact, outs), gradients[0])


def _steps(
    summables: Sequence[Summable],
    gradients: Sequence[Array],
    ranks: int,
    rank: int | None,
    decay: float,
    exact: bool,
    outs: Sequence[Array] | None,
) -> Generator[Array, Array, tuple[list[Array], Verdict]]:
    bucket, order = bucket_of(tuple(one.part for one in summables))
    ordered, given = [summables[at] for at in order], [gradients[at] for at in order]
    into = None if outs is None else [outs[at] for at in order]
    if host := rounds_for(bucket, given, ranks=ranks, exact=exact):
        added = tuple(one.into(it) for one, it in zip(ordered, given, strict=True))
        result, numbers = yield from host.step(
            host.part.join([one.state for one in ordered]),
            tuple(one.memory for one in ordered),
            tuple(given),
            added,
            tuple(into or map(np.empty_like, given)),
            decay,
        )
        states = host.part.split(result.state)
    else:
        found = [one.add(it, decay) for one, it in zip(ordered, given, strict=True)]
        xp = namespace(given[0])
        if into is not None:
            into = [xp.reshape(it, shape) for it, shape in zip(into, bucket.shapes, strict=True)]
        result, numbers = yield from summed(
            bucket,
            bucket.join([one.state for one in ordered]),
            [matrix for matrix, _ in found],
            [square for _, square in found],
            ranks=ranks,
            rank=rank,
            exact=exact,
            outs=into,
        )
        states = bucket.split(result.state)
    verdict = Verdict(Later(numbers))
    means: list[Array] = [None] * len(order)
    for at, left, mean, own in zip(order, result.left, result.mean, states, strict=True):
        summables[at].end(left, own, verdict)
        means[at] = namespace(mean).reshape(mean, (-1,))
    return means, verdict


def _device(array: Array) -> Any:
    return getattr(array, "device", None)


def _like(saved: Any, name: str, value: Any) -> Any:
    """A copy of a saved array, checked to be of the shape and kind of the one there is."""
    if value.dtype.kind == "f":
        return floats(saved, name, value.shape)
    array = np.asarray(saved)
    wanted = "b" if value.dtype.kind == "b" else "iu"
    if array.shape != value.shape or array.dtype.kind not in wanted:
        raise CompressError(
            f"saved {name} has shape {array.shape} and dtype {array.dtype}; expected {value.shape} "
            f"and {value.dtype}. Was it saved with other settings, or for another layer?"
        )
    if value.dtype.kind == "i" and not ((array >= -256) & (array <= 255)).all():
        raise CompressError(f"saved {name} is outside -256 to 255: it is damaged")
    return np.array(array, value.dtype, order="C")
