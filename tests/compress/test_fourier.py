"""The real FFT of our own and the Hadamard transform: the twins agree to the bit."""

import itertools
import math

import numpy as np
import pytest
from samples import ENERGY, alike, for_each, random

from sn_compress import FFTCodec
from sn_compress.ops import spectrum


def equal(fast: np.ndarray, slow: np.ndarray) -> None:
    """In all bits, but those that say which NaN it is."""
    nan = np.isnan(slow)
    np.testing.assert_array_equal(np.isnan(fast), nan)
    np.testing.assert_array_equal(fast.view(np.uint32)[~nan], slow.view(np.uint32)[~nan])


def rows(block: int, scale: float) -> np.ndarray:
    """Noise; noise with a NaN; an Inf; zeros of both signs; all equal; every third zero."""
    x = (random(6 * block, seed=block) * np.float64(scale)).clip(-3.4e38, 3.4e38)
    x = x.astype(np.float32).reshape(6, block)
    x[1, block // 3], x[2, block - 1] = np.nan, -np.inf
    x[3] = np.where(np.arange(block) % 3, 0.0, -0.0)
    x[4] = x[4, 0]
    x[5, ::3] = 0
    return x.reshape(-1)


FORMS = [
    {"positions": "bitmap"}, {"bits": 4, "mantissa": 1}, {"values": "fp16"}, {"values": "sign"},
    {"values": "2bit", "positions": "bitmap"}, {"bits": 16, "mantissa": 9},
]  # fmt: skip
CUTS = [(64, 32), (256, 64), (4096, 32), (4096, 1024), (8192, 4096), (2**17, 64)]
BLOCKS = [(2**power, 2**power) for power in range(5, 17)] + CUTS


@pytest.mark.parametrize(("block", "span", "transform"), [
    *((block, span, "fft") for block, span in BLOCKS),
    *((block, None, "hadamard") for block in (32, 64, 2048, 4096, 2**16)),
])  # fmt: skip
def test_equal_bits_on_both_back_ends(core, monkeypatch, block, span, transform):
    """Memories have all bits of what was transformed, and vectors those of the way back."""
    scales = (1, 1e-38, 1e-42, 1e30, 3e38) if block <= 4096 else (1, 3e38)
    forms = itertools.cycle(FORMS[block.bit_length() % len(FORMS) :] + FORMS)
    for scale, form, theta in zip(scales, forms, itertools.cycle((0.5, 0.98)), strict=False):
        codec = FFTCodec(block=block, span=span, transform=transform, theta=theta, **form)
        x, found = rows(block, scale), []
        for module in (core, None):
            monkeypatch.setattr("sn_compress._native.core", lambda module=module: module)
            state = codec.new_state(x.size)
            payloads = [codec.encode(x, state=state, decay=0.9) for _ in range(2)]
            payloads.append(codec.encode(x[::-1].copy()))
            means = codec.decode_mean(payloads), codec.state_to_values(state, x.size)
            # Transforms by themselves, and those that encode and decode blocks in one pass.
            found.append((payloads, state, (*codec.values_to_state(x), *means)))
        (fast, memory, arrays), (slow, other, expected) = found
        for one, two in zip(fast, slow, strict=True):
            assert one.to_bytes() == two.to_bytes()
            assert one.saturated == two.saturated
            tallies = [(each.energy, each.error) for each in (one, two)]
            np.testing.assert_allclose(*tallies, rtol=ENERGY, atol=0)
        alike(memory, other)
        for one, two in zip(arrays, expected, strict=True):
            equal(one, two)


def test_a_span_of_the_block_is_the_block():
    x = random(4096).reshape(4, 1024)
    np.testing.assert_array_equal(spectrum.forward_fourier(x, 1024), spectrum.forward_fourier(x))
    whole, cut = FFTCodec(block=1024), FFTCodec(block=1024, span=1024)
    state, other = whole.new_state(4096), cut.new_state(4096)
    one, two = whole.encode(x.reshape(-1), state=state), cut.encode(x.reshape(-1), state=other)
    alike((one.body, state), (two.body, other))


def test_the_extension_checks_sizes(core):
    table, x, bins = spectrum.roots(64), np.zeros(64, np.float32), np.zeros(66, np.float32)
    core.fourier(x, bins, table, 64, 64, False)
    for block in (0, -64, 16, 48, 128, 2**17, 2**40):
        with pytest.raises(ValueError, match="roots"):
            core.fourier(x, bins, table, block, block, False)
    for span in (0, -64, 16, 32, 48, 128):
        with pytest.raises(ValueError, match="in spans of"):
            core.fourier(x, bins, table, 64, span, False)
    for few in (x[:-1], x[:32], np.zeros(128, np.float32)):
        with pytest.raises(ValueError, match="do not match"):
            core.fourier(few, bins, table, 64, 64, False)
    x.setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        core.fourier(x, bins, table, 64, 64, True)
    for block in (0, -1, 3, 64, 2**40):
        with pytest.raises(ValueError, match="not rows of"):
            core.hadamard(np.zeros(96, np.float32), block)


@for_each("n", (0, 1, 31, 32, 33, 63, 1000, 2**14 + 1))
@pytest.mark.parametrize(
    "settings", [{}, {"span": 64}, {"transform": "identity"}, {"block": None}], ids=str
)
def test_into_given_memory(backend, n, settings):
    """What is encoded into a buffer and decoded into a vector is what a copy would hold."""
    codec, x = FFTCodec(theta=0.9, **settings), random(n)
    states = codec.new_state(n), codec.new_state(n)
    for _ in range(2):
        buffer = np.full(codec.payload_bytes(n), 0xFF, np.uint8)
        into = codec.encode_into(buffer, x, state=states[0], decay=0.5)
        copied = codec.encode(x, state=states[1], decay=0.5)
        assert into.buffer is buffer
        assert buffer.tobytes() == copied.to_bytes()
        assert (into.n, into.energy, into.error) == (copied.n, copied.energy, copied.error)
    room = np.full(n + 16, math.pi, np.float32)
    codec.decode_mean_into([into, copied], room[8 : n + 8])
    np.testing.assert_array_equal(room[8 : n + 8], codec.decode_mean([into, copied]))
    assert (np.delete(room, np.s_[8 : n + 8]) == np.float32(math.pi)).all()


def test_into_memory_of_another_size():
    codec, x = FFTCodec(), random(100)
    payload = codec.encode(x)
    with pytest.raises(ValueError, match="Make it with payload_bytes"):
        codec.encode_into(np.zeros(payload.nbytes + 16, np.uint8), x)
    for out in (np.zeros(99, "f4"), np.zeros(100, "f8"), np.zeros(200, "f4")[::2]):
        with pytest.raises(ValueError, match="contiguous"):
            codec.decode_mean_into([payload], out)


def test_fast_length_is_the_next_smooth_number():
    smooth = {2**a * 3**b * 5**c for a in range(12) for b in range(8) for c in range(6)}
    assert spectrum.fast_length(0) == 0
    for n in range(1, 2001):
        assert spectrum.fast_length(n) == min(it for it in smooth if it >= n)
    for n in (2**20 + 1, 25_000_001, 2**40 + 1):
        assert n <= spectrum.fast_length(n) <= n * 1.01
