"""Parameters that lie elsewhere than when the model was planned: in one vector, in other memory."""

import copy

import pytest
import torch
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sn_memory.torch import ReplayError, plan

SETTINGS = {"profile": False, "time_limit_s": 2.0}


class Sliced(nn.Module):
    """Layers that read parts of a parameter, as one type and as another, and a buffer."""

    def __init__(self, width=16):
        super().__init__()
        self.qkv = nn.Parameter(torch.randn(3 * width, width) / 4)
        self.waves = nn.Parameter(torch.randn(width, 2))
        self.norm = nn.BatchNorm1d(width)
        self.last = nn.Linear(width, width)

    def forward(self, x):
        query, key, value = (x @ part.t() for part in self.qkv.chunk(3))
        x = self.norm(query * key.sigmoid() + value)
        turn = torch.view_as_complex(self.waves)
        return self.last(torch.tanh(x * turn.abs()))


def trained(model, x, steps=3):
    """Train by steps along the gradient that are written into one vector; return all gradients."""
    found = []
    for _ in range(steps):
        model(x).square().mean().backward()
        gradients = [it.grad for it in model.parameters()]
        found += gradients
        now = parameters_to_vector(model.parameters()).detach()
        vector_to_parameters(
            now - 0.1 * torch.cat([it.flatten() for it in gradients]), model.parameters()
        )
        model.zero_grad()
    return found


@pytest.mark.parametrize("backend", ["graph", "modules", "compile"])
def test_parameters_become_views_of_one_vector(backend):
    model, x = Sliced(), torch.randn(32, 16)
    planned = plan(copy.deepcopy(model), x, "100%", backend=backend, **SETTINGS)
    expected = trained(model, x)
    assert all(map(torch.equal, trained(planned, x), expected))


def test_parameters_planned_as_views_of_one_vector():
    """Planned so, and moved to another vector, where each lies as far from the first as before."""
    model, x = Sliced(), torch.randn(32, 16)
    other = copy.deepcopy(model)
    vector_to_parameters(parameters_to_vector(other.parameters()).detach(), other.parameters())
    planned = plan(other, x, "100%", backend="graph", **SETTINGS)
    expected = trained(model, x)
    assert all(map(torch.equal, trained(planned, x), expected))


def test_what_shared_memory_and_does_no_longer_is_said():
    model, x = Sliced(), torch.randn(32, 16)
    vector_to_parameters(parameters_to_vector(model.parameters()).detach(), model.parameters())
    planned = plan(model, x, "100%", backend="graph", **SETTINGS)
    planned(x).sum().backward()
    planned.zero_grad()
    for it in planned.parameters():
        it.data = it.data.clone()
    with pytest.raises(ReplayError, match="no longer shares the storage"):
        planned(x)


def test_a_parameter_of_another_size_is_named():
    model, x = Sliced(), torch.randn(32, 16)
    planned = plan(model, x, "100%", backend="graph", **SETTINGS)
    planned.waves.data = torch.randn(1, 2)
    with pytest.raises(ReplayError, match=r"size \(1, 2\).*the plan expects \(16, 2\)"):
        planned(x)
