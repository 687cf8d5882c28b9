"""The interface of all methods: tensors of a bucket that are sent in the same way.

In a gather every rank receives all payloads, so bytes grow with the number of ranks. Here all ranks
agree, from numbers they already share, on what is sent, and an all-reduce sums it. The cost does
not grow with the number of ranks, and a rank that has joined just adds zeros.

Methods are array code without branches on data: the same functions run in NumPy, in torch on any
device, and in TensorFlow's graphs. Shared state is computed from integers, so that it is
bit-identical everywhere.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from itertools import accumulate
from typing import Any, ClassVar

from ...arrays import namespace

Array = Any  # of NumPy, torch or CuPy
State = dict[str, Array]  # small arrays, equal on all ranks
HEAD = 2  # words at the start of a round, before those of its parts


@dataclass(frozen=True)
class StepOptions:
    """Options shared by all tensors of a step.

    ranks, rank : number of ranks that may add to the sum; the number of this one, if needed
    decay : factor on the memories before they are added
    exact : the mean is bit-identical on any hardware; otherwise only on equal hardware
    """

    ranks: int
    rank: int | None
    decay: float = 1.0
    exact: bool = False


@dataclass(frozen=True)
class Send:
    """Words to sum, [words] int32, and whether all numbers of this rank are finite, 0-d bool.

    energy : the squared norm of gradients plus memories, if the step has added them itself
    """

    words: Array
    finite: Array
    energy: Array | None = None


@dataclass(frozen=True)
class Summed:
    """The sum of the ranks' words, and 0-d float32: 1, or NaN if a rank had non-finite numbers."""

    words: Array
    poison: Array


@dataclass(frozen=True)
class Outcome:
    """The end of a step.

    Attributes
    ----------
    residuals : per tensor, [rows, columns] float32, this rank's; the next memories
    mean : per tensor, [rows, columns] float32; NaN if the step is lost
    state : the next step's, unless the step is lost
    sent : 0-d float32, the squared norm of gradient plus memory minus that of `residuals`
    """

    residuals: list[Array]
    mean: list[Array]
    state: State
    sent: Array


Step = Generator[Send, Summed, Outcome]


class Method(ABC):
    """Tensors of one bucket and their settings; immutable.

    Attributes
    ----------
    shapes : (rows, columns) of each tensor, as a matrix
    rounds : number of all-reduces in a step
    settings : names of the constructor's arguments, sequences with an entry for each tensor
    """

    shapes: Sequence[tuple[int, int]]
    rounds: int
    settings: ClassVar[tuple[str, ...]] = ("shapes", "sizes")

    @abstractmethod
    def words(self, ranks: int) -> list[int]:
        """Return the 4-byte words sent in each round."""

    @classmethod
    def together(cls, parts: Sequence[Method]) -> Method:
        """Merge parts of this class; the tensors stay in order.

        A step of many small tensors is dominated by library calls, which one part makes only once.
        """
        make: Callable[..., Method] = cls
        return make(
            *([entry for part in parts for entry in getattr(part, name)] for name in cls.settings)
        )

    @abstractmethod
    def lengths(self) -> dict[str, Sequence[int]]:
        """Return, for each state array, the number of elements of each tensor, in order."""

    def split(self, state: State) -> list[State]:
        """Return the state of each tensor, in the order of `shapes`."""
        ends = {name: list(accumulate(sizes, initial=0)) for name, sizes in self.lengths().items()}
        return [
            {name: state[name][at[place] : at[place + 1]] for name, at in ends.items()}
            for place in range(len(self.shapes))
        ]

    def join(self, states: Sequence[State]) -> State:
        """Invert `split`."""
        if len(states) == 1:  # without copying the arrays
            return dict(states[0])
        xp = namespace(next(iter(states[0].values())))
        return {name: xp.concat([state[name] for state in states]) for name in states[0]}

    @abstractmethod
    def new_state(self, like: Array) -> State:
        """Return the initial state, on the device of `like`."""

    @abstractmethod
    def begin(self, state: State, means: Sequence[Array]) -> State:
        """Return the state for gradients like these means, which all ranks know.

        means : per tensor [rows, columns] float32; zero or non-finite ones change nothing
        """

    @abstractmethod
    def rescale(self, state: State, quarters: int) -> State:
        """Expect gradients 2**(quarters / 4) times as large from now on."""

    @abstractmethod
    def step(
        self,
        state: State,
        matrices: Sequence[Array],
        options: StepOptions,
        outs: Sequence[Array] | None = None,
    ) -> Step:
        """Run the rounds of a step: yields words, and is sent their sum over the ranks.

        Parameters
        ----------
        state : from the last step
        matrices : per tensor [rows, columns] float32, gradient plus memory; overwritten: what is
            sent is subtracted in place if the library supports it
        outs : per tensor, where to write the mean; None for new arrays
        """
