"""A loss of some of the outputs leaves the parameters of the others without a gradient.

Found by running: with a plan they had zeros, so that an optimizer with moments or weight decay
changed the head of a task that was not trained in that step.
"""

import copy

import pytest
import torch
from small_models import module_of
from steps import grads, same
from torch import nn

from sn_memory.torch import HostState, plan

LOSSES = {
    "first": lambda out: out["first"].square().sum(),
    "second": lambda out: out["second"].sin().sum(),
    "scale": lambda out: out["both"][1].square().sum(),
    "two": lambda out: out["both"][0].sum() + out["second"].square().sum(),
    "all": lambda out: out["first"].sum() + out["second"].sin().sum() + out["both"][1].sum(),
}
TASKS = ("all", "first", "second", "scale", "two", "first")


def of_tasks(width=32):
    """A model with two heads on one body, and a copy, with an optimizer each.

    The second head also scales what a parameter says.
    """

    def forward(self, x):
        found = self.body(x)
        return {
            "first": self.first(found),
            "second": self.norm(self.second(found)) * self.scale,
            "both": [self.first(found.square()), self.scale * 2],
        }

    model = module_of(
        forward,
        body=nn.Sequential(nn.Linear(8, width), nn.Tanh(), nn.Linear(width, 8), nn.Tanh()),
        first=nn.Linear(8, 3),
        second=nn.Linear(8, 8),
        norm=nn.BatchNorm1d(8),
        scale=nn.Parameter(torch.ones(8)),
    )
    mine = copy.deepcopy(model)
    steps = [torch.optim.AdamW(it.parameters(), 0.1, weight_decay=0.1) for it in (mine, model)]
    return model, mine, steps


def trained_alike(planned, mine, model, x, steps, micro_batches=1):
    """Train both by all tasks in turn: same gradients, unless the host has them, and same state."""
    for task in TASKS:
        for micro in range(micro_batches):
            micro_task = "first" if task == "two" and micro else task
            for it in (planned, model):
                LOSSES[micro_task](it(x + micro)).backward()
            assert planned.sn_memory.state or same(grads(mine), grads(model))
        for step in steps:
            step.step()
            step.zero_grad()
        assert same(mine.state_dict().values(), model.state_dict().values())


@pytest.mark.filterwarnings("ignore:.* finds gradients")
@pytest.mark.parametrize(
    ("backend", "accumulate"), [("graph", False), ("graph", True), ("modules", True)]
)
def test_optimizers_pass_over_what_has_no_gradient(backend, accumulate):
    model, mine, steps = of_tasks()
    x = torch.randn(16, 8)
    planned = plan(mine, x, "100%", backend=backend, profile=False)
    trained_alike(planned, mine, model, x, steps, 1 + accumulate)


@pytest.mark.parametrize(
    ("update", "budget", "in_place"),
    [("step", "70%", True), ("step", "70%", False), ("backward", "75%", True)],
)
def test_what_rests_on_the_host_is_not_updated_either(update, budget, in_place):
    model, mine, steps = of_tasks(width=128)
    x, state = torch.randn(4, 8), HostState(in_place=in_place, update=update)
    planned = plan(mine, x, budget, profile=False, state=state, optimizer=steps[0])
    trained_alike(planned, mine, model, x, steps)


def test_an_input_has_none_either():
    model = module_of(lambda self, x, y: (self.layer(x).tanh(), y.exp() * 2), layer=nn.Linear(8, 8))
    sample = [torch.randn(4, 8, requires_grad=True) for _ in range(2)]
    planned = plan(model, tuple(sample), "100%", backend="graph", profile=False)
    for which in (0, 1):
        planned.zero_grad()
        for it in sample:
            it.grad = None
        planned(*sample)[which].sum().backward()
        assert [it.grad is None for it in sample] == [which == 1, which == 0]
        assert [it.grad is None for it in model.parameters()] == [which == 1] * 2
