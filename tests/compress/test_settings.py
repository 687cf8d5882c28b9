"""FFTCodec's settings and arguments: what is legal, what the error says, what repr shows."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from samples import examples, random

from sn_compress import CompressError, FFTCodec, Payload, PayloadError


@pytest.mark.parametrize(("settings", "message"), [
    ({"theta": 1}, "theta=1; expected a fraction from 0"),
    ({"transform": "auto"}, "transform='auto'; expected fft or dct"),
    ({"theta": float("nan")}, "theta=nan; expected"),
    ({"block": 16}, "block=16; expected a power of two from 32"),
    ({"block": 4095}, "block=4095; expected"),
    ({"block": -4096}, "block=-4096; expected"),
    ({"block": 2**21}, r"expected a power of two from 32 to 2\*\*20, or None"),
    ({"span": 96}, "span=96; expected a power of two from 32 to the block"),
    ({"span": 8192}, "span=8192; expected a power of two from 32 to the block"),
    ({"span": 64, "block": None}, "span=64; expected a power of two from 32 to the block"),
    ({"span": 64, "transform": "dct"}, 'span=64; expected None unless transform="fft"'),
    ({"bits": 3}, "bits=3: a range float has 4 to 16 bits"),
    ({"mantissa": 8}, "mantissa=8 with bits=8: legal are 1 to 7"),
    ({"bits": 12}, "mantissa=3 with bits=12: legal are 5 to 11"),
    ({"positions": "rle"}, "positions='rle'; expected elias-fano or bitmap"),
    ({"values": "bf16"}, "values='bf16'; expected range or fp16 or sign or 2bit"),
    ({"transform": "dst"}, "transform='dst'; expected fft or dct or hadamard or identity or"),
    ({"shape": (4, 4)}, 'shape=\\(4, 4\\); expected None unless transform="axes"'),
    ({"transform": "dct", "axes": (0,)}, 'expected None unless transform="axes"'),
    ({"transform": "axes"}, "shape=None; expected the tensor's shape"),
    ({"transform": "axes", "shape": (4, 4)}, "axes=None; expected different axes from 0 to 1"),
    ({"transform": "axes", "shape": (4, 4), "axes": ()}, "different axes from 0 to 1"),
    ({"transform": "axes", "shape": (4, 4), "axes": (2,)}, "different axes from 0 to 1"),
    ({"transform": "axes", "shape": (4, 4), "axes": (-1,)}, "different axes from 0 to 1"),
    ({"transform": "axes", "shape": (4, 4), "axes": (1, 1)}, "different axes from 0 to 1"),
    ({"transform": "axes", "shape": (4, 0), "axes": (1,)}, "expected the tensor's shape"),
    ({"window": "tensor"}, 'window=\'tensor\'; expected "block", "payload" or a positive number'),
    ({"window": 0}, "window=0; expected"),
    ({"window": float("nan")}, "window=nan; expected"),
    ({"values": "fp16", "window": "payload"}, "expected \"block\" with values='fp16'"),
    ({"values": "sign", "window": 1.0}, "expected \"block\" with values='sign'"),
    ({"values": "2bit", "window": "payload"}, "expected \"block\" with values='2bit'"),
    ({"threads": 0}, "threads=0; expected at least 1"),
])  # fmt: skip
def test_illegal_settings(settings, message):
    with pytest.raises(CompressError, match=message):
        FFTCodec(**settings)


def test_settings_are_by_keyword_only():
    with pytest.raises(TypeError):
        FFTCodec(0.9)


def test_settings_that_only_concern_the_encoder_are_not_compared():
    x = random(5000)
    codec = FFTCodec(theta=0.9)
    for other in ({"window": "payload"}, {"window": 3.0}, {"half": True}, {"threads": 3}):
        assert codec.decode(FFTCodec(theta=0.9, **other).encode(x)).size == 5000


def test_payloads_of_different_vectors_have_no_mean():
    codec = FFTCodec(theta=0.9)
    with pytest.raises(PayloadError, match="expected 5000 elements"):
        codec.decode_mean([codec.encode(random(5000)), codec.encode(random(4999))])


@examples
@given(st.floats(0, 1, exclude_max=True), st.integers(1, 2**40))
def test_kept_bins(theta, f):
    k = FFTCodec(theta=theta).kept(f)
    assert 1 <= k <= f
    # Exact but for theta, which is cut to a multiple of 2**-32; a bin is rounded in our favour.
    assert f * (1 - theta) - f * 2.0**-52 <= k <= f * (1 - theta) + f * 2.0**-31 + 1


def test_a_codec_over_axes_serves_one_shape():
    codec = FFTCodec(transform="axes", shape=(10, 3, 3), axes=(1, 2))
    for call in (codec.encode, codec.values_to_state):
        with pytest.raises(CompressError, match=r"91 elements do not fill shape \(10, 3, 3\)"):
            call(random(91))
    with pytest.raises(CompressError, match=r"expected 90\. A codec over axes serves one"):
        codec.payload_bytes(89)


def test_one_range_for_the_payload():
    """A loud block and a quiet one, and a tail, all in one window."""
    x = np.concatenate([random(4096) * 100, random(4096) * 0.01, random(500)]).astype(np.float32)
    codec = FFTCodec(theta=0.5, window="payload")
    payload = codec.encode(x)
    words = payload.body.view("<u4")
    ends = set()
    for s in codec.sections(x.size):
        rows = words[s.words_at : s.words_at + s.count * s.layout.words].reshape(s.count, -1)
        ends |= {int(row[0]) & 0xFFFF for row in rows}
    assert len(ends) == 1
    assert payload.saturated == 0


def test_common_range_has_room_for_the_memory(backend):
    codec = FFTCodec(theta=0.9, window="payload")
    state = codec.new_state(8192)
    state[0][:] = 100
    for decay, end in ((1.0, 0x42C8), (0.25, 0x41C8)):  # upper halves of 100 and 25
        payload = codec.encode(np.zeros(8192, np.float32), state=[state[0].copy()], decay=decay)
        assert payload.saturated == 0
        # Rounded to 3 mantissa bits: 104 and 26.
        assert int(payload.body.view("<u4")[0]) & 0xFFFF == end + 8


def test_fixed_range_counts_what_it_clips(backend):
    x = random(4096)
    spectrum = np.fft.rfft(x.astype(np.float64), norm="ortho")
    parts = abs(np.concatenate([spectrum.real, spectrum.imag]))
    values = abs(x)
    payload = FFTCodec(theta=0.0, block=4096, window=0.25, transform="identity").encode(x)
    # The first rung above the window ends at 1.125 of it; halfway there is clipped.
    assert payload.saturated == (values >= 0.25 * 1.0625).sum() > 0
    for window in (1.0, 2.0**-20):
        payload = FFTCodec(theta=0.0, block=4096, window=window).encode(x)
        # The last rung takes what is up to half a step, 2**-4, above the window's end.
        counts = [(parts > window * above).sum() for above in (1.07, 1.06)]
        assert counts[0] <= payload.saturated <= counts[1]
        assert payload.saturated > 0
        assert Payload.from_bytes(payload.to_bytes()).saturated == payload.saturated
    for window in (100.0, 3e38):
        assert FFTCodec(theta=0.0, window=window).encode(x).saturated == 0
    with pytest.raises(CompressError, match="window=1e\\+39"):
        FFTCodec(window=1e39).encode(random(100))
