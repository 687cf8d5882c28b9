"""What tests do with a model and its planned twin: data, gradients, and whether they are equal."""

import warnings
from contextlib import contextmanager

import torch

from sn_memory.torch import PlanWarning, verify


def rows(count=64, seed=0, width=32):
    """Rows of normal numbers, the same for a seed."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def grads(model):
    return [it.grad for it in model.parameters()]


def same(left, right):
    """Whether tensors are equal to the bit, one by one; None equals None."""
    return all(a is b or torch.equal(a, b) for a, b in zip(left, right, strict=True))


def gradients(model, *inputs, wanted=None, between=lambda: None, seed=1, loss=None):
    """Gradients of a seeded step of mean squares, in which something is done between the passes."""
    torch.manual_seed(seed)
    result = model(*inputs).float().square().mean() if loss is None else loss(model, *inputs)
    between()
    if wanted is None:
        wanted = [it for it in model.parameters() if it.requires_grad]
    return torch.autograd.grad(result, wanted, allow_unused=True)


def off(found, expected):
    """How far tensors are from those expected, at most: a part of their norms."""
    parts = [
        (a.double() - b.double()).norm() / (b.double().norm() + 1e-12)
        for a, b in zip(found, expected, strict=True)
    ]
    return float(torch.stack(parts).detach().max()) if parts else 0.0


def exact(planned, sample):
    """Verify that a plan's step has the model's bits and holds what was predicted; return it."""
    found = verify(planned, sample)
    assert found.equal, found.different
    assert found.measured_peak_bytes == found.predicted_peak_bytes
    return found


@contextmanager
def plan_warnings():
    """Collect the texts of the plan's warnings inside, all of them."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        yield texts
    texts += [str(it.message) for it in caught if issubclass(it.category, PlanWarning)]


def mean_of_squares(out):
    return out.square().mean()


def step_of(model, *args, loss_of=mean_of_squares):
    """Take a step from no gradients; return its loss and the gradients."""
    model.zero_grad()
    loss = loss_of(model(*args))
    loss.backward()
    return [loss.detach(), *grads(model)]


def optimizer_tensors(optimizer):
    """Return the tensors of an optimizer's state."""
    values = [value for state in optimizer.state.values() for value in state.values()]
    return [value for value in values if isinstance(value, torch.Tensor)]
