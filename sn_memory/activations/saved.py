"""Saved tensors of a model: error and bytes of each at given bits, and the bits a budget allows.

Several saved tensors may share one memory, which is counted once. Under a budget, inputs of linear
ops get bits from 1 up, where a bit helps most. The error of a tensor falls with each width by more
than its bytes grow, so the greedy order is optimal except for the last step. The inputs of norms
are reduced to 4 and 2 bits, all alike, until at least 2 bits are left for the linear ones; then, if
allowed, the tensors that are not linear.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import pairwise
from typing import Final, Literal

from ..base.sizes import show_bytes
from ..plan.plan import BudgetError

LossyTreatment = Literal["linear", "norm", "nonlinear"]
"""Lossy treatments, by how the op's backward pass uses the tensor: see Treatment."""
Treatment = Literal["linear", "norm", "sign", "mask", "shape", "nonlinear", "exact"]
"""How a tensor that an op saved is kept.

linear      lossy and unbiased, at the bits the controller chooses
norm        the same, with separate grids per row, and 2 bits or more: in x, normalized by the kept
            mean and deviation, dx = g - mean(g) - x mean(g x) is linear except for one part in the
            length of a row, where an element's error is multiplied by itself
sign        whether it is above zero: 1 bit
mask        which of two values: 1 bit, if it has only two values, else as "nonlinear"
shape       nothing but its shape and dtype
nonlinear   lossy and unbiased, at 8 bits unless a budget requires fewer
exact       unchanged
"""

_TABLE: Final[dict[Treatment, frozenset[str]]] = {
    "linear": frozenset(
        (
            *("linear", "conv1d", "conv2d", "conv3d"),
            *("matmul", "mm", "bmm", "addmm", "baddbmm", "einsum"),
        )
    ),
    "norm": frozenset(("layer_norm", "batch_norm", "group_norm", "instance_norm")),
    "sign": frozenset(("relu", "relu_", "leaky_relu", "leaky_relu_")),
    "mask": frozenset(("dropout", "dropout1d", "dropout2d", "dropout3d")),
    "shape": frozenset(("max_pool1d", "max_pool2d", "max_pool3d", "nll_loss")),
    # Values that are compared, or exponents; and tensors not yet written when saved (only RReLU's
    # noise among torch's ops), so that the tensor itself has to be kept.
    "exact": frozenset(
        (
            *("embedding", "ctc_loss", "logsumexp", "threshold", "threshold_", "max", "min"),
            *("amax", "rrelu", "rrelu_", "rrelu_with_noise", "rrelu_with_noise_"),
        )
    ),
}
_BY_OP: Final = {op: kind for kind, ops in _TABLE.items() for op in ops}


def treatment(op: str) -> Treatment:
    """Return how floats of the size of its input that this op saved are kept.

    Unbiased errors are harmless only where the backward pass is linear in the saved tensor (inputs
    of matrix products and convolutions: arXiv 2605.01255). A ReLU needs only signs, a dropout its
    mask, a pooling layer indices and a shape: these are kept exactly.

    Parameters
    ----------
    op
        The function's name, as in torch.nn.functional.

    Examples
    --------
    >>> [treatment(op) for op in ("conv2d", "relu", "gelu")]
    ['linear', 'sign', 'nonlinear']
    """
    # An op without an entry is not assumed linear: a biased gradient would go unnoticed.
    return _BY_OP.get(op, "nonlinear")


def gradient_sd(
    variance: float, gradient_energy: float, outputs: int, coverage: float = 1.0
) -> float:
    """Return the standard deviation of the error of an entry of dW.

    A linear layer's gradient is dW = dY^T X. With X' = X + E, where the errors E are independent
    with mean zero and variance v[n, i], the variance of an entry's error is exactly
    sum over n of dY[n, o]^2 v[n, i]. Its mean over the entries is v ||dY||^2 / outputs, with v the
    mean of v[n, i], if errors and dY are uncorrelated. For a convolution, n runs over images and
    positions; at the border some taps fall on padding, which has no error. Nothing here is fitted:
    the paper (Jin et al., arXiv 2011.09017) uses an empirical constant, and the mean magnitude of
    dY where the mean square belongs.

    Parameters
    ----------
    variance
        Mean variance of the error of an element of X, zeros included.
    gradient_energy
        The sum of dY^2 over all outputs of the layer.
    outputs
        Features or channels of Y.
    coverage
        Fraction of the products of a convolution that do not involve padding.

    Examples
    --------
    >>> round(gradient_sd(variance=0.03, gradient_energy=64.0, outputs=16), 4)
    0.3464
    """
    return math.sqrt(variance * gradient_energy / max(outputs, 1) * coverage)


def error_tolerance(
    sd: float, gradient_energy: float, outputs: int, nonzero: float = 1.0, coverage: float = 1.0
) -> float:
    """Return the tolerance at which uniform errors of the non-zeros give dW this deviation.

    A uniform error in [-tolerance, tolerance] has the variance tolerance^2 / 3. Infinite if dY is
    zero.
    """
    # `gradient_sd` solved for the variance; zeros are kept exactly, so they have no error.
    weight = gradient_energy / max(outputs, 1) * coverage * nonzero
    return sd * math.sqrt(3 / weight) if weight else math.inf


def coverage(
    inputs: Sequence[int],
    outputs: Sequence[int],
    kernel: Sequence[int],
    stride: Sequence[int],
    padding: Sequence[int],
    dilation: Sequence[int],
) -> float:
    """Return the fraction of a convolution's (position, tap) pairs that lie inside the input.

    One number per spatial dimension in each argument.

    Examples
    --------
    >>> coverage([4], [4], [3], [1], [1], [1])  # 2 of 12 pairs are off the ends
    0.8333333333333334
    """
    inside = 1.0
    # Dimensions are independent, so the fractions multiply.
    for size, out, taps, step, pad, apart in zip(
        inputs, outputs, kernel, stride, padding, dilation, strict=True
    ):
        hits = sum(
            0 <= position * step + tap * apart - pad < size
            for position in range(out)
            for tap in range(taps)
        )
        inside *= hits / max(out * taps, 1)
    return inside


# Widths that divide a byte.
WIDTHS: Final = (1, 2, 4, 8)
# Overflows after which a tensor is kept uncompressed from then on.
OVERFLOWS: Final = 3
# Per element, for the grid of its group of 256.
_GRID_BYTES: Final = 6 / 256


@dataclass(frozen=True)
class Row:
    """One saved tensor: its observed statistics, and predictions from them.

    key : module path, op, slot
    n : elements
    bits : per element, at the last observation; None: kept uncompressed
    variance : mean variance of the rounding, at the last observation
    nonzero : fraction of elements that are not zero
    gradient_energy : sum of squares of the gradient of the layer's output; None until observed
    outputs, coverage : of the layer: features, fraction of its products that do not involve padding
    yardstick : mean magnitude of the weight's momentum, or its substitute
    overflows : how often it had to be kept exactly because too many elements overflowed
    measured_sd : standard deviation of the gradient's error, if measured
    group : name of its memory, if shared with others
    kind : how its op's backward pass uses it
    seconds : to pack and unpack it, in the first pass; 0: not measured
    """

    key: str
    n: int
    bits: int | None
    variance: float
    nonzero: float = 1.0
    gradient_energy: float | None = None
    outputs: int = 1
    coverage: float = 1.0
    yardstick: float = 0.0
    overflows: int = 0
    measured_sd: float | None = None
    group: str = ""
    kind: LossyTreatment = "linear"
    seconds: float = 0.0

    def predicted_sd(self, bits: int | None = None) -> float | None:
        """Return the standard deviation of the error of dW at these bits, or the current ones.

        None if dY has not been observed.
        """
        if self.gradient_energy is None:
            return None
        variance = self.variance_at(self.bits if bits is None else bits)
        return gradient_sd(variance, self.gradient_energy, self.outputs, self.coverage)

    def variance_at(self, bits: int | None) -> float:
        """Return the variance of the rounding at these bits, proportional to the step squared."""
        if self.bits is None or bits is None:
            return 0.0
        # The step is the range over the levels, and the range stays the same.
        return self.variance * (_levels(self.bits) / _levels(bits)) ** 2

    def gain(self, low: int, high: int) -> float:
        """Return the squared relative error saved per byte by `high` bits instead of `low`."""
        sds = [self.predicted_sd(bits) for bits in (low, high)]
        if sds[0] is None or sds[1] is None or not self.yardstick:
            return 0.0
        saved = (sds[0] ** 2 - sds[1] ** 2) / self.yardstick**2
        # Per bit, not per byte: a factor of 8 does not change the order.
        return saved / max(self.n * (high - low), 1)


def compressed_bytes(n: int, bits: int | None) -> int:
    """Return the bytes of n elements in groups of 256, including grids; None: kept as float32.

    Examples
    --------
    >>> compressed_bytes(2560, 4), compressed_bytes(2560, None)
    (1340, 10240)
    """
    return 4 * n if bits is None else math.ceil(n * (bits / 8 + _GRID_BYTES))


@dataclass(frozen=True)
class Saved:
    """Tensors one forward pass saved: bytes that autograd would hold, and bytes actually held."""

    plain_bytes: int
    compressed_bytes: int
    elements: int
    ways: tuple[tuple[str, int, int], ...] = ()
    """Per way of keeping tensors: its name, their number, and bytes that autograd would hold."""

    @property
    def ratio(self) -> float:
        """Ratio of plain to compressed bytes."""
        return self.plain_bytes / max(self.compressed_bytes, 1)

    def __str__(self) -> str:
        return (
            f"activations {show_bytes(self.plain_bytes)} -> {show_bytes(self.compressed_bytes)}, "
            f"{self.ratio:.1f} times less"
            + "".join(f"; {n} {what}, {show_bytes(size)}" for what, n, size in self.ways if n)
        )


@dataclass(frozen=True)
class Cost:
    """Cost of one way to keep some tensors: seconds, plain bytes, and bytes held instead."""

    seconds: float
    plain_bytes: float
    held_bytes: float

    def saved_by(self, other: Cost, price: float) -> float:
        """Return the seconds that another way saves, with bytes converted to seconds by `price`.

        0 if the other way holds more bytes, however fast it is.

        price : seconds that packing takes for each byte it frees, in the whole network

        Examples
        --------
        >>> packed, again = Cost(3.0, 400, 100), Cost(1.0, 400, 90)
        >>> packed.saved_by(again, price=0.01), again.saved_by(packed, price=0.01)
        (2.1, 0.0)
        """
        if other.held_bytes > self.held_bytes:
            return 0.0
        return self.seconds - other.seconds + price * (self.held_bytes - other.held_bytes)


@dataclass(frozen=True)
class Timed:
    """A tensor that a first pass kept: the modules and the call that saved it, and its cost.

    `nbytes` is its own size, `plain_bytes` what autograd would hold that was not saved before;
    `way` is how it is kept, `rounded` whether in fewer bits. `memory` identifies the device memory
    that it shares with others; 0: in host memory.
    """

    within: frozenset[str]
    way: str
    rounded: bool
    nbytes: int
    plain_bytes: int
    held_bytes: int
    seconds: float
    key: str = ""
    memory: int = 0


def rates_of(timed: Sequence[Timed]) -> dict[str, float]:
    """Return seconds of packing and unpacking a byte by way; "": over all rounded tensors.

    Over all tensors kept one way together, as a single one is too fast to be measured.
    """
    taken: dict[str, list[float]] = {}
    for call in timed:
        for way in (call.way, "") if call.rounded else (call.way,):
            total = taken.setdefault(way, [0.0, 0.0])
            total[0], total[1] = total[0] + call.seconds, total[1] + call.nbytes
    return {way: seconds / max(nbytes, 1) for way, (seconds, nbytes) in taken.items()}


def packing_of(timed: Sequence[Timed], rates: Mapping[str, float]) -> Cost:
    """Return the cost of keeping these tensors as the first pass did."""
    return Cost(
        sum(rates[call.way] * call.nbytes for call in timed),
        sum(call.plain_bytes for call in timed),
        sum(call.held_bytes for call in timed),
    )


# Without a budget, recomputation may cost up to this many times packing's seconds per freed byte.
_DEAREST: Final = 4


def cheapest_reruns(
    kept: Mapping[str, Cost],
    again: Mapping[str, Cost],
    price: float,
    *,
    within: Callable[[str, str], bool],
    fits: Callable[[Mapping[str, float]], bool] | None,
) -> dict[str, float]:
    """Return the places to recompute, and the seconds that each saves, with bytes at their price.

    kept, again : cost of a place as it is kept now, and recomputed; enclosing places come before
        those they contain
    price : seconds that packing takes for each byte it frees. Four times that is paid without a
        budget; with one it is doubled until the budget is kept, or all that frees bytes is rerun.
    within : whether the first of two places is a part of the second
    fits : whether a choice keeps the budget; None: no budget
    """
    # Doubled 20 times, a byte is worth any rerun: then everything that frees bytes was tried.
    dearest = price * (_DEAREST if fits is None else 2**20)
    price = dearest if fits is None else price
    while True:
        saving: dict[str, float] = {}
        # The innermost first; an enclosing place replaces them if it saves more than they do.
        for place in reversed(list(again)):
            gain = kept[place].saved_by(again[place], price)
            inside = {part for part in saving if within(part, place)}
            if gain > sum(saving[part] for part in inside):
                saving = {part: saving[part] for part in saving if part not in inside}
                saving[place] = gain
        if price >= dearest or fits is None or fits(saving):
            return saving
        price *= 2


def _levels(bits: int) -> int:
    return (1 << bits) - 1


Groups = dict[str, list[Row]]


class Observed:
    """Rows by key, and, by key, bytes that do not depend on the choice of bits."""

    def __init__(self) -> None:
        self.rows: dict[str, Row] = {}
        self.others: dict[str, int] = {}

    def is_free(self, row: Row) -> bool:
        """Whether the row's bits can be chosen."""
        return row.bits is not None and row.overflows < OVERFLOWS

    @property
    def free(self) -> list[Row]:
        return [row for row in self.rows.values() if self.is_free(row)]

    def groups(self) -> tuple[Groups, Groups, Groups]:
        """Return groups of compressed rows: all rows linear, some read by norms, the rest."""
        memories: Groups = {}
        for row in self.free:
            memories.setdefault(row.group, []).append(row)
        by_kind: tuple[Groups, Groups, Groups] = {}, {}, {}
        for group, rows in memories.items():
            kinds = {row.kind for row in rows}
            # The strictest reader decides for all: there is one copy of the memory.
            by_kind[2 if "nonlinear" in kinds else int("norm" in kinds)][group] = rows
        return by_kind

    def held(self, linear_bits: int, norm_bits: int, nonlinear_bits: int) -> int:
        """Return the bytes kept at these bits."""
        # By memory: rows of one group share the same bytes.
        exact = {
            row.group: compressed_bytes(row.n, None)
            for row in self.rows.values()
            if not self.is_free(row)
        }
        widths = linear_bits, norm_bits, nonlinear_bits
        compressed = (
            compressed_bytes(rows[0].n, bits)
            for groups, bits in zip(self.groups(), widths, strict=True)
            for rows in groups.values()
        )
        return sum(self.others.values()) + sum(exact.values()) + sum(compressed)

    def held_at(self, bits: Mapping[str, int | None]) -> int:
        """Return bytes kept with bits by key: each memory once, at the most bits of its rows."""
        sizes: dict[str, int] = {}
        for row in self.rows.values():
            size = compressed_bytes(row.n, bits[row.key])
            sizes[row.group] = max(sizes.get(row.group, 0), size)
        return sum(self.others.values()) + sum(sizes.values())


@dataclass(frozen=True)
class Choice:
    """Bits that a budget allows.

    bits : by key; None: uncompressed
    nonlinear_bits : bits of tensors that are not linear
    nonlinear, tensors : number of memories of that kind, and of all kinds
    """

    bits: dict[str, int | None]
    nonlinear_bits: int
    nonlinear: int
    tensors: int


def choose(
    seen: Observed, budget_bytes: int, *, nonlinear_bits: int, least_nonlinear_bits: int
) -> Choice:
    """Return bits with which all kept tensors fit in a budget.

    If bytes are left at the most bits, the tensors whose packing takes the most seconds for each
    freed byte are left uncompressed.

    seen : the tensors to keep
    nonlinear_bits, least_nonlinear_bits : bits of tensors that are not linear: preferred, and the
        fewest if the budget requires it

    Raises BudgetError with the bytes at the fewest bits.
    """
    widths = [width for width in (8, 4, 2) if width <= nonlinear_bits] or [nonlinear_bits]
    # Bits of norms are reduced first.
    ways = [(norm, widths[0]) for norm in widths]
    ways += [(norm, width) for width in widths[1:] for norm in widths if norm <= width]
    for norm, width in (way for way in ways if way[1] >= min(least_nonlinear_bits, widths[0])):
        if seen.held(2, norm, width) <= budget_bytes:
            break
    # If no way leaves 2 bits for the linear tensors, the last one is tried with 1.
    linear, norms, rest = seen.groups()
    least = seen.held(1, norm, width)
    if least > budget_bytes:
        raise BudgetError(
            f"saved tensors take {least} bytes at the fewest bits; expected "
            f"{budget_bytes} at most. Raise the budget, give a smaller batch, allow fewer "
            f"bits for what is not linear (least_nonlinear_bits, {width} now), or let modules run "
            "again: plan(model, sample, budget).",
            peak_bytes=least,
            budget_bytes=budget_bytes,
            op=max(seen.rows.values(), key=lambda row: row.n).key,
        )
    bits: dict[str, int | None] = {row.key: width for rows in rest.values() for row in rows}
    bits |= {row.key: norm for rows in norms.values() for row in rows}
    bits |= _widened(linear, budget_bytes - least)
    # Tensors are left uncompressed only if all others have the most bits.
    left = budget_bytes - seen.held(WIDTHS[-1], widths[0], widths[0])
    bits |= _left_exact([*linear.values(), *norms.values(), *rest.values()], widths[0], left)
    return Choice(bits, width, len(rest), len(rest) + len(norms) + len(linear))


def _left_exact(groups: Sequence[list[Row]], bits: int, left_bytes: int) -> dict[str, None]:
    """Return keys of tensors that the bytes left over at the most bits suffice to keep exact."""

    def more_bytes(rows: list[Row]) -> int:
        return compressed_bytes(rows[0].n, None) - compressed_bytes(rows[0].n, bits)

    def rank(rows: list[Row]) -> tuple[float, str]:
        # Most seconds per byte first; keys break ties, so that a restart makes the same choice.
        return -sum(row.seconds for row in rows) / more_bytes(rows), rows[0].key

    exact: dict[str, None] = {}
    for rows in sorted(groups, key=rank):
        if rows[0].seconds and more_bytes(rows) <= left_bytes:
            left_bytes -= more_bytes(rows)
            exact |= dict.fromkeys(row.key for row in rows)
    return exact


def _widened(linear: Groups, left_bytes: int) -> dict[str, int]:
    """Return bits by key, widened from 1 where a byte saves the most error, while bytes last."""
    chosen = dict.fromkeys(linear, 1)
    steps = sorted(
        ((sum(row.gain(low, high) for row in rows), group, low, high)
         for group, rows in linear.items() for low, high in pairwise(WIDTHS)),
        # For equal gains, the narrow step first, as a wider one starts where it ends.
        key=lambda step: (-step[0], step[2]),
    )  # fmt: skip
    for _, group, low, high in steps:
        n = linear[group][0].n
        cost = compressed_bytes(n, high) - compressed_bytes(n, low)
        # A group without enough bytes left for a step takes none of its later steps.
        if chosen[group] == low and cost <= left_bytes:
            chosen[group], left_bytes = high, left_bytes - cost
    return {row.key: chosen[group] for group, rows in linear.items() for row in rows}
