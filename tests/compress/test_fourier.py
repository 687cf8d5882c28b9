"""The real FFT of our own and the Hadamard transform: the twins agree to the bit."""

import math

import numpy as np
import pytest
from samples import ENERGY, layouts, random

from sn_compress import FFTCodec, PayloadError
from sn_compress.ops import spectrum
from sn_compress.ops.quantize import Layout
from sn_compress.ops.record import decode_blocks, encode_blocks

BLOCKS = [2**power for power in range(5, 17)]
CUTS = [(64, 32), (256, 64), (4096, 32), (4096, 64), (4096, 1024), (8192, 4096), (2**17, 64)]


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
    return x


@pytest.mark.parametrize("scale", [1, 1e-38, 1e-42, 1e30, 3e38])
@pytest.mark.parametrize("block", BLOCKS)
def test_equal_bits_on_both_back_ends(core, block, scale):
    if block > 4096 and scale not in (1, 3e38):
        return
    x, table = rows(block, scale), spectrum.roots(block)
    bins = np.full((6, block + 2), np.nan, np.float32)
    core.fourier(x, bins, table, block, block, False)
    equal(bins, spectrum.forward_twin(x))
    noise = rows(block + 2, scale)  # imaginary parts at the edges, which count for nothing
    back = np.full((6, block), np.nan, np.float32)
    core.fourier(back, noise, table, block, block, True)
    equal(back, spectrum.inverse_twin(noise, block))


@pytest.mark.parametrize("scale", [1, 1e-42, 3e38])
@pytest.mark.parametrize(("block", "span"), CUTS)
def test_spans_have_equal_bits_on_both_back_ends(core, block, span, scale):
    x, table = rows(block, scale), spectrum.roots(span)
    bins = np.full((6, block + 2), np.nan, np.float32)
    core.fourier(x, bins, table, block, span, False)
    equal(bins, spectrum.forward_twin(x, span))
    noise = rows(block + 2, scale)
    back = np.full((6, block), np.nan, np.float32)
    core.fourier(back, noise, table, block, span, True)
    equal(back, spectrum.inverse_twin(noise, block, span))


def test_a_span_of_the_block_is_the_block():
    x = random(4096).reshape(4, 1024)
    np.testing.assert_array_equal(spectrum.forward_fourier(x, 1024), spectrum.forward_fourier(x))
    whole, cut = FFTCodec(block=1024), FFTCodec(block=1024, span=1024)
    state, other = whole.new_state(4096), cut.new_state(4096)
    one, two = whole.encode(x.reshape(-1), state=state), cut.encode(x.reshape(-1), state=other)
    np.testing.assert_array_equal(one.body, two.body)
    np.testing.assert_array_equal(state[0], other[0])


def test_which_blocks_it_takes():
    takes = [block for block in range(1, 5000) if spectrum.fits(block)]
    assert takes == [32, 64, 128, 256, 512, 1024, 2048, 4096]
    assert spectrum.fits(2**16)
    assert not any(map(spectrum.fits, (0, 2**17, 3 * 2**10)))


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
    frozen = x.copy()
    frozen.setflags(write=False)
    with pytest.raises(ValueError, match="read-only"):
        core.fourier(frozen, bins, table, 64, 64, True)


FITTING = [x for x in layouts(blocks=(32, 1024, 4096)) if x.parts == 2 and spectrum.fits(x.block)]
LAYOUTS = FITTING[::3]


def both(core, monkeypatch, layout: Layout, x, memory, decay=0.9, top=None, span=None):
    """Encode on both back ends: words, memories and tallies."""
    runs = []
    for module in (core, None):
        monkeypatch.setattr("sn_compress._native.core", lambda module=module: module)
        words = np.full((len(x), layout.words), 0xFFFFFFFF, np.uint32)  # poison
        kept = None if memory is None else memory.copy()
        tally = encode_blocks("fft", x, kept, words, layout, decay, top, span)
        runs.append((words, kept, tally))
    return runs


@pytest.mark.parametrize("span", [None, 64])
@pytest.mark.parametrize("layout", LAYOUTS, ids=str)
def test_encode_and_decode_blocks_agree(core, monkeypatch, layout, span):
    for scale, remembers in ((1, True), (1, False), (1e-40, True), (1e36, True)):
        x = rows(layout.block, scale)
        memory = rows(layout.block, scale)[:, :1] * np.ones((1, layout.block + 2), np.float32)
        fast, slow = both(core, monkeypatch, layout, x, memory if remembers else None, span=span)
        np.testing.assert_array_equal(fast[0], slow[0])
        if remembers:
            np.testing.assert_array_equal(fast[1].view(np.uint32), slow[1].view(np.uint32))
        assert fast[2].saturated == slow[2].saturated
        np.testing.assert_allclose(fast[2][1:], slow[2][1:], rtol=ENERGY, atol=0)
        outs = []
        for module in (core, None):
            monkeypatch.setattr("sn_compress._native.core", lambda module=module: module)
            out = np.full(x.shape, np.nan, np.float32)
            records = [fast[0], fast[0][::-1].copy(), fast[0]]
            outs.append(decode_blocks("fft", records, out, layout, 1 / 3, span))
        equal(*outs)


def test_a_damaged_record_is_named(backend):
    layout = Layout(64, 4, "range", 8, 3, "elias-fano")
    words = np.zeros((3, layout.words), np.uint32)
    encode_blocks("fft", rows(64, 1)[[0, 4, 5]], None, words, layout)
    bad = words.copy()
    bad[1, 0] |= 0x7F80
    out = np.empty((3, 64), np.float32)
    decode_blocks("fft", [words, words], out, layout, 0.5)
    with pytest.raises(PayloadError, match="finite"):
        decode_blocks("fft", [words, bad], out, layout, 0.5)


def test_encode_blocks_checks_sizes(core, monkeypatch):
    monkeypatch.setattr("sn_compress._native.core", lambda: core)
    layout = Layout(64, 4, "range", 8, 3, "elias-fano")
    x, words = np.zeros((3, 64), np.float32), np.zeros((3, layout.words), np.uint32)
    for values, memory, out in (
        (x[:2], None, words),
        (x, np.zeros((2, 66), np.float32), words),
        (x, None, words[:, 1:].copy()),
    ):
        with pytest.raises(ValueError, match=r"match|has \d+ bytes"):
            encode_blocks("fft", values, memory, out, layout)
    with pytest.raises(ValueError, match="match"):
        decode_blocks("fft", [words, words[:2]], x, layout, 1.0)
    real = Layout(64, 4, "range", 8, 3, "elias-fano", 1)
    with pytest.raises(ValueError, match="match"):
        encode_blocks("fft", x, None, np.zeros((3, real.words), np.uint32), real)


@pytest.mark.parametrize("n", [0, 1, 31, 32, 33, 63, 1000, 2**20 + 1])
@pytest.mark.parametrize(
    "settings", [{}, {"span": 64}, {"transform": "identity"}, {"block": None}], ids=str
)
def test_into_given_memory(backend, n, settings):
    """What is encoded into a buffer and decoded into a vector is what a copy would hold."""
    n = n if backend == "cpp" else min(n, 2**14 + 1)
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


@pytest.mark.parametrize("name", spectrum.TRANSFORMS)
def test_energy_neither_overflows_nor_vanishes(backend, name):
    transform = spectrum.TRANSFORMS[name]
    for scale in (1e-40, 1e30):
        x = np.full((1, 32), scale, np.float32)
        want = 32 * float(x[0, 0]) ** 2
        got = spectrum.energy(transform.forward(x), 32, transform.parts)
        assert abs(got - want) <= 1e-4 * want


@pytest.mark.parametrize("scale", [1, 1e-38, 1e-42, 1e30, 3e38])
@pytest.mark.parametrize("block", [1, 2, 32, 64, 2048, 4096, 2**16])
def test_hadamard_gives_equal_bits_on_both_back_ends(core, monkeypatch, block, scale):
    x = (random(3 * block) * np.float64(scale)).clip(-3.4e38, 3.4e38)
    x = x.astype(np.float32).reshape(3, block)
    x[1] = np.where(np.arange(block) % 3, 0.0, -0.0)
    fast = spectrum.hadamard(x)
    monkeypatch.setattr(spectrum._native, "core", lambda: None)
    slow = spectrum.hadamard(x)
    nan = np.isnan(slow)
    np.testing.assert_array_equal(np.isnan(fast), nan)
    np.testing.assert_array_equal(fast.view(np.uint32)[~nan], slow.view(np.uint32)[~nan])


def test_the_extension_checks_the_block(core):
    rows = np.zeros(96, np.float32)
    for block in (0, -1, 3, 64, 2**40):
        with pytest.raises(ValueError, match="not rows of"):
            core.hadamard(rows, block)


def smooth(n: int) -> bool:
    for prime in (2, 3, 5):
        while n % prime == 0:
            n //= prime
    return n == 1


def test_fast_length_is_the_next_smooth_number():
    assert spectrum.fast_length(0) == 0
    want = 2000
    assert smooth(want)
    for n in range(2000, 0, -1):
        want = n if smooth(n) else want
        assert spectrum.fast_length(n) == want
    for n in (2**20 + 1, 25_000_001, 2**40 + 1):
        assert smooth(spectrum.fast_length(n))
        assert n <= spectrum.fast_length(n) <= n * 1.01
