"""What a model returns is returned by the plan: objects with tensors in them, new in each step."""

import threading
from dataclasses import dataclass, field
from types import SimpleNamespace

import pytest
import torch
from small_models import mlp, module_of
from steps import exact, grads, rows, same
from torch import nn

from sn_memory.torch import PlanWarning, TraceError, plan

SETTINGS = {"profile": False, "planner": "sqrt_n", "backend": "graph"}


@dataclass
class Result:
    logits: torch.Tensor
    states: list = field(default_factory=list)
    settings: object = None
    number: int = 3


class Bare:
    """No dataclass, with a tensor, itself, and a tensor that the caller also gets elsewhere."""


class Slotted:
    __slots__ = ("rows",)


class Returns(nn.Module):
    def __init__(self, returned):
        super().__init__()
        self.inner, self.last, self.returned = mlp(4), nn.Linear(32, 32), returned
        self.settings = Bare()

    def forward(self, x):
        h = self.inner(x)
        return self.returned(self, h, self.last(h))


def a_dataclass(model, h, out):
    return Result(out, [h, {"twice": h * 2}], model.settings)


def an_object(model, h, out):
    found = Bare()
    found.rows, found.own, found.count = out, found, 0
    return {"rows": out, "object": found, "again": found}


def slots(model, h, out):
    found = Slotted()
    found.rows = (out, h.detach())
    return [found, 7]


def a_distribution(model, h, out):
    return torch.distributions.Normal(out, h.exp(), validate_args=False)


def nothing_of_tensors(model, h, out):
    return out, Result(None, [1, 2])


RETURNED = (a_dataclass, an_object, slots, a_distribution, nothing_of_tensors)


def tensors_in(value, seen=None):
    """All tensors that can be reached, in order."""
    seen = set() if seen is None else seen
    if isinstance(value, torch.Tensor):
        return [value]
    if id(value) in seen or isinstance(value, nn.Module | str | int | float | type(None)):
        return []
    seen.add(id(value))
    if isinstance(value, Slotted):
        value = [value.rows]
    elif not isinstance(value, dict | list | tuple):
        value = vars(value)
    inside = value.values() if isinstance(value, dict) else value
    return [tensor for it in inside for tensor in tensors_in(it, seen)]


@pytest.mark.filterwarnings("ignore:2 forward passes")  # The budget is one step's.
@pytest.mark.parametrize("returned", RETURNED)
def test_objects_are_filled_with_this_steps_tensors(returned):
    model = Returns(returned)
    planned = plan(model, rows(), "85%", **SETTINGS)
    for seed in (1, 2):
        x = rows(seed=seed)
        mine, theirs = planned(x), model(x)
        assert type(mine) is type(theirs)
        pairs = list(zip(tensors_in(mine), tensors_in(theirs), strict=True))
        assert pairs
        gradients = []
        for a, b in pairs:
            assert type(a) is torch.Tensor
            assert torch.equal(a, b)
            assert a.requires_grad == b.requires_grad
        for it in (mine, theirs):
            sum(a.square().sum() for a in tensors_in(it) if a.requires_grad).backward()
            gradients.append(grads(model))
            model.zero_grad()
        assert same(*gradients)
        # Whatever the caller does to it, the next is as new.
        if returned is a_dataclass:
            assert mine.settings is model.settings
            assert (mine.number, len(mine.states)) == (3, 2)
            mine.number, mine.states = 5, None
        if returned is an_object:
            assert mine["object"].own is mine["object"] is mine["again"]
            assert mine["object"].rows is mine["rows"]
        if returned is nothing_of_tensors:
            assert mine[1].states == [1, 2]
            mine[1].states.append(3)


@pytest.mark.parametrize(
    ("returned", "backend"), [(it, ("graph", "modules")[at % 2]) for at, it in enumerate(RETURNED)]
)
def test_verify_looks_into_objects(returned, backend):
    exact(plan(Returns(returned), rows(), "95%", profile=False, backend=backend), rows())


def test_nothing_of_the_tracing_stays():
    """The trace is kept for the life of a planned model: no fake tensor may be in it."""
    planned = plan(Returns(a_dataclass), rows(), "100%", **SETTINGS)
    form = planned.sn_memory.trace.captured.output_form
    assert not tensors_in(form.shells)


def test_what_cannot_be_copied_is_refused():
    def locked(model, h, out):
        return SimpleNamespace(rows=[out], lock=threading.Lock())

    model, sample = Returns(locked), rows()
    with pytest.raises(TraceError, match="returns a SimpleNamespace, which cannot be copied"):
        plan(model, sample, "100%", **SETTINGS)
    with pytest.warns(PlanWarning, match="by regions"):
        planned = plan(model, sample, "100%", profile=False)
    assert type(planned(sample).rows[0]) is torch.Tensor


def test_an_argument_that_could_change_unseen_is_refused():
    """A step replayed would go on with the tensors that were in it when it was planned."""
    model = module_of(lambda self, batch: self.layer(batch.rows), layer=nn.Linear(32, 32))
    batch = Bare()
    batch.rows = rows()
    with pytest.raises(TraceError, match="Bare"):
        plan(model, batch, "100%", **SETTINGS)
    with pytest.warns(PlanWarning, match="Bare"):
        planned = plan(model, batch, "100%", profile=False)
    batch.rows = rows(seed=1)
    assert torch.equal(planned(batch), model(batch))
