"""Gradients are handed over as they are made, one by one: what that is for beside overlap.

Several micro-batches before one step hold the gradients of the earlier ones all the while; those of
this one may not be held beside them until the end. And whoever is handed a gradient may use it at
once: autograd.grad, inputs=, a hook that takes the optimizer's step.
"""

import copy

import pytest
import torch
from torch import nn

from sn_memory.torch import ReplayError, StorageTracker, plan

SETTINGS = {"profile": False, "planner": "greedy"}


def wide(layers=6, width=128):
    return nn.Sequential(
        *(it for _ in range(layers) for it in (nn.Linear(width, width), nn.GELU()))
    )


def head():
    """Large maps first, large weights last: gradients that `overlap=False` puts off."""
    return nn.Sequential(
        *(nn.Conv2d(3, 8, 3, padding=1), nn.ReLU(), nn.MaxPool2d(8)),
        *(nn.Flatten(), nn.Linear(8 * 8 * 8, 1024), nn.ReLU(), nn.Linear(1024, 10)),
    )


NETS = {"wide": (wide, (4, 128)), "head": (head, (2, 3, 64, 64))}


def micro_batches(model, sample, known=(), count=3):
    """The peak of each of some micro-batches whose gradients are summed."""
    peaks = []
    for it in model.parameters():
        it.grad = None
    for _ in range(count):
        gradients = [it.grad for it in model.parameters() if it.grad is not None]
        tracker = StorageTracker([*model.parameters(), sample, *known, *gradients])
        with tracker:
            out = model(sample)
        output_gradient = torch.ones_like(out)
        tracker.meet(output_gradient)
        with tracker:
            out.backward(output_gradient)
        del out, output_gradient
        peaks.append(tracker.peak_bytes)
    return peaks


@pytest.mark.parametrize("overlap", [False, True])
@pytest.mark.parametrize("net", list(NETS))
def test_micro_batches_take_what_torch_takes(net, overlap):
    make, shape = NETS[net]
    model, sample = make(), torch.randn(shape)
    planned = plan(copy.deepcopy(model), sample, "100%", overlap=overlap, **SETTINGS)
    step = planned.sn_memory.latest
    first, *later = micro_batches(planned, sample, step.known)
    assert first == step.plan.peak_bytes
    held = sum(it.nbytes for it in model.parameters())
    assert max(later) <= first + held
    assert max(later) <= max(micro_batches(model, sample))
    for mine, plain in zip(planned.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.grad, plain.grad)


@pytest.mark.parametrize("overlap", [False, True])
def test_autograd_sees_the_parameters(overlap):
    model, sample = wide(3), torch.randn(4, 128)
    planned = plan(copy.deepcopy(model), sample, "100%", overlap=overlap, **SETTINGS)
    expected = torch.autograd.grad(model(sample).sum(), list(model.parameters()))
    got = torch.autograd.grad(planned(sample).sum(), list(planned.parameters()))
    assert all(map(torch.equal, got, expected))
    # Some of them: what comes before them in the network is not run.
    some = [planned[4].weight, planned[2].bias]
    got = torch.autograd.grad(planned(sample).sum(), some)
    assert all(map(torch.equal, got, (expected[4], expected[3])))
    planned(sample).sum().backward(inputs=some)
    assert torch.equal(planned[4].weight.grad, expected[4])
    assert planned[0].weight.grad is None
    assert planned[4].bias.grad is None


def test_what_is_left_of_a_backward_pass_is_not_run_again():
    planned = plan(wide(3), torch.randn(4, 128), "100%", **SETTINGS)
    out = planned(torch.randn(4, 128)).sum()
    torch.autograd.grad(out, planned[4].weight, retain_graph=True)
    with pytest.raises(ReplayError, match="second time"):
        torch.autograd.grad(out, planned[0].weight)


@pytest.mark.parametrize("budget", ["100%", "85%"])
@pytest.mark.parametrize("overlap", [False, True])
def test_the_optimizers_step_in_a_hook(overlap, budget):
    """A parameter may change as soon as its gradient is handed over, also one used twice."""

    class Mixed(nn.Module):
        """Of a convolution the weight's gradient is made first, then what reads the weight."""

        def __init__(self):
            super().__init__()
            self.convolutions = nn.ModuleList(nn.Conv2d(4, 4, 3, padding=1) for _ in range(3))
            self.last = nn.Linear(8, 8)

        def forward(self, x):
            for layer in self.convolutions:
                x = torch.tanh(layer(x))
            return self.last(torch.tanh(self.last(x)))

    def trained(model):
        def update(parameter):
            with torch.no_grad():
                parameter -= 0.01 * parameter.grad
            parameter.grad = None

        for it in model.parameters():
            it.register_post_accumulate_grad_hook(update)
        for _ in range(3):
            model(sample).square().sum().backward()
        return list(model.parameters())

    model, sample = Mixed(), torch.randn(16, 4, 8, 8)
    planned = plan(copy.deepcopy(model), sample, budget, overlap=overlap, profile=False)
    runs = [it.target for it in planned.sn_memory.plan.steps if it.action == "run"]
    assert (len(set(runs)) < len(runs)) == (budget != "100%")
    assert all(map(torch.equal, trained(planned), trained(model)))


def test_a_hook_that_fails_leaves_the_next_step_alone():
    model, sample = wide(3), torch.randn(4, 128)
    planned = plan(copy.deepcopy(model), sample, "100%", **SETTINGS)

    def fail(gradient):
        raise RuntimeError("no")

    hook = planned[2].weight.register_hook(fail)
    with pytest.raises(RuntimeError, match="no"):
        planned(sample).sum().backward()
    hook.remove()
    for it in (planned, model):
        it.zero_grad()
        it(sample).sum().backward()
    for mine, plain in zip(planned.parameters(), model.parameters(), strict=True):
        assert torch.equal(mine.grad, plain.grad)
