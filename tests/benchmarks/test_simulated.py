"""The study's simulated ranks: the same bits as real ones, and the algorithms they claim."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="module")
def simulated():
    """Import from benchmarks/, which is no package."""
    pytest.importorskip("torch")
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        import simulated

        yield simulated
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


@pytest.mark.horovod
@pytest.mark.slow
def test_real_ranks_get_the_same_bits(horovodrun):
    run = horovodrun(2, Path(__file__).parent / "ranks/same_bits.py", timeout=120).check()
    assert run.stdout.count(">:ok gather\n") == 2, run.stdout


def test_powersgd_of_the_mean_is_powersgd_of_the_ranks(simulated):
    """Each rank with a memory of its own, as published, against the form on the mean gradient.

    Twenty steps of correlated gradients, so that memories and the warm start matter.
    """
    from sn_compress.codecs.powersgd import powersgd_allreduce

    rng = np.random.default_rng(0)
    shape, rank, ranks = (24, 40), 2, 4
    trend = rng.standard_normal(shape[0] * shape[1])
    on_mean = simulated.PowerSGD(shape, rank=rank)
    memories, factor = [np.zeros(trend.size, np.float32) for _ in range(ranks)], None
    for _ in range(20):
        vectors = [
            (trend + rng.standard_normal(trend.size)).astype(np.float32) for _ in range(ranks)
        ]
        with_memory = [v + m for v, m in zip(vectors, memories, strict=True)]
        expected, factor = powersgd_allreduce(with_memory, shape, rank, factor)
        memories = [v - expected for v in with_memory]
        found = on_mean.mean(vectors)
        # The two differ by float32 roundings of sums, 6e-8 each of values up to some hundred
        # times the result's deviation; the iteration contracts, so twenty steps add little.
        scale = float(np.abs(expected).max())
        assert np.abs(found - expected).max() < 1e-4 * scale
    assert on_mean.received == 20 * 2 * (ranks - 1) / ranks * 4 * rank * sum(shape)


@pytest.mark.parametrize("half", [False, True])
def test_plain_counts_a_ring(simulated, half):
    exchange = simulated.Plain(half=half)
    vectors = [np.full(100, r, np.float32) for r in range(8)]
    assert np.array_equal(exchange.mean(vectors), np.full(100, 3.5, np.float32))
    assert exchange.sent == (200 if half else 400)
    assert exchange.received == exchange.sent * 2 * 7 / 8


def test_gather_averages_what_ranks_send_and_remembers_the_rest(simulated):
    """Sums over time: what arrived plus what is remembered is what the ranks had."""
    from sn_compress import codec

    rng = np.random.default_rng(1)
    exchange = simulated.Gather([codec("topk", theta=0.9) for _ in range(3)])
    arrived, put_in = np.zeros(500), np.zeros(500)
    for _ in range(10):
        vectors = [rng.standard_normal(500).astype(np.float32) for _ in range(3)]
        arrived += exchange.mean(vectors)
        put_in += np.mean(vectors, axis=0)
    held = np.mean([memory.residual("tensor") for memory in exchange.memories], axis=0)
    # Ten steps of additions of numbers up to 10, each rounded to 2**-24 of itself.
    assert np.abs(arrived + held - put_in).max() < 10 * 3 * 10 * 2**-24
    assert exchange.received == 2 * exchange.sent


def test_shared_counts_and_averages(simulated):
    """Float16 in and out of the wire; nothing else is lost, and that comes later."""
    from sn_compress.exchange.shared import Halved

    rng = np.random.default_rng(2)
    exchange = simulated.Shared([Halved(64) for _ in range(8)])
    arrived, put_in = np.zeros(64), np.zeros(64)
    for _ in range(30):
        vectors = [rng.standard_normal(64).astype(np.float32) for _ in range(8)]
        arrived += exchange.mean(vectors)
        put_in += np.mean(vectors, axis=0)
    held = np.mean([part.memory for part in exchange.ranks], axis=0)
    # Lost for good are only the roundings of the sum: seven additions of float16 up to 16, in
    # each of 30 steps, each at most half of 2**-7, and an eighth of that in the mean.
    assert np.abs(arrived + held - put_in).max() < 30 * 7 * 2**-8 / 8
    assert exchange.sent == 30 * 2 * exchange.ranks[0].wire_elements
