"""Which transform a tensor's shape asks for, and that frameworks and ranks agree on it."""

from __future__ import annotations

import numpy as np
import pytest

from sn_compress import FFTCompression
from sn_compress.codecs.by_shape import transform_of


@pytest.mark.parametrize(
    ("shape", "axes"),
    [
        ((64, 32, 3, 3), (2, 3)),  # torch
        ((3, 3, 32, 64), (0, 1)),  # TensorFlow
        ((64, 3, 7, 7), (2, 3)),
        ((7, 7, 3, 64), (0, 1)),
        ((32, 16, 5), (2,)),
        ((5, 16, 32), (0,)),
        ((8, 8, 3, 3, 3), (2, 3, 4)),
        ((64, 1, 3, 3), (2, 3)),  # depthwise
        ((3, 3, 64, 1), (0, 1)),
        ((64, 64, 1, 3), (3,)),
        ((64, 32, 1, 1), (1,)),  # a matrix
        ((1, 1, 32, 64), (2,)),
        ((128, 1024), (0,)),
        ((1024, 64), (1,)),
        ((64, 64), (1,)),
    ],
)
def test_the_axes_that_a_shape_asks_for(shape, axes):
    assert transform_of(shape) == {"transform": "axes", "shape": shape, "axes": axes}


@pytest.mark.parametrize("shape", [(), (0,), (1,), (65536,), (1, 65536), (65536, 1), (1, 1, 7, 1)])
def test_one_axis_is_a_vector(shape):
    assert transform_of(shape) == {"transform": "fft"}


def test_a_compression_takes_one_transform_or_that_of_the_shape():
    by_shape, fixed = FFTCompression, FFTCompression.using(transform="fft")
    paper = FFTCompression.using(mode="paper")
    for shape in ((64, 32, 3, 3), (128, 1024)):
        assert by_shape.settings.codec(1, shape).axes == transform_of(shape)["axes"]
        assert fixed.settings.codec(1, shape).transform == "fft"
        assert paper.settings.codec(1, shape).transform == "fft"
    assert by_shape.settings.codec(1).transform == "fft"
    assert repr(fixed) == "FFTCompression.using(transform='fft')"


def test_as_published_is_as_published():
    """Whatever the defaults are: eight bits, one transform of all, no memory."""
    settings = FFTCompression.using(mode="paper").settings
    codec = settings.codec(1, (40, 50))
    assert (codec.block, codec.bits, codec.mantissa) == (None, 8, 3)
    assert (codec.positions, codec.half, codec.transform) == ("bitmap", True, "fft")
    assert not settings.feedback


def test_a_smooth_kernel_is_a_few_frequencies():
    """A gradient that is constant over height and width is one coefficient of nine."""
    shape = (32, 16, 3, 3)
    flat = np.random.default_rng(0).standard_normal((32, 16, 1, 1)).astype(np.float32)
    gradient = np.broadcast_to(flat, shape).reshape(-1)
    settings = FFTCompression.using(theta=8 / 9).settings
    payload = settings.codec(1, shape).encode(gradient)
    # All that is left is the rounding to 4 bits, at most a fifth of each value kept.
    assert payload.error < 0.2**2 * payload.energy
    blocks = FFTCompression.using(theta=8 / 9, transform="fft").settings.codec(1, shape)
    assert blocks.encode(gradient).error > 5 * payload.error
