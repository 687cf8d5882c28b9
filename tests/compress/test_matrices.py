"""How a tensor is cut into a matrix, and what a whole model then sends."""

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sn_compress import Link, LowRankCompression, predict
from sn_compress.ops.products import cut
from sn_compress.prediction.cost import Layer, layers


@pytest.mark.parametrize(("shape", "matrix"), [
    ((), (1, 1)),
    ((7,), (1, 7)),
    ((64, 32, 3, 3), (64, 288)),  # a kernel of torch
    ((3, 3, 256, 256), (2304, 256)),  # of Keras
    ((12, 64, 768), (768, 768)),  # heads
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


def keras_layout(model):
    """The same parameters as Keras has them: (in, out), and (height, width, in, out)."""
    return [Layer(layer.name, (*layer.shape[2:], *layer.shape[1::-1])) for layer in model]


@pytest.mark.parametrize("layout", [list, keras_layout])
def test_resnet50_reaches_the_ratio_in_torchs_layout_and_in_kerass(layout):
    model = layout(layers("resnet50"))
    if layout is keras_layout:
        shapes = {layer.name: layer.shape for layer in model}
        assert shapes["conv1.weight"] == (7, 7, 3, 64)
        assert (shapes["fc.weight"], shapes["fc.bias"]) == ((2048, 1000), (1000,))
    assert sum(layer.elements for layer in model) == 25_557_032
    settings = LowRankCompression.using(ratio=100).settings
    found = predict(model, ranks=8, link=Link.of_gbit(10), settings=settings)
    assert found.row("LowRankCompression").ratio == pytest.approx(100, abs=2)
