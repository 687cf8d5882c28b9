"""Auto: the right candidate for the tensor, at a fixed size, carried over and averaged."""

import math

import numpy as np
import pytest
import scipy.fft
from rivals.codecs.auto import AutoCodec
from rivals.codecs.lowrank import LowRankCodec
from samples import ENERGY, U, norm, random, specials, transform_error

from sn_compress import CompressError, FFTCodec, Payload

SHAPE = (64, 96)
N = 64 * 96


def heavy(n: int, seed: int = 0) -> np.ndarray:
    """A few values hold nearly all the energy, anywhere."""
    return np.random.default_rng(seed).standard_t(1.1, n).astype(np.float32)


def scattered(n: int, seed: int = 0) -> np.ndarray:
    """One value in 25 is not zero: too many places for low rank, few enough for positions."""
    rng = np.random.default_rng(seed)
    return (rng.standard_normal(n) * (rng.random(n) < 0.04)).astype(np.float32)


def smooth(n: int, seed: int = 0) -> np.ndarray:
    """A few slow waves of any phase, which blocks of 4096 see as few coefficients."""
    rng = np.random.default_rng(seed)
    t = np.arange(n) / 4096
    waves = [np.cos(np.pi * k * t + rng.uniform(0, 7)) for k in rng.integers(1, 200, 12)]
    return np.sum(waves, axis=0).astype(np.float32)


def flat(rows: int, columns: int, rank: int, seed: int = 0) -> np.ndarray:
    rng = np.random.default_rng(seed)
    matrix = rng.standard_normal((rows, rank)) @ rng.standard_normal((rank, columns))
    return matrix.reshape(-1).astype(np.float32)


def kernels(shape: tuple[int, ...], seed: int = 0) -> np.ndarray:
    """Each kernel of some mean and slope of its own: smooth over height and width only."""
    rng = np.random.default_rng(seed)
    coefficients = np.zeros(shape)
    coefficients[..., 0, 0] = rng.standard_t(3, shape[:2])
    x = scipy.fft.idctn(coefficients, axes=(2, 3), norm="ortho")
    return (x + 0.01 * rng.standard_normal(shape)).reshape(-1).astype(np.float32)


def chosen(codec: AutoCodec, payload: Payload):
    return codec.candidates(payload.n)[payload.settings[0]]


@pytest.mark.parametrize("n", [0, 1, 15, 100, 4095, 4096, 4097, 100_000])
@pytest.mark.parametrize("ratio", [1.5, 7.3, 100, 3000])
def test_the_size_is_the_budget(backend, n, ratio):
    codec = AutoCodec(ratio=ratio)
    inputs = [heavy(n), smooth(n), np.zeros(n, np.float32), np.full(n, np.nan, np.float32)]
    sizes = {codec.encode(x).nbytes for x in inputs[: 4 if n < 10**5 else 1]}
    assert sizes == {codec.payload_bytes(n)}
    budget = math.floor(4 * n / ratio / 16) * 16
    # The smallest there is: a word for each block, a header, filled up to 16 bytes.
    least = 32 + math.ceil(math.ceil(n / 4096) * 4 / 16) * 16
    assert codec.payload_bytes(n) == max(budget, least)


@pytest.mark.parametrize("seed", range(3))
def test_it_picks_the_right_kind(seed):
    plain = AutoCodec(ratio=60)
    choice = chosen(plain, plain.encode(heavy(N, seed)))
    assert choice.transform == "identity"
    choice = chosen(plain, plain.encode(smooth(8192, seed)))
    assert choice.transform in ("dct", "fft")
    matrix = AutoCodec(ratio=20, shape=SHAPE)
    choice = chosen(matrix, matrix.encode(flat(*SHAPE, 2, seed)))
    assert isinstance(choice, LowRankCodec)
    choice = chosen(matrix, matrix.encode(scattered(N, seed)))
    assert getattr(choice, "transform", None) == "identity"
    shape = (32, 32, 3, 3)
    convolution = AutoCodec(ratio=20, shape=shape)
    choice = chosen(convolution, convolution.encode(kernels(shape, seed)))
    assert choice.transform == "axes"
    assert choice.axes == (2, 3)


@pytest.mark.parametrize("shape", [None, SHAPE, (48, 32, 4), (16, 12, 8, 4), (N,)])
def test_it_loses_no_more_than_any_candidate(backend, shape):
    codec = AutoCodec(ratio=30, shape=shape)
    for x in (heavy(N), smooth(N), random(N), flat(*SHAPE, 2), specials(N)["wide"]):
        payload = codec.encode(x)
        singles = [candidate.encode(x).error for candidate in codec.candidates(N)]
        assert payload.error == min(singles)
        np.testing.assert_array_equal(codec.scores(x), singles)
        inner = chosen(codec, payload)
        np.testing.assert_array_equal(codec.decode(payload), inner.decode(inner.encode(x)))
        made = norm(x.astype(np.float64) - codec.decode(payload))
        e = transform_error(inner, N) if isinstance(inner, FFTCodec) else 8 * U
        slack = (3 * e + ENERGY) * norm(x)
        assert made <= math.sqrt(payload.error) + slack  # below where padding holds some of it
        assert payload.energy == pytest.approx(norm(x) ** 2, rel=4 * e + 2 * ENERGY)


def test_what_went_in_comes_out_across_choices(backend):
    codec = AutoCodec(ratio=20, shape=SHAPE, every=3)
    state = codec.new_state(N)
    sent, went_in, slack, choices = np.zeros(N), np.zeros(N), 0.0, set()
    e = max(transform_error(c, N) for c in codec.candidates(N) if isinstance(c, FFTCodec))
    for step in range(12):
        x = (heavy(N, step), smooth(N, step) * 30, flat(*SHAPE, 2, step) * 30)[step // 3 % 3]
        before = norm(codec.state_to_values(state, N))
        payload = codec.encode(x, state=state)
        choices.add(payload.settings[0])
        sent += codec.decode(payload)
        went_in += x
        # Forward on what goes in, back on what is sent, and two more where the choice changes.
        slack += (5 * e + 10 * U) * 2 * (norm(x) + before)
    assert len(choices) >= 3
    assert norm(sent + codec.state_to_values(state, N) - went_in) <= slack


def test_ranks_that_decide_together():
    """Scores summed over ranks, as an all-reduce gives them, make one choice everywhere."""
    codec = AutoCodec(ratio=20, shape=SHAPE)
    ranks = [heavy(N), smooth(N), flat(*SHAPE, 2) * 100]
    total = sum(codec.scores(x) for x in ranks)
    states = [codec.new_state(N) for _ in ranks]
    for state in states:
        codec.choose(state, total, N)
    assert len({state.choice for state in states}) == 1
    assert states[0].choice == int(np.argmin(total))
    payloads = [codec.encode(x, state=s) for x, s in zip(ranks, states, strict=True)]
    assert {p.settings[0] for p in payloads} == {states[0].choice}
    assert [state.age for state in states] == [1] * 3
    # A rank whose gradient is not finite spoils all scores alike, and nothing is changed.
    bad = heavy(N)
    bad[3] = np.nan
    assert np.isinf(codec.scores(bad)).all()
    before = states[0].choice
    codec.choose(states[0], total + codec.scores(bad), N)
    assert (states[0].choice, states[0].age) == (before, 1)


def test_settings():
    for wrong in ({"ratio": 1.0}, {"ratio": math.nan}, {"ratio": -3}, {"every": 0}):
        with pytest.raises(CompressError, match="expected a ratio above 1"):
            AutoCodec(**wrong)
    codec = AutoCodec(ratio=20, shape=[64, 96], every=7)
    assert repr(eval(repr(codec))) == repr(codec)
    assert codec.shape == SHAPE
    with pytest.raises(CompressError, match="do not fill shape"):
        codec.encode(heavy(N + 1))
