"""DGC, PowerSGD and DeMo: their definitions written plainly, and what their authors promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from rivals.codecs import codec
from rivals.codecs.demo import largest_divisor
from rivals.codecs.dgc import warmup_theta
from rivals.codecs.powersgd import powersgd_allreduce
from samples import U, plain_top, random

from sn_compress.ops import codes

# DGC.


def test_dgc_is_its_definition_over_steps():
    n, m = 200, 0.9
    made = codec("dgc", theta=0.95, momentum=m)
    state = made.new_state(n)
    u, v = np.zeros(n, np.float32), np.zeros(n, np.float32)
    for step in range(12):
        g = random(n, step)
        u = np.float32(m) * u + g
        v = v + u
        sent = np.zeros(n, np.float32)
        for i in plain_top(v, 10):
            sent[i] = v[i]
            u[i] = v[i] = 0
        assert np.array_equal(made.decode(made.encode(g, state=state)), sent)
        assert np.array_equal(state[0], u)
        assert np.array_equal(state[1], v)


def test_dgc_clips_the_norm_of_what_comes_in():
    x = np.array([3, -4], np.float32)
    made = codec("dgc", theta=0.0, clip=1.0)
    assert made.decode(made.encode(x)) == pytest.approx([0.6, -0.8], rel=U)
    wide = codec("dgc", theta=0.0, clip=6.0)
    assert wide.decode(wide.encode(x)).tolist() == [3, -4]


def test_warm_up_is_a_function_of_the_step():
    steps = [0, 9, 10, 20, 30, 40, 10**9]
    thetas = [warmup_theta(step, theta=0.999, phase=10) for step in steps]
    assert thetas == [0.75, 0.75, 0.9375, 0.984375, 0.99609375, 0.999, 0.999]
    assert warmup_theta(0, theta=0.9, phase=0) == 0.9
    assert warmup_theta(0, theta=0.5, phase=10) == 0.5


def test_memory_passes_from_phase_to_phase():
    made = codec("dgc", warmup=2)
    state = made.new_state(1000)
    sizes = []
    for step in range(12):
        now = made.at(step)
        payload = now.encode(random(1000, step), state=state)
        sizes.append(payload.nbytes)
        assert payload.nbytes == made.at(step).payload_bytes(1000)
        assert now.decode(payload).any()
    assert sizes == sorted(sizes, reverse=True)
    assert len(set(sizes)) == 5
    assert repr(made.at(10**6)) == repr(codec("dgc"))


# PowerSGD.


def plain_powersgd(matrices, q):
    """The published scheme in float64, with Gram-Schmidt as published."""
    p = np.mean([m @ q for m in matrices], axis=0)
    for i in range(p.shape[1]):
        for j in range(i):
            p[:, i] -= (p[:, j] @ p[:, i]) * p[:, j]
        p[:, i] /= np.linalg.norm(p[:, i])
    q = np.mean([m.T @ p for m in matrices], axis=0)
    return p @ q.T


def factor_error(r):
    """Of the product, relative to the norm of the matrix: P and Q are rounded once, P counts
    twice and has norm sqrt(r), and the product is r roundings and r sums."""
    return (3 * math.sqrt(r) + 2 * r * math.sqrt(r) + 1) * U


@pytest.mark.parametrize(("shape", "r"), [((30, 40), 1), ((40, 30), 2), ((100, 7), 3)])
def test_powersgd_is_its_definition(shape, r):
    x = random(shape[0] * shape[1])
    made = codec("powersgd", shape=shape, rank=r)
    q = codes.normal_matrix(0, shape[1], r).astype(float)
    expected = plain_powersgd([x.reshape(shape).astype(float)], q).reshape(-1)
    off = np.linalg.norm(made.decode(made.encode(x)) - expected)
    assert off <= factor_error(r) * np.linalg.norm(x)


@pytest.mark.parametrize("r", [1, 2, 4])
def test_powersgd_is_exact_on_matrices_of_its_rank(r):
    rng = np.random.default_rng(r)
    # Whole numbers, so that the matrix in float32 has this rank exactly.
    left, right = rng.integers(-9, 10, (50, r)), rng.integers(-9, 10, (40, r))
    x = (left @ right.T).astype(np.float32).reshape(-1)
    made = codec("powersgd", shape=(50, 40), rank=r)
    off = made.decode(made.encode(x)).astype(float) - x
    assert np.linalg.norm(off) <= factor_error(r) * np.linalg.norm(x)


def test_the_warm_start_finds_the_best_factors():
    x = random(60 * 50)
    made = codec("powersgd", shape=(60, 50), rank=2)
    state = made.new_state(x.size)
    best = np.linalg.svd(x.reshape(60, 50).astype(float), compute_uv=False)[2:]
    errors = []
    for _ in range(100):
        state[0][:] = 0  # the same matrix again, only Q is kept
        errors.append(made.encode(x, state=state).error)
    assert errors[-1] < errors[0]
    # Converges like (s3 / s2)**(4 t): far below a thousandth here.
    assert errors[-1] == pytest.approx(np.dot(best, best), rel=1e-3)


def test_a_gradient_of_zero_does_not_kill_the_factors():
    made = codec("powersgd", shape=(20, 20), rank=2)
    state = made.new_state(400)
    made.encode(np.zeros(400, np.float32), state=state)
    x = np.outer(np.arange(20) == 19, np.arange(20)).astype(np.float32).reshape(-1)
    found = made.decode(made.encode(x, state=state))
    assert np.linalg.norm(found - x) <= factor_error(2) * np.linalg.norm(x)


def test_factors_that_save_nothing_are_not_made():
    for shape, rank in (((2, 2), 1), ((1, 100), 1), ((10, 10), 5)):
        made = codec("powersgd", shape=shape, rank=rank)
        x = random(shape[0] * shape[1])
        assert np.array_equal(made.decode(made.encode(x)), x)
        assert made.payload_bytes(x.size) == 32 + -(-4 * x.size // 16) * 16


@pytest.mark.parametrize("r", [1, 3])
def test_the_all_reduced_form_is_the_published_one(r):
    shape = (30, 20)
    vectors = [random(600, seed) for seed in range(4)]
    mean, q = powersgd_allreduce(vectors, shape, r)
    start = codes.normal_matrix(0, 20, r).astype(float)
    expected = plain_powersgd([v.reshape(shape).astype(float) for v in vectors], start)
    size = np.linalg.norm(np.mean(vectors, axis=0))
    assert np.linalg.norm(mean - expected.reshape(-1)) <= factor_error(r) * size
    assert np.linalg.matrix_rank(mean.reshape(shape).astype(float), tol=1e-4 * size) == r
    again, _ = powersgd_allreduce(vectors, shape, r, q)
    true = np.mean([v.astype(float) for v in vectors], axis=0)
    assert np.linalg.norm(again - true) < np.linalg.norm(mean - true)


def test_for_one_rank_codec_and_all_reduced_form_agree_bit_by_bit():
    x = random(600)
    made = codec("powersgd", shape=(30, 20), rank=2)
    state = made.new_state(600)
    q = None
    for _ in range(3):
        state[0][:] = 0
        mean, q = powersgd_allreduce([x], (30, 20), 2, q)
        assert np.array_equal(made.decode(made.encode(x, state=state)), mean)
        assert np.array_equal(state[1], q)


# DeMo.


def basis(n):
    """The orthonormal DCT-II, row by row."""
    k, i = np.arange(n)[:, None], np.arange(n)[None, :]
    rows = math.sqrt(2 / n) * np.cos(math.pi * (2 * i + 1) * k / (2 * n))
    rows[0] /= math.sqrt(2)
    return rows


@pytest.mark.parametrize("shape", [(96, 130), (1, 1000), (31, 64)])
def test_demo_is_its_definition(shape):
    x = random(shape[0] * shape[1])
    height, width = (max(d for d in range(1, 65) if side % d == 0) for side in shape)
    made = codec("demo", shape=shape, topk=5)
    matrix = x.reshape(shape).astype(float)
    expected = np.zeros(shape)
    for top in range(0, shape[0], height):
        for left in range(0, shape[1], width):
            tile = matrix[top : top + height, left : left + width]
            spectrum = basis(height) @ tile @ basis(width).T
            kept = np.zeros(spectrum.size)
            places = plain_top(spectrum.reshape(-1), 5)
            kept[places] = spectrum.reshape(-1)[places]
            back = basis(height).T @ kept.reshape(spectrum.shape) @ basis(width)
            expected[top : top + height, left : left + width] = back
    off = made.decode(made.encode(x)) - expected.reshape(-1)
    # Two transforms along two axes of at most 64, 8 U a stage and two stages of twiddles; random
    # data has no coefficients close enough to change places.
    assert np.linalg.norm(off) <= 4 * (8 * (6 + 2) + 2) * U * np.linalg.norm(x)


def test_a_vector_is_one_row_and_primes_are_not_cut():
    x = random(1000)
    vector, row = codec("demo", topk=3), codec("demo", shape=(1, 1000), topk=3)
    assert np.array_equal(vector.decode(vector.encode(x)), row.decode(row.encode(x)))
    assert [largest_divisor(n, 64) for n in (0, 1, 63, 64, 100, 97, 130)] == [
        0, 1, 63, 64, 50, 1, 26,
    ]  # fmt: skip
    # 97 chunks of one element, 12 bytes each: more than the vector itself.
    assert vector.payload_bytes(97) == 32 + -(-97 * 12 // 16) * 16


def test_demo_forgets_a_thousandth_a_step():
    made = codec("demo", topk=1)
    state = made.new_state(64)
    x = random(64)
    made.encode(x, state=state)
    left = state[0].copy()
    made.encode(np.zeros(64, np.float32), state=state)
    total = made.decode(made.encode(np.zeros(64, np.float32), state=made.values_to_state(left)))
    assert np.allclose(state[0] + total, left * np.float32(0.999), rtol=0, atol=4 * U)
