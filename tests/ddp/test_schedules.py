"""Theta over time is followed in every seam, and its settings say the same on every rank."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch

from sn_compress import CompressError, FFTCompression
from sn_compress.collective import Gradient
from sn_compress.engine import engine_state
from sn_compress.engine.engine import Engine
from sn_compress.schedule import Constant, Diminishing, Warmup
from sn_compress.torch.ddp import CompressionState
from sn_compress.torch.layout import BucketSlice

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "compress"))

from counted import SHAPES, transforms

N = 50_000
WARMUP = Warmup(4, Constant(0.9), dense=0.25)
STEPWISE = Warmup(4, Diminishing(0.99, rate=lambda step: 0.5**step), dense=0.25)


def test_bare_computes_ffts(alone):
    """One of each gradient's blocks, whatever its shape."""
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    starts = np.cumsum([0, *sizes])
    parts = [BucketSlice(f"p{at}", int(starts[at]), shape) for at, shape in enumerate(SHAPES)]
    with transforms() as found:
        for _ in CompressionState(FFTCompression).rounds([(torch.ones(sum(sizes)), parts)]):
            pass
    assert found == ["fft"] * 3


def test_the_engine_follows_the_steps():
    """Of gradients that a rim has chosen by itself, as that of TensorFlow does.

    The rims' steps are in programs of ranks, of DDP in ranks/schedules.py.
    """
    settings = FFTCompression.using(theta=STEPWISE).settings
    theta = settings.schedule().theta
    want = [settings.codec_of(theta(step), 1).payload_bytes(N) for step in range(9)]
    assert len(set(want)) > 4

    def made():
        return Engine(settings, 1, stock="", tuner=None, drops_unused=False)

    own, rng, found = made(), np.random.default_rng(0), []
    for step in range(9):
        for name in ("0:w", "1:v"):  # of one step, in two calls
            gradient = Gradient(name, (N,), rng.standard_normal(N).astype("f4"))
            own.begin([gradient])
            coded = own.sort([gradient], ranks=1, total=None, taken=True).coded
            rounds = own.rounds(coded, ranks=1, rank=0)
            (carry,) = next(rounds)
            with pytest.raises(StopIteration):
                rounds.send([carry.words])
            assert np.isfinite(gradient.values).all()
        found.append(carry.words.size)
        if step == 4:
            state = engine_state.state_dict(own, ranks=1, rank=0)
            own = made()
            engine_state.load_state_dict(own, state, ranks=1, rank=0)
    assert found == want
    with pytest.raises(CompressError, match="without a name"):
        own.theta.refuse_unnamed()


def test_settings_say_the_same_in_every_process():
    for schedule in (WARMUP, STEPWISE, Diminishing(0.5, rate=np.sin)):
        assert "0x" not in repr(FFTCompression.using(theta=schedule).settings)


def test_a_saved_place_in_a_schedule_that_is_damaged_is_refused(alone):
    named = [("w", torch.zeros(N))]
    state = CompressionState(FFTCompression.using(theta=WARMUP), named_parameters=named)
    for _ in range(3):
        for _ in state.rounds([(torch.randn(N), [BucketSlice("w", 0, (N // 200, 200))])]):
            pass
    saved = state.state_dict()
    again = CompressionState(FFTCompression.using(theta=WARMUP), named_parameters=named)
    for steps in (None, [3], -1, "x"):
        with pytest.raises(CompressError):
            again.load_state_dict(saved | {"theta": {"steps": steps}})
        assert again.state_dict()["theta"]["steps"] == 0
    again.load_state_dict(saved)
    assert again.state_dict()["theta"] == saved["theta"]
