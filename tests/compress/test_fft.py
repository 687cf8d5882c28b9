"""What the FFT codec promises of a vector: size, error, zeros, NaN, order of nothing but bytes."""

import math

import numpy as np
import pytest
import scipy.fft
from samples import (
    ENERGY,
    SIZES,
    TINY,
    U,
    alike,
    codecs,
    edges,
    for_each,
    norm,
    random,
    specials,
    transform_error,
)

from sn_compress import FFTCodec
from sn_compress.codecs.fft import PAPER

CODECS = codecs()
IDS = [repr(codec)[9:-1] for codec in CODECS]


def absolute(codec: FFTCodec, n: int) -> float:
    """What denormals add to a norm: each of some 20 roundings on the way of each of the parts is
    good to half of TINY only."""
    return 20 * TINY * math.sqrt(sum(s.count * s.layout.block for s in codec.sections(n)))


def check_error(codec: FFTCodec, x: np.ndarray) -> None:
    """The error said is the error made, and no more than what was there."""
    payload = codec.encode(x)
    y = codec.decode(payload)
    assert y.dtype == np.float32
    assert y.shape == x.shape
    assert payload.nbytes == codec.payload_bytes(x.size) == len(payload.to_bytes())
    e = transform_error(codec, x.size)
    floor = absolute(codec, x.size)
    # Energies are sums in float64 of squares down to 1e-90, each row's within ENERGY.
    said = math.sqrt(payload.error)
    made = norm(x.astype(np.float64) - y)
    # Exactly, the spectrum's error is that of the padded vector. Forward adds e |x|, back e |y|.
    slack = e * (norm(x) + 1.01 * (norm(x) + said)) + ENERGY * said + 2 * floor
    assert made <= said + slack
    padded = any(s.count * s.layout.block != s.stop - s.start for s in codec.sections(x.size))
    if not padded:
        assert made >= said - slack
    assert abs(math.sqrt(payload.energy) - norm(x)) <= (e + ENERGY) * norm(x) + floor
    # Each kept part is moved to the nearest value, among them zero, or those of a group to within
    # a rounding of their mean, which is as far from twice the mean as from zero; the others are
    # dropped. (Where edge bins count half, the group's mean may be off by 2**-8 of itself over
    # the number of parts, more than 256 then.)
    assert payload.error <= payload.energy * (1 + 2 * ENERGY + 2.0**-16)


@for_each("n", (*SIZES[:-1], 2**16 + 1))
@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_error_is_what_the_payload_says(backend, codec, n):
    check_error(codec, random(n))
    for x in specials(n).values() if n in (1, 33, 1000, 4096) else ():
        check_error(codec, x)


@pytest.mark.parametrize("values", ["sign", "2bit"])
@pytest.mark.parametrize("block", [64, None])
def test_what_the_inverse_ignores_is_no_error_and_not_remembered(backend, values, block):
    """A coder without a zero gives the first bin an imaginary part all the same."""
    x = 1 + random(75)  # one block of 75 without a last bin of its own, or one of 64 and one of 32
    codec = FFTCodec(theta=0.5, block=block, values=values)
    state = codec.new_state(75)
    payload = codec.encode(x, state=state)
    made = norm(x.astype(np.float64) - codec.decode(payload))
    slack = 3 * transform_error(codec, 75) * norm(x)
    if block is None:
        assert abs(made - math.sqrt(payload.error)) <= slack
    for s, part in zip(codec.sections(75), state, strict=True):
        assert not part[:, edges(s.layout)].any()


def test_promised_ratio():
    x = random(1_000_000)
    for theta, least in ((0.9, 25), (0.98, 110)):
        for block in (4096, None):
            payload = FFTCodec(theta=theta, bits=8, block=block).encode(x)
            assert x.nbytes / len(payload.to_bytes()) >= least


@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_exact_zeros_stay_zero(backend, codec):
    n = 3 * 4096 + 100
    zeros = np.where(np.arange(n) % 2, 0.0, -0.0).astype(np.float32)
    payload = codec.encode(zeros)
    assert not codec.decode(payload).view(np.uint32).any()  # plus zeros all
    assert (payload.energy, payload.error, payload.saturated) == (0, 0, 0)
    if codec.block:  # and a block of zeros among others
        b = codec.block
        x = random(n)
        x[b : 2 * b] = 0
        assert not codec.decode(codec.encode(x))[b : 2 * b].view(np.uint32).any()


@for_each("bad", (np.nan, np.inf, -np.inf))
@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_non_finite_reaches_its_block_and_no_memory(backend, codec, bad):
    n = 2 * 4096 + 77
    x, clean = random(n, 1), random(n, 1)
    section = codec.sections(n)[0]
    row, block = section.count // 2, section.layout.block
    first, last = row * block, min(row * block + block, n)
    x[(first + last) // 2] = bad
    clean[first:last] = 0
    state = codec.new_state(n)
    codec.encode(random(n, 2), state=state)  # so that there is something to remember
    if codec.window == "payload":  # or the range that all share would show the row's memory
        state[0][row] = 0
    before, clean_state = ([part.copy() for part in state] for _ in range(2))
    y = codec.decode(codec.encode(x, state=state))
    z = codec.decode(codec.encode(clean, state=clean_state))
    assert np.isnan(y[first:last]).all()
    np.testing.assert_array_equal(np.delete(y, np.s_[first:last]), np.delete(z, np.s_[first:last]))
    alike(state[0][row], before[0][row])
    clean_state[0][row] = before[0][row]
    alike(state, clean_state)


def test_half_casts_first():
    x = random(5000)
    plain, half = FFTCodec(theta=0.9), FFTCodec(theta=0.9, half=True)
    rounded = x.astype(np.float16).astype(np.float32)
    assert (
        half.encode(x).to_bytes() == plain.encode(rounded).to_bytes() != plain.encode(x).to_bytes()
    )
    assert np.isnan(half.decode(half.encode(np.full(100, 1e5, np.float32)))).all()  # beyond float16


@pytest.mark.parametrize("settings", [
    {}, {"block": 2**17}, {"window": "payload"}, {"transform": "dct", "values": "2bit"}, PAPER,
    {"transform": "hadamard", "values": "sign"}, {"transform": "identity", "values": "fp16"},
    {"transform": "axes", "shape": (3, 7, 26_027), "axes": (0,)},
], ids=str)  # fmt: skip
def test_threads_change_nothing(core, settings):
    n = math.prod(settings.get("shape", [2**20 + 5001]))
    x = random(n)
    one, four = (FFTCodec(theta=0.98, threads=t, **settings) for t in (1, 4))
    states = one.new_state(n), four.new_state(n)
    for _ in range(2):
        a, b = one.encode(x, state=states[0]), four.encode(x, state=states[1])
        assert a.to_bytes() == b.to_bytes()
        assert (a.energy, a.error, a.saturated) == (b.energy, b.error, b.saturated)
    alike(states[0], states[1])
    alike(one.decode(a), four.decode(a))


@pytest.mark.parametrize("values", ["range", "fp16"])
def test_without_a_transform_each_zero_stays_zero(backend, values):
    """Plain top-k with a coder that has a zero: what is zero decodes to zero, kept or not."""
    x = random(5000)
    x[::3] = 0
    for theta in (0.0, 0.2, 0.9):
        codec = FFTCodec(theta=theta, block=256, transform="identity", values=values)
        assert not codec.decode(codec.encode(x))[::3].view(np.uint32).any()


@for_each("ranks", (1, 2, 3, 8))
@pytest.mark.parametrize("codec", CODECS, ids=IDS)
def test_decode_mean_is_the_mean_of_the_decodes(backend, codec, ranks):
    n = 9000
    payloads = [codec.encode(random(n, seed)) for seed in range(ranks)]
    mean = codec.decode_mean(payloads)
    decodes = [codec.decode(p).astype(np.float64) for p in payloads]
    # Each payload is weighted (1 rounding of the weight, 1 of the product) and added (1 per sum);
    # a transform each on either side.
    whole = 0.0
    for payload in payloads:  # norms with the padding, which the vector does not show
        whole += math.sqrt(payload.energy) + math.sqrt(payload.error)
    bound = (2.01 * transform_error(codec, n) + (ranks + 2) * U) * whole / ranks
    assert norm(mean - sum(decodes) / ranks) <= bound
    alike(codec.decode_mean(payloads), mean)
    # A quarter of a value of at most 11 bits, added up four times, is never rounded.
    for count in (1, 4) if ranks == 1 else ():
        alike(codec.decode_mean(payloads * count), codec.decode(payloads[0]))


SHAPE, AXES = (10, 6, 5, 3), (2, 3)
OVER_AXES = [
    {"theta": 0.9},
    {"theta": 0.5, "block": None, "bits": 4, "mantissa": 1},
    {"theta": 0.8, "block": 64, "values": "sign"},
    {"theta": 0.0, "values": "fp16"},
]


@pytest.mark.parametrize("settings", OVER_AXES, ids=str)
@for_each("axes", ((0,), (3, 1), (0, 1, 2, 3)))
def test_axes_error_is_what_the_payload_says(backend, settings, axes):
    codec = FFTCodec(transform="axes", shape=SHAPE, axes=axes, **settings)
    for x in (random(900), *specials(900).values()):
        check_error(codec, x)


@pytest.mark.parametrize("settings", OVER_AXES, ids=str)
def test_axes_is_top_k_of_a_cosine_transform(backend, settings):
    """The payload's body is that of plain top-k over SciPy's coefficients."""
    codec = FFTCodec(transform="axes", shape=SHAPE, axes=AXES, **settings)
    plain = FFTCodec(transform="identity", **settings)
    x = random(900)
    coefficients = scipy.fft.dctn(x.reshape(SHAPE), axes=AXES, norm="ortho").reshape(-1)
    ours, top = codec.encode(x), plain.encode(coefficients)
    assert ours.body.tobytes() == top.body.tobytes()
    assert (ours.energy, ours.error) == (top.energy, top.error)
    back = scipy.fft.idctn(plain.decode(top).reshape(SHAPE), axes=AXES, norm="ortho")
    np.testing.assert_array_equal(codec.decode(ours), back.reshape(-1))
    assert codec.payload_bytes(900) == plain.payload_bytes(900)


@pytest.mark.parametrize("bad", [np.nan, np.inf])
def test_axes_non_finite_spreads_along_the_axes_only(backend, bad):
    codec = FFTCodec(theta=0.5, transform="axes", shape=(40, 8, 8), axes=(1, 2), block=64)
    x, state = random(2560), codec.new_state(2560)
    codec.encode(random(2560, 1), state=state)
    before = state[0].copy()
    x[5 * 64 + 7] = bad  # in the sixth 8 by 8 kernel, and the sixth block
    y = codec.decode(codec.encode(x, state=state))
    assert np.flatnonzero(np.isnan(y)).tolist() == list(range(5 * 64, 6 * 64))
    np.testing.assert_array_equal(state[0][5], before[5])
    assert np.isfinite(state[0]).all()
