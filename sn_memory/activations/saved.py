"""What a model saves for its backward pass: what was seen of it, and the bytes it takes.

Several saved tensors may lie in one memory: it is counted once. A part of the model that runs again
keeps its inputs only; parts lie inside one another, and what lies inside one that runs again is not
kept, but what it was given is.

What an op needs of what it saved is a table. Unbiased errors are harmless where the backward pass
is linear in what was saved (inputs of matrix products and convolutions: arXiv 2605.01255), and
nowhere else. A ReLU asks for signs only, a dropout for its mask, a pooling layer for indices and a
shape: these are kept exactly.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Container, Iterable, Mapping
from dataclasses import dataclass
from typing import Final, Literal

from .theory import gradient_sd

WIDTHS: Final = (1, 2, 4, 8)
_GRID_BYTES: Final = 6 / 256  # of an element, for the grid of its group
INPUT: Final = "input"
"""Stands in a key where an op would: what a unit was given."""

Groups = dict[str, list["Row"]]


Treatment = Literal["linear", "sign", "mask", "shape", "nonlinear", "exact"]
"""How what an op saved is kept.

linear      lossy and unbiased, at the bits the controller chooses
sign        whether it is above zero: 1 bit
mask        which of two values: 1 bit, if it does hold two, else as "nonlinear"
shape       nothing but its shape and type
nonlinear   lossy and unbiased, at 8 bits unless a budget says otherwise
exact       as it is
"""

_TABLE: Final[dict[Treatment, str]] = {
    "linear": "linear conv1d conv2d conv3d matmul mm bmm addmm baddbmm einsum",
    "sign": "relu relu_ leaky_relu leaky_relu_",
    "mask": "dropout dropout1d dropout2d dropout3d",
    "shape": "max_pool1d max_pool2d max_pool3d",
    # What follows from comparing values, or is an exponent; and what is not written yet when it is
    # saved (RReLU's noise, of torch's ops alone), so that the tensor itself has to be kept.
    "exact": "embedding ctc_loss logsumexp threshold threshold_ max min amax "
    "rrelu rrelu_ rrelu_with_noise rrelu_with_noise_",
}
_BY_OP: Final = {op: kind for kind, ops in _TABLE.items() for op in ops.split()}


def treatment(op: str) -> Treatment:
    """Return how floats of the size of its input that this op saved are kept.

    Parameters
    ----------
    op
        The function's name, as torch.nn.functional has it.

    Examples
    --------
    >>> [treatment(op) for op in ("conv2d", "relu", "gelu")]
    ['linear', 'sign', 'nonlinear']
    """
    return _BY_OP.get(op, "nonlinear")


@dataclass(frozen=True)
class Unit:
    """A part of a model that may run again.

    Parameters
    ----------
    name
        Its module path.
    work
        What running it costs, as a fraction of the forward pass.
    inputs
        What would be kept of it: elements by the name of the memory.
    """

    name: str
    work: float
    inputs: Mapping[str, int]


def is_inside(key: str, units: Container[str]) -> bool:
    """Whether what is saved under a key is saved inside one of the units.

    What a unit was given is not, but for units around it.

    Examples
    --------
    >>> [is_inside(key, {"a.b"}) for key in ("a.b.c/relu/0", "a.b/gelu/1", "a.b/input/0", "a.bc/0")]
    [True, True, False, False]
    """
    path, *op = key.split("/")
    parts = path.split(".")
    return any(
        ".".join(parts[:depth]) in units for depth in range(1, len(parts) + (op[:1] != [INPUT]))
    )


@dataclass(frozen=True)
class Row:
    """One saved tensor: what was seen of it, and what that says of the error and of bytes.

    Parameters
    ----------
    key
        Module path, op, slot.
    n
        Elements.
    bits
        Per element, of the last observation; None: kept as it is.
    variance
        Mean variance of the rounding, of the last observation.
    nonzero
        Fraction of elements that are not zero.
    gradient_energy, mean_gradient
        Sum of squares and mean magnitude of what arrives at the layer's output; None until seen.
    outputs, terms, coverage
        Of the layer: features, products summed by an entry, fraction not meeting padding.
    yardstick
        Mean magnitude of the weight's momentum, or what stands for it.
    overflows
        How often it had to be kept exactly, as too many elements escaped.
    measured_sd
        Of the gradient's error, where it was measured.
    group
        Name of the memory it lies in, where others have it too.
    linear
        Whether its op is linear in it.
    """

    key: str
    n: int
    bits: int | None
    variance: float
    nonzero: float = 1.0
    gradient_energy: float | None = None
    mean_gradient: float = 0.0
    outputs: int = 1
    terms: int = 1
    coverage: float = 1.0
    yardstick: float = 0.0
    overflows: int = 0
    measured_sd: float | None = None
    group: str = ""
    linear: bool = True

    def predicted_sd(self, bits: int | None = None) -> float | None:
        """Return the deviation of the error of dW at these bits, or those it has.

        At other bits the variance is taken to follow the square of the step. None: dY is unseen.
        """
        if self.gradient_energy is None:
            return None
        if self.bits is None:
            return 0.0
        scale = ((1 << self.bits) - 1) / ((1 << (self.bits if bits is None else bits)) - 1)
        variance = self.variance * scale**2
        return gradient_sd(variance, self.gradient_energy, self.outputs, self.coverage)

    @property
    def relative_error(self) -> float | None:
        """Predicted deviation over the yardstick."""
        sd = self.predicted_sd()
        return None if sd is None or not self.yardstick else sd / self.yardstick

    @property
    def unit(self) -> str | None:
        """The unit that was given this tensor; None: an op saved it."""
        path, _, _ = self.key.rpartition("/")
        name, _, op = path.rpartition("/")
        return name if op == INPUT else None

    def gain(self, low: int, high: int) -> float:
        """Squared relative error saved per byte, by `high` bits instead of `low`."""
        sds = [self.predicted_sd(bits) for bits in (low, high)]
        if sds[0] is None or sds[1] is None or not self.yardstick:
            return 0.0
        saved = (sds[0] ** 2 - sds[1] ** 2) / self.yardstick**2
        return saved / max(self.n * (high - low), 1)


def compressed_bytes(n: int, bits: int | None) -> int:
    """Bytes of n elements in groups of 256, the grids included; None: kept as float32.

    Examples
    --------
    >>> compressed_bytes(2560, 4), compressed_bytes(2560, None)
    (1340, 10240)
    """
    return 4 * n if bits is None else math.ceil(n * (bits / 8 + _GRID_BYTES))


class Observed:
    """Rows by key, bytes that no choice changes by key, and units by name.

    Parameters
    ----------
    overflow_limit
        Overflows after which a tensor is kept as it is.
    """

    def __init__(self, overflow_limit: int) -> None:
        self.overflow_limit = overflow_limit
        self.rows: dict[str, Row] = {}
        self.others: dict[str, int] = {}
        self.units: dict[str, Unit] = {}

    def is_free(self, row: Row) -> bool:
        """Whether its bits can be chosen."""
        return row.bits is not None and row.overflows < self.overflow_limit

    @property
    def free(self) -> list[Row]:
        return [row for row in self.rows.values() if self.is_free(row)]

    def groups(self, again: frozenset[str]) -> tuple[Groups, Groups]:
        """Groups that are compressed if these units run again: linear in all their rows, or not."""
        found: Groups = {}
        for row in self.free:
            if row.unit is None and not is_inside(row.key, again):
                found.setdefault(row.group, []).append(row)
        inputs = {group: n for name in again for group, n in self._inputs(name)}
        linear: Groups = {}
        rest: Groups = {group: [Row(group, n, 8, 0.0)] for group, n in inputs.items()}
        for group, rows in found.items():
            here = linear if group not in rest and all(row.linear for row in rows) else rest
            here[group] = rows
        return linear, rest

    def _inputs(self, name: str) -> Iterable[tuple[str, int]]:
        """What a unit was given: as it was observed or, without, as it was compressed."""
        if name in self.units:
            return self.units[name].inputs.items()
        keys = (key for key in self.rows if key.startswith(f"{name}/{INPUT}/"))
        return [(self.rows[key].group, self.rows[key].n) for key in keys]

    def held(self, again: frozenset[str], linear_bits: int, nonlinear_bits: int) -> int:
        """Bytes kept if these units run again."""
        exact = {
            row.group: compressed_bytes(row.n, None)
            for row in self.rows.values()
            if not self.is_free(row) and not is_inside(row.key, again)
        }
        linear, rest = self.groups(again)
        compressed = (
            compressed_bytes(rows[0].n, bits)
            for groups, bits in ((linear, linear_bits), (rest, nonlinear_bits))
            for rows in groups.values()
        )
        others = sum(size for key, size in self.others.items() if not is_inside(key, again))
        return others + sum(exact.values()) + sum(compressed)

    def held_at(self, again: frozenset[str], bits: Mapping[str, int | None]) -> int:
        """Bytes kept if these units run again, at bits by key."""
        rows = [row for row in self.rows.values() if row.unit is None or row.unit in again]
        return self._bytes(rows, bits, lambda key: not is_inside(key, again))

    def inside(self, name: str, linear_bits: int, nonlinear_bits: int) -> int:
        """Bytes of what a unit saves, while it runs again."""
        rows = [row for row in self.rows.values() if row.unit is None]
        bits: dict[str, int | None] = {
            row.key: (linear_bits if row.linear else nonlinear_bits) if self.is_free(row) else None
            for row in rows
        }
        return self._bytes(rows, bits, lambda key: is_inside(key, {name}))

    def _bytes(
        self, rows: Iterable[Row], bits: Mapping[str, int | None], counts: Callable[[str], bool]
    ) -> int:
        """Bytes of what counts by its key: each memory once, at the most bits any row of it has."""
        sizes: dict[str, int] = {}
        for row in rows:
            if counts(row.key):
                size = compressed_bytes(row.n, bits[row.key])
                sizes[row.group] = max(sizes.get(row.group, 0), size)
        others = sum(size for key, size in self.others.items() if counts(key))
        return others + sum(sizes.values())
