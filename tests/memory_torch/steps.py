"""What tests do with a model and its planned twin: data, gradients, and whether they are equal."""

import torch


def rows(count=64, seed=0, width=32):
    """Rows of normal numbers, the same for a seed."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def grads(model):
    return [it.grad for it in model.parameters()]


def same(left, right):
    """Whether tensors are equal to the bit, one by one; None equals None."""
    return all(a is b or torch.equal(a, b) for a, b in zip(left, right, strict=True))


# For tests of training loops, accumulation, state and ranks.


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
