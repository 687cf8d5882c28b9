"""The extension's twins of a low-rank step: the array forms' bits, or one order of sums."""

import numpy as np
import pytest
import torch
from samples import alike

from sn_compress import _native
from sn_compress.arrays import full_fp32_matmul, host_view
from sn_compress.ops import products
from sn_compress.ops.fixed_point import FixedPointColumns
from sn_compress.ops.orthonormal import Orthonormal

MAKES = {"numpy": np.asarray, "torch": torch.asarray}


def drawn(rng, *shape):
    """Numbers of many sizes, denormals and zeros among them."""
    values = rng.standard_normal(shape) * 2.0 ** rng.integers(-20, 20, shape)
    few = rng.random(shape)
    return np.where(few < 0.02, 1e-40, np.where(few < 0.04, -0.0, values)).astype(np.float32)


def factors(rng, rows, columns, directions):
    sides = (rows, columns), (directions, rows), (directions, columns)
    return tuple(drawn(rng, *each) for each in sides)


@pytest.fixture
def twins(core, monkeypatch):
    """Calls what it is handed: first without the extension, then with it."""

    def both(call):
        with monkeypatch.context() as patch, np.errstate(all="ignore"):
            patch.setattr(_native, "core", lambda: None)
            expected = call()
        with np.errstate(all="ignore"):
            return call(), expected

    return both


def each_kernel(core, matrix, left, right):
    """Of every instruction set: what the kernels write over NaN, in one piece and in some."""
    rows, columns = matrix.shape
    sizes = (rows, columns, len(left))
    for kernel in range(core.product_kernels()):
        for step in (max(rows, columns), 7):
            p, q = (np.full_like(it, np.nan) for it in (left, right))
            mean, rest = np.full_like(matrix, np.nan), matrix.copy()
            for first in range(0, rows, step):
                here = (first, min(first + step, rows))
                core.times_rows(matrix, p, right, *sizes, *here, 0, kernel)
                core.outer(mean, left, right, *sizes, *here, 0, kernel)
                core.outer(rest, left, right, *sizes, *here, 1, kernel)
            for first in range(0, columns, step):
                here = (first, min(first + step, columns))
                core.times_columns(matrix, left, q, *sizes, *here, 0, kernel)
            yield p, q, mean, rest


@pytest.mark.parametrize(("rows", "columns", "directions"), [
    (1, 1, 1), (1, 1, 16), (31, 32, 2), (31, 32, 33), (33, 63, 7), (33, 63, 16), (4, 1000, 1),
    (4, 1000, 33), (1000, 5, 7), (1000, 5, 2), (130, 257, 16), (130, 257, 33),
])  # fmt: skip
def test_products_have_the_same_bits_on_every_instruction_set(core, rows, columns, directions):
    """In one piece or in some."""
    first, *others = each_kernel(
        core, *factors(np.random.default_rng(rows), rows, columns, directions)
    )
    for found in others:
        for one, other in zip(found, first, strict=True):
            # Zeros may differ in sign where all terms are zero.
            alike(one + 0, other + 0)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf])
def test_products_spread_what_is_not_finite_no_further_than_it_goes(core, value):
    matrix, left, right = factors(np.random.default_rng(1), 37, 45, 3)
    matrix[5, 44] = value
    for p, q, _, rest in each_kernel(core, matrix, left, right):
        assert (np.isfinite(p) == (np.arange(37) != 5)).all()
        assert (np.isfinite(q) == (np.arange(45) != 44)).all()
        assert np.isfinite(rest).sum() == matrix.size - 1
    left[1, 36] = value
    for _, _, mean, _ in each_kernel(core, matrix, left, right):
        assert (np.isfinite(mean) == (np.arange(37) != 36)[:, None]).all()


def test_a_product_of_other_sizes_is_refused(core):
    matrix, left, right = factors(np.random.default_rng(1), 4, 5, 2)
    good = (matrix, left, right, 4, 5, 2, 0, 4, 0, 0)
    core.outer(*good)
    for at, bad in [(0, matrix[:3]), (1, right), (3, 5), (4, -5), (5, 0), (6, -1), (7, 5), (9, 99)]:
        with pytest.raises(ValueError, match="do not belong together"):
            core.outer(*good[:at], bad, *good[at + 1 :])


@pytest.mark.parametrize("threads", [1, 3])
def test_products_are_those_of_the_libraries_but_for_rounding(core, twins, monkeypatch, threads):
    """And the same from arrays of NumPy and of torch, on any number of threads."""
    if products.kernel(core) is None:
        pytest.skip("this processor has no kernels that are used")
    rng = np.random.default_rng(2)
    shapes = [(300, 1000, 5), (33, 63, 2), (2000, 300, 9)]
    matrices, left, right = zip(*(factors(rng, *shape) for shape in shapes), strict=True)

    def all_of(make):
        own = [[make(it.copy()) for it in each] for each in (matrices, left, right)]
        p = products.times_rows(own[2], own[0])
        q = products.times_columns(own[1], own[0])
        outs = [make(np.full_like(it, np.nan)) for it in matrices]
        means = products.outer(own[1], own[2], outs)
        assert all(mean is out for mean, out in zip(means, outs, strict=True))
        for mean, alone in zip(means, products.outer(own[1], own[2], None), strict=True):
            alike(mean, alone)
        left_over = products.subtract_outer(own[0], own[1], own[2])
        assert all(it is m for it, m in zip(left_over, own[0], strict=True))
        return [p, q, *means, *left_over]

    monkeypatch.setattr(products, "host_threads", lambda _: threads)
    found, oracle = twins(lambda: all_of(np.asarray))
    alike(found, all_of(torch.asarray))

    def bound(one, other):
        """Each of n products and n - 1 sums is rounded once, in both forms."""
        return 2 * len(other) * 2.0**-24 * (abs(one).astype(float) @ abs(other))

    pairs = list(zip(matrices, left, right, strict=True))
    p = np.concatenate([bound(b, m.T).reshape(-1) for m, _, b in pairs])
    q = np.concatenate([bound(a, m).reshape(-1) for m, a, _ in pairs])
    means = [bound(a.T, b) for _, a, b in pairs]
    rests = [mean + 2.0**-23 * abs(it) for mean, it in zip(means, oracle[5:], strict=True)]
    for one, other, most in zip(found, oracle, [p, q, *means, *rests], strict=True):
        assert (abs(one - other) <= most).all()


def test_the_kernels_see_memory_of_the_host_only():
    assert host_view(torch.zeros(3)) is not None
    assert host_view(np.zeros(3, np.float32)) is not None
    for other in (
        torch.zeros(3, device="meta"), torch.zeros(3, dtype=torch.float64), torch.zeros(4)[::2],
        np.zeros(4, np.float32)[::2], np.zeros(3), torch.nn.Parameter(torch.zeros(3)),
    ):  # fmt: skip
        assert host_view(other) is None


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize(
    ("n", "decay"),
    [(0, 1.0), (1, 0.75), (31, 0.0), (32, 1.0), (33, 0.75), (1000, 0.0), (2**18 + 5, 0.75)],
)
def test_what_is_remembered_and_its_norm(core, monkeypatch, n, decay, make):
    rng = np.random.default_rng(n)
    memory, gradient = drawn(rng, n), drawn(rng, n)
    out = make(np.full(n, np.nan, np.float32))
    vector, energy = products.remembered(make(memory), make(gradient), decay, out)
    assert vector is out
    alike(vector, memory * np.float32(decay) + gradient)
    exact = float((np.asarray(vector).astype(np.float64) ** 2).sum())
    # 16 sums of a term each of 64 lanes, then float64; the norm is rounded once more.
    assert abs(float(energy) - exact) <= 20 * 2.0**-24 * exact
    assert (energy.shape, energy.dtype) == ((), vector.dtype)
    monkeypatch.setattr(products, "host_threads", lambda _: 3)
    alike(products.remembered(make(memory), make(gradient), decay)[1], energy)


@pytest.mark.parametrize("value", [np.nan, np.inf, -np.inf, 1e30])
@pytest.mark.parametrize("n", [1, 63, 1000])
def test_a_norm_that_is_no_number_is_told(core, n, value):
    memory, gradient = np.zeros(n, np.float32), np.zeros(n, np.float32)
    gradient[-1] = value
    with full_fp32_matmul(memory):
        assert not np.isfinite(products.remembered(memory, gradient, 1.0)[1])


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize("kind", [np.int32, np.float64])
@pytest.mark.parametrize("top", [1, 15, 2**15 - 1])
def test_orthonormal_rows_are_those_of_the_array_form(twins, top, kind, make):
    rng = np.random.default_rng(top)
    shapes = [(3, 40), (5, 20), (1, 7), (2, 2), (3, 33), (1, 1), (2, 40), (33, 63), (20, 1000)]
    each = [rng.integers(-top, top + 1, shape) for shape in shapes]
    each[4][1] = 2 * each[4][0] // 2
    each[0][:] = 0
    flat = np.concatenate([it.reshape(-1) for it in each]).astype(kind)
    orthonormal = Orthonormal(shapes)
    for instead in (None, make(drawn(rng, flat.size))):
        found, expected = twins(lambda instead=instead: orthonormal(make(flat), instead))
        alike(np.asarray(found) + 0, np.asarray(expected) + 0)


@pytest.mark.parametrize("make", MAKES.values(), ids=MAKES)
@pytest.mark.parametrize(("ranks", "fine"), [(1, False), (2, True), (8, False), (2047, False)])
def test_digits_are_those_of_the_array_form(twins, ranks, fine, make):
    rng = np.random.default_rng(ranks)
    columns = FixedPointColumns([(3, 31), (1, 1), (2, 1000), (5, 33), (1, 63)], fine=fine)
    flat = drawn(rng, columns.size)
    flat[:31] = 0  # a column that says nothing
    flat[31:34] = 3e38, -3e38, 1e-45
    exponents = rng.integers(-256, 256, columns.count).astype(np.int32)
    exponents[2:] = rng.integers(-30, 30, columns.count - 2)
    total = rng.integers(-(2**31), 2**31, columns.words(ranks)).astype(np.int32)
    total[: columns.count] >>= 1

    def packed_and_read():
        packed = columns.pack(make(flat.copy()), make(exponents), ranks)
        return [*packed, *columns.unpack(make(total), make(exponents), ranks)]

    for one, other in zip(*twins(packed_and_read), strict=True):
        assert type(one) is type(other)
        alike(one, other)


def test_columns_of_other_sizes_or_scales_are_refused(core):
    columns = FixedPointColumns([(2, 5)])
    flat, exponents = np.ones(10, np.float32), np.zeros(2, np.int32)
    for bad in ((flat[:9], exponents), (flat, exponents - 257), (flat, exponents + 256)):
        with pytest.raises(ValueError, match="do not belong together"):
            columns.pack(*bad, 2)
