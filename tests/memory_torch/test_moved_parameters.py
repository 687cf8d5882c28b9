"""Parameters that lie elsewhere than when the model was planned: in one vector, in other memory."""

import copy
import pickle
from multiprocessing.context import set_spawning_popen

import pytest
import torch
from small_models import module_of
from steps import grads, same
from torch import nn
from torch.nn.utils import parameters_to_vector, vector_to_parameters

from sn_memory.torch import PlanWarning, ReplayError, plan

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


def in_one_vector(model):
    vector_to_parameters(parameters_to_vector(model.parameters()).detach(), model.parameters())


def trained(model, x, steps=3):
    """Train by steps along the gradient that are written into one vector; return all gradients."""
    found = []
    for _ in range(steps):
        model(x).square().mean().backward()
        found += grads(model)
        now = parameters_to_vector(model.parameters()).detach()
        along = torch.cat([it.flatten() for it in grads(model)])
        vector_to_parameters(now - 0.1 * along, model.parameters())
        model.zero_grad()
    return found


@pytest.mark.parametrize(
    ("backend", "moved"), [("graph", False), ("graph", True), ("modules", False), ("compile", True)]
)
def test_parameters_become_views_of_one_vector(backend, moved):
    """Planned so, too, and moved to another, where each lies as far from the first as before."""
    model, x = Sliced(), torch.randn(32, 16)
    other = copy.deepcopy(model)
    if moved:
        in_one_vector(other)
    planned = plan(other, x, "100%", backend=backend, **SETTINGS)
    assert same(trained(planned, x), trained(model, x))


def test_what_shared_memory_and_does_no_longer_is_said():
    model, x = Sliced(), torch.randn(32, 16)
    in_one_vector(model)
    planned = plan(model, x, "100%", backend="graph", **SETTINGS)
    for it in planned.parameters():
        it.data = it.data.clone()
    with pytest.raises(ReplayError, match="no longer shares the storage"):
        planned(x)


@pytest.mark.parametrize("change", [lambda it: it.double(), lambda it: in_one_vector(it)])
def test_other_memory_between_the_passes_is_said(change):
    """Before, the backward pass read the new values, or ended in torch's error about types."""
    model, x = Sliced(), torch.randn(32, 16)
    planned = plan(model, x, "100%", backend="graph", **SETTINGS)
    loss = planned(x).sum()
    change(planned)
    with pytest.raises(ReplayError, match="given other memory"):
        loss.backward()


def test_a_model_for_a_new_process_says_that_it_is_plain():
    planned = plan(nn.Sequential(nn.Linear(4, 4)), torch.randn(8, 4), "100%", **SETTINGS)
    pickle.dumps(planned)
    set_spawning_popen(object())  # as while a Process is pickled
    try:
        with pytest.warns(PlanWarning, match="where it has no plan"):
            pickled = pickle.dumps(planned)
    finally:
        set_spawning_popen(None)
    assert type(pickle.loads(pickled)) is nn.Sequential


@pytest.mark.parametrize("backend", ["graph", "modules"])
def test_parameters_of_another_shape_or_type_are_another_kind(backend):
    """A model may be cast in mid-training, or get a head of more classes; and become as it was.

    It is given integers, which are the same whatever type its parameters have.
    """

    def forward(self, words):
        return self.head(self.body(words)) @ self.bank.t()

    body = nn.Sequential(nn.Embedding(8, 16), nn.Linear(16, 16), nn.GELU())
    model, x = module_of(forward, body=body, head=nn.Linear(16, 4)), torch.arange(64) % 8
    model.register_buffer("bank", torch.randn(3, 4))
    other = copy.deepcopy(model)
    planned = plan(other, x, "200%", backend=backend, **SETTINGS)
    before = copy.deepcopy(model.state_dict())

    def classes(it):
        it.head, it.bank = nn.Linear(16, 6), torch.ones(3, 6)
        nn.init.constant_(it.head.weight, 0.5)
        nn.init.constant_(it.head.bias, 0.5)

    def words(it):
        it.body[0].weight.data = torch.ones(9, 16)

    def back(it):
        it.body[0].weight.data = torch.ones(8, 16)
        it.head, it.bank = nn.Linear(16, 4), torch.ones(3, 4)
        it.load_state_dict(before)

    kept, cast, cast_back = nn.Module.train, nn.Module.bfloat16, nn.Module.float
    for change in (kept, cast, kept, cast_back, classes, words, back):
        for it in (planned, model):
            it.zero_grad()
            change(it)
        for _ in range(2):
            assert torch.equal(planned(x), model(x))
            planned(x).float().square().mean().backward()
            model(x).float().square().mean().backward()
            assert same(grads(planned), grads(model))
    assert len(planned.sn_memory.kinds) == 4


class Pairs(nn.Module):
    """Tensors of one size in pairs, which a plan could take for each other."""

    def __init__(self, width=16):
        super().__init__()
        self.norm, self.scale = nn.LayerNorm(width), nn.BatchNorm1d(width)
        self.query, self.key, self.value = (nn.Linear(width, width) for _ in range(3))
        self.value.weight = self.query.weight
        nn.init.normal_(self.norm.weight)
        nn.init.normal_(self.norm.bias)

    def forward(self, x):
        x = self.norm(x)
        return torch.tanh(self.scale(self.query(x)) * self.key(x).sigmoid()) + self.value(x)


def weight_last(model):
    """As parametrizations, pruning and weight norms leave it behind that are removed."""
    weight = model.norm.weight
    del model.norm.weight
    model.norm.weight = weight


def buffer_last(model):
    mean = model.scale.running_mean
    mean.add_(1.0)
    del model.scale.running_mean
    model.scale.register_buffer("running_mean", mean)


def module_last(model):
    query = model.query
    del model.query
    model.query = query


def tied_otherwise(model):
    model.value.weight = model.key.weight


CASES = [(it, "graph") for it in (weight_last, buffer_last, module_last, tied_otherwise)]
CASES += [(weight_last, "regions"), (tied_otherwise, "regions"), (module_last, "modules")]


@pytest.mark.parametrize(("change", "backend"), CASES)
def test_another_order_of_tensors_is_followed(change, backend):
    """Without a word a plan would take one tensor for the other."""
    model, x = Pairs(), torch.randn(32, 16)
    planned = plan(copy.deepcopy(model), x, "100%", backend=backend, **SETTINGS)
    for it in (model, planned):
        it(x).square().mean().backward()
        it.zero_grad()
        change(it)
        it(x).square().mean().backward()
    expected = dict(model.named_parameters())
    for name, parameter in planned.named_parameters():
        assert torch.equal(parameter.grad, expected[name].grad), name
    assert same(planned.buffers(), model.buffers())
