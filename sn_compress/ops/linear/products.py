"""Products of matrices with a few directions each: what a low-rank step spends its time on.

Factors lie transposed, [directions, rows] and [directions, columns]. On a host with AVX2 or more
the compiled kernels compute them: an order of sums of their own, the same for every instruction
set, block and thread, and no fused multiply-add, so that the bits are the same on all of them. The
array forms are the oracle: equal to within the rounding of float32 sums.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import numpy.typing as npt

from ...devices import _native
from ...devices.arrays import (
    Array,
    device_of,
    host_threads,
    host_view,
    join,
    namespace,
    product,
    split,
    subtract_product,
    turned,
)

_CHUNK = 1 << 18  # elements of a matrix that a thread takes at a time
_Host = npt.NDArray[Any]


def kernel(core: Any) -> int | None:
    """The fastest of the extension's kernels; None where libraries have faster ones."""
    last: int = core.product_kernels() - 1 if core is not None else 0
    return last or None


def times_rows(factors: Sequence[Array], matrices: Sequence[Array]) -> Array:
    """[sum of directions * rows]: factor @ matrix.T of each, one behind the other."""
    shapes = [(q.shape[0], m.shape[0]) for q, m in zip(factors, matrices, strict=True)]
    flat, sums = _into(matrices, shapes)
    if sums and _run("times_rows", matrices, sums, factors, axis=0):
        return flat
    return _joined([q @ turned(m) for q, m in zip(factors, matrices, strict=True)])


def times_columns(factors: Sequence[Array], matrices: Sequence[Array]) -> Array:
    """[sum of directions * columns]: factor @ matrix of each, one behind the other."""
    shapes = [(p.shape[0], m.shape[1]) for p, m in zip(factors, matrices, strict=True)]
    flat, sums = _into(matrices, shapes)
    if sums and _run("times_columns", matrices, factors, sums, axis=1):
        return flat
    return _joined([p @ m for p, m in zip(factors, matrices, strict=True)])


def outer(
    left: Sequence[Array], right: Sequence[Array], outs: Sequence[Array] | None
) -> list[Array]:
    """left.T @ right of each, [rows, columns], in `outs` if there are any."""
    if host_view(left[0]) is not None and kernel(_native.core()) is not None:
        xp = namespace(left[0])
        sides = [(a.shape[1], b.shape[1]) for a, b in zip(left, right, strict=True)]
        made = outs or [xp.empty(shape, dtype=xp.float32) for shape in sides]
        if _run("outer", made, left, right, axis=0):
            return list(made)
    into = outs or [None] * len(left)
    return [product(turned(a), b, out) for a, b, out in zip(left, right, into, strict=True)]


def subtract_outer(
    matrices: Sequence[Array], left: Sequence[Array], right: Sequence[Array]
) -> list[Array]:
    """Each matrix less left.T @ right, in its place where the library can."""
    if _run("outer", matrices, left, right, axis=0, subtract=True):
        return list(matrices)
    return [
        subtract_product(m, turned(a), b) for m, a, b in zip(matrices, left, right, strict=True)
    ]


def _run(
    name: str, matrices: Sequence[Array], left: Sequence[Array], right: Sequence[Array],
    *, axis: int, subtract: bool = False,
) -> bool:  # fmt: skip
    """Call a kernel for pieces of matrices along an axis; False where there is none for them."""
    if host_view(matrices[0]) is None:
        return False
    core = _native.core()
    fastest = kernel(core)
    if fastest is None:
        return False
    called: list[tuple[_Host, _Host, _Host]] = []
    for three in zip(matrices, left, right, strict=True):
        views = [host_view(it) for it in three]
        if any(view is None for view in views):
            return False
        called.append(tuple(views))  # type: ignore[arg-type]
    function: Callable[..., None] = getattr(core, name)
    pieces = [
        (at, start, min(start + step, m.shape[axis]))
        for at, (m, _, _) in enumerate(called)
        for step in (max(64, _CHUNK * m.shape[axis] // max(m.size, 1) // 64 * 64),)
        for start in range(0, m.shape[axis], step)
    ]

    def work(places: Iterator[int]) -> None:
        for place in places:
            at, first, last = pieces[place]
            m, a, b = called[at]
            function(m, a, b, *m.shape, len(a), first, last, subtract, fastest)

    _native.parallel(work, range(len(pieces)), host_threads(matrices[0]))
    return True


def _into(
    matrices: Sequence[Array], shapes: Sequence[tuple[int, int]]
) -> tuple[Array, list[Array]]:
    """Room for products of these shapes, in one vector and each; nothing where no kernel is."""
    if host_view(matrices[0]) is None or kernel(_native.core()) is None:
        return None, []
    xp, sizes = namespace(matrices[0]), [rows * columns for rows, columns in shapes]
    flat = xp.empty(sum(sizes), dtype=xp.float32, device=device_of(matrices[0]))
    pieces = zip(split(flat, sizes), shapes, strict=True)
    return flat, [piece.reshape(shape) for piece, shape in pieces]


def _joined(factors: Sequence[Array]) -> Array:
    xp = namespace(factors[0])
    return join([xp.reshape(it, (-1,)) for it in factors])


def exact_outer(
    left: Sequence[Array], right: Sequence[Array], outs: Sequence[Array] | None
) -> list[Array]:
    """See `outer`; one order of sums and one rounding, for ranks of unlike hardware."""
    into = outs or [None] * len(left)
    return [_exact_product(turned(a), b, out) for a, b, out in zip(left, right, into, strict=True)]


def _exact_product(left: Array, right: Array, out: Array | None) -> Array:
    """Left @ right with one order of sums and one rounding, for ranks of unlike hardware."""
    xp = namespace(left)
    left, right = xp.astype(left, xp.float64), xp.astype(right, xp.float64)
    total = left[:, :1] * right[:1, :]
    for place in range(1, right.shape[0]):
        total = total + left[:, place : place + 1] * right[place : place + 1, :]
    total = xp.astype(total, xp.float32)
    if out is None:
        return total
    out[...] = total
    return out
