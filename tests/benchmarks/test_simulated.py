"""The study's simulated ranks: the bits of real ones, and rivals as published, of equal bytes."""

from __future__ import annotations

import math
from pathlib import Path

import numpy as np
import pytest

from sn_compress.codecs.base import HEADER_BYTES


@pytest.mark.horovod
@pytest.mark.slow
@pytest.mark.parametrize(("ranks", "ways"), [(2, ("frequencies", "shared")), (3, ("frequencies",))])
def test_real_ranks_get_the_same_bits(horovodrun, ranks, ways):
    run = horovodrun(ranks, Path(__file__).parent / "ranks/same_bits.py", timeout=120).check()
    for way in ways:
        assert run.stdout.count(f">:ok {way}\n") == ranks, run.stdout


@pytest.mark.parametrize("method", ["top-k", "sparseloco", "demo"])
def test_rivals_are_set_to_the_bytes_asked_for(method):
    """Never more bytes than asked for, and no more than a knob's step (a sixth here) fewer."""
    study, ratio = pytest.importorskip("study"), 50.0
    shapes = {"a": (64, 48, 3, 3), "b": (128, 1024)}
    exchanges = study.build(method, shapes, 8, ratio, 100)
    received = sum(
        7 * (exchanges[name].codecs[0].payload_bytes(math.prod(shape)) - HEADER_BYTES)
        for name, shape in shapes.items()
    )
    plain = 2 * 7 / 8 * 4 * sum(map(math.prod, shapes.values()))
    assert ratio <= plain / received <= ratio * 1.2


def test_powersgd_of_the_mean_is_powersgd_of_the_ranks():
    """Each rank with a memory of its own, as published, against the form on the mean gradient.

    Twenty steps of correlated gradients, so that memories and the warm start matter.
    """
    simulated = pytest.importorskip("simulated")
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
        # The two differ by float32 roundings of sums, 6e-8 each of values up to some hundred
        # times the result's deviation; the iteration contracts, so twenty steps add little.
        scale = float(np.abs(expected).max())
        assert np.abs(on_mean.mean(vectors) - expected).max() < 1e-4 * scale
    assert on_mean.received == 20 * 2 * (ranks - 1) / ranks * 4 * rank * sum(shape)
