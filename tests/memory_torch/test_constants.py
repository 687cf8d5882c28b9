"""What a forward makes of Python's numbers is made anew in each step, whoever writes into it.

Found by running: `loss = torch.tensor(0.0)`, to which terms are added in place, was one tensor for
all steps of a plan, so that the loss grew from step to step, in silence.
"""

import copy

import numpy as np
import pytest
import torch
from small_models import module_of
from steps import grads, same
from torch import nn

from sn_memory.torch import TraceError, plan, trace


def net(ends):
    def forward(self, x):
        means = []
        for layer in self.layers:
            x = layer(x).tanh()
            means.append(x.square().mean())
        return ends(x, means)

    return module_of(forward, layers=nn.ModuleList(nn.Linear(8, 8) for _ in range(3)))


def summed(x, means):
    total = torch.tensor(0.0)
    for each in means:
        total += each
    return x + total


def filled(x, means):
    """Two of the same numbers, each of which is written to."""
    first, second = (torch.tensor([1.0] * 8) for _ in range(2))
    first[2:4] = x[0, 2:4].detach()
    second.mul_(3)
    return x * first * second * torch.tensor(2.0)


def out(x, means):
    found = torch.tensor([0.0] * 8)
    torch.mul(x[0].detach(), 2, out=found)
    return x * found


def of_numpy(x, means):
    found = torch.from_numpy(np.zeros(8, dtype=np.float32))
    found += x[0].detach()
    return x * found


def handed_out(x, means):
    """The caller writes into what it gets."""
    weights = torch.tensor([1.0, 2.0])
    return x + means[0], weights, weights[:1]


def leaf(x, means):
    weight = torch.tensor([1.0] * 8)
    weight *= x.detach().mean()
    return torch.where(x > 0, weight, x)


@pytest.mark.filterwarnings("ignore:.* finds gradients")
@pytest.mark.parametrize("ends", [summed, filled, out, of_numpy, handed_out, leaf])
def test_each_step_has_its_own(ends):
    """Three steps, of which the last has two forward and backward passes."""
    model, x = net(ends), torch.randn(4, 8)
    planned = plan(copy.deepcopy(model), x, "100%", backend="graph", profile=False)
    for at in range(4):
        results = []
        for it in (planned, model):
            if at < 3:
                it.zero_grad()
            found = it(x + at)
            found = found if isinstance(found, tuple) else (found,)
            found[0].sum().backward()
            results.append([*(each.detach().clone() for each in found), *grads(it)])
            for handed in found[1:2]:
                handed.add_(1)
        assert same(*results)


def test_what_is_only_read_is_one_for_all_steps():
    model = net(lambda x, means: x * torch.tensor([2.0] * 8))
    recording = trace(model, torch.randn(4, 8), profile=False).captured.recording
    assert len(recording.constants) == 1
    assert not [call for call in recording.calls if call.name == "clone"]


class Late(torch.autograd.Function):
    """Its backward pass writes into what its forward pass was given."""

    @staticmethod
    def forward(ctx, x, count):
        ctx.count = count
        return x * count

    @staticmethod
    def backward(ctx, gradient):
        return gradient * ctx.count.add_(1), None


def test_a_backward_pass_that_writes_into_one_is_refused():
    model = net(lambda x, means: Late.apply(x, torch.tensor(1.0)))
    with pytest.raises(TraceError, match="Write into a clone"):
        trace(model, torch.randn(4, 8), profile=False)
