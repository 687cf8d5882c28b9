"""The supports that were compared: nothing lost, all ranks agree, words as said."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest

ROOT = Path(__file__).resolve().parents[2]
N, COUNT, RANKS, STEPS = 360, 24, 3, 12
KINDS = {
    "past": {"named": 0.0},
    "leader": {"by": "leader"},
    "half": {"named": 0.5, "by": "leader"},
    "union": {},
    "fresh leader": {"by": "leader", "fresh": True},
    "fresh rows": {"unit": 6, "count": 4, "fresh": True},
}


@pytest.fixture(scope="module")
def candidate():
    """Import from benchmarks/, which is no package."""
    sys.path.insert(0, str(ROOT / "benchmarks"))
    try:
        from _supports import Candidate

        yield Candidate
    finally:
        sys.path.remove(str(ROOT / "benchmarks"))


def step(parts, vectors):
    running = [
        p.exchange(v, ranks=RANKS, rank=r)
        for r, (p, v) in enumerate(zip(parts, vectors, strict=True))
    ]
    words = [next(rounds) for rounds in running]
    sizes, means = [], []
    while not means:
        sizes.append(words[0].size)
        summed, words = np.sum(words, axis=0, dtype=np.int32), []
        for rounds in running:
            try:
                words.append(rounds.send(summed))
            except StopIteration as end:
                means.append(end.value)
    assert sizes == parts[0].words(RANKS)
    return means


@pytest.mark.parametrize("kind", KINDS)
def test_nothing_is_lost_and_all_ranks_agree(candidate, kind):
    rng = np.random.default_rng(0)
    parts = [candidate(N, **{"count": COUNT, **KINDS[kind]}) for _ in range(RANKS)]
    given, got = np.zeros(N), np.zeros(N)
    for turn in range(STEPS):
        vectors = [rng.standard_normal(N).astype(np.float32) for _ in parts]
        if turn == 5:
            vectors[1][7] = np.nan
        means = step(parts, vectors)
        if turn == 5:
            assert all(np.isnan(mean).all() for mean in means)
            continue
        assert all((mean == means[0]).all() for mean in means)
        given += np.mean(vectors, axis=0, dtype=np.float64)
        got += means[0]
    left = np.mean([p.memory for p in parts], axis=0, dtype=np.float64)
    # Numbers up to about 20, rounded to float32 a few times in each of the steps.
    assert np.abs(given - got - left).max() < STEPS * 4 * 20 * 2**-24
