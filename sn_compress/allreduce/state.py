"""State kept between the steps of a tensor that an all-reduce sums, on one rank.

`TensorState` has its error memory and the state shared by all ranks. `Tensor` wraps it and has the
state before a size is chosen, and when a new one is. `JointStep` runs a step of many tensors.
"""

from __future__ import annotations

import math
from collections.abc import Generator, Mapping, Sequence
from copy import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from .. import saved
from ..arrays import Array, AsyncScalars, asarray_like, device_of, namespace, to_host
from ..errors import CompressError, PayloadError
from ..ops.fixed_point import (
    HIGHEST,
    LOWEST,
    MOST_EXPONENT,
    PER_OCTAVE,
    exponent_of,
    times_power,
)
from ..saved import floats, reading
from .allocate import (
    METHODS,
    Allocation,
    EnergyCurve,
    allocate,
    better,
    budget,
    largest,
    with_frequencies,
)
from .bucket import Bucket, Result, bucket_of, check
from .methods.base import Method, State, StepOptions


@dataclass
class StepStatus:
    """Outcome of a step; available once the device has computed it.

    Attributes
    ----------
    later : Result.numbers()
    """

    later: AsyncScalars
    _result: tuple[bool, float, float] | None = None

    def read(self) -> tuple[bool, float, float]:
        """Return whether the step was lost, and the squared norms of its input and its residual.

        Raises PayloadError, only the first time, if a sum was corrupt.
        """
        if self._result is None:
            lost, damaged, energy, sent = self.later.read()
            # The norm of the residual follows from the norm before and the norm sent, without a
            # pass over it; if nearly all was sent, rounding may make it slightly negative.
            self._result = bool(lost or damaged), energy, max(energy - sent, 0.0)
            # All tensors of a step read this. The first raises; for the others the step is lost.
            if damaged:
                raise PayloadError(
                    "the checksum of the sum does not match the sum of the checksums: corrupt in "
                    "transit, or ranks run with different settings. If it happens again, suspect "
                    "memory or the network."
                )
        return self._result


@dataclass(eq=False)
class TensorState:
    """One tensor of a bucket: its method, the state shared by all ranks, and this rank's memory.

    The memory is double-buffered: gradient and memory are added into the other buffer, from which
    what is sent is subtracted. So the memory before the last step still exists, without a copy, if
    that step turns out to be lost or is aborted. If gradients accumulate over several exchanges
    there is a third buffer: the memory before the first of them.

    part : the method, for this tensor alone
    memory : [n] float32, this rank's residual; in any array library, see `place`
    """

    part: Method
    state: State
    memory: Array
    _spare: Array | None = None
    _before: tuple[Array, State] | None = None  # memory and state before the last step
    _committed: tuple[Array, State] | None = None  # those before the first uncommitted step
    _verdict: StepStatus | None = None

    @classmethod
    def of(cls, part: Method, mean: Array) -> TensorState:
        """Create a state for gradients like a mean, [n], equal on all ranks; see Method.begin."""
        (shape,) = part.shapes
        state = part.begin(part.new_state(mean), [namespace(mean).reshape(mean, shape)])
        return cls(part, state, namespace(mean).zeros_like(mean))

    @property
    def n(self) -> int:
        """Number of elements."""
        (shape,) = self.part.shapes
        return math.prod(shape)

    def words(self, ranks: int) -> list[int]:
        """Return the 4-byte words sent in each round if the tensor travels alone."""
        return Bucket([self.part]).words(ranks)

    def place(self, like: Array) -> None:
        """Move everything to the library and device of an array."""
        if type(self.memory) is not type(like) or device_of(self.memory) != device_of(like):
            self.conclude()  # before anything moves: an undo restores buffers on the old device
            self.memory = asarray_like(self.memory, like)
            self.state = {name: asarray_like(value, like) for name, value in self.state.items()}
            self._spare = self._before = self._committed = None

    def buffer(self, gradient: Array) -> Array | None:
        """Return the buffer for gradient plus memory, [n], which will become the memory.

        None in the first step, and if all buffers are still needed.
        """
        self.place(gradient)
        # Which of the two buffers is the memory depends on whether the last step was lost.
        self.conclude()
        before, self._before = self._before, None
        out, self._spare = (self._spare, None) if before is None else (before[0], None)
        # An abort restores the memory from before the first uncommitted step.
        needed = self._committed is not None and self._committed[0] is out
        return None if needed else out

    def end(self, residual: Array, state: State, verdict: StepStatus) -> None:
        """Store the results of a step, whose status may not be known until later."""
        self._before = self.memory, self.state
        self._committed = self._committed or self._before
        self.memory, self.state = namespace(residual).reshape(residual, (-1,)), state
        self._spare, self._verdict = None, verdict

    def conclude(self) -> None:
        """Wait for the last step's status, and undo the step if it was lost."""
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
        """Undo the last step."""
        self._verdict = None
        if self._before is not None:
            self._spare = self.memory
            self.memory, self.state = self._before
            self._before = None
            # It was the first after a commit: nothing is left for an abort to revert.
            if self._committed is not None and self._committed[0] is self.memory:
                self._committed = None

    def commit(self) -> None:
        """Keep all changes so far: `abort` reverts only later ones."""
        self.conclude()
        if self._before is not None:
            self._spare, self._before = self._before[0], None
        self._committed = None

    def abort(self) -> None:
        """Restore the last commit."""
        self._verdict = None  # no need to wait for a dropped step
        if self._committed is not None:
            self._spare = None
            self.memory, self.state = self._committed
            self._before = self._committed = None

    def reopen(self, memory: Array, state: State) -> None:
        """Set what `abort` restores: memory and state before a step that a graph has run."""
        self._committed = memory, state

    def exclude(self, zeros: Array) -> Array:
        """Set the memory to zeros for one step; return it, for `include`."""
        self.place(zeros)
        self.conclude()
        # Saved here, because the step itself would save the zeros.
        self._committed = self._committed or (self.memory, self.state)
        memory = self.memory
        self.include(zeros)
        return memory

    def include(self, memory: Array) -> None:
        """Restore a memory that `exclude` has returned."""
        self.conclude()
        # Clear `_before`, or an undo would restore the zeros.
        self.memory, self._spare, self._before = memory, None, None

    def rescale(self, factor: float) -> None:
        """Expect gradients `factor` times as large from now on; does not change the memory."""
        self.commit()
        self.state = self.part.rescale(self.state, round(PER_OCTAVE * math.log2(factor)))

    def replace(self, memory: Array) -> None:
        """Replace the memory, [n] float32."""
        self.commit()
        self.memory, self._spare = memory, None

    def state_dict(self) -> dict[str, Any]:
        """Return NumPy arrays to resume bit by bit; all but `memory` are equal on all ranks."""
        self.conclude()
        shared = {name: np.array(to_host(value)) for name, value in self.state.items()}
        return {"memory": np.array(to_host(self.memory)), "shared": shared}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Load what state_dict returned; nothing changes if it does not fit."""
        self.conclude()
        mine = {"memory": self.memory, **self.state}
        with reading("the saved state"):
            saved = {"memory": state["memory"], **state["shared"]}
            loaded = {name: _like(saved[name], name, to_host(old)) for name, old in mine.items()}
        self.memory, self.state = loaded.pop("memory"), loaded
        self._spare = self._before = self._committed = None


class JointStep:
    """One step of many tensors: its rounds, and storing the results.

    Parameters
    ----------
    tensors, gradients : of each tensor; gradients are [n] float32
    outs : where to write each mean, [n] float32; may be the gradients

    Attributes
    ----------
    rounds : see Bucket.step; pass its result to `end`

    Every rank makes the same step. Ranks that receive the same sums get the same bits.
    """

    def __init__(
        self,
        tensors: Sequence[TensorState],
        gradients: Sequence[Array],
        options: StepOptions,
        outs: Sequence[Array] | None = None,
    ) -> None:
        for one, gradient in zip(tensors, gradients, strict=True):
            check(gradient, one.part.shapes[0])
        # A bucket groups tensors by method, so its order differs from that of `tensors`.
        self._bucket, order = bucket_of(tuple(one.part for one in tensors))
        self._order, self._tensors = order, [tensors[at] for at in order]
        ordered = [gradients[at] for at in order]
        added = [one.buffer(gradient) for one, gradient in zip(self._tensors, ordered, strict=True)]
        self.rounds = self._bucket.step(
            self._bucket.join([one.state for one in self._tensors]),
            ordered,
            options,
            [one.memory for one in self._tensors],
            added=added,
            outs=None if outs is None else [outs[at] for at in order],
        )

    def end(self, result: Result) -> tuple[list[Array], StepStatus]:
        """Store the results of the step; return the means, [n] each, and its status."""
        status = StepStatus(AsyncScalars(result.numbers()))
        states = self._bucket.split(result.state)
        for one, residual, state in zip(self._tensors, result.residuals, states, strict=True):
            one.end(residual, state, status)
        means = dict(zip(self._order, result.mean, strict=True))
        return [namespace(mean).reshape(mean, (-1,)) for _, mean in sorted(means.items())], status


def exchange(
    tensors: Sequence[TensorState],
    gradients: Sequence[Array],
    options: StepOptions,
    outs: Sequence[Array] | None = None,
) -> Generator[Array, Array, tuple[list[Array], StepStatus]]:
    """Run the rounds of a JointStep; return the result of its `end`."""
    step = JointStep(tensors, gradients, options, outs)
    return step.end((yield from step.rounds))


def _like(saved: Any, name: str, value: Any) -> Any:
    """Return a copy of a saved array; CompressError unless shape and kind match `value`'s."""
    if value.dtype.kind == "f":
        return floats(saved, name, value.shape)
    array = np.asarray(saved)
    kinds = "b" if value.dtype.kind == "b" else "iu"
    if array.shape != value.shape or array.dtype.kind not in kinds:
        raise CompressError(
            f"saved {name} has shape {array.shape} and dtype {array.dtype}; expected {value.shape} "
            f"and {value.dtype}. Was it saved with other settings, or for another layer?"
        )
    # Integers in a state are exponents, which index a table: see ops/fixed_point.py.
    if value.dtype.kind == "i" and not ((array >= LOWEST) & (array <= HIGHEST)).all():
        raise CompressError(f"saved {name} has values outside -256 to 255: the state is corrupt")
    return np.array(array, value.dtype, order="C")


# Maximum elements of a tensor whose saved state has no array to check its size against. A forged
# state could otherwise make `propose` allocate terabytes of zeros.
_MOST_UNSEEN = 2**31


@dataclass
class Tensor:
    """One tensor on one rank: dense, with `summable` None, until its size is chosen.

    `summable` works on gradients divided by 2**exponent, the same on all ranks; its memory is
    divided by it as well.
    """

    shape: tuple[int, ...]
    step: int = 0  # step of the next gradient
    proposed: Allocation | None = None  # by this rank, until the ranks have agreed on one
    size: Allocation | None = None  # agreed on by all ranks
    size_words: int = 0  # words with which the last step agreed on sizes, or voted on them
    mean: Array | None = None  # of the last dense step, until a size is chosen from it
    owed: Array | None = None  # residual of a dense tensor; a `summable` has its own
    exponent: int = 0  # nonzero if gradients are near the limits of float32
    summable: TensorState | None = None
    earlier: TensorState | None = None  # before a dense step, in case that is lost
    has_energy: AsyncScalars | None = None  # whether the last mean was nonzero, if size.waits
    held: float | None = None  # norm of the memory over that of the gradient, last measured
    before: dict[str, Any] | None = None  # the fields above, before the last step
    committed: dict[str, Any] | None = None  # the fields above, before the first uncommitted step

    def residual(self) -> Array | None:
        """Return the residual, [n]; not copied unless there is an exponent."""
        if self.summable is None:
            return self.owed
        self.summable.conclude()
        return times_power(self.summable.memory, self.exponent)

    def replace(self, memory: Array) -> None:
        """Replace the residual, [n] float32."""
        if self.summable is not None:
            self.summable.replace(times_power(memory, -self.exponent))
        else:
            self.owed = memory

    def note_energy(self, mean: Array) -> None:
        """Record whether the mean of a coded step is nonzero, for `restart_on_energy`."""
        if self.size is not None and self.size.waits:
            xp = namespace(mean)
            has_energy = xp.any(mean != 0) & xp.all(xp.isfinite(mean))
            self.has_energy = AsyncScalars(xp.reshape(xp.astype(has_energy, xp.float64), (1,)))

    def note_held(self, memory: float, gradient: float) -> None:
        """Record how many gradients' worth the memory holds, from the norms of both."""
        known = gradient > 0 and math.isfinite(memory) and math.isfinite(gradient)
        # Rounded as in a saved state, or a resumed run might vote differently.
        self.held = float(np.float32(memory / gradient)) if known else None

    def restart_on_energy(self) -> None:
        """Restart, with dense steps, if a mean that was all zeros has become nonzero."""
        has_energy, self.has_energy = self.has_energy, None
        if has_energy is not None and has_energy.read()[0]:
            self.step = 0

    def open(self) -> None:
        """Begin a step: save what `undo` and `abort` need."""
        fields = {k: v for k, v in vars(self).items() if k not in ("before", "committed")}
        self.before = fields
        self.committed = self.committed or fields

    def reopen(self, memory: Array, state: State) -> None:
        """Treat the current state as the uncommitted result of a step that a graph has run.

        memory, state : of the summable, before that step
        """
        self.commit()
        self.open()
        if self.summable is not None:
            self.summable.reopen(memory, state)

    def commit(self) -> None:
        """Keep all changes so far: `undo` and `abort` restore this point."""
        self.before = self.committed = None
        if self.summable is not None:
            self.summable.commit()

    def undo(self) -> None:
        """Restore the state before the last step, which failed; or the last commit.

        Ranks may have reached different points of that step, so its count is reverted as well.
        """
        before = self.before
        self.abort()  # restores array contents; `before` has only the fields
        for name, value in (before or {}).items():
            setattr(self, name, value)

    def abort(self) -> None:
        """Restore the memory of the last commit.

        Step counts, and whether the tensor is dense, are kept: ranks that disagree about an abort
        would otherwise deadlock. The mean of an aborted step is discarded.
        """
        committed, self.committed, self.before = self.committed, None, None
        if committed is None:
            return
        saved_state = committed["summable"]
        # Steps since then may have gone through any of these.
        for summable in (saved_state, self.summable, self.earlier):
            if summable is not None:
                summable.abort()
        residual = committed["owed"]
        if saved_state is not None:
            residual = times_power(saved_state.memory, committed["exponent"])
        if self.summable is None:  # now dense
            self.owed = residual
            # Discard the mean of the aborted step, unless there was never another one.
            if saved_state is not None or committed["mean"] is not None:
                self.mean = committed["mean"]
        elif self.summable is not saved_state:  # a size was chosen since, which is kept
            memory = self.summable.memory
            self.replace(namespace(memory).zeros_like(memory) if residual is None else residual)

    def aborted(self) -> Tensor:
        """Return a copy as `abort` would leave it, sharing arrays, without changing this one."""
        copies = {id(s): copy(s) for s in (self.summable, self.earlier) if s is not None}
        tensor = copy(self)
        tensor.summable = copies.get(id(self.summable))
        tensor.earlier = copies.get(id(self.earlier))
        if self.committed is not None:
            before = self.committed["summable"]
            tensor.committed = self.committed | {"summable": copies.get(id(before), copy(before))}
        tensor.abort()
        return tensor

    def begin(self, size: Allocation) -> None:
        """Start at a size that ranks have agreed on, from the mean gradient of a dense step."""
        mean = self.mean
        if mean is None:
            mean = np.zeros(math.prod(self.shape), np.float32)
        if self.mean is None and self.earlier is not None and size == self.size:
            self.summable = self.earlier  # the dense step was lost: keep the earlier directions
        else:
            self.size, self.exponent, self.held = size, exponent_of(mean), None
            self.summable = TensorState.of(size.part(), times_power(mean, -self.exponent))
        if self.owed is not None:
            self.replace(asarray_like(self.owed, self.summable.memory))
        self.mean = self.owed = self.earlier = self.proposed = None

    def state_dict(self) -> dict[str, Any]:
        """Return everything needed to resume, as arrays and numbers."""
        self.restart_on_energy()  # `has_energy` is not saved
        entry: dict[str, Any] = {"shape": list(self.shape), "step": self.step}
        if self.mean is not None:
            entry["mean"] = np.array(to_host(self.mean))
        if self.owed is not None:
            entry["owed"] = np.array(to_host(self.owed))
        if self.summable is not None and self.size is not None:
            entry["sides"], entry["way"] = list(self.size.shape), self.size.method
            entry["size"], entry["summable"] = self.size.size, self.summable.state_dict()
            if self.exponent:
                entry["exponent"] = self.exponent
            if self.held is not None:
                entry["held"] = np.float32(self.held)
        return entry

    @classmethod
    def load(cls, entry: dict[str, Any]) -> Tensor:
        """Create from what state_dict returned; CompressError if it is not valid."""
        shape = saved.shape(entry["shape"], "shape")
        n, step = math.prod(shape), saved.count(entry["step"], "step")
        if saved.held(entry) < n and n > _MOST_UNSEEN:
            raise CompressError(f"declares {n} elements, contains {saved.held(entry)}")
        tensor = cls(shape, step)
        for kind in ("mean", "owed"):
            if kind in entry:
                setattr(tensor, kind, saved.floats(entry[kind], kind, (n,)))
        if "summable" in entry:
            saved.floats(entry["summable"]["memory"], "memory", (n,))
            tensor.size = _size(entry, n)
            part = tensor.size.part()
            empty = np.zeros(n, np.float32)
            tensor.summable = TensorState(part, part.new_state(empty), empty)
            tensor.summable.load_state_dict(entry["summable"])
            tensor.exponent = _exponent(entry.get("exponent", 0))
            if "held" in entry:
                tensor.held = float(saved.floats(entry["held"], "number of gradients held", ()))
        return tensor


def _size(entry: dict[str, Any], n: int) -> Allocation:
    sides, method = saved.shape(entry["sides"], "shape of sides"), entry["way"]
    if math.prod(sides) != n or method not in METHODS:
        raise CompressError(
            f"got sides {sides} and method {method!r}; expected sides of {n} elements, and a "
            f"method of {METHODS}"
        )
    size = saved.count(entry["size"], "size", high=largest(sides, method))
    return Allocation(sides, size, method)


def _exponent(value: Any) -> int:
    if type(value) is not int or abs(value) > MOST_EXPONENT:
        raise CompressError(
            f"its exponent is {value!r}; expected a whole number of at most {MOST_EXPONENT} in "
            "magnitude"
        )
    return value


def propose(
    tensors: Mapping[str, Tensor],
    left_out: int,
    *,
    ratio: float,
    ranks: int,
    rows: bool,
    frequencies: bool,
) -> None:
    """Propose sizes for all tensors that have none, from the mean gradients of dense steps.

    left_out : elements sent uncompressed; each tensor's budget is reduced by its share of them
    rows, frequencies : whether a tensor may be sent by rows, or by frequencies of its kernels
    """
    new = {name: t for name, t in tensors.items() if t.summable is None and t.proposed is None}
    for name, tensor in list(new.items()):
        known = None if tensor.mean is None else to_host(tensor.mean)
        # A lost dense step has no information: a tensor that had a size resumes with it.
        if known is not None and not np.isfinite(known).all():
            tensor.mean, tensor.summable = None, tensor.earlier
            if tensor.summable is not None:
                del new[name]
    curves = {}
    for name, t in list(new.items()):
        n = math.prod(t.shape)
        mean = np.zeros(n, np.float32) if t.mean is None else to_host(t.mean)
        mean = times_power(mean, -exponent_of(mean))  # shares of energy have no unit
        curves[name] = EnergyCurve.of(mean, t.shape)
        if curves[name].flat:
            continue
        if t.mean is None and t.earlier is not None:
            t.proposed = t.size  # the dense step that would determine a new one was aborted
        elif not mean.any():
            t.proposed = Allocation(t.shape, 0)  # no information: send the whole tensor until then
        if t.proposed is not None:
            del new[name], curves[name]
            continue
        low_rank = curves[name]
        if rows:
            curves[name] = better(low_rank, EnergyCurve.of_rows(mean, t.shape), n / ratio, ranks)
        if frequencies and curves[name] is low_rank:
            by_frequencies = EnergyCurve.of_frequencies(mean, t.shape)
            curves[name] = with_frequencies(low_rank, by_frequencies, n / ratio, ranks)
    taken, all_taken = (sum(math.prod(t.shape) for t in of.values()) for of in (new, tensors))
    chosen = allocate(curves, budget(taken, left_out * taken / all_taken, ratio), ranks)
    for name, tensor in new.items():
        curve, size = curves[name], chosen[name]
        tensor.proposed = Allocation(curve.shape, size, curve.method if size else "low_rank")
