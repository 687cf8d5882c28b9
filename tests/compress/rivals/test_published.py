"""DGC, PowerSGD and DeMo: their definitions written plainly, and what their authors promise."""

from __future__ import annotations

import math

import numpy as np
import pytest
from rivals.codecs import codec
from rivals.codecs.dgc import warmup_theta
from rivals.codecs.powersgd import normal_matrix, powersgd_allreduce
from samples import U, plain_top, random

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


def test_warm_up_is_a_function_of_the_step():
    steps = [0, 9, 10, 20, 30, 40, 10**9]
    thetas = [warmup_theta(step, theta=0.999, phase=10) for step in steps]
    assert thetas == [0.75, 0.75, 0.9375, 0.984375, 0.99609375, 0.999, 0.999]
    assert warmup_theta(0, theta=0.9, phase=0) == 0.9
    assert warmup_theta(0, theta=0.5, phase=10) == 0.5


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


@pytest.mark.parametrize(("shape", "r"), [((30, 40), 1), ((100, 7), 3)])
def test_powersgd_is_its_definition(shape, r):
    x = random(shape[0] * shape[1])
    made = codec("powersgd", shape=shape, rank=r)
    q = normal_matrix(0, shape[1], r).astype(float)
    expected = plain_powersgd([x.reshape(shape).astype(float)], q).reshape(-1)
    off = np.linalg.norm(made.decode(made.encode(x)) - expected)
    assert off <= factor_error(r) * np.linalg.norm(x)


def test_the_all_reduced_form_is_the_published_one_and_of_one_rank_the_codec():
    vectors, shape, r = [random(600, seed) for seed in range(4)], (30, 20), 3
    mean, _ = powersgd_allreduce(vectors, shape, r)
    start = normal_matrix(0, 20, r).astype(float)
    expected = plain_powersgd([v.reshape(shape).astype(float) for v in vectors], start)
    size = np.linalg.norm(np.mean(vectors, axis=0))
    assert np.linalg.norm(mean - expected.reshape(-1)) <= factor_error(r) * size
    made, q = codec("powersgd", shape=shape, rank=r), None
    state = made.new_state(600)
    for _ in range(3):
        state[0][:] = 0
        mean, q = powersgd_allreduce(vectors[:1], shape, r, q)
        assert np.array_equal(made.decode(made.encode(vectors[0], state=state)), mean)
        assert np.array_equal(state[1], q)


# DeMo.


def basis(n):
    """The orthonormal DCT-II, row by row."""
    k, i = np.arange(n)[:, None], np.arange(n)[None, :]
    rows = math.sqrt(2 / n) * np.cos(math.pi * (2 * i + 1) * k / (2 * n))
    rows[0] /= math.sqrt(2)
    return rows


@pytest.mark.parametrize("shape", [(96, 130), (1, 1000)])
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
