"""Theta over time is followed in every seam, and its settings say the same on every rank."""

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist

from sn_compress import CompressError, FFTCompression
from sn_compress.schedule import Diminishing, EnergyBudget, Warmup, learner
from sn_compress.torch.ddp import CompressionState, Part
from sn_compress.torch.under_ddp import collectives as rim

sys.path.insert(0, str(Path(__file__).resolve().parents[1] / "compress"))

from counted import SHAPES, transforms

RANKS = Path(__file__).parent / "ranks"
N = 50_000
WARMUP = Warmup(4, EnergyBudget(lost=0.5, start=0.9, every=2), dense=0.25)
STEPWISE = Warmup(4, Diminishing(0.99, rate=lambda step: 0.5**step), dense=0.25)


@pytest.fixture
def alone():
    """A process group of this process only."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    yield
    dist.destroy_process_group()


def expected(schedule, steps: int) -> list[int]:
    settings = FFTCompression.using(theta=schedule).settings
    own = settings.schedule()
    return [settings.codec_of(own.theta(s), 1).payload_bytes(N) for s in range(steps)]


def steps_of(state: CompressionState, steps: int, sent: list[int]) -> list[int]:
    """Bytes of each step's payload."""
    found = []
    for seed in range(steps):
        del sent[:]
        flat = torch.from_numpy(np.random.default_rng(seed).standard_normal(N).astype("f4"))
        for _ in state.rounds([(flat, [Part("w", 0, (N // 200, 200))])]):
            pass
        found.append(sent[-1])
    return found


@pytest.fixture
def sent(alone, monkeypatch):
    """What is gathered, in bytes."""
    found, gather = [], rim._all_gather

    def counted(out, wire, **options):
        found.append(wire.numel())
        return gather(out, wire, **options)

    monkeypatch.setattr(rim, "_all_gather", counted)
    return found


def test_ddp_follows_the_steps(sent):
    want = expected(STEPWISE, 9)
    assert len(set(want)) > 4
    named = [("w", torch.zeros(N))]
    state = CompressionState(FFTCompression.using(theta=STEPWISE), named_parameters=named)
    assert steps_of(state, 5, sent) == want[:5]
    again = CompressionState(FFTCompression.using(theta=STEPWISE), named_parameters=named)
    again.load_state_dict(state.state_dict())
    assert steps_of(again, 4, sent) == want[5:]


def test_ddp_learns_what_was_lost(sent):
    """Far above the budget theta falls, far below it rises; not before the warm-up is over."""
    for lost, up in ((1e-6, True), (0.999, False)):
        budget = EnergyBudget(lost=lost, start=0.9, every=2)
        state = CompressionState(FFTCompression.using(theta=Warmup(3, budget)))
        sizes = steps_of(state, 12, sent)
        start = expected(EnergyBudget(lost=lost, start=0.9), 1)[0]
        assert sizes[3] == start
        assert sizes[11] > start if up else sizes[11] < start
        assert budget.theta(0) == EnergyBudget(lost=lost, start=0.9).theta(0)  # the user's own


def test_bare_computes_ffts(alone):
    """One of each gradient's blocks, whatever its shape."""
    sizes = [int(np.prod(shape)) for shape in SHAPES]
    starts = np.cumsum([0, *sizes])
    parts = [Part(f"p{at}", int(starts[at]), shape) for at, shape in enumerate(SHAPES)]
    with transforms() as found:
        for _ in CompressionState(FFTCompression).rounds([(torch.ones(sum(sizes)), parts)]):
            pass
    assert found == ["fft"] * 3


def test_tensorflow_follows_the_steps():
    traced = pytest.importorskip("sn_compress.tensorflow.traced")
    own = traced.Traced(FFTCompression.using(theta=STEPWISE).settings, threads=1)
    rng, want, found = np.random.default_rng(0), expected(STEPWISE, 9), []
    for step in range(9):
        for key in ("0:w", "1:v"):  # steps are counted for each
            x = rng.standard_normal(N).astype("f4")
            wire = own.encode([key], [x])
            (mean,) = own.mean([key], wire, ranks=1, sizes=[N], factor=1.0)
            assert np.isfinite(mean).all()
        found.append(wire.size)
        if step == 4:
            state = own.state_dict()
            own = traced.Traced(FFTCompression.using(theta=STEPWISE).settings, threads=1)
            own.load_state_dict(state)

    assert found == want
    with pytest.raises(CompressError, match="without a name"):
        own.encode([None], [x])


@pytest.mark.slow
def test_every_kind_of_schedule_on_real_ranks(ranks):
    """DDP with several buckets and accumulation, a run resumed bit by bit, and FSDP2."""
    for rank in ranks(2, RANKS / "schedules.py", timeout=120):
        assert rank.returncode == 0, rank.output
        assert "ok thrifty\n" in rank.output, rank.output  # the last of KINDS


def test_settings_say_the_same_in_every_process():
    for schedule in (WARMUP, STEPWISE, EnergyBudget(lost=0.1), Diminishing(0.5, rate=np.sin)):
        assert "0x" not in repr(FFTCompression.using(theta=schedule).settings)
    budget = EnergyBudget(lost=0.1, start=0.8, low=0.1, high=0.99, every=7)
    before = repr(budget)
    for _ in range(20):
        budget.observe(1.0, 0.9)
    assert repr(budget) == before  # what it was made with
    assert repr(eval(before)) == before
    assert before != repr(EnergyBudget(lost=0.1))


def test_a_saved_place_in_a_schedule_that_is_damaged_is_refused(alone):
    budget = EnergyBudget(lost=0.2, every=2)
    named = [("w", torch.zeros(N))]
    state = CompressionState(FFTCompression.using(theta=budget), named_parameters=named)
    steps = [torch.randn(N) for _ in range(3)]
    for flat in steps:
        for _ in state.rounds([(flat, [Part("w", 0, (N // 200, 200))])]):
            pass
    saved = state.state_dict()
    assert saved["lost"][0] > saved["lost"][1] > 0
    again = CompressionState(FFTCompression.using(theta=budget), named_parameters=named)
    for lost in ([-1.0, 0.0], [1.0], "ab", None):
        with pytest.raises(CompressError):
            again.load_state_dict(saved | {"lost": lost})
        assert again.state_dict()["theta"]["steps"] == {}
    again.load_state_dict(saved)
    assert again.state_dict()["lost"] == saved["lost"]


def test_who_learns():
    inner = WARMUP.then
    assert learner(WARMUP, 3) is None
    assert learner(WARMUP, 4) is inner
    assert learner(Warmup(2, WARMUP), 6) is inner
    assert learner(STEPWISE, 100) is None
    inner = EnergyBudget(lost=0.1)
    with pytest.raises(CompressError):
        inner.load_state_dict({"theta": 2.0, "energy": 0, "error": 0, "seen": 0})
    for _ in range(60):
        inner.observe(1.0, 0.9)
    other = EnergyBudget(lost=0.1)
    other.load_state_dict(inner.state_dict())
    assert other.theta(0) == inner.theta(0) < EnergyBudget(lost=0.1).theta(0)
