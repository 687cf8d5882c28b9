"""The backward pass as it is arranged for a plan: less is held, and no bit changes."""

import pytest
import torch
from small_models import maps_then_weights, module_of
from steps import exact
from torch import nn

from sn_memory.graph.liveness import peak
from sn_memory.torch import plan, trace
from sn_memory.torch.trace.trace import CallArguments


def graph_of(model, sample, **settings):
    return trace(model, sample, profile=False, **settings).graph


def backward(graph):
    return [op for op in graph.ops if op.phase == "backward" and op.name != "loss"]


def kinds(graph):
    return [op.kind for op in backward(graph)]


def planned_exactly(model, sample):
    return exact(plan(model, sample, "100%", profile=False), sample)


def head(rows):
    """A layer whose weight is large beside its input and output, as at the end of VGG."""
    return nn.Sequential(nn.Linear(256, 256), nn.ReLU(), nn.Linear(256, 10)), torch.randn(rows, 256)


def test_large_gradients_of_small_inputs_come_last():
    model, sample = head(4)
    last = backward(graph_of(model, sample))[-4:]
    assert len([name for op in last for name in op.outputs]) == 4
    assert {op.kind for op in last} == {"mm", "sum"}
    planned_exactly(model, sample)
    # With overlap each gradient stays where torch computes it.
    orders = [kinds(graph_of(model, sample, overlap=it)) for it in (True, False)]
    assert [it.index("threshold_backward") for it in orders] == [3, 1]
    # And so do those that are smaller than their inputs.
    *ops, late = backward(graph_of(*head(4096)))
    # But for that of the last bias: what it sums is the caller's, and there to the end.
    assert (late.kind, late.inputs) == ("sum", ("gradient of output 0",))
    assert [op.kind for op in ops] == ["mm", "mm", "threshold_backward", "mm", "sum"]


def test_large_maps_and_large_gradients_are_never_held_together():
    model, sample = maps_then_weights(), torch.randn(2, 3, 64, 64)
    early, late = (graph_of(model, sample, overlap=it) for it in (True, False))
    gradients = sum(it.nbytes for it in model.parameters())
    assert peak(late).bytes <= late.base_bytes + gradients + 4 * 2 * 1024 * 4
    assert peak(early).bytes > peak(late).bytes
    planned_exactly(model, sample)


def test_what_is_written_over_later_is_not_delayed():
    """Twice the same weight: its first gradient is read by the sum of both."""
    twice = module_of(
        lambda self, x: (x @ self.weight).relu() @ self.weight,
        weight=nn.Parameter(torch.randn(64, 64) / 8),
    )
    found = planned_exactly(twice, torch.randn(2, 64))
    assert found.predicted_peak_bytes <= found.unplanned_peak_bytes


PLAIN, LAST = torch.contiguous_format, torch.channels_last


@pytest.mark.parametrize(("layer", "form"), [
    (nn.Conv2d(8, 8, 3, padding=1), PLAIN), (nn.Conv2d(8, 8, 3, padding=1), LAST),
    (nn.Conv2d(8, 8, 3, padding=1, bias=False), PLAIN),
    (nn.Conv2d(8, 16, 3, stride=2, padding=1), LAST),
    (nn.Conv2d(8, 8, 3, padding=1, groups=8), PLAIN), (nn.Conv2d(8, 4, 5, dilation=2), LAST),
    (nn.ConvTranspose2d(8, 4, 2, stride=2), PLAIN),
], ids=str)  # fmt: skip
def test_convolutions_in_parts_give_the_same_bits(layer, form):
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), layer).to(memory_format=form)
    sample = torch.randn(2, 3, 16, 16).to(memory_format=form)
    # Weight and bias, then the input; the first layer's input wants none.
    assert kinds(graph_of(model, sample)).count("convolution_backward") == 3
    planned_exactly(model, sample)


def test_the_gradient_of_an_input_does_not_hold_that_input():
    """Two large maps at once, not three: the input of the layer is there for its shape only."""
    model = nn.Sequential(nn.Conv2d(3, 8, 3, padding=1), nn.Tanh(), nn.Conv2d(8, 8, 3, padding=1))
    graph = trace(model, torch.randn(2, 3, 32, 32), profile=False).named.graph
    parts = [op for op in backward(graph) if op.kind == "convolution_backward"]
    (op,) = (op for op in parts if len(op.outputs) == 1)
    (kept,) = (op.outputs[0] for op in graph.ops if op.kind == "tanh")
    assert kept not in op.inputs


def test_frozen_convolutions_stay_one_call():
    model = nn.Sequential(nn.Conv2d(3, 8, 3), nn.Conv2d(8, 8, 3), nn.Conv2d(8, 8, 3))
    model[1].requires_grad_(False)
    sample = torch.randn(2, 3, 16, 16)
    assert kinds(graph_of(model, sample)).count("convolution_backward") == 2 + 1 + 1
    planned_exactly(model, sample)


@pytest.mark.parametrize(("pool", "form"), [
    (nn.MaxPool2d(2), PLAIN), (nn.MaxPool2d(3, 2, 1), LAST), (nn.AvgPool2d(2), LAST),
    (nn.AdaptiveAvgPool2d(4), PLAIN),
], ids=str)  # fmt: skip
def test_pools_read_the_shape_of_their_input_alone(pool, form):
    """A wide layer beside a pool lends its weight's memory as the shape of the pool's input."""

    def forward(self, x):
        pooled = self.pool(self.first(x).exp()).flatten(1)
        return self.last(nn.functional.pad(pooled, (0, 4096 - pooled.shape[1])))

    parts = {"first": nn.Conv2d(3, 4, 3, padding=1), "pool": pool, "last": nn.Linear(4096, 8)}
    model = module_of(forward, **parts).to(memory_format=form)
    sample = torch.randn(1, 3, 16, 16).to(memory_format=form)
    graph = graph_of(model, sample)
    (op,) = (op for op in backward(graph) if "pool" in op.kind)
    (read,) = (op.outputs[0] for op in graph.ops if op.kind == "exp")
    assert read not in op.inputs
    assert "last.weight" in op.inputs
    planned_exactly(model, sample)


def two_branches(self, x, y):
    """The gradient of one input is one of the terms that make up the gradient of the other."""
    grown, mixed = x.exp(), x + y
    return grown + mixed.sin() + mixed.cos()


def doubled(self, x):
    """Both terms of the gradient of the input are the same sum."""
    twice = x + x
    return twice.sin() + twice.cos()


@pytest.mark.parametrize(("forward", "inputs"), [(two_branches, 2), (doubled, 1)])
def test_a_sum_that_is_read_otherwise_is_not_left_to_autograd(forward, inputs):
    model = module_of(forward)
    sample = CallArguments(tuple(torch.ones(3, requires_grad=True) for _ in range(inputs)), {})
    part = {"part": True, "shares_inputs": True, "unplanned": False}
    captured = trace(model, sample, profile=False, **part).captured
    computed = {storage for call in captured.recording.calls for storage in call.makes}
    assert {view.storage for _, view in captured.gradients} <= computed
