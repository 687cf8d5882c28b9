"""One FFT over a long vector, the paper's form: SciPy's transform, records of either back end."""

import numpy as np
import pytest
import scipy
import scipy.fft
from samples import ENERGY, alike, random
from test_fourier import equal

from sn_compress import FFTCodec, FFTCompression, LowRankCompression, Payload, PayloadError
from sn_compress.codecs import batched
from sn_compress.codecs.fft import PAPER

LENGTH = 10**5  # no power of two, and longer than the blocks of fourier.py
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


@pytest.fixture
def on(core, monkeypatch):
    """Choose the back end."""
    return lambda fast: monkeypatch.setattr(
        "sn_compress._native.core", lambda: core if fast else None
    )


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
    """Bytes, memories and vectors, and of array code; where no vector fills its transform."""
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
            assert fast[i].to_bytes()[2] == 3
            assert fast[i].saturated == slow[i].saturated
            told = [(run[i].energy, run[i].error) for run in runs]
            np.testing.assert_allclose(*told, rtol=ENERGY, atol=0)
        alike(fast[2], slow[2])
        equal(fast[3], slow[3])
        if codec.window != "payload" and name == "random":  # of which array code has a form
            made = batched.encode(codec, [x])
            assert made.words.tobytes() == plain.to_bytes()
            decoded = batched.decode(codec, np.stack([made.words] * 2), [n])
            assert not decoded.damaged
            np.testing.assert_array_equal(decoded.means[0], codec.decode_mean([plain, plain]))


def test_which_payloads_are_of_version_3():
    x = random(2**17 + 100)
    for settings, version in (
        ({"block": None}, 3),
        ({"block": 2**17}, 3),
        ({"block": 2**16}, 2),
        ({"block": 2**17, "span": 64}, 2),
        ({"block": None, "transform": "dct"}, 2),
        ({}, 2),
    ):
        codec = FFTCodec(theta=0.99, **settings)
        data = codec.encode(x).to_bytes()
        assert (data[2], codec.version) == (version, version)
        assert Payload.from_bytes(data).n == x.size
        assert batched.encode(codec, [x]).words.tobytes()[2] == version


@pytest.mark.parametrize("positions", ["elias-fano", "bitmap"])
def test_damage_is_seen(backend, positions):
    codec = FFTCodec(theta=0.98, block=None, positions=positions)
    good = codec.encode(random(LENGTH))
    layout = codec.sections(LENGTH)[0].layout
    # The map, or the upper parts: one more or one less of the ones is not what was kept.
    end = layout.positions_at + layout.position_bits
    for at in range(end - 1000, end, 97):
        buffer = good.buffer.copy()
        buffer[32:].view("<u4")[at // 32] ^= np.uint32(1 << at % 32)
        bad = Payload(buffer, 1, LENGTH, codec.settings)
        with pytest.raises(PayloadError, match=r"damaged|positions|map"):
            codec.decode_mean([good, bad])


def test_ranks_compare_the_library_whose_transform_they_decode_by():
    said = dict(FFTCompression.using(mode="paper").settings.fingerprint())
    assert said["version of SciPy"] == scipy.__version__
    for other in (FFTCompression, LowRankCompression):
        assert "version of SciPy" not in dict(other.settings.fingerprint())
