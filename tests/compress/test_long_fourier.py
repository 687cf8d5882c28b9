"""Transforms of long vectors and their records: twins agree to the bit, SciPy within the bound."""

import math
from itertools import pairwise

import numpy as np
import pytest
import scipy.fft
from samples import ENERGY, fft_error, random
from test_fourier import equal

from sn_compress import FFTCodec, PayloadError
from sn_compress.codecs.frequency.fft import PAPER
from sn_compress.ops.records import long_record
from sn_compress.ops.records.layout import Layout
from sn_compress.ops.records.record import decode_records
from sn_compress.ops.spectra import long_fourier

# Between them: every radix, odd heights, columns that do not fill their last tile.
LENGTHS = {2**17: (512, 256), 2 * 3**10: (243, 486), 10**5: (625, 160), 5**7 * 2: (625, 250)}
LENGTH = 10**5


@pytest.fixture
def on(core, monkeypatch):
    """Choose the back end."""
    return lambda fast: monkeypatch.setattr(
        "sn_compress.devices._native.core", lambda: core if fast else None
    )


@pytest.fixture
def fast(core, on):
    """The extension, whatever another test has chosen."""
    on(True)
    return core


@pytest.mark.parametrize("length", LENGTHS)
def test_against_float64(backend, length):
    assert long_fourier.split(length)[:2] == LENGTHS[length]
    x = random(length, seed=1)[None]
    exact = scipy.fft.rfft(x.astype(np.float64), norm="ortho").view(np.float64)
    bins = long_fourier.forward(x)
    assert np.linalg.norm(bins - exact) <= fft_error(length) * np.linalg.norm(exact)
    assert not bins[:, [1, -1]].any()
    noise = random(length + 2, seed=2)[None]  # imaginary parts at the edges count for nothing
    want = scipy.fft.irfft(noise.astype(np.float64).view(complex), n=length, norm="ortho")
    got = long_fourier.inverse(noise, length)
    assert np.linalg.norm(got - want) <= fft_error(length) * np.linalg.norm(want)


@pytest.mark.parametrize("length", LENGTHS)
def test_each_kind_of_bin_alone(fast, length):
    """A cosine: bins at the edges, in the rows that are their own mirrors, and mirrored ones."""
    height = long_fourier.split(length).height
    places = (0, 1, height // 2, height // 2 + 1, height - 1, height, 16, length // 2 - 1)
    for at in (*places, length // 2):
        single = np.zeros((1, length + 2), np.float32)
        single[0, 2 * at : 2 * at + 2] = 1, 0 if at in (0, length // 2) else 0.5
        want = scipy.fft.irfft(single.astype(np.float64).view(complex), n=length, norm="ortho")
        got = long_fourier.inverse(single, length)
        assert np.linalg.norm(got - want) <= fft_error(length) * np.linalg.norm(want)
        back = long_fourier.forward(want.astype(np.float32))
        assert np.linalg.norm(back - single) <= (fft_error(length) + 2.0**-24) * 1.5


@pytest.mark.parametrize("scale", [1, 1e-38, 1e-42, 3e38])
@pytest.mark.parametrize("length", LENGTHS)
def test_equal_bits_on_both_back_ends(fast, length, scale):
    x = (random(length + 2, seed=length) * np.float64(scale)).clip(-3.4e38, 3.4e38)
    x = x.astype(np.float32)[None]
    with np.errstate(all="ignore"):
        equal(long_fourier.forward(x[:, 2:]), long_fourier.forward_twin(x[:, 2:]))
        equal(long_fourier.inverse(x, length), long_fourier.inverse_twin(x, length))


def test_which_lengths_it_takes():
    assert not any(map(long_fourier.fits, (0, 4096, 2**16, 3**12, 7 * 2**15, 2**17 + 2)))
    assert all(map(long_fourier.fits, (2**17, 3 * 2**15, 25_000_000, 2**33)))
    for length in set(map(scipy.fft.next_fast_len, range(2**16, 2**19, 4999))):
        if long_fourier.fits(length):
            height, width = long_fourier.split(length)[:2]
            assert height * width == length
            assert width % 2 == 0
            assert min(height, width) >= 32
    # Balanced, so that a tile of either fits the second-level cache as long as it can.
    assert long_fourier.split(2**24)[:2] == (4096, 4096)
    assert long_fourier.split(25_000_000)[:2] == (6250, 4000)


@pytest.mark.parametrize("length", [*LENGTHS, 25_000_000, 2**33])
def test_turns_are_good_to_a_few_units(length):
    """Against the library's sines, of angles of up to a turn that are rounded twice: 2**-49.4."""
    numerators = random(1000).view(np.uint32).astype(np.int64) % length
    numerators[:9] = [0, 1, length // 8, length // 4, length // 2, length - 1, length // 3, 5, 7]
    right, up = long_fourier._turns(numerators, length)
    angles = -2 * np.pi * (numerators / length)
    assert abs(right - np.cos(angles)).max() < 2.0**-49
    assert abs(up - np.sin(angles)).max() < 2.0**-49


SETTINGS = [
    {"theta": 0.9, **PAPER},
    {"theta": 0.98},
    {"theta": 0.5, "positions": "bitmap", "bits": 6, "mantissa": 2},
    {"theta": 0.9999, "values": "fp16", "half": True},
    {"theta": 0.0, "values": "fp16"},
    {"theta": 0.7, "window": "payload"},
    {"theta": 0.7, "window": 0.25, "half": True},
    {"theta": 0.9, "values": "2bit"},
]


def inputs(n: int) -> dict[str, np.ndarray]:
    one = random(n, seed=3)
    spike = np.zeros(n, np.float32)
    spike[0] = 1
    return {
        "random": one,
        "spike": spike,  # all bins tie, but for rounding
        "zeros": np.zeros(n, np.float32),
        "equal": np.full(n, 0.3, np.float32),
        "tiny": one * np.float32(1e-40),
        "huge": one * np.float32(1e36),
        "NaN": np.where(np.arange(n) == n // 2, np.float32(np.nan), one),
    }


@pytest.mark.parametrize("settings", SETTINGS, ids=str)
def test_payloads_agree(on, settings):
    """Bytes, memories and vectors, of a vector that does not fill its transform."""
    n = LENGTH - 400
    codec = FFTCodec(**({"block": None} | settings))
    assert [s.layout.block for s in codec.sections(n)] == [LENGTH]
    for name, x in inputs(n).items():
        runs = []
        for fast in (True, False):
            on(fast)
            state = [random(LENGTH + 2, seed=4)[None] * abs(x).max(initial=0, where=x == x) / 9]
            state[0][:, [1, -1]] = 0
            plain = codec.encode(x)
            payload = codec.encode(x, state=state, decay=0.5)
            mean = codec.decode_mean([plain, payload, plain])
            runs.append((plain, payload, state[0], mean))
        fast, slow = runs
        for i in range(2):
            assert fast[i].to_bytes() == slow[i].to_bytes(), name
            assert fast[i].saturated == slow[i].saturated
            told = [(run[i].energy, run[i].error) for run in runs]
            np.testing.assert_allclose(*told, rtol=ENERGY, atol=0)
        np.testing.assert_array_equal(fast[2].view(np.uint32), slow[2].view(np.uint32))
        equal(fast[3], slow[3])


@pytest.mark.parametrize("others", [1e-3, 0.7, 0.95, 1.05, 1e3])
def test_a_sample_that_misleads(on, others):
    """The bins that the search for the threshold looks at first are stronger, or weaker."""
    cut = long_fourier.split(LENGTH)
    height, width = cut.height, cut.width
    row, at = np.meshgrid(np.arange(height // 2 + 1), np.arange(width // 2), indexing="ij")
    strong = ((row // long_fourier.SIDE) * width + at) % 61 == 0
    bins = random(LENGTH + 2)
    bins[:-2].reshape(width // 2, height, 2)[:, : height // 2 + 1][~strong.T] *= np.float32(others)
    x = long_fourier.inverse(bins[None], LENGTH)[0]
    codec = FFTCodec(theta=0.8, block=None)
    payloads = []
    for fast in (True, False):
        on(fast)
        payloads.append(codec.encode(x).to_bytes())
    assert payloads[0] == payloads[1]


def test_rounding_to_half_precision_inside(fast):
    """All finite half-precision numbers and what lies beside and between them."""
    halves = np.arange(0x7C00, dtype=np.uint16).view(np.float16).astype(np.float32)
    middles = np.array([(a + b) / 2 for a, b in pairwise(halves)], np.float32)
    some = np.concatenate([halves, middles, np.float32([2.0**-25, 1e-8, 1e-42, 65519.996])])
    near = np.concatenate([some, np.nextafter(some, 0), np.nextafter(some, np.float32(1e9))])
    x = np.concatenate([near, -near])
    with np.errstate(over="ignore"):
        rounded = x.astype(np.float16).astype(np.float32)
    x, rounded = x[np.isfinite(rounded)], rounded[np.isfinite(rounded)]
    length = 3 * 2**17
    inside, peak = long_fourier.to_plane(x, length, half=True)
    before, same = long_fourier.to_plane(rounded, length)
    assert peak == same
    np.testing.assert_array_equal(inside.view(np.uint32), before.view(np.uint32))
    for bad in (65520, -1e30, np.inf, np.nan):
        assert long_fourier.to_plane(np.float32([0, bad]), length, half=True)[1] > 0x7F7FFFFF
    assert long_fourier.to_plane(np.float32([65519.996]), length, half=True)[1] < 0x7F7FFFFF


@pytest.mark.parametrize("n", [2**17, LENGTH - 400])
def test_threads_and_bytes_beside_change_nothing(fast, n):
    x, given = random(2 * n)[::2], random(2 * n)[::2].copy()
    runs = []
    for threads in (1, 3):
        codec = FFTCodec(theta=0.9, **PAPER, threads=threads)
        state = codec.new_state(n)
        payloads = [codec.encode(x, state=state) for _ in range(2)]
        room = np.full(n + 16, math.pi, np.float32)
        codec.decode_mean_into(payloads, room[8 : n + 8])
        assert (np.delete(room, np.s_[8 : n + 8]) == np.float32(math.pi)).all()
        runs.append((payloads[1].to_bytes(), payloads[1].error, state[0].tobytes(), room.tobytes()))
    assert runs[0] == runs[1]
    np.testing.assert_array_equal(x, given)


def test_non_finite_leaves_the_memory(fast):
    codec, x = FFTCodec(theta=0.9, block=None), random(LENGTH)
    state = codec.new_state(LENGTH)
    good = codec.encode(x, state=state)
    before = state[0].copy()
    x[77] = np.inf
    bad = codec.encode(x, state=state)
    assert (bad.energy, bad.error, bad.saturated) == (0, 0, 0)
    np.testing.assert_array_equal(state[0], before)
    assert np.isnan(codec.decode_mean([good, bad, good])).all()


@pytest.mark.parametrize("positions", ["elias-fano", "bitmap"])
def test_damage_is_seen(fast, positions):
    layout = Layout(LENGTH, 1000, "range", 8, 3, positions)
    words = np.zeros(layout.words, np.uint32)
    long_record.encode_long(random(LENGTH), None, words, layout)
    out = np.empty(LENGTH, np.float32)
    long_record.decode_long([words, words], out, layout, 0.5)
    # The map, or the upper parts: one more or one less of the ones is not what was kept.
    end = layout.positions_at + layout.position_bits
    lasts = range(end - (layout.bins if positions == "bitmap" else 1000), end, 97)
    refused = 0
    for at in [*range(7, 15), *range(layout.positions_at, lasts[0], 211), *lasts]:
        bad = words.copy()
        bad[at // 32] ^= np.uint32(1 << at % 32)
        try:  # as the records of blocks are read
            decode_records(bad[None], np.zeros((1, LENGTH + 2), np.float32), layout, 1.0)
        except PayloadError:
            refused += 1
            with pytest.raises(PayloadError, match="damaged"):
                long_record.decode_long([words, bad], out, layout, 0.5)
        else:
            assert at < lasts[0]
            long_record.decode_long([words, bad], out, layout, 0.5)
    assert refused >= len(lasts)


def test_the_extension_checks_sizes(fast):
    cut, values = long_fourier.split(LENGTH), random(LENGTH)
    plane, _ = long_fourier.to_plane(values, LENGTH)
    tiles = cut.column_tiles
    short = plane[:-1].copy()
    many = np.zeros(LENGTH + 1, np.float32)
    for x, room, first, last in (
        (values, short, 0, tiles),
        (many, plane, 0, tiles),
        (values, plane, 0, tiles + 1),
        (values, plane, -1, tiles),
        (values, plane, 3, 2),
    ):
        with pytest.raises(ValueError, match="belong together"):
            fast.long_forward_columns(cut, x, room, False, first, last)
        with pytest.raises(ValueError, match="belong together"):
            fast.long_inverse_columns(cut, room, x, first, last)
    for change in (
        {"height": 626},
        {"width": 7},
        {"height": 0},
        {"height": 637},  # has a factor of 7
        {"turns": cut.turns[:-1].copy()},
        {"width_roots": cut.height_roots},
    ):
        with pytest.raises(ValueError, match="belong together"):
            fast.long_forward_rows(cut._replace(**change), plane, None, 1.0, 0, 1)
    with pytest.raises(ValueError, match="belong together"):
        fast.long_forward_rows(cut, plane, values, 1.0, 0, 1)  # a memory of other size
    with pytest.raises(ValueError, match="belong together"):
        fast.long_inverse_rows(cut, plane, 0, cut.row_tiles + 1)
    layout = Layout(LENGTH, 1000, "range", 8, 3, "bitmap")
    with pytest.raises(ValueError, match="belong together"):
        long_record.encode_long(values, None, np.zeros(layout.words - 1, np.uint32), layout)
    with pytest.raises(ValueError, match="belong together"):
        long_record.decode_long([np.zeros(3, np.uint32)], values, layout, 1.0)
    with pytest.raises(ValueError, match="belong together"):
        fast.long_natural_order(cut, plane, values, False)
