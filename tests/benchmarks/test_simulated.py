"""The study's simulated ranks: the same bits as real ones, and the algorithms they claim."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest


@pytest.fixture(scope="module")
def simulated():
    """The script, where torch is."""
    pytest.importorskip("torch")
    import simulated

    return simulated


@pytest.mark.horovod
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "ways"), [(2, ("frequencies", "shared")), (3, ("frequencies",))])
def test_real_ranks_get_the_same_bits(horovodrun, ranks, ways):
    run = horovodrun(ranks, Path(__file__).parent / "ranks/same_bits.py", timeout=120).check()
    for way in ways:
        assert run.stdout.count(f">:ok {way}\n") == ranks, run.stdout


def test_powersgd_of_the_mean_is_powersgd_of_the_ranks(simulated):
    """Each rank with a memory of its own, as published, against the form on the mean gradient.

    Twenty steps of correlated gradients, so that memories and the warm start matter.
    """
    from rivals.codecs.powersgd import powersgd_allreduce

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


def test_batch_norm_is_of_one_rank_and_tested_with_that_of_the_first(simulated):
    """Gradients as each rank alone has them; running statistics those of rank 0, moved once."""
    import torch
    from nets import residual

    torch.manual_seed(0)
    net, alone = residual(), residual()
    before = {name: value.clone() for name, value in net.state_dict().items()}
    images, labels = torch.randn(3, 4, 1, 28, 28), torch.randint(0, 10, (3, 4))
    found, _ = simulated.rank_gradients(net, images, labels)
    for rank in reversed(range(3)):
        alone.load_state_dict(before)
        own = slice(rank, rank + 1)
        (expected,), _ = simulated.rank_gradients(alone, images[own], labels[own])
        assert all(map(np.array_equal, found[rank], expected))
    assert all(map(torch.equal, net.buffers(), alone.buffers()))  # those of rank 0, the last here
    assert int(net.state_dict()["2.norms.0.num_batches_tracked"]) == 1


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


def test_shared_averages_what_ranks_send_and_remembers_the_rest(simulated):
    """As above; and the words of every round are counted."""
    from sn_compress.allreduce.exchange import AllReduceExchange

    rng = np.random.default_rng(2)
    shape, ranks, steps = (16, 24), 8, 30
    sessions = [AllReduceExchange(ratio=5, warmup=1, min_elements=64) for _ in range(ranks)]
    exchange = simulated.Shared(sessions, "tensor", shape)
    arrived, put_in = np.zeros(384), np.zeros(384)
    for _ in range(steps):
        vectors = [rng.standard_normal(384).astype(np.float32) for _ in range(ranks)]
        arrived += exchange.mean(vectors)
        put_in += np.mean(vectors, axis=0)
    part = sessions[0].tensors["tensor"].summable
    held = np.mean([session.tensors["tensor"].summable.memory for session in sessions], axis=0)
    # Integers add up exactly. What is left are float32 roundings of numbers up to about 100 (the
    # memory grows), a few in each of 30 steps.
    assert np.abs(arrived + held - put_in).max() < steps * 4 * 100 * 2**-23
    told = 4 * (3 + ranks)  # the size, by a word for each rank, once
    assert exchange.sent == 4 * 384 + told + (steps - 1) * 4 * sum(part.words(ranks))
    assert exchange.received == exchange.sent * 2 * 7 / 8
