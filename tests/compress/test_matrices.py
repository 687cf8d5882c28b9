"""How a tensor is cut into a matrix, and what a whole model then sends."""

import itertools
import math
import struct
import zlib

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sn_compress import Link, LowRankCompression, PayloadError, predict
from sn_compress.codecs.factors.lowrank import LowRankCodec
from sn_compress.ops.linear.matrices import cut
from sn_compress.prediction.layers import keras_layout, layers


@pytest.mark.parametrize(("shape", "matrix"), [
    ((), (1, 1)),
    ((7,), (1, 7)),
    ((7, 3, 2), (7, 6)),
    ((64, 32, 3, 3), (64, 288)),  # a kernel of torch
    ((3, 3, 256, 256), (2304, 256)),  # of Keras
    ((7, 7, 3, 64), (147, 64)),
    ((8, 512, 2048), (4096, 2048)),  # a stack of experts
    ((12, 64, 768), (768, 768)),  # heads
    ((4, 4), (4, 4)),
    ((2, 2, 2), (2, 4)),  # a tie: the earlier one
    ((5, 1), (1, 5)),
    ((0, 3), (1, 0)),
])  # fmt: skip
def test_shapes_people_have(shape, matrix):
    assert cut(shape) == matrix


@given(st.lists(st.integers(1, 40), max_size=6))
def test_no_other_cut_has_fewer_rows_and_columns(shape):
    rows, columns = cut(shape)
    assert rows * columns == math.prod(shape)
    sums = [math.prod(shape[:at]) + math.prod(shape[at:]) for at in range(len(shape) + 1)]
    assert rows + columns == min(sums)
    first = sums.index(min(sums))
    assert rows == math.prod(shape[:first])


@pytest.mark.parametrize("layout", [list, keras_layout])
def test_resnet50_reaches_the_ratio_in_torchs_layout_and_in_kerass(layout):
    model = layout(layers("resnet50"))
    assert sum(layer.elements for layer in model) == 25_557_032
    settings = LowRankCompression.using(ratio=100).settings
    found = predict(model, ranks=8, link=Link.of_gbit(10), settings=settings)
    assert found.row("shared").ratio == pytest.approx(100, abs=2)


def test_kerass_layout_is_that_of_keras():
    ours = {layer.name: layer.shape for layer in keras_layout(layers("resnet50"))}
    assert ours["conv1.weight"] == (7, 7, 3, 64)
    assert ours["layer1.0.conv2.weight"] == (3, 3, 64, 64)
    assert ours["fc.weight"] == (2048, 1000)
    assert ours["fc.bias"] == (1000,)


def test_a_kernel_of_keras_is_caught_by_as_many_directions_as_its_matrix_has():
    """Rows of the old cut were 3: a matrix of rank 4 in the new one it could not hold."""
    rng = np.random.default_rng(3)
    true = rng.standard_normal((3 * 3 * 16, 4)) @ rng.standard_normal((4, 24))
    kernel = true.astype(np.float32).reshape(3, 3, 16, 24)
    codec = LowRankCodec(shape=kernel.shape, rank=4, bits=16)
    x = kernel.reshape(-1)
    error = np.linalg.norm(codec.decode(codec.encode(x)) - x) / np.linalg.norm(x)
    # P and Q in half precision: 2**-11 each, and the ridge of the fit, sqrt(1e-6).
    assert error < 3e-3


def payload_of_before(codec, x):
    """As written when every tensor was cut behind its first axis."""
    about = repr((codec.shape, None)).encode()
    settings = struct.pack("<HBBII", codec.rank, codec.bits, codec.mantissa, zlib.crc32(about), 0)
    payload = codec.encode(x)
    return type(payload).seal(payload.buffer.copy(), codec_id=2, n=x.size, settings=settings)


@pytest.mark.parametrize("shape", [(3, 3, 8, 8), (64,), (8, 9, 4), (24, 4, 3, 3), (64, 1)])
def test_a_payload_cut_elsewhere_is_not_read_as_one_of_now(shape):
    """Of a vector both cuts have as many bytes, so that only the settings can tell."""
    x = np.random.default_rng(5).standard_normal(math.prod(shape)).astype(np.float32)
    codec = LowRankCodec(shape=shape, rank=1)
    old = payload_of_before(codec, x)
    if cut(shape)[0] == shape[0]:
        np.testing.assert_array_equal(codec.decode(old), codec.decode(codec.encode(x)))
    else:
        with pytest.raises(PayloadError, match="expected that of LowRankCodec"):
            codec.decode(old)


def test_codecs_of_one_matrix_and_other_shapes_do_not_read_each_other():
    shapes = [(4, 4, 6), (16, 6), (4, 24)]
    x = np.random.default_rng(7).standard_normal(96).astype(np.float32)
    for mine, other in itertools.permutations(shapes, 2):
        with pytest.raises(PayloadError):
            LowRankCodec(shape=mine, rank=2).decode(LowRankCodec(shape=other, rank=2).encode(x))
