"""Payloads in the engine where no compiled code reaches: as array code, damage told a step late.

Tensors of torch on the host stand for those of a device: they are taken for such.
"""

import numpy as np
import pytest
import torch
from engines import RANKS, SHAPES, Way, nowhere_on_host, step

from sn_compress import FFTCompression, PayloadError
from sn_compress.collective import Gradient
from sn_compress.engine.engine_state import load_state_dict, state_dict

NAMES = ("wide", "kernel", "count")  # a bias travels plain
WAY = Way("on a device", FFTCompression.using(theta=0.9), on_device=True)
DAMAGE = (1, 40)  # a bit in the first record of the first rank


@pytest.fixture
def elsewhere(monkeypatch):
    """No tensor is on the host."""
    nowhere_on_host(monkeypatch)


def means(all_, seed, **how):
    """Of one step, by rank, as tensors."""
    values = [{name: torch.from_numpy(v) for name, v in own.items()} for own in WAY.noise(seed)]
    step(all_, values, **how)
    return values


def test_it_is_the_step_of_the_host(elsewhere):
    """Means and memories, over some steps; the FFTs differ in their last bits."""
    host = Way("host", WAY.compression)
    other = host.engines()
    hosts = [host.noise(seed) for seed in range(4)]
    for values in hosts:
        host.step(other, values)
    both = WAY.engines()
    for seed in range(4):
        found = means(both, seed)
        for name in NAMES:
            # What is at the threshold in one block of a step may be kept in one and not the other.
            missed = np.linalg.norm(found[0][name].numpy() - hosts[seed][0][name])
            assert missed < 0.02 * np.linalg.norm(found[0][name])
    for engine, twin in zip(both, other, strict=True):
        for name in NAMES:
            one, two = engine.residual(name), twin.residual(name)
            assert np.linalg.norm(one - two) < 0.02 * np.linalg.norm(one)
    assert all(isinstance(part, torch.Tensor) for part in both[0].feedback._memory["wide"][1])
    differ = dict.fromkeys(("relative_error", "codec_s", "exchange_s"), 0)
    assert both[0].report() | differ == other[0].report() | differ


def test_damage_is_an_error_of_the_next_step_on_every_rank(elsewhere):
    both = WAY.engines()
    means(both, 0)
    for own in means(both, 1, spoil=DAMAGE):
        assert own["wide"].isnan().all()
        assert not own["kernel"].isnan().any()
    for rank, engine in enumerate(both):
        given = [Gradient("wide", SHAPES["wide"], torch.from_numpy(WAY.noise(2)[rank]["wide"]))]
        with pytest.raises(PayloadError, match=r"step is corrupt.*the mean of its tensor was NaN"):
            engine.sort(given, ranks=RANKS, total=None)
    # Told once; who goes on all the same may.
    assert not means(both, 2)[0]["wide"].isnan().any()
    means(both, 3)


def test_damage_in_the_last_step_is_not_saved(elsewhere):
    both = WAY.engines()
    means(both, 0, spoil=DAMAGE)
    with pytest.raises(PayloadError, match="previous step is corrupt"):
        state_dict(both[0], ranks=RANKS, rank=0)
    load_state_dict(both[1], state_dict(WAY.engines()[1], ranks=RANKS, rank=1), ranks=RANKS, rank=1)
    means(both, 1)  # another state has been taken over


def test_what_is_not_finite_reaches_all_and_no_memory(elsewhere):
    both = WAY.engines()
    means(both, 0)
    bad = WAY.noise(1)
    bad[0]["wide"][7] = np.inf
    WAY.step(both, bad)
    assert np.isnan(bad[1]["wide"]).any()
    assert np.isfinite(both[0].residual("wide")).all()
    assert not means(both, 2)[0]["wide"].isnan().any()


def test_a_step_reads_no_value():
    """Tensors of torch's device `meta` have none."""
    engine = WAY.engines()[0]
    given = [
        Gradient(name, SHAPES[name], torch.zeros(int(np.prod(SHAPES[name])), device="meta"))
        for name in NAMES
    ]
    way = engine.sort(given, ranks=RANKS, total=None)
    rounds = engine.rounds(way.coded, ranks=RANKS, rank=0)
    ((carry,),) = [next(rounds)]
    assert (carry.kind, carry.words.dtype, carry.words.device.type) == (
        "gather", torch.uint8, "meta",
    )  # fmt: skip
    with pytest.raises(StopIteration):
        rounds.send([torch.cat([carry.words] * RANKS)])
    assert engine.report()["steps"] == 1
