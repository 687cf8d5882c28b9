"""The same layers in torch and in TensorFlow: their ops are priced the same.

What differs are the frameworks' own ops: torch has one for the gradients of a convolution's input
and weight, and TensorFlow an op for each gradient. So sums over both gradients are compared.
"""

import keras
import pytest
import tensorflow as tf

import sn_memory.tensorflow

torch = pytest.importorskip("torch")
nn = torch.nn
ours_of = pytest.importorskip("sn_memory.torch").trace
BATCH, WIDTH, SIDE = 64, 16, 32
TOKENS, MODEL = 128, 64
MAP_BYTES = 4 * BATCH * WIDTH * SIDE * SIDE


def convolutions():
    """Convolutions of stride 1 and 2, as (torch's graph, TensorFlow's)."""
    plain = nn.Sequential(
        nn.Conv2d(3, WIDTH, 3, 1, 1, bias=False),
        nn.ReLU(),
        nn.Conv2d(WIDTH, 2 * WIDTH, 3, 2, 1, bias=False),
        nn.ReLU(),
        nn.Conv2d(2 * WIDTH, 2 * WIDTH, 3, 1, 1, bias=False),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(2 * WIDTH, 10),
    )
    layers = [
        keras.layers.Conv2D(width, 3, stride, "same", use_bias=False, activation=activation)
        for width, stride, activation in (
            (WIDTH, 1, "relu"), (2 * WIDTH, 2, "relu"), (2 * WIDTH, 1, None)
        )
    ]  # fmt: skip
    layers += [keras.layers.GlobalAveragePooling2D(), keras.layers.Dense(10)]
    model = keras.Sequential([keras.Input((SIDE, SIDE, 3)), *layers])
    return graphs(plain, torch.zeros(BATCH, 3, SIDE, SIDE), model, (BATCH, SIDE, SIDE, 3))


class Products(nn.Module):
    """Dense layers, and scores of all pairs of tokens between two of them."""

    def __init__(self):
        super().__init__()
        self.wide, self.narrow = nn.Linear(MODEL, 4 * MODEL), nn.Linear(4 * MODEL, MODEL)

    def forward(self, x):
        x = torch.relu(self.wide(x))
        return self.narrow(torch.softmax(x @ x.transpose(-1, -2), -1) @ x)


def products():
    start = keras.Input((TOKENS, MODEL))
    x = keras.layers.Dense(4 * MODEL, "relu")(start)
    pairs = keras.ops.matmul(x, keras.ops.transpose(x, (0, 2, 1)))
    x = keras.layers.Dense(MODEL)(keras.ops.matmul(keras.layers.Softmax()(pairs), x))
    shape = (16, TOKENS, MODEL)
    return graphs(Products(), torch.zeros(shape), keras.Model(start, x), shape)


def graphs(plain, sample, model, shape):
    """Both graphs, priced by the roofline of one device."""
    theirs = sn_memory.tensorflow.trace(model, tf.TensorSpec(shape), profile=False).graph
    return ours_of(plain, sample, profile=False).graph, theirs


def seconds(graph, kinds, phase):
    """Seconds of the ops of these kinds, the shortest first."""
    return sorted(
        ways[0]
        for op, ways in zip(graph.ops, graph.arrays.seconds, strict=True)
        if op.kind in kinds and op.phase == phase
    )


def flops(graph, kinds, phase):
    return sum(op.flops for op in graph.ops if op.kind in kinds and op.phase == phase)


def test_convolutions_are_priced_the_same():
    ours, theirs = convolutions()
    forward = seconds(ours, {"convolution"}, "forward")
    assert len(forward) == 3
    assert forward == pytest.approx(seconds(theirs, {"conv2d"}, "forward"), rel=1e-6)
    back, gradients = {"convolution_backward"}, {"conv2dbackpropfilter", "conv2dbackpropinput"}
    assert flops(ours, back, "backward") == flops(theirs, gradients, "backward") > 0
    # torch's op takes the input although its gradient needs none. Where nothing else of its shape
    # is there to stand in, at the convolution of stride 2, it is counted as read.
    extra = MAP_BYTES / ours.device.bytes_per_s
    mine, other = seconds(ours, back, "backward"), seconds(theirs, gradients, "backward")
    assert sum(mine) == pytest.approx(sum(other) + extra, rel=1e-3)


def test_products_are_priced_the_same():
    ours, theirs = products()
    for phase, mine, count in (("forward", {"addmm"}, 2), ("backward", {"mm"}, 3)):
        found, other = seconds(ours, mine, phase), seconds(theirs, {"matmul"}, phase)
        assert len(found) == count
        # addmm adds the bias as well, some hundred bytes; TensorFlow has an op for that.
        assert found == pytest.approx(other, rel=5e-3)
        assert flops(ours, mine, phase) == flops(theirs, {"matmul"}, phase) > 0
        scores = seconds(ours, {"bmm"}, phase)
        assert scores == pytest.approx(seconds(theirs, {"batchmatmulv2"}, phase), rel=1e-6)
