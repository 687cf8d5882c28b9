"""FFTCodec near the ends of float32: what it does of ordinary numbers, times a power of two."""

import numpy as np
import pytest
import torch
from samples import alike, random

from sn_compress import FFTCodec
from sn_compress.codecs import batched
from sn_compress.ops import quantize

N = 4096 + 333
HIGHEST = np.finfo(np.float32).max
KINDS = [
    {}, {"span": 512}, {"block": 1024, "window": "payload"}, {"window": 2.0**126},
    {"values": "2bit"}, {"values": "fp16"}, {"values": "sign"}, {"transform": "dct"},
    {"transform": "hadamard"}, {"transform": "identity"}, {"block": None},
]  # fmt: skip


def steps(codec, gradients, count=4):
    """Means of steps of two ranks, with memories."""
    memories = [codec.new_state(N) for _ in gradients]
    for _ in range(count):
        pairs = zip(gradients, memories, strict=True)
        yield codec.decode_mean([codec.encode(it, state=own, decay=1.0) for it, own in pairs])


def gradients_at(power):
    found = [np.clip(random(N, seed), -4, 3.5) for seed in range(2)]
    found[0][:64] = 3.5  # coherent: one coefficient above all values
    return [np.ldexp(it, power) for it in found]


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_large_gradients_come_out_as_ordinary_ones_do(backend, settings):
    """Bit for bit; to 2**117: values are 2**2, coefficients 2**6 times as large."""
    for power in (89, 117):
        codec = lower = FFTCodec(theta=0.9, **settings)
        if settings.get("window") == 2.0**126:
            lower = FFTCodec(theta=0.9, window=2.0 ** (126 - power))
        pairs = zip(steps(lower, gradients_at(0)), steps(codec, gradients_at(power)), strict=True)
        for one, other in pairs:
            assert np.array_equal(other, np.ldexp(one, power))


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_the_largest_gradients_stay_finite(backend, settings):
    codec = FFTCodec(theta=0.9, **settings)
    gradients = [np.where(it < 0, -HIGHEST, HIGHEST) for it in gradients_at(0)]
    for mean in steps(codec, gradients, 60):  # until what was not sent is as large as it gets
        assert np.isfinite(mean).all()


@pytest.mark.parametrize("settings", KINDS, ids=str)
def test_ordinary_gradients_of_one_rank_and_large_ones_of_another(backend, settings):
    """The mean is half the large ones, but for less than a block's sum of the others."""
    codec = FFTCodec(theta=0.9, **settings)
    large_one, small_one = gradients_at(100)[0], gradients_at(0)[1]
    both = codec.decode_mean([codec.encode(large_one), codec.encode(small_one)])
    zero = codec.encode(np.zeros(N, np.float32))
    alone = codec.decode_mean([codec.encode(large_one), zero])
    assert np.abs(both - alone).max() <= 4 * 4096


@pytest.mark.parametrize(
    "settings",
    [{}, {"span": 512}, {"values": "2bit"}]
    + [{"transform": "hadamard", "window": window} for window in ("block", 2.0**115)],
    ids=str,
)
@pytest.mark.parametrize("library", [np.asarray, torch.from_numpy], ids=["numpy", "torch"])
def test_array_code_does_the_same(settings, library):
    codec = FFTCodec(theta=0.9, **settings)
    exact = codec.transform != "fft"
    memories = [codec.new_state(N) for _ in range(2)]
    kept = [[library(it) for it in codec.new_state(N)] for _ in range(2)]
    large_one, small_one = gradients_at(110)[0], gradients_at(0)[1]
    mixed = large_one.copy()
    mixed[4096:] = 1.5  # an ordinary block behind a large one
    for gradients in ((large_one, small_one), (mixed, large_one)):
        pairs = zip(gradients, memories, strict=True)
        payloads = [codec.encode(it, state=own) for it, own in pairs]
        mean = codec.decode_mean(payloads)
        pairs = zip(gradients, kept, strict=True)
        made = [batched.encode(codec, [library(it)], [own], tally=True) for it, own in pairs]
        kept = [it.memories[0] for it in made]
        words = np.stack([np.asarray(it.words) for it in made])
        decoded = batched.decode(codec, library(words), [N])
        assert not decoded.damaged
        # Transforms of libraries differ by rounding, and a code by a step: 2**-4 of a value.
        assert np.abs(np.asarray(decoded.means[0]) - mean).max() <= 2.0**-4 * np.abs(mean).max()
        if exact:
            buffers = [bytes(row.view(np.uint8)) for row in words]
            assert buffers == [bytes(payload.buffer) for payload in payloads]
            alike(kept, memories)
        assert all(np.isfinite(np.asarray(part)).all() for own in kept for part in own)


def test_the_smallest_gradients_wait_until_codes_reach_them():
    """What is below 2**-130, the lowest rung, is remembered until its sum is not."""
    codec, count = FFTCodec(theta=0.9), 200
    gradient, memory = gradients_at(-135)[0], codec.new_state(N)
    total = np.zeros(N)
    for _ in range(count):
        total += codec.decode_mean([codec.encode(gradient, state=memory)])
    assert np.abs(total).max() > 2.0**-130
    due = count * gradient.astype(np.float64) - codec.state_to_values(memory, N)
    # Twelve passes there and back round each number to the least float32, in every step.
    assert np.abs(total - due).max() <= count * 24 * 2.0**-149


def test_the_limits_fit_the_longest_block():
    assert quantize.LARGE_FROM * 2.0**32 < HIGHEST
    assert HIGHEST * 2.0**-quantize.LARGE_SHIFT < quantize.LARGE_FROM
