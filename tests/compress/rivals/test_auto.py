"""Auto: the best candidate for the tensor, at a fixed size, carried over and averaged."""

import math

import numpy as np
import pytest
from rivals.codecs.auto import AutoCodec
from samples import ENERGY, U, for_each, norm, random, specials, transform_error

from sn_compress import FFTCodec

SHAPE = (64, 96)
N = 64 * 96


def heavy(n: int, seed: int = 0) -> np.ndarray:
    """A few values hold nearly all the energy, anywhere."""
    return np.random.default_rng(seed).standard_t(1.1, n).astype(np.float32)


def smooth(n: int, seed: int = 0) -> np.ndarray:
    """A few slow waves of any phase, which blocks of 4096 see as few coefficients."""
    rng = np.random.default_rng(seed)
    t = np.arange(n) / 4096
    waves = [np.cos(np.pi * k * t + rng.uniform(0, 7)) for k in rng.integers(1, 200, 12)]
    return np.sum(waves, axis=0).astype(np.float32)


def flat(rank: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((SHAPE[0], rank)) @ rng.standard_normal((rank, SHAPE[1]))
    return matrix.reshape(-1).astype(np.float32)


@for_each("n", (0, 1, 15, 100, 4095, 4097, 20_000))
@pytest.mark.parametrize("ratio", [1.5, 100, 3000])
def test_the_size_is_the_budget(n, ratio):
    codec = AutoCodec(ratio=ratio)
    inputs = [heavy(n), np.zeros(n, np.float32), np.full(n, np.nan, np.float32)]
    sizes = {codec.encode(x).nbytes for x in inputs}
    budget = math.floor(4 * n / ratio / 16) * 16
    # The smallest there is: a word for each block, a header, filled up to 16 bytes.
    least = 32 + math.ceil(math.ceil(n / 4096) * 4 / 16) * 16
    assert sizes == {codec.payload_bytes(n)} == {max(budget, least)}


@pytest.mark.parametrize("shape", [None, SHAPE, (16, 12, 8, 4)])
def test_it_loses_no_more_than_any_candidate(shape):
    codec, kinds = AutoCodec(ratio=30, shape=shape), set()
    for x in (heavy(N), smooth(N), random(N), flat(2), specials(N)["wide"]):
        payload = codec.encode(x)
        singles = [candidate.encode(x).error for candidate in codec.candidates(N)]
        assert payload.error == min(singles)
        np.testing.assert_array_equal(codec.scores(x), singles)
        kinds.add(payload.settings[0])
        inner = codec.candidates(N)[payload.settings[0]]
        np.testing.assert_array_equal(codec.decode(payload), inner.decode(inner.encode(x)))
        made = norm(x.astype(np.float64) - codec.decode(payload))
        e = transform_error(inner, N) if isinstance(inner, FFTCodec) else 8 * U
        slack = (3 * e + ENERGY) * norm(x)
        assert made <= math.sqrt(payload.error) + slack  # below where padding holds some of it
    assert len(kinds) > 1


def test_what_went_in_comes_out_across_choices():
    codec = AutoCodec(ratio=20, shape=SHAPE, every=3)
    state = codec.new_state(N)
    sent, went_in, slack, choices = np.zeros(N), np.zeros(N), 0.0, set()
    e = max(transform_error(c, N) for c in codec.candidates(N) if isinstance(c, FFTCodec))
    for step in range(12):
        x = (heavy(N, step), smooth(N, step) * 30, flat(2, step) * 30)[step // 3 % 3]
        before = norm(codec.state_to_values(state, N))
        payload = codec.encode(x, state=state)
        choices.add(payload.settings[0])
        sent += codec.decode(payload)
        went_in += x
        # Forward on what goes in, back on what is sent, and two more where the choice changes.
        slack += (5 * e + 10 * U) * 2 * (norm(x) + before)
    assert len(choices) >= 3
    assert norm(sent + codec.state_to_values(state, N) - went_in) <= slack
