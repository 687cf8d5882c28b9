"""Tensors as matrices, their products with few directions, and sums of gradient and memory.

**Products** with a few directions take most of the time of a low-rank step. Factors are stored
transposed, [directions, rows] and [directions, columns]. On a host with AVX2 or more, the compiled
kernels compute them with a fixed summation order, the same for every instruction set, block and
thread, and without fused multiply-add, so that results are bit-identical on all of them. The array
forms are the reference: equal to within the rounding of float32 sums.

**A tensor as a matrix** is its shape split between two axes. The obvious split is the first axis
against all others, as in PowerSGD. It suits kernels of shape (out, in, height, width). Keras has
(height, width, in, out), which gives a matrix of three rows; stacks of experts and the
(heads, d, D) kernels of attention fare no better. A factor of rank r has r (rows + columns)
numbers, so the split with the least sum is chosen.

**A matrix's dominant directions** are found by power iteration. PowerSGD runs one iteration per
step, from the previous step's factor; without one, or with an old one, more are needed (Halko,
Martinsson, Tropp 2011, algorithm 4.4). The library's QR orthonormalizes the result. Ranks that must
obtain the same bits use `orthonormal.py` instead.

**The hardware fingerprint** shows whether ranks compute float32 products with the same bits. The
order in which a library sums a product depends on the processor, the threads and the release. Their
names are compared, and a digest of a few products, as a name does not show which kernels a library
has chosen. Ranks with equal fingerprints multiply the final factors in float32, others in float64
with a fixed order, which takes longer (`allreduce/methods/low_rank.py`).
"""

from __future__ import annotations

import hashlib
import math
import platform
import sys
from collections.abc import Callable, Iterator, Sequence
from functools import lru_cache
from typing import Any

import numpy as np
import numpy.typing as npt

from .. import _native
from ..arrays import (
    Array,
    asarray_like,
    device_of,
    full_fp32_matmul,
    host_threads,
    host_view,
    is_fixed,
    is_torch,
    join,
    matrix_transpose,
    namespace,
    product,
    split,
    squared_norm,
    subtract_product,
    to_host,
)

_CHUNK = 1 << 18  # elements of a matrix that a thread processes at a time
_Host = npt.NDArray[Any]


def kernel(core: Any) -> int | None:
    """Return the fastest of the extension's kernels; None if the libraries' are faster."""
    # Kernel 0 runs on any processor, but is slower than a BLAS.
    last: int = core.product_kernels() - 1 if core is not None else 0
    return last or None


def times_rows(factors: Sequence[Array], matrices: Sequence[Array]) -> Array:
    """Return factor @ matrix.T of each, concatenated, [sum of directions * rows]."""
    shapes = [(q.shape[0], m.shape[0]) for q, m in zip(factors, matrices, strict=True)]
    flat, sums = _into(matrices, shapes)
    if sums and _run("times_rows", matrices, sums, factors, axis=0):
        return flat
    return _joined([q @ matrix_transpose(m) for q, m in zip(factors, matrices, strict=True)])


def times_columns(factors: Sequence[Array], matrices: Sequence[Array]) -> Array:
    """Return factor @ matrix of each, concatenated, [sum of directions * columns]."""
    shapes = [(p.shape[0], m.shape[1]) for p, m in zip(factors, matrices, strict=True)]
    flat, sums = _into(matrices, shapes)
    if sums and _run("times_columns", matrices, factors, sums, axis=1):
        return flat
    return _joined([p @ m for p, m in zip(factors, matrices, strict=True)])


def outer(
    left: Sequence[Array], right: Sequence[Array], outs: Sequence[Array] | None
) -> list[Array]:
    """Return left.T @ right of each, [rows, columns], written to `outs` if not None."""
    if host_view(left[0]) is not None and kernel(_native.core()) is not None:
        xp = namespace(left[0])
        sides = [(a.shape[1], b.shape[1]) for a, b in zip(left, right, strict=True)]
        results = outs or [xp.empty(shape, dtype=xp.float32) for shape in sides]
        if _run("outer", results, left, right, axis=0):
            return list(results)
    into = outs or [None] * len(left)
    return [
        product(matrix_transpose(a), b, out) for a, b, out in zip(left, right, into, strict=True)
    ]


def subtract_outer(
    matrices: Sequence[Array], left: Sequence[Array], right: Sequence[Array]
) -> list[Array]:
    """Subtract left.T @ right from each matrix, in place if possible; return the matrices."""
    if _run("outer", matrices, left, right, axis=0, subtract=True):
        return list(matrices)
    return [
        subtract_product(m, matrix_transpose(a), b)
        for m, a, b in zip(matrices, left, right, strict=True)
    ]


def _run(
    name: str, matrices: Sequence[Array], left: Sequence[Array], right: Sequence[Array],
    *, axis: int, subtract: bool = False,
) -> bool:  # fmt: skip
    """Run a kernel on pieces of matrices along an axis; False if no kernel supports them."""
    if host_view(matrices[0]) is None:
        return False
    core = _native.core()
    fastest = kernel(core)
    if fastest is None:
        return False
    # Take all views before computing: a fallback halfway would repeat part of an in-place product.
    called: list[tuple[_Host, _Host, _Host]] = []
    for three in zip(matrices, left, right, strict=True):
        views = [host_view(array) for array in three]
        if any(view is None for view in views):
            return False
        called.append(tuple(views))  # type: ignore[arg-type]
    function: Callable[..., None] = getattr(core, name)
    pieces = [
        (at, start, min(start + step, m.shape[axis]))
        for at, (m, _, _) in enumerate(called)
        # Multiples of 64, which kernels process at a time: no sum crosses pieces, so the number of
        # threads and the sizes of pieces change no bit.
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
    """Allocate a vector for products, and views of these shapes; nothing if there is no kernel."""
    if host_view(matrices[0]) is None or kernel(_native.core()) is None:
        return None, []
    xp, sizes = namespace(matrices[0]), [rows * columns for rows, columns in shapes]
    flat = xp.empty(sum(sizes), dtype=xp.float32, device=device_of(matrices[0]))
    pieces = zip(split(flat, sizes), shapes, strict=True)
    return flat, [piece.reshape(shape) for piece, shape in pieces]


def _joined(factors: Sequence[Array]) -> Array:
    xp = namespace(factors[0])
    return join([xp.reshape(factor, (-1,)) for factor in factors])


def exact_outer(
    left: Sequence[Array], right: Sequence[Array], outs: Sequence[Array] | None
) -> list[Array]:
    """See `outer`; with a fixed order of sums and one rounding, for ranks on different hardware."""
    into = outs or [None] * len(left)
    return [
        _exact(matrix_transpose(a), b, out) for a, b, out in zip(left, right, into, strict=True)
    ]


def _exact(left: Array, right: Array, out: Array | None) -> Array:
    xp = namespace(left)
    left, right = xp.astype(left, xp.float64), xp.astype(right, xp.float64)
    # One direction after another, with the array API's elementwise operations: a library can
    # neither choose the order of sums, nor fuse a product with a sum.
    total = left[:, :1] * right[:1, :]
    for place in range(1, right.shape[0]):
        total = total + left[:, place : place + 1] * right[place : place + 1, :]
    total = xp.astype(total, xp.float32)
    if out is None:
        return total
    out[...] = total
    return out


def cut(shape: Sequence[int]) -> tuple[int, int]:
    """Return the rows and columns of a tensor as a matrix, by a plain reshape.

    shape : sizes of the axes, 0 or more; () is a scalar
    Returns (prod(left), prod(right)) of the split with the least sum; ties go to the earliest. A
    vector is one row.

    >>> cut((3, 3, 256, 256)), cut((256, 64, 3, 3)), cut((12, 64, 768)), cut((1000,))
    ((2304, 256), (256, 576), (768, 768), (1, 1000))
    """
    cuts = ((math.prod(shape[:at]), math.prod(shape[at:])) for at in range(len(shape) + 1))
    return min(cuts, key=sum)


_SEED = 2019


def first_factor(columns: int, rank: int) -> npt.NDArray[np.float32]:
    """Return a power iteration's start, [columns, rank]: the same normal numbers on every rank."""
    rng = np.random.default_rng((_SEED, columns, rank))
    return rng.standard_normal((columns, rank), dtype=np.float32)


def directions(matrix: Array, start: Array, rounds: int = 0) -> Array:
    """Return orthonormal columns, [rows, rank], that capture nearly the most energy of a matrix.

    matrix : [rows, columns], finite, floats; squares of its numbers must not overflow
    start : [columns, rank] of the same type, rank at most rows
    rounds : iterations after the first; each costs two products with the matrix
    """
    xp = namespace(matrix)
    basis = xp.linalg.qr(matrix @ start)[0]
    for _ in range(rounds):
        basis = xp.linalg.qr(matrix @ (matrix.T @ basis))[0]
    return basis


_SQUARES_CHUNK = 1 << 18  # elements whose squares are summed separately, whatever the threads


def remember(memory: Array, gradient: Array, decay: float, out: Array | None = None) -> Array:
    """Return memory * decay + gradient, [n] float32.

    out : buffer of [n] float32 to write to, distinct from both arguments
    """
    if is_torch(memory):
        return sys.modules["torch"].add(gradient, memory, alpha=decay, out=out)
    if is_fixed(memory):
        return (memory if decay == 1 else memory * decay) + gradient
    xp = namespace(memory)
    part = memory if decay == 1 else xp.multiply(memory, xp.float32(decay), out=out)
    return xp.add(part, gradient, out=out)


def remembered(
    memory: Array, gradient: Array, decay: float, out: Array | None = None
) -> tuple[Array, Array]:
    """Return the result of `remember`, and the sum of its squares, 0-d float32.

    On a host the extension computes both in one pass, with its own summation order.
    """
    held, new, core = host_view(memory), host_view(gradient), None
    if held is not None and new is not None:
        core = _native.core()
    if held is None or new is None or core is None:
        vector = remember(memory, gradient, decay, out)
        return vector, squared_norm(vector)
    xp = namespace(memory)
    vector = xp.empty_like(memory) if out is None else out
    into = to_host(vector)
    pieces = range(0, max(into.size, 1), _SQUARES_CHUNK)

    def work(starts: Iterator[int]) -> list[tuple[int, float]]:
        sums = []
        for start in starts:
            here = slice(start, start + _SQUARES_CHUNK)
            sums.append((start, core.remember(held[here], new[here], float(decay), into[here])))
        return sums

    shares = _native.parallel(work, pieces, host_threads(memory))
    # In the order of the pieces, whichever thread was first: a sum of floats depends on its order.
    squares = sorted(pair for share in shares for pair in share)
    energy = sum(square for _, square in squares)
    return vector, xp.asarray(energy, dtype=xp.float32)


# [rows, directions, columns]: below and above the kernels' tile sizes, and odd sizes.
_SHAPES = ((3, 2, 5), (64, 4, 64), (257, 7, 129), (1000, 16, 96), (96, 33, 1000))


def hardware_fingerprint(like: Array) -> list[tuple[str, str]]:
    """Return what must be equal on all ranks, for the array library and device of `like`.

    Copies a few numbers to the host; called at the start, and when the set of ranks has changed.
    """
    library = namespace(like).__name__.rpartition(".")[2]
    return [
        ("array library", library),
        ("processor", f"{platform.machine()} {device_of(like)}"),
        ("products", _digest(like)),
    ]


def _digest(like: Array) -> str:
    digest = hashlib.sha256()
    with full_fp32_matmul(like):
        for rows, size, columns in _SHAPES:
            left, right = _factor(size, rows), _factor(size, columns)
            (result,) = outer([asarray_like(left, like)], [asarray_like(right, like)], None)
            digest.update(to_host(result).tobytes())
    return digest.hexdigest()[:16]


@lru_cache(maxsize=32)
def _factor(rows: int, columns: int) -> Any:
    """Return numbers that use all bits of float32's significand, the same on every machine."""
    # Full significands: sums of short products would be exact in any order, and show nothing.
    integers = np.random.default_rng(rows * columns).integers(-(2**23), 2**23, (rows, columns))
    return (integers / 2**23).astype(np.float32)
