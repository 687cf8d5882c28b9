"""FFTCompression without processes: settings, dispatch, counting."""

from __future__ import annotations

import numpy as np
import pytest

from sn_compress import CompressError, FFTCodec, FFTCompression
from sn_compress.report import Traffic


def test_using_makes_a_configured_class_and_leaves_the_bare_one_alone():
    ours = FFTCompression.using(theta=0.9, bits=6, mantissa=2)
    assert issubclass(ours, FFTCompression)
    assert ours.settings.codec(1).theta == 0.9
    assert FFTCompression.settings.theta == 0.98
    assert ours.using(block=None).settings.theta == 0.9


def test_paper_mode_is_the_papers_pipeline():
    settings = FFTCompression.using(mode="paper", theta=0.85).settings
    assert (settings.block, settings.positions, settings.half, settings.feedback) == (
        None, "bitmap", True, False,
    )  # fmt: skip
    assert settings.theta == 0.85


@pytest.mark.parametrize(
    ("change", "word"),
    [
        ({"theta": 1.0}, "theta"),
        ({"block": 1000}, "block"),
        ({"bits": 3}, "bits"),
        ({"bits": 8, "mantissa": 8}, "mantissa"),
        ({"min_elements": 0}, "min_elements"),
        ({"decay": 0.0}, "decay"),
        ({"mode": "best"}, "mode"),
        ({"topk": 3}, "no setting topk"),
    ],
)
def test_bad_settings_are_refused_when_given(change, word):
    with pytest.raises(CompressError, match=word):
        FFTCompression.using(**change)


def test_decompress_takes_a_missing_context():
    """Horovod passes ctx None for sparse gradients."""
    assert FFTCompression.decompress("as it is", None) == "as it is"


def test_traffic_counts_steps_by_the_return_of_a_name():
    codec, traffic = FFTCodec(theta=0.9), Traffic()
    assert traffic.report()["ratio"] == 0.0
    rng = np.random.default_rng(0)
    for _ in range(3):
        for name in ("a", "b"):
            payload = codec.encode(rng.standard_normal(8192, dtype=np.float32))
            traffic.payload(name, 8192, payload, extra=4)
        traffic.plain("bias", 10, 40)
    report = traffic.report()
    assert report["steps"] == 3
    assert report["tensors"] == 2
    assert report["dense_bytes"] == 4 * (2 * 8192 + 10)
    assert report["payload_bytes"] == 2 * (codec.payload_bytes(8192) + 4) + 40
    # White noise, the tenth of the bins with the largest magnitude: section 7 of the facts
    # derives 33.0 % of the energy for complex bins, so sqrt(0.67) remains.
    assert report["relative_error"] == pytest.approx(0.67**0.5, abs=0.02)
