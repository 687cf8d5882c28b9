"""AutoCompression in DDP: on real ranks, and what is owed when compression is given up."""

from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sn_compress import AutoCompression
from sn_compress.torch.ddp import BucketSlice, CompressionState

RANKS = Path(__file__).parent / "ranks"
N = 4096


@pytest.mark.slow
def test_ranks_take_up_compression_and_give_it_up_together(ranks):
    """The hook then sends a bucket as without it, and nothing was lost on the way."""
    for rank in ranks(2, RANKS / "tune.py", timeout=150):
        assert rank.returncode == 0, rank.output
        assert "ok replicas_of_fsdp\n" in rank.output, rank.output  # the last case


@pytest.fixture
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


class Chosen:
    """A tuner that has settled, on what the test says."""

    settled = True

    def __init__(self, method):
        self.choice = method

    def method(self, name, shape):
        return self.choice

    def report(self):
        return {}


class Scaler:
    scale = 1.0

    def get_scale(self):
        return self.scale


def step(state, values):
    flat = torch.from_numpy(np.array(values, np.float32))
    for _ in state.rounds([(flat, [BucketSlice("w", 0, (64, 64))])]):
        pass
    return flat.numpy()


def noise(seed):
    return np.random.default_rng(seed).standard_normal(N).astype(np.float32)


def left_behind(**options):
    """A state that goes plain from here on, and what went in before and did not come out."""
    state = CompressionState(
        AutoCompression.using(warmup=1, ratio=20), named_parameters=[("w", torch.zeros(64, 64))],
        **options,
    )  # fmt: skip
    state.tuner = Chosen("shared")
    owed = sum(noise(seed) - step(state, noise(seed)) for seed in range(4))
    assert np.linalg.norm(owed) > 10
    state.tuner = Chosen("plain")
    return state, owed


# Sums of a few float32 numbers of size 4, and a transform there and back.
NEAR = {"atol": 2e-5, "rtol": 0}


def test_what_is_owed_goes_along_once(alone):
    state, owed = left_behind()
    np.testing.assert_allclose(step(state, noise(9)), noise(9) + owed, **NEAR)
    np.testing.assert_array_equal(step(state, noise(10)), noise(10))


def test_where_there_is_no_gradient_it_waits(alone):
    """DDP drops the mean of a parameter that no rank has used."""
    state, owed = left_behind()
    assert not step(state, np.zeros(N)).any()
    np.testing.assert_allclose(step(state, noise(9)), noise(9) + owed, **NEAR)


def test_it_is_saved_and_loaded(alone):
    state, owed = left_behind()
    step(state, np.zeros(N))
    saved = state.state_dict()
    left = state.exchange.residual("w")
    np.testing.assert_allclose(left, owed, **NEAR)
    again, _ = left_behind()
    again.load_state_dict(saved)
    np.testing.assert_array_equal(step(again, noise(9)), step(state, noise(9)))
    np.testing.assert_array_equal(step(again, noise(10)), noise(10))


@pytest.mark.parametrize("waits", [False, True])
def test_a_step_that_the_scaler_skips_owes_it_again(alone, waits):
    """And in the scaler's new unit."""
    scaler = Scaler()
    state, owed = left_behind(scaler=scaler)
    if waits:
        step(state, np.zeros(N))
    step(state, noise(9))  # nobody has applied it
    scaler.scale = 0.5
    np.testing.assert_allclose(step(state, noise(10)), noise(10) + owed / 2, **NEAR)
    np.testing.assert_array_equal(step(state, noise(11)), noise(11))


def test_another_number_of_ranks_shares_what_was_owed(alone):
    """Of two ranks one has sent it already: the one that goes on owes half."""
    state, _ = left_behind()
    step(state, np.zeros(N))
    first = state.state_dict() | {"rank": 0, "ranks": 2}
    left = state.exchange.residual("w")
    step(state, noise(9))
    second = state.state_dict() | {"rank": 1, "ranks": 2}
    again, _ = left_behind()
    for states in ([first, second], [second | {"rank": 0}, first | {"rank": 1}]):
        again.load_state_dict(states)
        np.testing.assert_array_equal(again.exchange.residual("w"), left / 2)


def test_compression_can_be_taken_up_again(alone):
    state, _ = left_behind()
    step(state, noise(9))
    state.tuner = Chosen("shared")
    assert np.linalg.norm(step(state, noise(10)) - noise(10)) > 1
    assert state.exchange.remembers("w")
