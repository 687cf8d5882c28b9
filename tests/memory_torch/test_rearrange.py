"""The backward pass as it is arranged for a plan: less is held, and no bit changes."""

import pytest
import torch
from torch import nn

from sn_memory.graph.liveness import peak
from sn_memory.torch import plan, trace, verify


def backward(graph):
    return [op for op in graph.ops if op.phase == "backward" and op.name != "loss"]


def exact(model, sample, budget="100%", **settings):
    """Plan, run, compare; return what was found."""
    planned = plan(model, sample, budget, profile=False, **settings)
    found = verify(planned, sample)
    assert found.equal, found.different
    assert found.measured_peak_bytes == found.predicted_peak_bytes
    return found


def head(rows):
    """A layer whose weight is large beside its input and output, as at the end of VGG."""
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)), torch.randn(rows, 256)


def test_large_gradients_of_small_inputs_are_made_last():
    model, sample = head(4)
    last = backward(trace(model, sample, profile=False).graph)[-4:]
    made = [name for op in last for name in op.outputs]
    assert len(made) == 4
    assert {op.kind for op in last} == {"mm", "sum"}
    exact(model, sample)


def test_gradients_smaller_than_their_inputs_stay():
    model, sample = head(4096)
    late = backward(trace(model, sample, profile=False).graph)[-1]
    # But for that of the last bias: what it sums is the caller's, and there to the end.
    assert (late.kind, late.inputs) == ("sum", ("gradient of output 0",))
    kinds = [op.kind for op in backward(trace(model, sample, profile=False).graph)[:-1]]
    assert kinds == ["mm", "mm", "threshold_backward", "mm", "sum"]


def test_with_overlap_each_gradient_stays_where_torch_makes_it():
    model, sample = head(4)
    early, late = (trace(model, sample, profile=False, overlap=it).graph for it in (True, False))
    assert [op.kind for op in backward(early)].index("threshold_backward") == 3
    assert [op.kind for op in backward(late)].index("threshold_backward") == 1


def wide_head():
    """Large maps first, large weights last."""
    model = nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(8)),
        *(nn.Flatten(), nn.Linear(8 * 8 * 8, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    )
    return model, torch.randn(2, 3, 64, 64)


def test_large_maps_and_large_gradients_are_never_held_together():
    model, sample = wide_head()
    early, late = (trace(model, sample, profile=False, overlap=it).graph for it in (True, False))
    gradients = sum(it.nbytes for it in model.parameters())
    assert peak(late).bytes <= late.base_bytes + gradients + 4 * 2 * 1024 * 4
    assert peak(early).bytes > peak(late).bytes
    exact(model, sample)


def test_what_is_written_over_later_is_not_put_off():
    """Twice the same weight: its first gradient is read by the sum of both."""

    class Twice(nn.Module):
        def __init__(self):
            super().__init__()
            self.weight = nn.Parameter(torch.randn(64, 64) / 8)

        def forward(self, x):
            return (x @ self.weight).relu() @ self.weight

    found = exact(Twice(), torch.randn(2, 64))
    assert found.predicted_peak_bytes <= found.unplanned_peak_bytes


@pytest.mark.parametrize(
    "layer",
    [
        nn.Conv2d(8, 8, 3, padding=1),
        nn.Conv2d(8, 8, 3, padding=1, bias=False),
        nn.Conv2d(8, 16, 3, stride=2, padding=1),
        nn.Conv2d(8, 8, 3, padding=1, groups=8),
        nn.Conv2d(8, 4, 5, dilation=2),
        nn.ConvTranspose2d(8, 4, 2, stride=2),
    ],
    ids=str,
)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_convolutions_taken_apart_give_the_same_bits(layer, form):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), layer).to(memory_format=form)
    sample = torch.randn(2, 3, 16, 16).to(memory_format=form)
    kinds = [op.kind for op in backward(trace(model, sample, profile=False).graph)]
    # Weight and bias, then the input; the first layer's input wants none.
    assert kinds.count("convolution_backward") == 3
    exact(model, sample)


def test_frozen_convolutions_stay_one_call():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    model[1].requires_grad_(False)
    kinds = [
        op.kind for op in backward(trace(model, torch.randn(2, 3, 16, 16), profile=False).graph)
    ]
    assert kinds.count("convolution_backward") == 2 + 1 + 1
    exact(model, torch.randn(2, 3, 16, 16))


def test_the_gradient_of_an_input_does_not_hold_that_input():
    """Two large maps at once, not three: the input of the layer is there for its shape only."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1))
    named = trace(model, torch.randn(2, 3, 32, 32), profile=False).named
    (op,) = (
        op
        for op in backward(named.graph)
        if op.kind == "convolution_backward" and len(op.outputs) == 1
    )
    (kept,) = (op.outputs[0] for op in named.graph.ops if op.kind == "tanh")
    assert kept not in op.inputs


@pytest.mark.parametrize(
    "pool",
    [nn.MaxPool2d(2), nn.MaxPool2d(3, 2, 1), nn.AvgPool2d(2), nn.AdaptiveAvgPool2d(4)],
    ids=str,
)
@pytest.mark.parametrize("form", [torch.contiguous_format, torch.channels_last])
def test_pools_read_the_shape_of_their_input_alone(pool, form):
    """A wide layer beside the pool lends its weight's memory as the shape."""

    class Net(nn.Module):
        def __init__(self):
            super().__init__()
            self.first = nn.Conv2d(3, 4, 3, padding=1)
            self.pool = pool
            self.last = nn.Linear(4096, 8)

        def forward(self, x):
            pooled = self.pool(self.first(x).exp()).flatten(1)
            return self.last(torch.nn.functional.pad(pooled, (0, 4096 - pooled.shape[1])))

    model, sample = Net().to(memory_format=form), torch.randn(1, 3, 16, 16)
    sample = sample.to(memory_format=form)
    graph = trace(model, sample, profile=False).graph
    (op,) = (op for op in backward(graph) if "pool" in op.kind)
    (made,) = (op.outputs[0] for op in graph.ops if op.kind == "exp")
    assert made not in op.inputs
    assert "last.weight" in op.inputs
    exact(model, sample)
