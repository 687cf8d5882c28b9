"""What one tensor of the shared exchange is at: its step, its size, its memory; and as saved."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from ..base import saved
from ..base.errors import CompressError
from ..devices.arrays import Array, Later, namespace, to_host
from ..ops.words.scales import MOST_EXPONENT, exponent_of, times_power
from .choose import WAYS, Size, largest
from .parts.base import State
from .summable import Summable

_MOST_UNSEEN = 2**31  # elements of a saved tensor of which no array was saved


@dataclass
class Tensor:
    """One tensor's part: dense (`summable` is None) until its size is chosen.

    `summable` works on gradients over 2**exponent, on all ranks alike, and so does its memory.
    """

    shape: tuple[int, ...]
    step: int = 0  # that the next gradient belongs to
    proposed: Size | None = None  # by this rank, until the ranks have agreed on one
    size: Size | None = None  # that they have agreed on
    told: int = 0  # words in which sizes travelled in the last step
    mean: Array | None = None  # of the last dense step, until then
    owed: Array | None = None  # what was not sent of it when the exchange began anew
    exponent: int = 0  # of numbers near the ends of float32
    summable: Summable | None = None
    earlier: Summable | None = None  # until then, in case that step turns out to be lost
    awake: Later | None = None  # whether the last mean of a tensor that waits had energy
    held: float | None = None  # gradients that the memory held when it was looked at last
    before: dict[str, Any] | None = None  # the fields above, before the last step
    committed: dict[str, Any] | None = None  # and before the first that was not committed

    def left(self) -> Array | None:
        """What was not sent of it, [n]; no copy in the ordinary range."""
        if self.summable is None:
            return self.owed
        self.summable.conclude()
        return times_power(self.summable.memory, self.exponent)

    def replace(self, memory: Array) -> None:
        """Put another memory, [n] float32, in the place of the summable's."""
        if self.summable is not None:
            self.summable.replace(times_power(memory, -self.exponent))

    def listen(self, mean: Array) -> None:
        """Take note of the mean of a coded step, the same on all ranks, for `wake`."""
        if self.size is not None and self.size.waits:
            xp = namespace(mean)
            found = xp.any(mean != 0) & xp.all(xp.isfinite(mean))
            self.awake = Later(xp.reshape(xp.astype(found, xp.float64), (1,)))

    def look(self, memory: float, gradient: float) -> None:
        """Take note of how many gradients the memory holds, from the norms of both."""
        known = gradient > 0 and math.isfinite(memory) and math.isfinite(gradient)
        self.held = float(np.float32(memory / gradient)) if known else None

    def wake(self) -> None:
        """Begin anew, with dense steps, if a tensor without energy has got some."""
        awake, self.awake = self.awake, None
        if awake is not None and awake.read()[0]:
            self.step = 0

    def open(self) -> None:
        """A step begins: keep what `undo` and `abort` need."""
        fields = {k: v for k, v in vars(self).items() if k not in ("before", "committed")}
        self.before = fields
        self.committed = self.committed or fields

    def reopen(self, memory: Array, state: State) -> None:
        """Take what there is for what a step has made that was not committed.

        memory, state : of the summable, before that step
        """
        self.commit()
        self.open()
        if self.summable is not None:
            self.summable.reopen(memory, state)

    def commit(self) -> None:
        """Keep what was done so far: `undo` and `abort` take back what comes after."""
        self.before = self.committed = None
        if self.summable is not None:
            self.summable.commit()

    def undo(self) -> None:
        """Be as before the last step, which broke off; as after the last commit if there is none.

        Ranks may have come to different places in that step, so its count is taken back, too.
        """
        before = self.before
        self.abort()
        for field, value in (before or {}).items():
            setattr(self, field, value)

    def abort(self) -> None:
        """Remember what was remembered after the last commit.

        Steps stay counted, and what is dense stays so: ranks that disagreed about an abort would
        otherwise wait for each other for ever. The mean of an aborted step shows nothing.
        """
        committed, self.committed, self.before = self.committed, None, None
        if committed is None:
            return
        own = committed["summable"]
        for summable in (own, self.summable, self.earlier):
            if summable is not None:
                summable.abort()
        left = committed["owed"]
        if own is not None:
            left = times_power(own.memory, committed["exponent"])
        if self.summable is None:
            self.owed = left
            if own is not None or committed["mean"] is not None:
                self.mean = committed["mean"]
        elif self.summable is not own:
            memory = self.summable.memory
            self.replace(namespace(memory).zeros_like(memory) if left is None else left)

    def begin(self, size: Size) -> None:
        """Go on at a size, from the mean gradient that the dense steps showed."""
        mean = self.mean
        if mean is None:
            mean = np.zeros(math.prod(self.shape), np.float32)
        if self.mean is None and self.earlier is not None and size == self.size:
            self.summable = self.earlier
        else:
            self.size, self.exponent, self.held = size, exponent_of(mean), None
            self.summable = Summable.of(size.part(), times_power(mean, -self.exponent))
        if self.owed is not None:
            self.replace(self.owed)
        self.mean = self.owed = self.earlier = self.proposed = None

    def state_dict(self) -> dict[str, Any]:
        """Everything needed to go on with it, as arrays and numbers."""
        self.wake()
        entry: dict[str, Any] = {"shape": list(self.shape), "step": self.step}
        if self.mean is not None:
            entry["mean"] = np.array(to_host(self.mean))
        if self.owed is not None:
            entry["owed"] = np.array(to_host(self.owed))
        if self.summable is not None and self.size is not None:
            entry["sides"], entry["way"] = list(self.size.shape), self.size.way
            entry["size"], entry["summable"] = self.size.size, self.summable.state_dict()
            if self.exponent:
                entry["exponent"] = self.exponent
            if self.held is not None:
                entry["held"] = np.float32(self.held)
        return entry

    @classmethod
    def load(cls, entry: dict[str, Any]) -> Tensor:
        """From what state_dict returned; CompressError if it is not that."""
        shape = saved.shape(entry["shape"], "shape")
        n, step = math.prod(shape), saved.count(entry["step"], "step")
        # Without an array there is nothing to hold a size against.
        if saved.held(entry) < n and n > _MOST_UNSEEN:
            raise CompressError(f"it says {n} elements and holds {saved.held(entry)} numbers")
        tensor = cls(shape, step)
        for kind in ("mean", "owed"):
            if kind in entry:
                setattr(tensor, kind, saved.floats(entry[kind], kind, (n,)))
        if "summable" in entry:
            saved.floats(entry["summable"]["memory"], "memory", (n,))
            tensor.size = _size(entry, n)
            part = tensor.size.part()
            empty = np.zeros(n, np.float32)
            tensor.summable = Summable(part, part.new_state(empty), empty)
            tensor.summable.load_state_dict(entry["summable"])
            tensor.exponent = _exponent(entry.get("exponent", 0))
            if "held" in entry:
                tensor.held = float(saved.floats(entry["held"], "number of gradients held", ()))
        return tensor


def _size(entry: dict[str, Any], n: int) -> Size:
    sides, way = saved.shape(entry["sides"], "shape of sides"), entry["way"]
    if math.prod(sides) != n or way not in WAYS:
        raise CompressError(
            f"its sides are {sides} and its way is {way!r}; expected {n} elements, and one of "
            f"{WAYS}"
        )
    return Size(sides, saved.count(entry["size"], "size", high=largest(sides, way)), way)


def _exponent(value: Any) -> int:
    if type(value) is not int or abs(value) > MOST_EXPONENT:
        raise CompressError(
            f"its exponent is {value!r}; expected a whole number of at most {MOST_EXPONENT} in "
            "magnitude"
        )
    return value
