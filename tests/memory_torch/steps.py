"""What tests do with a model and its planned twin: data, gradients, and whether they are equal."""

import warnings
from contextlib import contextmanager

import torch

from sn_memory.torch import PlanWarning


def rows(count=64, seed=0, width=32):
    """Rows of normal numbers, the same for a seed."""
    return torch.randn(count, width, generator=torch.Generator().manual_seed(seed))


def grads(model):
    return [it.grad for it in model.parameters()]


def same(left, right):
    """Whether tensors are equal to the bit, one by one; None equals None."""
    return all(a is b or torch.equal(a, b) for a, b in zip(left, right, strict=True))


# What the tests of kinds of input share.


@contextmanager
def plan_warnings():
    """Collect the texts of the plan's warnings inside, all of them."""
    texts = []
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always", PlanWarning)
        yield texts
    texts += [str(it.message) for it in caught if issubclass(it.category, PlanWarning)]
